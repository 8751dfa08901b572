"""Failures that people met with the published code: it still has them here, ours does not.

The published code is the stand-in of legacy_repository.py. Two real processes train under ZeRO-3
with nothing gathered longer than needed. The reports are of training and DPO with LoRA, checkpoints
and ZeRO-3: ``CheckpointError`` in the backward pass, the saved weights of a decoder layer against
tensors of shape [0]; and of the warning about an old format of checkpointing.
"""

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from transformers import PreTrainedModel

from tests.helpers.legacy_repository import (
    count_labels_of_small_images,
    image_row,
    legacy_model,
    write_legacy_repository,
)
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import tiny_model

# The release in which DeepSpeed began to hold frozen weights through a recomputation itself.
FIRST_HOLDING_DEEPSPEED = "0.19.3"
DEEPSPEED_FAILS = Version(version("deepspeed")) < Version(FIRST_HOLDING_DEEPSPEED)
# Which code, what is trained, in which type, with which checkpoints. "adapters" are LoRA on the
# attention projections of both towers.
PLAIN, CHECKPOINTED = [("ours", "adapters", "bf16", of) for of in ("plain", "nonreentrant")]
DYING = [(of, *CHECKPOINTED[1:]) for of in ("legacy", "ours without the cure")]
WHOLE = [("legacy", "all", "fp32", checkpoints) for checkpoints in ("plain", "nonreentrant")]
RUNS = [PLAIN, CHECKPOINTED, *WHOLE] + (DYING if DEEPSPEED_FAILS else [])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    write_legacy_repository(folder / "legacy")
    tiny_model().save_pretrained(folder / "ours")
    (folder / "runs.json").write_text(json.dumps(RUNS))
    run_two_processes("failure_worker.py", str(folder), seconds=400)
    return folder


def result(results: Path, of_run: tuple[str, ...]) -> dict:
    return torch.load(results / f"{'-'.join(of_run)}.pt")


@pytest.mark.slow
def test_ours_trains_frozen_weights_with_checkpoints_to_the_bit(results):
    want, got = result(results, PLAIN), result(results, CHECKPOINTED)
    assert got["losses"] == want["losses"]
    for gradients, wanted in zip(got["gradients"], want["gradients"], strict=True):
        assert gradients.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(gradients[name], wanted[name])] == []


@pytest.mark.slow
def test_the_published_code_trains_with_checkpoints_where_nothing_is_frozen(results):
    """What all runs rest on: the first loss is that of ours in one process, without sharding."""
    plain, checkpointed = (result(results, run)["losses"] for run in WHOLE)
    assert checkpointed == plain
    model = tiny_model()
    with torch.no_grad():
        want = sum(model(**image_row(seed)).loss.item() for seed in (0, 2)) / 2
    assert plain[0] == pytest.approx(want, rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    not DEEPSPEED_FAILS,
    reason=f"DeepSpeed {version('deepspeed')} is not one that fails; one before "
    f"{FIRST_HOLDING_DEEPSPEED} is: pip install --no-deps deepspeed==0.19.2",
)
@pytest.mark.parametrize("of_run", DYING, ids=" ".join)
def test_frozen_weights_in_a_checkpoint_die_as_reported(of_run, results):
    error = result(results, of_run).get("error", "it trained")
    assert "have different metadata than during the forward pass" in error
    assert "saved metadata: {'shape': torch.Size([64])" in error  # a norm of the decoder
    recomputed = re.findall(r"recomputed metadata: \{'shape': torch.Size\((.*?)\)", error)
    assert {*recomputed} == {"[0]"}


def recomputed_layers(model) -> list[str]:
    """With checkpoints, the classes of the layers that run twice in a training step."""
    # The second name is deprecated from transformers 5.23 on.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})
    runs = []
    layers = [*model.transformer.vision.transformer.layers, *model.transformer.encoder.layers]
    norms = {layer.input_layernorm: type(layer).__name__ for layer in layers}
    for norm in norms:
        norm.register_forward_hook(lambda norm, *_: runs.append(norm))
    model.train()(**image_row(0)).loss.backward()
    return [name for norm, name in norms.items() if runs.count(norm) == 2]


def test_the_published_code_is_told_that_its_format_is_old_and_checkpoints_one_tower(
    tmp_path, warned
):
    """Ours is told nothing, and checkpoints both."""
    ours = tiny_model()
    assert recomputed_layers(ours) == ["TransformerLayer"] * 2 + ["GLMBlock"] * 2
    # The old format's mark is an override of this method.
    assert type(ours)._set_gradient_checkpointing is PreTrainedModel._set_gradient_checkpointing
    assert warned.text == ""
    with legacy_model(tmp_path, dtype=torch.float32) as model:
        count_labels_of_small_images(model)
        assert recomputed_layers(model) == ["GLMBlock"] * 2
    assert warned.text.count("old version of the checkpointing format") == 1
