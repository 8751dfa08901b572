"""Reused features on two real processes: under ZeRO-3 and FSDP2 a step reuses features only if
both have those of their pictures (PICTURES in feature_worker.py)."""

import json
from pathlib import Path

import pytest
import torch

from glm4v_patched.data.feature_cache import digest_weights
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import tiny_model

# In how many steps of AB AB C- C- AD CD -- -D BA the tower runs, on each rank; without an image it
# runs for the blank one, but under DDP.
ALWAYS = [[1] * 9] * 2
WITHOUT = {"zero3": ALWAYS, "fsdp2": ALWAYS}
WITHOUT["ddp"] = [[1, 1, 1, 1, 1, 1, 0, 0, 1], [1, 1, 0, 0, 1, 1, 0, 1, 1]]
NEW_FOR_ONE_OF_THEM = [[1, 0, 1, 0, 1, 0, 0, 0, 1]] * 2
NEW_TO_THE_FOLDER = [[1, 0, 1, 0, 1, 0, 0, 0, 0]] * 2
FIRST_STEP = [[1, 0, 0, 0, 0, 0, 0, 0, 0]] * 2
# What is trained, how, and where features are kept; each run comes after that without features.
RUNS = {
    ("frozen_vision", "zero3", "memory"): NEW_FOR_ONE_OF_THEM,
    ("frozen_vision", "zero3", "folder"): NEW_TO_THE_FOLDER,
    ("lora_language", "zero3", "folder"): FIRST_STEP,  # the tower is the same
    ("frozen_vision", "fsdp2", "memory"): NEW_FOR_ONE_OF_THEM,
    ("frozen_vision", "fsdp2", "folder"): FIRST_STEP,
    ("frozen_vision", "ddp", "memory"): [[1, 0, 1, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0, 0, 0, 1]],
}
EVERY = [*dict.fromkeys((*run[:2], None) for run in RUNS), *RUNS]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    tiny_model().save_pretrained(folder / "model")
    runs = [("-".join(map(str, run)), *run) for run in EVERY]
    (folder / "runs.json").write_text(json.dumps(runs))
    output = run_two_processes("feature_worker.py", str(folder), seconds=300)
    assert output.count("kept in the memory of 2 processes") == 2 * 3
    return folder


def result(results: Path, *run: str | None) -> dict:
    return torch.load(results / f"{'-'.join(map(str, run))}.pt")


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_reuse_changes_no_bit_and_spares_the_tower_of_both_processes(run, results):
    want, got = result(results, *run[:2], None), result(results, *run)
    assert got["losses"] == want["losses"]
    for gradients, wanted in zip(got["gradients"], want["gradients"], strict=True):
        assert gradients.keys() == wanted.keys() and len(wanted) > 1
        assert [n for n in wanted if not torch.equal(gradients[n], wanted[n])] == []
    assert want["runs"] == WITHOUT[run[1]]
    assert got["runs"] == RUNS[run]


def test_the_weights_have_one_digest_however_they_are_spread(results):
    digests = {result(results, *run)["digest"] for run in EVERY}
    assert digests == {digest_weights(tiny_model().transformer.vision)}
    assert len(list((results / "folder").iterdir())) == 1
