"""Kernels that apply GELU or SwiGLU to rows, quantize rows to fp8, or do both.

Importing this module needs Triton, which torch's GPU builds include.
"""

import math
from typing import Any

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .e4m3 import AMAX_FLOOR, E4M3, E4M3_MAX
from .pdl import pdl_wait_and_launch, supports_pdl
from .skinny_gemm import MAX_M, SplitKPartials
from .skinny_gemm_triton import load_row, load_row_args


@triton.jit
def _exp2(x):
    """Return an approximation of ``2 ** x``, which takes one instruction."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _reciprocal(x):
    """Return an approximation of ``1 / x``, which takes one instruction."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu(x):
    """Return GELU of fp32 ``x`` with an error of at most 1e-7 times ``x``.

    GELU is x * Phi(x), where Phi is the cumulative distribution function of the normal
    distribution. Computing erf would take three times as long as reading and writing the row. So
    1 / (1 + 2 ** (-x * p(x ** 2))) approximates Phi(x), because the log-odds of Phi are almost
    linear in x. The polynomial p was fitted for abs(x) <= 6.5; for larger abs(x), Phi is 0 or 1.
    """
    square = tl.minimum(x * x, 42.0)
    p = 5.23396250e-09 * square - 3.86020055e-07
    p = p * square + 1.14667985e-05
    p = p * square - 1.59485679e-04
    p = p * square - 9.52935820e-05
    p = p * square + 1.04838192e-01
    p = p * square + 2.30220736e00
    return x * _reciprocal(1.0 + _exp2(-x * p))


@triton.jit
def _silu(x):
    return x * _reciprocal(1.0 + _exp2(-1.4426950408889634 * x))


@triton.jit
def store_quantized(
    values, pointers, scale_pointer, mask, fp8_max: tl.constexpr, amax_floor: tl.constexpr
):
    """Store fp32 values as fp8, and their common scale. Values outside ``mask`` must be 0.

    ``fp8_max`` and ``amax_floor`` are the constants of :mod:`e4m3`.
    """
    amax = tl.maximum(tl.max(tl.abs(values), axis=0), amax_floor)
    # A NaN must make the whole row NaN, and tl.max ignores it.
    has_nan = tl.max((values != values).to(tl.int32), axis=0)
    amax = tl.where(has_nan > 0, float("nan"), amax)
    quantized = (values * (fp8_max / amax)).to(pointers.dtype.element_ty)
    tl.store(pointers, quantized, mask=mask)
    tl.store(scale_pointer, amax / fp8_max)


@triton.jit
def triton_activate(  # the prefix makes our kernels easy to find in profiles
    x,
    scale,
    bias,
    NUM_PARTIALS: tl.constexpr,
    gelu_bias,
    out,
    out_scales,
    in_channels,
    out_channels,
    dtype: tl.constexpr,
    is_partials: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    has_gelu_bias: tl.constexpr,
    fp8_max: tl.constexpr,
    amax_floor: tl.constexpr,
    group_size,
    BLOCK: tl.constexpr,
    function: tl.constexpr,
    quantizes: tl.constexpr,
    use_pdl: tl.constexpr,
):
    """Compute one group of channels of one row.

    ``x`` may be split-K partial sums: see :func:`load_row`. ``gelu_bias`` is added before GELU.
    """
    pdl_wait_and_launch(use_pdl)
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)  # offsets may pass 2**31
    channels = tl.arange(0, BLOCK)
    mask = channels < group_size
    channels += tl.program_id(1) * group_size
    mask &= channels < out_channels
    values = load_row(
        x, scale, bias, NUM_PARTIALS, num_rows, in_channels, row, channels, mask, dtype,
        is_partials, is_scaled, has_bias,
    )  # fmt: skip
    if has_gelu_bias:
        values += tl.load(gelu_bias + channels, mask=mask, other=0.0).to(tl.float32)
    if function == "gelu":
        values = _gelu(values)
    if function == "swiglu":
        up = load_row(
            x, scale, bias, NUM_PARTIALS, num_rows, in_channels, row, out_channels + channels, mask,
            dtype, is_partials, is_scaled, has_bias,
        )  # fmt: skip
        values = _silu(values)
        if not quantizes:  # round after SiLU, as torch does
            values = values.to(dtype).to(tl.float32)
        values = tl.where(mask, values * up, 0.0)
    out += row * out_channels + channels
    if quantizes:
        out_scales += row * tl.num_programs(1) + tl.program_id(1)
        store_quantized(values, out, out_scales, mask, fp8_max, amax_floor)
    else:
        tl.store(out, values.to(dtype), mask=mask)


