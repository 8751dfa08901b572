"""The effect of engine options on a model and on DeepSpeed's configuration."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.engine import prepare
from glm4v_patched.engine.deepspeed.config import deepspeed_config, require_divisible_processes
from glm4v_patched.engine.memory_plan import GIB
from glm4v_patched.engine.options import LoraOptions, check_trained
from glm4v_patched.engine.prepare import prepare_model
from glm4v_patched.engine.trainable import load_adapters, select_weights
from tests.helpers.fp8 import PLAIN as FP8
from tests.helpers.recipes import recipe
from tests.helpers.tiny import tiny_model

PLAIN = replace(FP8, trained="full", zero_stage=3, fp8=False, tower="full", language="full")


@pytest.mark.parametrize(
    "trained", ["all", "", "tower+", "tower+tower", "tower+lora_lm", "full+tower"]
)
def test_an_unknown_empty_repeated_or_mixed_part_of_trained_is_refused(trained):
    check_trained("projector+tower")
    with pytest.raises(ValueError, match="^trained is .* expected one of"):
        check_trained(trained)


@pytest.mark.parametrize(("stage", "trained"), [(0, torch.float32), (2, torch.bfloat16)])
def test_trained_weights_are_fp32_without_zero_which_has_fp32_copies(stage, trained):
    def build(dtype, **_):
        return tiny_model(dtype)

    model = prepare_model(replace(PLAIN, zero_stage=stage, trained="lm"), build)
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(True, trained), (False, torch.bfloat16)}


def test_the_memory_limit_applies_while_a_model_is_built_unless_it_is_quantized(monkeypatch):
    calls, total = [], 100 * GIB
    for name in ("set_device", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total, total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", calls.append)
    monkeypatch.setattr(prepare, "quantization_options", lambda *args: {})

    def build(**kwargs):
        calls.append("build")
        return tiny_model(dtype=kwargs.get("dtype"))

    for trained, limit, order in (
        ("lora_lm", 25.0, [0.25, "build"]),
        ("qlora", 25.0, ["build", 0.25]),
        ("lora_lm", 200.0, [1.0, "build"]),  # more than there is
    ):
        calls.clear()
        prepare_model(replace(PLAIN, trained=trained, memory_limit=limit), build)
        assert calls[:2] == order


def test_alpha_is_twice_the_rank_unless_it_is_set():
    for lora, alpha in ((LoraOptions(rank=3), 6), (LoraOptions(rank=3, alpha=5), 5)):
        config = select_weights(tiny_model(), "lora_lm", lora).peft_config["default"]
        assert (config.r, config.lora_alpha) == (3, alpha)


def test_adapters_that_do_not_fit_their_config_are_refused(tmp_path):
    """peft would only warn, and leave missing tensors at their initial values."""
    select_weights(tiny_model(), "lora_lm").save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    [(name, tensor), *rest] = load_file(file).items()
    for tensors in (dict(rest), {name: tensor, name.replace("lora", "lara"): tensor} | dict(rest)):
        save_file({name: value.clone() for name, value in tensors.items()}, file)
        message = f"has {len(tensors)} tensors; 1 are missing or do not fit its adapter_config.json"
        with pytest.raises(ValueError, match=message):
            load_adapters(tiny_model(), tmp_path)


def zero_section(**changes) -> dict:
    return deepspeed_config(replace(PLAIN, **changes))["zero_optimization"]


def test_engine_options_reach_the_deepspeed_config():
    # torch rounds pinned blocks up to powers of two.
    assert zero_section(offload=True)["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    # ZeRO-3 saves and loads fp32 weights by its groups, which a resumed run must not change.
    for changes in ({}, {"tower": "selective", "language": "selective", "compile": True}):
        assert zero_section(**changes)["sub_group_size"] == 5e8
    # Compiled and selectively checkpointed layers are gathered at once.
    threshold = "stage3_param_persistence_threshold"
    assert threshold not in zero_section()
    for changes in ({"compile": True}, {"tower": "selective"}, {"language": "linear"}):
        assert zero_section(**changes)[threshold] == 0
    options = recipe({"engine.zero_hpz_partition_size": 8}).engine_options()
    section = zero_section(zero_hpz_partition_size=options.zero_hpz_partition_size)
    assert section["zero_hpz_partition_size"] == 8
    assert "zero_hpz_partition_size" not in zero_section()


def test_shards_that_do_not_divide_the_processes_are_refused_with_both_numbers(words):
    shared = replace(PLAIN, zero_hpz_partition_size=8)
    require_divisible_processes(shared, processes=16)
    require_divisible_processes(PLAIN, processes=1)
    with words.refused(ValueError, "is 8", "12 processes"):
        require_divisible_processes(shared, processes=12)
