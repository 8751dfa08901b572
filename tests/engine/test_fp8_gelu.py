"""GELU that quantises: the operator, its kernel, and a frozen tower whose layers use it."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import gelu

from glm4v_patched.engine import fp8
from glm4v_patched.engine.fp8_gelu import quantise_rows_of_gelu
from glm4v_patched.engine.prepare import prepare_model
from tests.helpers.fp8 import PLAIN, build

pytestmark = pytest.mark.newest  # torch's products


def drawn(device: str = "cpu", rows: int = 6, channels: int = 96) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    size = torch.logspace(-4, 2, rows)[:, None]
    x = (torch.randn(rows, channels) * size).bfloat16()
    return x.to(device), torch.randn(channels).bfloat16().to(device)


def test_rows_are_those_of_gelu_quantised():
    x, bias = drawn()
    x[2, 7] = float("nan")
    numbers, scale = quantise_rows_of_gelu(x, bias)
    found, wide = numbers.double() * scale.double(), gelu(x.double() + bias.double())
    assert not found[2].isfinite().any()
    found, wide = found[[0, 1, 3, 4, 5]], wide[[0, 1, 3, 4, 5]]
    largest = wide.abs().amax(-1, keepdim=True)
    assert ((found - wide).abs() <= (wide.abs() / 16).clamp(min=largest / 2e5)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "channels"), [(0, 96), (3, 96), (500, 15360)])
def test_the_kernel_does_what_plain_torch_does(rows, channels):
    x, bias = drawn("cuda", rows, channels)
    x[1:2, 3] = float("nan")
    numbers, scale = quantise_rows_of_gelu(x, bias)
    expected, scales = fp8.quantise_rows(gelu(x.float() + bias.float()))
    assert torch.allclose(scale, scales, rtol=1e-5, equal_nan=True)
    assert numbers.shape == expected.shape
    if rows:
        # Where a value lies between two numbers, either will do.
        assert (numbers.float() != expected.float()).float().mean() < 0.01 + (rows == 3)
        apart = (numbers.float() - expected.float()).abs() / expected.float().abs().clamp(min=0.02)
        assert not (apart > 0.13).any()
        assert not (numbers.float() * scale)[1].isfinite().any()


@pytest.mark.parametrize("trained", ["lora_lm", "lm"])
def test_a_frozen_tower_uses_it_and_computes_the_same(trained, monkeypatch):
    monkeypatch.setattr(fp8, "_on_cpu", True)
    outputs = []
    for fused in (True, False):
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(fp8, "_fuse_activations", lambda model: None)
            model = prepare_model(replace(PLAIN, trained=trained, compile=True), build)
        mlps = [m for m in model.modules() if isinstance(m, fp8.MLP)]
        assert mlps and all((type(m) is fp8.FrozenTowerMLP) is fused for m in mlps)
        with torch.no_grad():
            mlps[0].fc1.bias.fill_(0.5)
            x = torch.randn(1, 5, mlps[0].fc1.in_features, generator=torch.manual_seed(0))
            outputs.append(mlps[0](x.bfloat16()).float())
            compiled = torch.compile(mlps[0].forward, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x.bfloat16()).float(), outputs[-1])
    # fc2's input is not rounded to bf16 before it is quantised.
    assert outputs[1].norm() > 0 and (outputs[0] - outputs[1]).norm() / outputs[1].norm() < 0.03


@pytest.mark.parametrize(("trained", "compiled"), [("lora_all", True), ("lora_lm", False)])
def test_others_keep_their_activation(trained, compiled, monkeypatch):
    monkeypatch.setattr(fp8, "_on_cpu", True)
    model = prepare_model(replace(PLAIN, trained=trained, compile=compiled), build)
    assert not any(isinstance(m, fp8.FrozenTowerMLP) for m in model.modules())
