"""ZeRO-3 gathers weights in place as DeepSpeed copies them, and weights in fp8 as whole ones."""

from pathlib import Path

import pytest
import torch

from tests.helpers.fp8 import build
from tests.helpers.processes import run_two_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gathers")
    build().save_pretrained(folder / "model")
    run_two_processes("gather_worker.py", str(folder), seconds=300)
    return folder


@pytest.mark.parametrize("trained", ["all", "lora_both"])
def test_gathers_and_norms_in_place_change_no_number_and_copy_nothing(folder, trained):
    found = torch.load(folder / "gathers.pt")
    in_place, copied = found[trained, True], found[trained, False]
    assert in_place["losses"] == copied["losses"]
    assert in_place["weights"].keys() == copied["weights"].keys()
    for name, weight in in_place["weights"].items():
        assert torch.equal(weight, copied["weights"][name]), name
    assert in_place["in place"] == copied["by DeepSpeed"] > 0
    assert in_place["by DeepSpeed"] == copied["in place"] == 0
    assert in_place["replaced once"]
    assert in_place["norms"] == pytest.approx(copied["norms"], rel=1e-12)
    assert in_place["norms by"] == "glm4v_patched.engine.deepspeed.zero3"
    assert copied["norms by"].startswith("deepspeed.")


def test_in_fp8_losses_are_those_of_whole_weights_held_as_bytes_and_saved_in_bf16(folder):
    found = torch.load(folder / "fp8.pt", weights_only=False)
    for trained in ("lora_all", "lm"):
        losses, whole = (found[trained, stage]["losses"] for stage in (3, 2))
        assert losses[0] == pytest.approx(whole[0], rel=1e-5)
        # Updates differ in how they round.
        assert losses == pytest.approx(whole, rel=0.05) and losses[-1] < losses[0] - 0.05
    sharded = found["lora_all", 3]
    assert sharded["held"] == {(torch.uint8, torch.int32)}
    assert found["lora_all", 2]["bytes"] == 2 * sharded["bytes"] > 0
    assert not found["lm", 3]["held"]
    saved = found["lm", 3]["saved"]
    assert saved.keys() == build().state_dict().keys()
    inverse = "transformer.rotary_pos_emb.inv_freq"
    assert {dtype for name, dtype in saved.items() if name != inverse} == {torch.bfloat16}
