"""The kernels that quantize rows, as they are or of GELU or SwiGLU, and that compute these without
quantizing; importing it takes Triton, which torch for GPUs brings."""

import math
from typing import Any

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .e4m3 import E4M3, LARGEST, SMALLEST
from .skinny_gemm import MOST_ROWS, Parts, overlaps
from .skinny_gemm_triton import load_row, operands, take_turn


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
def quantize(value, numbers, scale, inside, largest_number: tl.constexpr, smallest: tl.constexpr):
    """Store values in e4m3, and the scale of all; they are 0 where they are not ``inside``."""
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), smallest)
    # The maximum passes over NaN, which is to make all NaN.
    broken = tl.max((value != value).to(tl.int32), axis=0)
    largest = tl.where(broken > 0, float("nan"), largest)
    quantized = (value * (largest_number / largest)).to(numbers.dtype.element_ty)
    tl.store(numbers, quantized, mask=inside)
    tl.store(scale, largest / largest_number)


@triton.jit
def triton_activate(  # profiles know kernels by their names
    x,
    scale,
    bias,
    number: tl.constexpr,
    gelu_bias,
    out,
    scales,
    width,
    channels,
    kind: tl.constexpr,
    is_parts: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    has_gelu_bias: tl.constexpr,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
    group,
    block: tl.constexpr,
    function: tl.constexpr,
    quantizes: tl.constexpr,
    is_early: tl.constexpr,
):
    """One group of a row's channels."""
    take_turn(is_early)
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)  # may pass 2**31
    at = tl.arange(0, block)
    inside = at < group
    at += tl.program_id(1) * group
    inside &= at < channels
    value = load_row(
        x, scale, bias, number, rows, width, row, at, inside, kind, is_parts, is_scaled, has_bias
    )
    if has_gelu_bias:
        value += tl.load(gelu_bias + at, mask=inside, other=0.0).to(tl.float32)
    if function == "gelu":
        value = _gelu(value)
    if function == "swiglu":
        up = load_row(
            x, scale, bias, number, rows, width, row, channels + at, inside, kind, is_parts,
            is_scaled, has_bias,
        )  # fmt: skip
        value = _silu(value)
        if not quantizes:  # rounded between, as torch does it in two steps
            value = value.to(kind).to(tl.float32)
        value = tl.where(inside, value * up, 0.0)
    out += row * channels + at
    if quantizes:
        scales += row * tl.num_programs(1) + tl.program_id(1)
        quantize(value, out, scales, inside, largest_number, smallest)
    else:
        tl.store(out, value.to(kind), mask=inside)


def activate(x: Tensor | Parts, function: str) -> Tensor:
    """``gelu`` of ``(..., C)``, in its own memory, or ``swiglu`` of ``(..., 2 * C)``, in its
    dtype."""
    *leading, width = x.shape
    if function == "gelu" and isinstance(x, Tensor):
        out = x = x.contiguous()
    else:
        channels = width // 2 if function == "swiglu" else width
        out = _of(x).new_empty(*leading, channels, dtype=x.dtype)
    _activate(x, None, function, out, None, 2048)
    return out


def quantize_rows(
    x: Tensor | Parts,
    bias: Tensor | None = None,
    function: str = "none",
    group: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`fp8_matmul.quantize_rows`, of what ``gelu`` makes of ``x`` and a bias, or
    ``swiglu``."""
    *leading, width = x.shape
    channels, rows = width // 2 if function == "swiglu" else width, math.prod(leading)
    group = group or channels
    numbers = _of(x).new_empty(rows, channels, dtype=E4M3)
    scales = numbers.new_empty(rows, triton.cdiv(channels, group), dtype=torch.float32)
    _activate(x, bias, function, numbers, scales, group)
    return numbers, scales


def _activate(
    x: Any, bias: Tensor | None, function: str, out: Tensor, scales: Tensor | None, group: int
) -> None:
    """Into ``out``, quantized if there are scales, of so many channels each."""
    x = x if isinstance(x, Parts) else x.contiguous()
    width, channels = x.shape[-1], out.shape[-1]
    if not (rows := out.numel() // channels):
        return
    given, flags = operands(x)
    is_early, block = overlaps(out.device), triton.next_power_of_2(group)
    # 8 are the fastest of 4, 8 and 16 for quantizing GELU of 15,360 channels on an H200.
    a_warp = 1024 if scales is not None and rows > MOST_ROWS else 256
    warps = min(max(block // a_warp, 1), 8)
    with torch.cuda.device_of(out):
        triton_activate[rows, triton.cdiv(channels, group)](
            *given, out if bias is None else bias.contiguous(), out,
            out if scales is None else scales, width, channels, *flags, bias is not None, LARGEST,
            SMALLEST, group, block, function, scales is not None, is_early, launch_pdl=is_early,
            num_warps=warps,
        )  # fmt: skip


def _of(x: Tensor | Parts) -> Tensor:
    return x.parts if isinstance(x, Parts) else x
