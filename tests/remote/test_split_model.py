"""A model that device_map split over devices is trained by one process, or refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers.tiny import text, tiny_model

SPLIT = {"transformer.vision": 0, "transformer.encoder": 1, "transformer.embedding": 0}
ON_ONE = {"transformer.vision": torch.device("cuda:0"), "encoder": "cuda:0", "a": 0}


@pytest.fixture
def processes():
    """``processes(number)`` makes this process one of a group; torch's fake group sends nothing."""

    def join(number: int) -> None:
        torch.distributed.init_process_group("fake", FakeStore(), rank=0, world_size=number)

    yield join
    torch.distributed.destroy_process_group()


def split_model(device_map=SPLIT):
    """A model with the mark that accelerate leaves when it spreads one over devices."""
    model = tiny_model()
    model.hf_device_map = device_map
    return model


def train_a_step(model) -> None:
    ids = torch.tensor([text(6)])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.transformer.embedding.word_embeddings.weight.grad.norm() > 0


def test_is_refused_when_training_begins_among_processes_or_they_meet_later(processes):
    wrapped = get_peft_model(split_model(), LoraConfig(target_modules=["query_key_value"]))
    met_later = split_model().train()
    processes(2)
    told = r"split over 2 devices \(0, 1\).*cannot be trained by 2 processes.*train it in 1 process"
    for model in (split_model(), wrapped):
        with pytest.raises(ValueError, match=told):
            model.train()
    with pytest.raises(ValueError, match=told):
        train_a_step(met_later)
    with torch.no_grad():  # several processes may answer with it
        split_model().eval()(input_ids=torch.tensor([text(6)]))
    train_a_step(split_model(ON_ONE).train())


def test_one_process_trains_it(processes):
    train_a_step(split_model().train())
    processes(1)
    train_a_step(split_model().train())
