"""The kernel of :mod:`fp8_gelu`; importing it takes Triton, which torch for GPUs brings."""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .fp8_numbers import E4M3, LARGEST, SMALLEST


@triton.jit
def triton_quantise_rows_of_gelu(  # profiles know kernels by their names
    x,
    bias,
    numbers,
    scales,
    channels,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # times channels it may pass 2**31
    at = tl.arange(0, block)
    inside = at < channels
    value = tl.load(x + row * channels + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), smallest)
    # The maximum passes over NaN, which is to make its row NaN.
    broken = tl.max((value != value).to(tl.int32), axis=0)
    largest = tl.where(broken > 0, float("nan"), largest)
    tl.store(
        numbers + row * channels + at,
        (value * (largest_number / largest)).to(numbers.dtype.element_ty),
        mask=inside,
    )
    tl.store(scales + row, largest / largest_number)


def quantise_rows_of_gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`fp8_gelu.quantise_rows_of_gelu`."""
    x, bias = x.contiguous(), bias.contiguous()
    rows, channels = x.shape
    numbers = torch.empty_like(x, dtype=E4M3)
    scales = x.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        block = triton.next_power_of_2(channels)
        warps = min(max(block // 1024, 1), 16)
        triton_quantise_rows_of_gelu[(rows,)](
            x, bias, numbers, scales, channels, LARGEST, SMALLEST, block, num_warps=warps
        )
    return numbers, scales
