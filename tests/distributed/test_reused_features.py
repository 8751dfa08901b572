"""Reused features on two processes whose batches are unlike: under ZeRO-3 and FSDP2 a step reuses
features only if both have those of their images."""

from pathlib import Path

import pytest
import torch

from glm4v_patched.data.feature_cache import TowerFeatures, digest_weights
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import (
    Training,
    of_both_ranks,
    save_on_first,
    select_weights,
    zero_config,
)
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import expanded_image, random_pixels, text, tiny_model
from tests.remote.inputs import assert_close

# The image of rank 0 and that of rank 1, step by step; "-" is a batch without one.
IMAGES = ["AB", "AB", "C-", "C-", "AD", "CD", "--", "-D", "BA"]
# In how many of these steps the tower runs, on each rank; without an image it runs for the blank
# one, but under DDP.
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
EVERY = [*dict.fromkeys((*run[:2], "") for run in RUNS), *RUNS]


def rank_batch(step: int) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    image = IMAGES[step][rank]
    row = [*text(5, seed=step), *(expanded_image() if image != "-" else [])]
    row += text(9, seed=10 * step + rank + 1)
    ids = torch.tensor([row])
    images = {} if image == "-" else {"pixel_values": random_pixels(1, seed=ord(image))}
    return {"input_ids": ids, "labels": ids} | images


def train(weights: str, strategy: str, keep: str, folder: Path) -> dict:
    """Both ranks' losses, the gradients, how often the tower ran in every step on each rank, and
    the digest of the tower's weights."""
    model = GLM4VForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    model = select_weights(model, weights)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Made before the model is sharded, as a recipe does; used after it.
    features = keep and TowerFeatures(model, None if keep == "memory" else folder / keep)
    tower = next(m for m in model.modules() if type(m).__name__ == "EVA2CLIPModel")
    runs = []
    tower.register_forward_hook(lambda module, inputs, output: runs.append(len(output)))
    training = Training(model, strategy, zero_config())
    losses, gradients, counts = [], [], []
    digest = digest_weights(tower)
    for step in range(len(IMAGES)):
        inputs = rank_batch(step)
        output = training(**features.replace_images(inputs) if features else inputs)
        if features:
            features.keep(output)
        training.backward(output.loss)
        gradients.append(training.gradients())
        losses.append(output.loss.item())
        counts.append(len(runs))
        runs.clear()
        training.update()
    training.close()
    losses, counts = zip(*of_both_ranks((losses, counts)), strict=True)
    return {"losses": losses, "runs": [*counts], "gradients": gradients, "digest": digest}


def on_each_rank(folder: Path) -> None:
    save_on_first({run: train(*run, folder) for run in EVERY}, folder / "found.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    tiny_model().save_pretrained(folder / "model")
    output = run_two_processes(on_each_rank, folder, seconds=300)
    assert output.count("kept in the memory of 2 processes") == 2 * 3
    return folder


@pytest.fixture(scope="module")
def found(folder) -> dict:
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_reuse_changes_no_bit_and_spares_the_tower_of_both_processes(run, found):
    want, got = found[(*run[:2], "")], found[run]
    assert got["losses"] == want["losses"]
    for gradients, wanted in zip(got["gradients"], want["gradients"], strict=True):
        assert_close(gradients, wanted)
        assert len(wanted) > 1
    assert want["runs"] == WITHOUT[run[1]]
    assert got["runs"] == RUNS[run]


def test_the_weights_have_one_digest_however_they_are_spread(folder, found):
    digests = {found[run]["digest"] for run in EVERY}
    assert digests == {digest_weights(tiny_model().transformer.vision)}
    assert len(list((folder / "folder").iterdir())) == 1
