"""Plain steps that do what the kernels of a model that is only read do, for a CPU."""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import (
    gelu,
    layer_norm,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)
from transformers.cache_utils import StaticLayer

from glm4v_patched.engine import inference_layers
from glm4v_patched.engine.kernels import fp8_matmul, skinny_gemm
from glm4v_patched.engine.kernels.fp8_matmul import Quantised
from glm4v_patched.engine.kernels.skinny_gemm import Parts
from glm4v_patched.remote.modeling_chatglm import apply_rotary


def put_in_the_place_of_kernels(monkeypatch, model, has_products: bool) -> list[str]:
    """Returns a list that gets the name of each one called."""
    calls: list[str] = []

    def noted(function):
        def call(*args):
            calls.append(function.__name__)
            return function(*args)

        return call

    for name, functions in KERNELS.items():
        module: Any = ModuleType(name)
        vars(module).update({each.__name__: noted(each) for each in functions})
        monkeypatch.setitem(sys.modules, f"glm4v_patched.engine.kernels.{name}", module)
    monkeypatch.setattr(inference_layers, "_takes", lambda x: isinstance(x, Tensor))
    monkeypatch.setattr(inference_layers, "HEAD_CHANNELS", (model.config.kv_channels,))
    for module in (inference_layers, skinny_gemm):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(skinny_gemm, "takes", lambda rows, weight: has_products and rows <= 32)
    return calls


def whole(x: Tensor | Parts) -> Tensor:
    if isinstance(x, Tensor):
        return x
    total = x.parts.sum(0)
    if x.scale is not None:
        total = total * x.scale.T
    if x.bias is not None:
        total = total + x.bias.float()
    return total.to(x.dtype).view(x.shape)


def quantised(x: Tensor) -> Quantised:
    return Quantised(*fp8_matmul.quantise_rows(x.flatten(0, -2))).reshape(*x.shape)


def add_norm(x, norm, y, quantises):
    added = x + layer_norm(y, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return added, quantised(added) if quantises else added


def add_rms_norm(x, norm, y, quantises):
    added = x if y is None else x + whole(y)
    normed = rms_norm(added, norm.weight.shape, norm.weight, norm.eps).to(x.dtype)
    return added, quantised(normed) if quantises else normed


def rotate(heads, rotated_heads, cos, sin):
    heads[:, :, :rotated_heads] = apply_rotary(heads[:, :, :rotated_heads], cos, sin)


def rotate_and_keep(heads, sizes, cos, sin, kept):
    heads = whole(heads).unflatten(-1, (sum(sizes), -1)).clone()
    rotate(heads, sizes[0] + sizes[1], cos, sin)
    query, key, value = heads.transpose(1, 2).split(sizes, dim=1)
    StaticLayer.update(kept, key, value)
    return query.squeeze(2)


def attend_to_kept(query, kept, mask, quantises):
    given = query[:, :, None], kept.keys, kept.values
    out = scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True)
    out = out.transpose(1, 2).flatten(2)
    return quantised(out) if quantises else out


def activate(x, function):
    if function == "gelu":
        return x.copy_(gelu(x))  # in its own memory
    gate, up = whole(x).chunk(2, dim=-1)
    return silu(gate) * up


def quantise_rows(x, bias, function, group):
    assert (bias, function) == (None, "swiglu")
    return fp8_matmul.quantise_rows(activate(x, function).flatten(0, -2))


def sum_of_parts(of, residual=0):
    return whole(of) + residual


def parts_of_product(x, weight, scales=None):
    x = x.float() if scales is None else x.float() * scales
    return torch.stack([x @ weight.float().T])


KERNELS = {
    "inference_triton": (add_norm, add_rms_norm, rotate, rotate_and_keep, attend_to_kept),
    "fp8_triton": (activate, quantise_rows),
    "skinny_gemm_triton": (sum_of_parts, parts_of_product),
}
