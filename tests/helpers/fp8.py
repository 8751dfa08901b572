"""Layers that multiply in fp8, and a model that learns."""

from typing import Any

import torch
from torch import Tensor, nn

from glm4v_patched.engine.implementations import set_implementation
from glm4v_patched.engine.kernels.fp8_linear import Fp8DynamicLinear, Fp8StoredLinear
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import small_model

PLAIN = EngineOptions(
    trained="lora_all",
    zero_stage=2,
    fp8=True,
    tower="none",
    language="none",
    offload=False,
    compile=False,
    precision="bf16",
    stage3_max_live_parameters=1e9,
)


def build(dtype: torch.dtype = torch.bfloat16, **_) -> GLM4VForCausalLM:
    return small_model(dtype)


def layer(stored: bool, into: int = 96, out: int = 64, bias: bool = True, **where) -> nn.Linear:
    """One that quantizes its bf16 weight where it is used, or holds it quantized; the same weight
    for the same sizes."""
    torch.manual_seed(0)
    linear: Any = nn.Linear(into, out, bias=bias, dtype=torch.bfloat16, **where)
    set_implementation(linear, Fp8StoredLinear if stored else Fp8DynamicLinear)
    if stored:
        linear.requires_grad_(False).quantize_weight(stores_transposed=bias)
    return linear


def passes(linear: nn.Module, x: Tensor, towards: Tensor) -> list[Tensor]:
    """Its output, and the gradients of its input and of what of it is trained."""
    x = x.detach().clone().requires_grad_()
    out = linear(x)
    out.backward(towards)
    gradients = [x.grad, *(p.grad for p in linear.parameters() if p.requires_grad)]
    linear.zero_grad()
    return [out.detach(), *gradients]


def apart(result: Tensor, exact: Tensor) -> float:
    """Their relative distance."""
    assert result.isfinite().all()
    return ((result.double() - exact).norm() / exact.norm().clamp(min=1e-300)).item()
