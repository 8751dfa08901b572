"""The choice of implementations: which one modules get, what blocks a faster one, the report.

``test_inference_layers.py`` tests that implementations bypass no hooks, adapters or wrappers.
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
    ModelUsage,
    explain_implementations,
    find_blocker,
    summarize_explanations,
    use_implementations,
)
from glm4v_patched.engine.kernels.cuda_graphs import GraphedTower
from glm4v_patched.engine.kernels.flash_attention_3 import find_fa3_problem
from glm4v_patched.engine.trainable import select_weights
from tests.helpers.fp8 import PLAIN, build
from tests.helpers.tiny import random_pixels

PACKAGE = Path(glm4v_patched.__file__).parent


@pytest.fixture(autouse=True)
def uncached_package_checks():
    """The check for fa3-fwd is cached for a process; other tests replace what it finds."""
    find_fa3_problem.cache_clear()
    yield
    find_fa3_problem.cache_clear()


def test_only_one_file_changes_classes_and_looks_for_hooks():
    for pattern in (r"__class__ = ", r"\._forward_(pre_)?hooks\b"):
        files = [p for p in PACKAGE.rglob("*.py") if re.search(pattern, p.read_text("utf-8"))]
        assert files == [Path(implementations.__file__)]
    assert Path(implementations.__file__).read_text("utf-8").count("__class__ = ") == 1


class LinearSubclass(nn.Linear):
    pass


class PackedParameter(nn.Parameter):
    pass


def linear_with(change: str) -> nn.Module:
    linear = LinearSubclass(4, 4) if change == "subclass" else nn.Linear(4, 4)
    if change == "hook":
        linear.register_forward_hook(lambda *_: None)
    if change == "pre-hook":
        linear.register_forward_pre_hook(lambda *_: None)
    if change == "offloaded":
        linear.forward = linear.forward
    if change == "quantized":
        linear.weight = PackedParameter(linear.weight)
    return linear


@pytest.mark.parametrize(
    ("change", "reason", "reason_without_hooks"),
    [
        ("plain", None, None),
        ("hook", "it has hooks", None),
        ("pre-hook", "it has hooks", None),
        ("subclass", r"it is a .*\.LinearSubclass", r"it is a .*\.LinearSubclass"),
        ("offloaded", "its forward was replaced", "its forward was replaced"),
        ("quantized", "its weight is a PackedParameter", "its weight is a PackedParameter"),
    ],
)
def test_blockers_of_a_module_are_found(change, reason, reason_without_hooks):
    for hooks_block, expected in ((True, reason), (False, reason_without_hooks)):
        blocker = find_blocker(linear_with(change), (nn.Linear,), hooks_block)
        assert blocker == expected or re.match(expected, blocker)


def report(model: nn.Module, usage: ModelUsage) -> str:
    return "\n".join(summarize_explanations(explain_implementations(model, usage)))


def test_the_report_for_training_names_each_modules_implementation(monkeypatch):
    monkeypatch.setattr(fp8, "_allow_cpu", True)
    usage = ModelUsage.training(replace(PLAIN, trained="lora_lm", compile=True))
    model = select_weights(build(), "lora_lm")
    before = report(model, replace(usage, fp8=False))
    assert before.startswith("as published (fp8 is off): 2 x language model query_key_value, 2 x ")
    use_implementations(model, usage)
    problem = "fa3-fwd is not installed: pip install fa3-fwd"
    kernels = implementations.flash_attention_3
    monkeypatch.setattr(kernels, "find_fa3_problem", lambda head_dim: problem)
    text = report(model, usage)
    # Of a LoRA layer only the base layer is reported, not its factors.
    assert "Fp8StoredLinear: 2 x language model query_key_value, " in text and "default" not in text
    assert "FrozenTowerMLP: 2 x tower VisionMLP" in text
    assert re.search(r"as published \(.* gains nothing\): 2 x tower dense\b", text)
    assert re.search(r"as published \(fa3-fwd is not installed: .*\): 2 x tower Attention", text)
    hooked = model.get_submodule("base_model.model.transformer.vision.transformer.layers.1.mlp")
    hooked.fc2.register_forward_hook(lambda *_: None)
    reason = "computes as published at the moment, because of its fc2: it has hooks"
    assert f"FrozenTowerMLP ({reason}): 1 x tower VisionMLP" in report(model, usage)


def test_the_report_for_inference_says_why_kernels_are_not_used(monkeypatch):
    model, usage = build().eval().requires_grad_(False), ModelUsage.inference()
    block = model.transformer.encoder.layers[0]
    block.mlp.dense_4h_to_h = LinearSubclass(8, 8)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    use_implementations(model, usage)
    text = report(model, usage)
    without = re.search(r"as published \(Triton is not installed.*\): (.*)", text)
    assert {"2 x language model MLP", "1 x PatchEmbedding"} <= {*without[1].split(", ")}
    assert re.search(r"as published \(it is a .*\.LinearSubclass\): 1 x .* dense_4h_to_h", text)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    use_implementations(model, usage)
    text = report(model, usage)
    assert "InferenceBlock: 2 x language model GLMBlock" in text
    assert "InferenceTowerMLP (fp8 is off): 2 x tower VisionMLP" in text
    block.input_layernorm.register_forward_hook(lambda *_: None)
    reason = "does not fuse its input_layernorm: it has hooks"
    assert f"InferenceBlock ({reason}): 1 x language model GLMBlock" in report(model, usage)


@torch.no_grad()
@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_tower_with_hooks_inside_is_not_captured_as_a_cuda_graph(is_hooked):
    """They would be called at the capture, and never again."""
    model, usage = build(), ModelUsage(purpose=CUDA_GRAPHS)
    if is_hooked:
        model.transformer.vision.conv.register_forward_hook(lambda *_: None)
    use_implementations(model, usage)
    assert isinstance(model.transformer.vision, GraphedTower) is not is_hooked
    (line,) = summarize_explanations(explain_implementations(model, usage))
    assert ("a module in it: it has hooks" in line) is is_hooked


@torch.no_grad()
def test_a_tower_with_a_cuda_graph_still_gives_its_hidden_states():
    model = build()
    use_implementations(model, ModelUsage(purpose=CUDA_GRAPHS))
    options = {"output_hidden_states": True, "return_dict": True}
    features = model.get_image_features(random_pixels(1).bfloat16(), **options)
    assert len(features.hidden_states) == 1 + model.config.vision.num_hidden_layers


def test_a_model_with_implementations_survives_pickling(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    model, ids = build().eval().requires_grad_(False), torch.arange(5, 9)[None]
    use_implementations(model, ModelUsage.inference())
    again = pickle.loads(pickle.dumps(model))
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(again(ids).logits, model(ids).logits)
    [first, second] = again.transformer.encoder.layers
    assert first.next_block is second


def test_entries_of_another_backend_are_neither_used_nor_reported(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    model = build().eval().requires_grad_(False)
    classes = [type(module) for module in model.modules()]
    use_implementations(model, ModelUsage.inference())
    assert [type(module) for module in model.modules()] == classes
    assert explain_implementations(model, ModelUsage.inference()) == []


def test_implementations_accept_keyword_arguments_as_the_published_classes_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    model = build().eval().requires_grad_(False)
    x_NTV = torch.randn(1, 5, model.config.vision.hidden_size, dtype=model.dtype)
    mlp = model.transformer.vision.transformer.layers[0].mlp
    expected = mlp(x_NTV)
    use_implementations(model, ModelUsage.inference())
    [parameter] = inspect.signature(type(mlp).__mro__[1].forward).parameters.keys() - {"self"}
    assert torch.equal(mlp(**{parameter: x_NTV}), expected)
