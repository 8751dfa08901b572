"""Reused image features on two processes with different batches: under ZeRO-3 and FSDP2, a step
reuses features only if both processes have those of their images."""

from pathlib import Path

import pytest
import torch

from glm4v_patched.data.feature_cache import TowerFeatures, digest_weights
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import (
    Training,
    gather_from_both_ranks,
    save_on_rank_0,
    select_weights,
    zero_config,
)
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import expanded_image, random_pixels, text, tiny_model
from tests.remote.inputs import assert_close

# The images of rank 0 and rank 1 in each step; "-" is a batch without an image.
IMAGES = ["AB", "AB", "C-", "C-", "AD", "CD", "--", "-D", "BA"]
# How often the tower runs in each step, by rank, without reuse. Without an image it runs for a
# blank one, except under DDP.
ALWAYS = [[1] * 9] * 2
WITHOUT = {"zero3": ALWAYS, "fsdp2": ALWAYS}
WITHOUT["ddp"] = [[1, 1, 1, 1, 1, 1, 0, 0, 1], [1, 1, 0, 0, 1, 1, 0, 1, 1]]
NEW_FOR_ONE_OF_THEM = [[1, 0, 1, 0, 1, 0, 0, 0, 1]] * 2
NEW_TO_THE_FOLDER = [[1, 0, 1, 0, 1, 0, 0, 0, 0]] * 2
FIRST_STEP = [[1, 0, 0, 0, 0, 0, 0, 0, 0]] * 2
# Trained weights, strategy and place of the features, with the expected runs of the tower. Each is
# preceded by the same training without reuse.
RUNS = {
    ("frozen_vision", "zero3", "memory"): NEW_FOR_ONE_OF_THEM,
    ("frozen_vision", "zero3", "folder"): NEW_TO_THE_FOLDER,
    ("frozen_vision", "fsdp2", "memory"): NEW_FOR_ONE_OF_THEM,
    ("lora_language", "fsdp2", "folder"): FIRST_STEP,  # the tower is the same
    ("frozen_vision", "ddp", "memory"): [[1, 0, 1, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0, 0, 0, 1]],
}
ALL_RUNS = [*dict.fromkeys((*run[:2], "") for run in RUNS), *RUNS]


def rank_batch(step: int) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    image = IMAGES[step][rank]
    prompt = [*text(5, seed=step), *(expanded_image() if image != "-" else [])]
    ids = torch.tensor([prompt + text(9, seed=10 * step + rank + 1)])
    images = {} if image == "-" else {"pixel_values": random_pixels(1, seed=ord(image))}
    return {"input_ids": ids, "labels": ids} | images


def train(weights: str, strategy: str, storage: str, folder: Path) -> dict:
    """Train; return both ranks' losses, the gradients, how often the tower ran in each step on each
    rank, and the digest of the tower's weights."""
    model = GLM4VForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    model = select_weights(model, weights)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Created before the model is sharded, as in a recipe, and used after it.
    features = storage and TowerFeatures(model, None if storage == "memory" else folder / storage)
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
            features.cache_new(output)
        training.backward(output.loss)
        gradients.append(training.gradients())
        losses.append(output.loss.item())
        counts.append(len(runs))
        runs.clear()
        training.update()
    training.close()
    losses, counts = zip(*gather_from_both_ranks((losses, counts)), strict=True)
    return {"losses": losses, "runs": [*counts], "gradients": gradients, "digest": digest}


def on_each_rank(folder: Path) -> None:
    save_on_rank_0({run: train(*run, folder) for run in ALL_RUNS}, folder / "results.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    tiny_model().save_pretrained(folder / "model")
    output = run_two_processes(on_each_rank, folder, seconds=300)
    assert output.count("each of 2 processes caches features in its own memory") == 2 * 3
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict:
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_reuse_gives_the_same_bits_and_skips_the_tower_of_both_processes(run, results):
    plain, reused = results[(*run[:2], "")], results[run]
    assert reused["losses"] == plain["losses"]
    for gradients, expected in zip(reused["gradients"], plain["gradients"], strict=True):
        assert_close(gradients, expected)
        assert len(expected) > 1
    assert plain["runs"] == WITHOUT[run[1]]
    assert reused["runs"] == RUNS[run]


def test_the_digest_of_weights_does_not_depend_on_sharding(folder, results):
    digests = {results[run]["digest"] for run in ALL_RUNS}
    assert digests == {digest_weights(tiny_model().transformer.vision)}
    assert len(list((folder / "folder").iterdir())) == 1
