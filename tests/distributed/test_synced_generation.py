"""Two processes generate answers of different lengths, with weights that ZeRO-3 shards."""

from pathlib import Path

import pytest
import torch

from tests.distributed.strategies import (
    Training,
    gather_from_both_ranks,
    save_on_rank_0,
    zero_config,
)
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import BOI, EOI, PAD, random_pixels, text, tiny_model

OPTIONS = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 2},
}
NEW_TOKENS = (2, 7)  # of the process with an image, and of the other one


def generate(model, rank: int, options: dict, synced: bool) -> list[int]:
    ids = [*text(3), BOI, PAD, EOI, *text(2)] if rank == 0 else text(4)
    inputs = {"input_ids": torch.tensor([ids])}
    if rank == 0:
        inputs["pixel_values"] = random_pixels(1)
    limits = {"max_new_tokens": NEW_TOKENS[rank], "do_sample": False, "eos_token_id": None}
    return model.generate(**inputs, **limits, **options, synced_gpus=synced)[0].tolist()


def on_each_rank(folder: Path) -> None:
    model = tiny_model().eval()
    training = Training(model, "zero3", zero_config())
    rank = torch.distributed.get_rank()
    answers = {name: generate(model, rank, options, True) for name, options in OPTIONS.items()}
    save_on_rank_0(gather_from_both_ranks(answers), folder / "answers.pt")
    training.close()


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("synced")
    run_two_processes(on_each_rank, folder, seconds=120)
    return torch.load(folder / "answers.pt")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_process_that_finished_first_waits_and_both_answers_stay(name, rank, answers):
    expected = generate(tiny_model().eval(), rank, OPTIONS[name], False)
    assert answers[rank][name] == expected
