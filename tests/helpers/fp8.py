"""Layers that multiply in fp8, their products written plainly; a model that learns."""

from typing import Any

import torch
from torch import Tensor, nn

from glm4v_patched.engine.implementations import TRAINING, ModelUsage, set_implementation
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

# As in inference, but for its kernels.
FP8_ALONE = ModelUsage(purpose=TRAINING, fp8=True, stores_fp8=True, has_fused_quantization=True)


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


def rounded(x: Tensor) -> Tensor:
    """Quantize the rows of a tensor to e4m3, each with its scale, and dequantize them to fp64."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    numbers = (x.float() * (448 / largest)).to(torch.float8_e4m3fn)
    return numbers.double() * (largest / 448).double()


def emulated(linear: nn.Linear, x: Tensor, towards: Tensor, stored: bool) -> list[Tensor]:
    """Output and gradients of input, weight and bias, in fp64 from quantized operands.

    Args:
        linear: bf16.
        x, towards: ``(T, I)`` and ``(T, O)``.
        held: The gradient of the input is made with the weight of forward, whose scales are
            multiplied into ``towards``; otherwise the weight is quantized by its input channels.
    """
    weight, wide = linear.weight.detach(), towards.double()
    out = rounded(x) @ rounded(weight).t()
    if stored:
        scale = weight.float().abs().amax(-1, keepdim=True) / 448
        of_input = rounded(towards.float() * scale.t()) @ (rounded(weight) / scale.double())
    else:
        of_input = rounded(towards) @ rounded(weight.t()).t()
    bias = 0 if linear.bias is None else linear.bias.detach().double()
    return [out + bias, of_input, wide.t() @ x.double(), wide.sum(0)]
