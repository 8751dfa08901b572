"""Weights that ZeRO-3 gathers in place are those that DeepSpeed copies out of a buffer."""

import pytest
import torch

from tests.helpers.processes import run_two_processes


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("gathers")
    run_two_processes("gather_worker.py", str(folder), seconds=240)
    return torch.load(folder / "gathers.pt")


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["all", "lora_both", "frozen_vision"])
def test_gathers_in_place_change_no_number_and_copy_nothing(found, trained):
    in_place, copied = found[trained, True], found[trained, False]
    assert in_place["losses"] == copied["losses"]
    assert in_place["weights"].keys() == copied["weights"].keys()
    for name, weight in in_place["weights"].items():
        assert torch.equal(weight, copied["weights"][name]), name
    assert in_place["in place"] == copied["by DeepSpeed"] > 0
    assert in_place["by DeepSpeed"] == copied["in place"] == 0
    assert in_place["replaced once"]


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["all", "lora_both", "frozen_vision"])
def test_norms_in_place_are_those_of_copies(found, trained):
    in_place, copied = found[trained, True], found[trained, False]
    assert in_place["norms"] == pytest.approx(copied["norms"], rel=1e-12)
    assert in_place["norms by"] == "glm4v_patched.engine.deepspeed.gradient_norm"
    assert copied["norms by"].startswith("deepspeed.")
