"""The kernels that quantise rows, as they are or of GELU or SwiGLU, and that compute these without
quantising; importing it takes Triton, which torch for GPUs brings."""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .e4m3 import E4M3, LARGEST, SMALLEST
from .early_kernels import overlaps
from .few_rows import MOST_ROWS


@triton.jit
def _exp2(x):
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _inverse(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu(x):
    """``x`` times the normal distribution, within 1e-7 of ``x``; erf would take three times as
    long as its row takes to be read and written.

    The distribution's odds have a logarithm that is nearly linear: over ``x``, to the base 2, it is
    a polynomial of ``x`` squared, fitted up to 6.5. Beyond, the distribution is 0 or 1.
    """
    square = tl.minimum(x * x, 42.0)
    slope = 5.23396250e-09 * square - 3.86020055e-07
    slope = slope * square + 1.14667985e-05
    slope = slope * square - 1.59485679e-04
    slope = slope * square - 9.52935820e-05
    slope = slope * square + 1.04838192e-01
    slope = slope * square + 2.30220736e00
    return x * _inverse(1.0 + _exp2(-x * slope))


@triton.jit
def _silu(x):
    return x * _inverse(1.0 + _exp2(-1.4426950408889634 * x))


@triton.jit
def quantise_row(
    value, numbers, scales, row, at, channels, largest_number: tl.constexpr, smallest: tl.constexpr
):
    """Store one row in e4m3, and its scale; ``value`` is 0 where ``at`` is beyond the channels."""
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), smallest)
    # The maximum passes over NaN, which is to make its row NaN.
    broken = tl.max((value != value).to(tl.int32), axis=0)
    largest = tl.where(broken > 0, float("nan"), largest)
    tl.store(
        numbers + row * channels + at,
        (value * (largest_number / largest)).to(numbers.dtype.element_ty),
        mask=at < channels,
    )
    tl.store(scales + row, largest / largest_number)


@triton.jit
def triton_quantise_rows(  # profiles know kernels by their names
    x,
    bias,
    numbers,
    scales,
    width,
    channels,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
    block: tl.constexpr,
    function: tl.constexpr,
    is_early: tl.constexpr,
):
    if is_early:
        tl.extra.cuda.gdc_wait()  # until the kernel before has written the rows
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)  # times the width it may pass 2**31
    at = tl.arange(0, block)
    inside = at < channels
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if function == "gelu":
        value = _gelu(value + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32))
    if function == "swiglu":
        up = tl.load(x + row * width + channels + at, mask=inside, other=0.0).to(tl.float32)
        value = _silu(value) * up
    quantise_row(value, numbers, scales, row, at, channels, largest_number, smallest)


@triton.jit
def triton_activate(x, out, width, channels, block: tl.constexpr, function: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if function == "gelu":
        value = _gelu(value)
    if function == "swiglu":
        up = tl.load(x + row * width + channels + at, mask=inside, other=0.0).to(tl.float32)
        # Rounded between, as torch does it in two steps.
        value = _silu(value).to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * channels + at, value.to(out.dtype.element_ty), mask=inside)


def activate(x: Tensor, function: str) -> Tensor:
    """``gelu`` of ``(..., C)``, in its own memory, or ``swiglu`` of ``(..., 2 * C)``, in its
    dtype."""
    x, width = x.contiguous(), x.shape[-1]
    out, block = x, 2048
    if function == "swiglu":
        out = x.new_empty(*x.shape[:-1], width // 2)
    if rows := x.numel() // width:
        channels = out.shape[-1]
        with torch.cuda.device_of(x):
            triton_activate[rows, triton.cdiv(channels, block)](
                x, out, width, channels, block, function, num_warps=8
            )
    return out


def quantise_rows(
    x: Tensor, bias: Tensor | None = None, function: str = "none"
) -> tuple[Tensor, Tensor]:
    """As :func:`fp8_numbers.quantise_rows`, of what ``gelu`` makes of ``x`` and a bias, or
    ``swiglu``."""
    x, (rows, width) = x.contiguous(), x.shape
    bias, channels = x if bias is None else bias.contiguous(), width
    if function == "swiglu":
        channels = width // 2
    numbers = x.new_empty(rows, channels, dtype=E4M3)
    scales = x.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        block = triton.next_power_of_2(channels)
        # 8 are the fastest of 4, 8 and 16 for GELU of 15,360 channels on an H200, where rows are
        # many; few leave most of the GPU idle.
        warps = min(max(block // 1024, 1), 8) if rows > MOST_ROWS else min(max(block // 256, 1), 32)
        is_early = overlaps(x.device)
        with torch.cuda.device_of(x):
            triton_quantise_rows[(rows,)](
                x, bias, numbers, scales, width, channels, LARGEST, SMALLEST, block, function,
                is_early, launch_pdl=is_early, num_warps=warps,
            )  # fmt: skip
    return numbers, scales
