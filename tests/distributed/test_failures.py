"""Failures that people met with the published code: it still has them here, ours does not.

The published code is the stand-in of legacy_repository.py. Two real processes train under ZeRO-3
with nothing gathered longer than needed. The reports are of training and DPO with LoRA, checkpoints
and ZeRO-3: ``CheckpointError`` in the backward pass, the saved weights of a decoder layer against
tensors of shape [0]; and of the warning about an old format of checkpointing. That ours trains with
frozen weights and checkpoints is a cell of test_matrix.py.
"""

import re
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import deepspeed
import pytest
import torch
from packaging.version import Version
from torch.utils.checkpoint import CheckpointError
from transformers import AutoModel, PreTrainedModel

from glm4v_patched.remote import checkpointing
from tests.distributed.strategies import (
    Training,
    averaged,
    save_on_first,
    select_weights,
    zero_config,
)
from tests.helpers.legacy_repository import (
    image_row,
    legacy_model,
    remote_code_under,
    write_legacy_repository,
)
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import tiny_model

# The release in which DeepSpeed began to hold frozen weights through a recomputation itself.
FIRST_HOLDING_DEEPSPEED = "0.19.3"
DEEPSPEED_FAILS = Version(version("deepspeed")) < Version(FIRST_HOLDING_DEEPSPEED)
# Which code trains with which checkpoints: adapters in bf16, or all weights in fp32.
DYING = [("legacy", "adapters"), ("ours without the cure", "adapters")]
WHOLE = [("legacy", "all, no checkpoints"), ("legacy", "all")]
# The second step runs on DeepSpeed's finished trace of the parameters, the first does not.
STEPS = 2


def load(code: str, trained: str, folder: Path):
    """The model, whole in every process: what is tested begins where DeepSpeed shards it."""
    dtype = torch.bfloat16 if trained == "adapters" else torch.float32
    if code == "legacy":
        for rank in range(torch.distributed.get_world_size()):
            if rank == torch.distributed.get_rank():  # both copy the code to the same place
                model = AutoModel.from_pretrained(
                    folder / "legacy", trust_remote_code=True, dtype=dtype
                )
            torch.distributed.barrier()
    else:
        model = tiny_model(dtype)
    model = select_weights(model, "lora_both" if trained == "adapters" else "all")
    if "no checkpoints" not in trained:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(model) -> list[float] | str:
    """Losses, or the error that both processes met."""
    is_bf16 = model.dtype == torch.bfloat16
    training = Training(model, "zero3", zero_config() | {"bf16": {"enabled": is_bf16}})
    losses, rank = [], torch.distributed.get_rank()
    try:
        for step in range(STEPS):
            loss = training(**image_row(seed=2 * (10 * step + rank))).loss
            training.backward(loss)
            losses.append(averaged(loss))
            training.update()
    except CheckpointError as error:
        return str(error)
    finally:
        training.close()
    return losses


def on_each_rank(folder: Path) -> None:
    # DeepSpeed replaces F.linear for good when a model is made under zero.Init, as from_pretrained
    # does; since 0.19.3 always. Only then are Linear weights saved for backward as they are.
    with deepspeed.zero.Init(config_dict_or_path=zero_config()):
        pass
    found = {}
    with remote_code_under(folder / "modules"), pytest.MonkeyPatch.context() as patch:
        for code, trained in WHOLE + DYING:
            if code == "ours without the cure":
                patch.setattr(checkpointing, "frozen_parameters_held", nullcontext)
            found[code, trained] = train(load(code, trained, folder))
    save_on_first(found, folder / "found.pt")


on_failing_deepspeed = pytest.mark.skipif(
    not DEEPSPEED_FAILS,
    reason=f"DeepSpeed {version('deepspeed')} is not one that fails; one before "
    f"{FIRST_HOLDING_DEEPSPEED} is: pip install --no-deps deepspeed==0.19.2",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("failures")
    write_legacy_repository(folder / "legacy")
    run_two_processes(on_each_rank, folder, seconds=400)
    return torch.load(folder / "found.pt")


@pytest.mark.slow
@on_failing_deepspeed
def test_the_published_code_trains_with_checkpoints_where_nothing_is_frozen(found):
    """What all runs rest on: the first loss is that of ours in one process, without sharding."""
    plain, checkpointed = (found[run] for run in WHOLE)
    assert checkpointed == plain
    model = tiny_model()
    with torch.no_grad():
        want = sum(model(**image_row(seed)).loss.item() for seed in (0, 2)) / 2
    assert plain[0] == pytest.approx(want, rel=1e-6)


@pytest.mark.slow
@on_failing_deepspeed
@pytest.mark.parametrize("of_run", DYING, ids=" ".join)
def test_frozen_weights_in_a_checkpoint_die_as_reported(of_run, found):
    error = found[of_run]
    assert isinstance(error, str), "it trained"
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
        assert recomputed_layers(model) == ["GLMBlock"] * 2
    assert warned.text.count("old version of the checkpointing format") == 1
