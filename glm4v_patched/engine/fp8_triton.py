"""The kernels that quantise rows, as they are or of GELU or SwiGLU, and that compute these without
quantising; importing it takes Triton, which torch for GPUs brings."""

import math
from typing import Any

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .e4m3 import E4M3, LARGEST, SMALLEST
from .early_kernels import overlaps
from .few_rows import MOST_ROWS, Parts
from .few_rows_triton import load_row, operands


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
    left_scale,
    right_scale,
    bias,
    number,
    gelu_bias,
    numbers,
    scales,
    width,
    channels,
    kind: tl.constexpr,
    is_parts: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
    block: tl.constexpr,
    function: tl.constexpr,
    is_early: tl.constexpr,
):
    if is_early:
        tl.extra.cuda.gdc_wait()  # until the kernel before has written the rows
        tl.extra.cuda.gdc_launch_dependents()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)  # may pass 2**31
    at = tl.arange(0, block)
    inside = at < channels
    value = load_row(
        x, left_scale, right_scale, bias, number, rows, width, row, at, inside, kind, is_parts,
        is_scaled, has_bias,
    )  # fmt: skip
    if function == "gelu":
        value = _gelu(value + tl.load(gelu_bias + at, mask=inside, other=0.0).to(tl.float32))
    if function == "swiglu":
        up = load_row(
            x, left_scale, right_scale, bias, number, rows, width, row, channels + at, inside,
            kind, is_parts, is_scaled, has_bias,
        )  # fmt: skip
        value = _silu(value) * up
    quantise_row(value, numbers, scales, row, at, channels, largest_number, smallest)


@triton.jit
def triton_activate(
    x,
    left_scale,
    right_scale,
    bias,
    number,
    out,
    width,
    channels,
    kind: tl.constexpr,
    is_parts: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
    function: tl.constexpr,
    is_early: tl.constexpr,
):
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    value = load_row(
        x, left_scale, right_scale, bias, number, rows, width, row, at, inside, kind, is_parts,
        is_scaled, has_bias,
    )  # fmt: skip
    if function == "gelu":
        value = _gelu(value)
    if function == "swiglu":
        up = load_row(
            x, left_scale, right_scale, bias, number, rows, width, row, channels + at, inside,
            kind, is_parts, is_scaled, has_bias,
        )  # fmt: skip
        # Rounded between, as torch does it in two steps.
        value = _silu(value).to(kind).to(tl.float32) * up
    tl.store(out + row * channels + at, value.to(kind), mask=inside)


def activate(x: Tensor | Parts, function: str) -> Tensor:
    """``gelu`` of ``(..., C)``, in its own memory, or ``swiglu`` of ``(..., 2 * C)``, in its
    dtype."""
    x, block = _contiguous(x), 2048
    (*leading, width), device = x.shape, x.parts.device if isinstance(x, Parts) else x.device
    channels = width // 2 if function == "swiglu" else width
    in_place = function == "gelu" and isinstance(x, Tensor)
    out: Any = x if in_place else torch.empty(*leading, channels, dtype=x.dtype, device=device)
    is_early = overlaps(device)
    if rows := out.numel() // channels:
        given, flags = operands(x)
        with torch.cuda.device_of(out):
            triton_activate[rows, triton.cdiv(channels, block)](
                *given, out, width, channels, *flags, block, function, is_early,
                launch_pdl=is_early, num_warps=8,
            )  # fmt: skip
    return out


def quantise_rows(
    x: Tensor | Parts, bias: Tensor | None = None, function: str = "none"
) -> tuple[Tensor, Tensor]:
    """As :func:`fp8_numbers.quantise_rows`, of what ``gelu`` makes of ``x`` and a bias, or
    ``swiglu``."""
    x = _contiguous(x)
    of, (*leading, width) = x.parts if isinstance(x, Parts) else x, x.shape
    channels, rows = width // 2 if function == "swiglu" else width, math.prod(leading)
    numbers = of.new_empty(rows, channels, dtype=E4M3)
    scales = of.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        block = triton.next_power_of_2(channels)
        # 8 are the fastest of 4, 8 and 16 for GELU of 15,360 channels on an H200, where rows are
        # many; few leave most of the GPU idle.
        warps = min(max(block // 1024, 1), 8) if rows > MOST_ROWS else min(max(block // 256, 1), 32)
        is_early = overlaps(of.device)
        given, flags = operands(x)
        with torch.cuda.device_of(of):
            triton_quantise_rows[(rows,)](
                *given, numbers if bias is None else bias.contiguous(), numbers, scales, width,
                channels, *flags, LARGEST, SMALLEST, block, function, is_early,
                launch_pdl=is_early, num_warps=warps,
            )  # fmt: skip
    return numbers, scales


def _contiguous(x: Tensor | Parts) -> Any:
    return x if isinstance(x, Parts) else x.contiguous()
