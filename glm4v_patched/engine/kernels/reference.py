"""What each Triton kernel computes, in plain torch, under the kernel's own name and arguments.

Shapes and arguments are documented at the kernels. The tests compare each kernel with its function
here on a GPU, and run the layers of :mod:`inference_layers` with these functions on a CPU.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention, silu
from transformers.cache_utils import StaticLayer

from ...remote.modeling_chatglm import RMSNorm, apply_rotary
from . import fp8_matmul
from .fp8_matmul import Quantized
from .skinny_gemm import Parts

# Of inference_triton.py.


def layer_norm_add(
    x: Tensor, norm: nn.LayerNorm, y: Tensor, quantizes: bool
) -> tuple[Tensor, Tensor | Quantized]:
    added = x + layer_norm(y, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return added, quantized(added) if quantizes else added


def add_rms_norm(
    x: Tensor, norm: RMSNorm, y: Tensor | Parts | None, quantizes: bool
) -> tuple[Tensor, Tensor | Quantized]:
    added = x if y is None else x + reduced(y)
    normed = rms_norm(added, norm.weight.shape, norm.weight, norm.eps).to(x.dtype)
    return added, quantized(normed) if quantizes else normed


def rotate(heads_BRHC: Tensor, rotated_heads: int, cos_BR1C: Tensor, sin_BR1C: Tensor) -> None:
    rotated = heads_BRHC[:, :, :rotated_heads]
    heads_BRHC[:, :, :rotated_heads] = apply_rotary(rotated, cos_BR1C, sin_BR1C)


def rope_and_update_cache(
    heads: Tensor | Parts, sizes: tuple[int, int, int], cos: Tensor, sin: Tensor, kept: Any
) -> Tensor:
    split = reduced(heads).unflatten(-1, (sum(sizes), -1)).clone()
    rotate(split, sizes[0] + sizes[1], cos, sin)
    query, key, value = split.transpose(1, 2).split(sizes, dim=1)
    StaticLayer.update(kept, key, value)
    return query.squeeze(2)


def flash_decode(
    query_BHC: Tensor, kept: Any, mask: Tensor, quantizes: bool
) -> Tensor | Quantized:
    query_BHRC = query_BHC[:, :, None]
    out = scaled_dot_product_attention(
        query_BHRC, kept.keys, kept.values, attn_mask=mask, enable_gqa=True
    )
    out = out.transpose(1, 2).flatten(2)
    return quantized(out) if quantizes else out


# Of fp8_triton.py.


def activate(x: Tensor | Parts, function: str) -> Tensor:
    if function == "gelu":
        assert isinstance(x, Tensor)
        return x.copy_(gelu(x))  # in its own memory
    gate, up = reduced(x).chunk(2, dim=-1)
    return silu(gate) * up


def quantize_rows(
    x: Tensor | Parts, bias: Tensor | None, function: str, group: int | None
) -> tuple[Tensor, Tensor]:
    """Quantize with one scale for a whole row, where the kernel has one for each ``group``."""
    assert (bias, function) == (None, "swiglu"), "as inference_layers.py calls it"
    return fp8_matmul.quantize_rows(activate(x, function).flatten(0, -2))


# Of skinny_gemm_triton.py.


def reduce_partials(of: Parts, residual: Tensor | float = 0.0) -> Tensor:
    return reduced(of) + residual


def split_k_matmul(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return the whole product as one partial sum, where the kernel splits it over blocks."""
    x = x.float() if scales is None else x.float() * scales
    return torch.stack([x @ weight.float().T])


# Used by several of them.


def reduced(x: Tensor | Parts) -> Tensor:
    """Return a tensor as it is, and partial sums added, scaled and rounded."""
    if isinstance(x, Tensor):
        return x
    total = x.parts.sum(0)
    if x.scale is not None:
        total = total * x.scale.T
    if x.bias is not None:
        total = total + x.bias.float()
    return total.to(x.dtype).view(x.shape)


def quantized(x: Tensor) -> Quantized:
    return Quantized(*fp8_matmul.quantize_rows(x.flatten(0, -2))).reshape(*x.shape)
