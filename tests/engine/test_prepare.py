"""What engine options make of a model, and of DeepSpeed's configuration."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.bench.settings import TrainingSettings
from glm4v_patched.engine import prepare
from glm4v_patched.engine.deepspeed import config as deepspeed
from glm4v_patched.engine.deepspeed.config import deepspeed_config, require_zero_plus_plus
from glm4v_patched.engine.memory_plan import GIB, Batch, decide
from glm4v_patched.engine.options import TRAINED, EngineOptions, LoraOptions
from glm4v_patched.engine.prepare import prepare_model
from glm4v_patched.engine.trainable import load_trainable_adapters, select_weights
from tests.helpers.recipes import recipe
from tests.helpers.tiny import tiny_model

PLAIN = EngineOptions(
    tower="full", language="full", offload=False, compile=False, stage3_max_live_parameters=1e9
)
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
ZERO_PLUS_PLUS = {"zero_hpz_partition_size": 8} | QUANTIZED


def test_recipe_and_bench_ask_for_the_same_where_neither_says_anything():
    from_recipe = recipe({"engine": {}, "trained": "lora_lm"}).engine_options()
    assert TrainingSettings(trained="lora_lm").engine_options() == from_recipe


def test_without_a_gpu_all_is_recomputed():
    config = tiny_model().config
    for trained in TRAINED:
        options = EngineOptions(trained=trained, zero_stage=0 if trained == "qlora" else 3)
        found = decide(config, options, Batch(num_sequences=1, sequence_length=40, processes=2), 0, 1000)
        assert (found.tower, found.language, found.compile) == ("full", "full", False)


def test_what_is_asked_reaches_the_model():
    given = {}

    def build(**options):
        given.update(options)
        return tiny_model()

    options = replace(PLAIN, attn_implementation="eager", precision="fp32", loss_chunk_size=7)
    for skip_logits in (True, False):
        model = prepare_model(replace(options, skip_logits=skip_logits), partial(build, extra=1))
        assert given == {"dtype": torch.float32, "attn_implementation": "eager", "extra": 1}
        assert model.config.skip_logits is skip_logits
        assert model.config.loss_chunk_size == 7 and model.training


def test_the_limit_of_memory_holds_while_the_model_is_built_unless_it_is_quantized(monkeypatch):
    done, total = [], 100 * GIB
    for name in ("set_device", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total, total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", done.append)
    monkeypatch.setattr(prepare, "quantization_options", lambda *given: {})

    def build(**given):
        done.append("build")
        return tiny_model(dtype=given.get("dtype"))

    for trained, limit, order in (
        ("lora_lm", 25.0, [0.25, "build"]),
        ("qlora", 25.0, ["build", 0.25]),
        ("lora_lm", 200.0, [1.0, "build"]),  # more than there is
    ):
        done.clear()
        prepare_model(replace(PLAIN, trained=trained, memory_limit=limit), build)
        assert done[:2] == order


def test_what_is_trained():
    for trained in ("full", "lm", "lora_lm", "lora_all"):
        model = select_weights(tiny_model(), trained)
        learned = [name for name, p in model.named_parameters() if p.requires_grad]
        assert any("encoder" in name for name in learned)
        assert any("vision" in name for name in learned) == (trained in ("full", "lora_all"))
        assert all("lora_" in name for name in learned) == trained.startswith("lora")
    for given, alpha in ((LoraOptions(rank=3), 6), (LoraOptions(rank=3, alpha=5), 5)):
        config = select_weights(tiny_model(), "lora_lm", given).peft_config["default"]
        assert (config.r, config.lora_alpha) == (3, alpha)
    for trained in ("all", "tower+towr", "tower+tower"):
        with pytest.raises(ValueError, match=re.escape(f"{trained!r}; expected one of full, lm")):
            select_weights(tiny_model(), trained)


def test_adapters_that_do_not_fit_their_config_are_refused(tmp_path):
    """peft would warn, and leave what it does not find as new adapters begin."""
    select_weights(tiny_model(), "lora_lm").save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    [(name, tensor), *rest] = load_file(file).items()
    for tensors in (dict(rest), {name: tensor, name.replace("lora", "lara"): tensor} | dict(rest)):
        save_file({name: each.clone() for name, each in tensors.items()}, file)
        told = f"holds {len(tensors)} tensors, of which 1 do not fit its adapter_config.json"
        with pytest.raises(ValueError, match=told):
            load_trainable_adapters(tiny_model(), tmp_path)


def zero_of(**changes) -> dict:
    return deepspeed_config(replace(PLAIN, **changes))["zero_optimization"]


def test_what_deepspeed_is_given():
    # torch rounds pinned blocks up to powers of two.
    assert zero_of(offload=True)["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    # ZeRO-3 saves and loads fp32 weights by its groups, which a continued run must not change.
    for changes in ({}, {"tower": "selective", "language": "selective", "compile": True}):
        assert zero_of(**changes)["sub_group_size"] == 5e8
    # A layer that is compiled, or of which a part is kept, is gathered at once and as a whole.
    kept = "stage3_param_persistence_threshold"
    assert kept not in zero_of()
    for changes in ({"compile": True}, {"tower": "selective"}, {"language": "linear"}):
        assert zero_of(**changes)[kept] == 0
    for name, value in ZERO_PLUS_PLUS.items():
        asked = recipe({f"engine.{name}": value}).engine_options()
        zero = zero_of(**{name: getattr(asked, name)})
        assert {known: zero[known] for known in ZERO_PLUS_PLUS if known in zero} == {name: value}
    assert not ZERO_PLUS_PLUS.keys() & zero_of().keys()


def test_zero_plus_plus_that_cannot_be_is_told_with_both_numbers(monkeypatch, words):
    shared = replace(PLAIN, zero_hpz_partition_size=8)
    quantized = replace(PLAIN, zero_quantized_gradients=True)
    require_zero_plus_plus(shared, processes=16, on_cpu=False)
    require_zero_plus_plus(PLAIN, processes=1, on_cpu=True)
    with words.refused(ValueError, "is 8", "12 processes"):
        require_zero_plus_plus(shared, processes=12, on_cpu=False)
    with words.refused(ValueError, "CPU"):
        require_zero_plus_plus(quantized, processes=2, on_cpu=True)
    monkeypatch.setattr(deepspeed.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", "nowhere")
    with words.refused(ValueError, "nvcc"):
        require_zero_plus_plus(quantized, processes=2, on_cpu=False)
