"""The Triton kernels in plain torch, under the kernels' own names and arguments.

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
from .fp8_matmul import Fp8Tensor
from .skinny_gemm import SplitKPartials

# Kernels of inference_triton.py.


def layer_norm_add(
    x: Tensor, norm: nn.LayerNorm, y: Tensor, quantizes: bool
) -> tuple[Tensor, Tensor | Fp8Tensor]:
    total = x + layer_norm(y, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return total, to_fp8(total) if quantizes else total


def add_rms_norm(
    x: Tensor, norm: RMSNorm, y: Tensor | SplitKPartials | None, quantizes: bool
) -> tuple[Tensor, Tensor | Fp8Tensor]:
    total = x if y is None else x + to_tensor(y)
    normalized = rms_norm(total, norm.weight.shape, norm.weight, norm.eps).to(x.dtype)
    return total, to_fp8(normalized) if quantizes else normalized


def rope_in_place(
    heads_BRHC: Tensor, num_rotated_heads: int, cos_BR1C: Tensor, sin_BR1C: Tensor, distance: int
) -> None:
    rotated = heads_BRHC[:, :, :num_rotated_heads]
    heads_BRHC[:, :, :num_rotated_heads] = apply_rotary(rotated, cos_BR1C, sin_BR1C, distance)


def rope_and_update_cache(
    qkv: Tensor | SplitKPartials,
    head_counts: tuple[int, int, int],
    cos: Tensor,
    sin: Tensor,
    distance: int,
    cache_layer: Any,
) -> Tensor:
    heads_BRHC = to_tensor(qkv).unflatten(-1, (sum(head_counts), -1)).clone()
    rope_in_place(heads_BRHC, head_counts[0] + head_counts[1], cos, sin, distance)
    query, key, value = heads_BRHC.transpose(1, 2).split(head_counts, dim=1)
    StaticLayer.update(cache_layer, key, value)
    return query.squeeze(2)


def flash_decode(
    query_BHC: Tensor, cache_layer: Any, mask: Tensor, quantizes: bool
) -> Tensor | Fp8Tensor:
    query_BHRC = query_BHC[:, :, None]
    out = scaled_dot_product_attention(
        query_BHRC, cache_layer.keys, cache_layer.values, attn_mask=mask, enable_gqa=True
    )
    out = out.transpose(1, 2).flatten(2)
    return to_fp8(out) if quantizes else out


# Kernels of fp8_triton.py.


def activate(x: Tensor | SplitKPartials, function: str) -> Tensor:
    if function == "gelu":
        assert isinstance(x, Tensor)
        return x.copy_(gelu(x))  # in place
    gate, up = to_tensor(x).chunk(2, dim=-1)
    return silu(gate) * up


def activate_and_quantize_rows(
    x: Tensor | SplitKPartials, bias: Tensor | None, function: str, group_size: int | None
) -> tuple[Tensor, Tensor]:
    """Quantize with one scale per row, where the kernel has one per group of channels."""
    assert (bias, function) == (None, "swiglu"), "inference_layers.py calls it only so"
    return fp8_matmul.quantize_rows(activate(x, function).flatten(0, -2))


# Kernels of skinny_gemm_triton.py.


def reduce_partials(x: SplitKPartials, residual: Tensor | float = 0.0) -> Tensor:
    return to_tensor(x) + residual


def split_k_matmul(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return the complete product as the only partial sum, where the kernel splits K."""
    x = x.float() if scales is None else x.float() * scales
    return torch.stack([x @ weight.float().T])


# Helpers.


def to_tensor(x: Tensor | SplitKPartials) -> Tensor:
    """Return a tensor unchanged, or the tensor that split-K partial sums add up to."""
    if isinstance(x, Tensor):
        return x
    total = x.partials.sum(0)
    if x.scale is not None:
        total = total * x.scale.T
    if x.bias is not None:
        total = total + x.bias.float()
    return total.to(x.dtype).view(x.shape)


def to_fp8(x: Tensor) -> Fp8Tensor:
    """Quantize ``(..., channels)`` with one scale per row."""
    return Fp8Tensor(*fp8_matmul.quantize_rows(x.flatten(0, -2))).reshape(*x.shape)
