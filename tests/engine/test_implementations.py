"""Which implementation modules get, what is in a faster one's way, and what is said of it.

That hooks, adapters and wrappers are passed over by none: ``test_inference_layers.py``.
"""

import importlib.util
import inspect
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import glm4v_patched
from glm4v_patched.engine import fp8, implementations
from glm4v_patched.engine.implementations import (
    CUDA_GRAPHS,
    Use,
    explain,
    summarize,
    use_implementations,
    find_blocker,
)
from glm4v_patched.engine.kernels.flash_attention_3 import fault
from glm4v_patched.engine.kernels.cuda_graphs import GraphedTower
from glm4v_patched.engine.trainable import select_weights
from tests.helpers.fp8 import PLAIN, build

PACKAGE = Path(glm4v_patched.__file__).parent


@pytest.fixture(autouse=True)
def looks_for_packages_anew():
    """What was found of fa3-fwd is kept for a process, also where a test has it found."""
    fault.cache_clear()
    yield
    fault.cache_clear()


def test_one_place_changes_classes_and_looks_for_hooks():
    for pattern in (r"__class__ = ", r"\._forward_(pre_)?hooks\b"):
        files = [p for p in PACKAGE.rglob("*.py") if re.search(pattern, p.read_text())]
        assert files == [Path(implementations.__file__)]
    assert Path(implementations.__file__).read_text().count("__class__ = ") == 1


class Other(nn.Linear):
    pass


class Packed(nn.Parameter):
    pass


def changed(how: str) -> nn.Module:
    linear = Other(4, 4) if how == "subclass" else nn.Linear(4, 4)
    if how == "hook":
        linear.register_forward_hook(lambda *_: None)
    if how == "pre-hook":
        linear.register_forward_pre_hook(lambda *_: None)
    if how == "offloaded":
        linear.forward = linear.forward
    if how == "quantized":
        linear.weight = Packed(linear.weight)
    return linear


@pytest.mark.parametrize(
    ("how", "reason", "stays"),
    [
        ("plain", None, None),
        ("hook", "it has hooks", None),
        ("pre-hook", "it has hooks", None),
        ("subclass", r"it is a .*\.Other", r"it is a .*\.Other"),
        ("offloaded", "its forward was replaced", "its forward was replaced"),
        ("quantized", "its weight is a Packed", "its weight is a Packed"),
    ],
)
def test_what_is_in_the_way_of_computing_what_a_module_does(how, reason, stays):
    for hooks_block, expected in ((True, reason), (False, stays)):
        found = find_blocker(changed(how), (nn.Linear,), hooks_block)
        assert found == expected or re.match(expected, found)


def lines(model: nn.Module, use: Use) -> str:
    return "\n".join(summarize(explain(model, use)))


def test_in_training_each_module_is_said_to_have_its_implementation(monkeypatch):
    monkeypatch.setattr(fp8, "_allow_cpu", True)
    use = Use.training(replace(PLAIN, trained="lora_lm", compile=True))
    model = select_weights(build(), "lora_lm")
    before = lines(model, replace(use, fp8=False))
    assert before.startswith("as published (fp8 is off): 2 x language model query_key_value, 2 x ")
    use_implementations(model, use)
    found = lines(model, use)
    # Of LoRA's layer the inner one; its factors are not told of.
    assert "Fp8StoredLinear: 2 x language model query_key_value, " in found and "default" not in found
    assert "FrozenTowerMLP: 2 x tower MLP" in found
    assert re.search(r"as published \(.* gains nothing\): 2 x tower dense\b", found)
    assert re.search(r"as published \(fa3-fwd is not installed: .*\): 2 x tower Attention", found)
    hooked = model.get_submodule("base_model.model.transformer.vision.transformer.layers.1.mlp")
    hooked.fc2.register_forward_hook(lambda *_: None)
    reason = "as published at the moment, for its fc2: it has hooks"
    assert f"FrozenTowerMLP ({reason}): 1 x tower MLP" in lines(model, use)


def test_in_inference_why_kernels_are_not_used_is_said(monkeypatch):
    model, use = build().eval().requires_grad_(False), Use.inference()
    block = model.transformer.encoder.layers[0]
    block.mlp.dense_4h_to_h = Other(8, 8)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    use_implementations(model, use)
    found = lines(model, use)
    without = re.search(r"as published \(Triton is not installed.*\): (.*)", found)
    assert {"2 x language model MLP", "1 x PatchEmbedding"} <= {*without[1].split(", ")}
    assert re.search(r"as published \(it is a .*\.Other\): 1 x .* dense_4h_to_h", found)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    use_implementations(model, use)
    found = lines(model, use)
    assert "InferenceBlock: 2 x language model GLMBlock" in found
    assert "InferenceTowerMLP (fp8 is off): 2 x tower MLP" in found
    block.input_layernorm.register_forward_hook(lambda *_: None)
    reason = "without its input_layernorm: it has hooks"
    assert f"InferenceBlock ({reason}): 1 x language model GLMBlock" in lines(model, use)


@torch.no_grad()
@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_tower_with_hooks_inside_is_not_recorded(is_hooked):
    """They would be called while it is recorded, and never again."""
    model, use = build(), Use(purpose=CUDA_GRAPHS)
    if is_hooked:
        model.transformer.vision.conv.register_forward_hook(lambda *_: None)
    use_implementations(model, use)
    assert isinstance(model.transformer.vision, GraphedTower) is not is_hooked
    (line,) = summarize(explain(model, use))
    assert ("of a module in it: it has hooks" in line) is is_hooked


def test_a_changed_model_is_pickled_and_computes_the_same(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    model, ids = build().eval().requires_grad_(False), torch.arange(5, 9)[None]
    use_implementations(model, Use.inference())
    again = pickle.loads(pickle.dumps(model))
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(again(ids).logits, model(ids).logits)
    [first, second] = again.transformer.encoder.layers
    assert first.behind is second


def test_rows_of_another_makers_gpus_are_neither_used_nor_told_of(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    model = build().eval().requires_grad_(False)
    kinds = [type(module) for module in model.modules()]
    use_implementations(model, Use.inference())
    assert [type(module) for module in model.modules()] == kinds
    assert explain(model, Use.inference()) == []


def test_an_implementation_takes_arguments_by_name_as_the_published_class_does(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    model = build().eval().requires_grad_(False)
    x_NTV = torch.randn(1, 5, model.config.vision.hidden_size, dtype=model.dtype)
    mlp = model.transformer.vision.transformer.layers[0].mlp
    expected = mlp(x_NTV)
    use_implementations(model, Use.inference())
    [parameter] = inspect.signature(type(mlp).__mro__[1].forward).parameters.keys() - {"self"}
    assert torch.equal(mlp(**{parameter: x_NTV}), expected)