def activate(x: Tensor | SplitKPartials, function: str) -> Tensor:
    """Apply an activation function, in the dtype of ``x``.

    Args:
        function: "gelu" of ``(..., C)``, in place if ``x`` is a contiguous tensor, or "swiglu" of
            ``(..., 2 * C)``.

    Returns:
        ``(..., C)``.
    """
    *leading, in_channels = x.shape
    if function == "gelu" and isinstance(x, Tensor):
        out = x = x.contiguous()
    else:
        out_channels = in_channels // 2 if function == "swiglu" else in_channels
        out = _storage_of(x).new_empty(*leading, out_channels, dtype=x.dtype)
    _launch_activate(x, None, function, out, scales=None, group_size=2048)
    return out


def activate_and_quantize_rows(
    x: Tensor | SplitKPartials,
    bias: Tensor | None = None,
    function: str = "none",
    group_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply an activation function and quantize each row, or each group of a row's channels.

    Args:
        x: ``(..., C)``, or ``(..., 2 * C)`` for "swiglu".
        bias: ``(C,)``, added before GELU.
        function: "none", "gelu" or "swiglu".
        group_size: Channels that share a scale; None for one scale per row.

    Returns:
        ``(rows, C)`` in e4m3, and ``(rows, groups)`` scales in fp32.
    """
    *leading, in_channels = x.shape
    out_channels = in_channels // 2 if function == "swiglu" else in_channels
    rows = math.prod(leading)
    group_size = group_size or out_channels
    out = _storage_of(x).new_empty(rows, out_channels, dtype=E4M3)
    scales = out.new_empty(rows, triton.cdiv(out_channels, group_size), dtype=torch.float32)
    _launch_activate(x, bias, function, out, scales, group_size)
    return out, scales


def _launch_activate(
    x: Any, bias: Tensor | None, function: str, out: Tensor, scales: Tensor | None, group_size: int
) -> None:
    """Launch the kernel, which writes ``out`` in groups of ``group_size`` channels.

    If ``scales`` is a tensor, ``out`` is quantized, and each group has a scale there.
    """
    x = x if isinstance(x, SplitKPartials) else x.contiguous()
    in_channels, out_channels = x.shape[-1], out.shape[-1]
    if not (rows := out.numel() // out_channels):
        return
    row_args, row_constexprs = load_row_args(x)
    use_pdl, block = supports_pdl(out.device), triton.next_power_of_2(group_size)
    # 8 warps are the fastest of 4, 8 and 16 for quantizing GELU of 15,360 channels on an H200.
    channels_per_warp = 1024 if scales is not None and rows > MAX_M else 256
    warps = min(max(block // channels_per_warp, 1), 8)
    with torch.cuda.device_of(out):
        triton_activate[rows, triton.cdiv(out_channels, group_size)](
            *row_args, out if bias is None else bias.contiguous(), out,
            out if scales is None else scales, in_channels, out_channels, *row_constexprs,
            bias is not None, E4M3_MAX, AMAX_FLOOR, group_size, block, function, scales is not None,
            use_pdl, launch_pdl=use_pdl, num_warps=warps,
        )  # fmt: skip


def _storage_of(x: Tensor | SplitKPartials) -> Tensor:
    """Return a tensor on the device of ``x``, with which outputs are allocated."""
    return x.partials if isinstance(x, SplitKPartials) else x
