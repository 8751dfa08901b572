"""A model that device_map split over devices is trained by one process, or refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers.tiny import text, tiny_model

SPLIT = {"transformer.vision": 0, "transformer.encoder": 1, "transformer.embedding": 0}
REFUSED = (
    r"split over 2 devices \(0, 1\).*cannot be trained by 2 processes"
    r'.*without device_map or with device_map=\{"": local_rank\}, or train it in 1 process'
)


@pytest.fixture
def processes():
    """``processes(number)`` makes this process one of a group; torch's fake group sends nothing."""

    def join(number: int) -> None:
        torch.distributed.init_process_group("fake", FakeStore(), rank=0, world_size=number)

    yield join
    if torch.distributed.is_initialized():
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
    without_loss = split_model().transformer
    without_loss.hf_device_map = SPLIT
    met_later = split_model().train()
    processes(2)
    for model in (split_model(), wrapped, without_loss):
        with pytest.raises(ValueError, match=REFUSED):
            model.train()
    with pytest.raises(ValueError, match=REFUSED):
        train_a_step(met_later)
    with torch.no_grad():  # several processes may answer with it
        split_model().eval()(input_ids=torch.tensor([text(6)]))


def test_one_process_trains_it(processes):
    train_a_step(split_model().train())
    processes(1)
    train_a_step(split_model().train())


def test_one_device_is_no_split_however_it_is_written(processes):
    processes(2)
    same = {"transformer.vision": torch.device("cuda:0"), "encoder": "cuda:0", "a": 0}
    train_a_step(split_model(same).train())
