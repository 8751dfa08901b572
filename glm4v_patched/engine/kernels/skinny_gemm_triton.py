"""The kernel of :mod:`skinny_gemm`; importing it takes Triton, which torch for GPUs brings."""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .skinny_gemm import (
    COLUMNS,
    MOST_ROWS,
    WIDTH,
    Parts,
    k_blocks_per_split,
    num_sms,
    overlaps,
    num_splits,
)

# Blocks of weights on their way at a time: of bf16 16 KiB each, with the rows' 4 or 8.
STAGES = 4

KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def take_turn(is_early: tl.constexpr):
    """Wait until the kernel before has written what it writes, and let the next one be started."""
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def triton_product_of_few_rows(  # profiles know kernels by their names
    x,
    scales,
    weight,
    out,
    rows,
    columns,
    width,
    k_blocks_per_split,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_width: tl.constexpr,
    parts: tl.constexpr,
    groups: tl.constexpr,
    is_early: tl.constexpr,
):
    """``groups``: of a row's channels with scales: none, one, as many as parts, or as blocks."""
    part = tl.program_id(1)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    row = tl.arange(0, block_rows)
    at = tl.arange(0, block_width)[None, :]
    weights_at = weight + column.to(tl.int64)[:, None] * width + at  # it may pass 2**31
    rows_at = x + row[:, None] * width + at
    # Weights are the left factor: tensor cores take 64 of those, and as few as 8 of the right one.
    total = tl.zeros((block_columns, block_rows), tl.float32)
    first = part * k_blocks_per_split
    last = tl.minimum(first + k_blocks_per_split, width // block_width)
    if is_early:
        tl.extra.cuda.gdc_wait()  # until the kernel before has written the rows
    by_block: tl.constexpr = groups > 1 and groups != parts
    if groups > 0:
        scales_at = scales + row * groups
        if groups == parts:
            scales_at += part
        if by_block:
            scales_at += first
        scale = tl.load(scales_at, mask=row < rows, other=0.0)
    for block in range(first, last):
        # Each weight is read once: what else is cached is to stay.
        weights = tl.load(weights_at + block * block_width, eviction_policy="evict_first")
        values = tl.load(rows_at + block * block_width, mask=row[:, None] < rows, other=0.0)
        if by_block:  # the next one's scale is on its way while this one is multiplied
            scales_at += 1
            next_scale = tl.load(scales_at, mask=(row < rows) & (block + 1 < last), other=0.0)
            total += tl.dot(weights, values.T) * scale[None, :]
            scale = next_scale
        else:
            # Of fp8, tensor cores keep 14 bits of a sum: it is added to fp32 after each block.
            total = tl.dot(weights, values.T, total, max_num_imprecise_acc=block_width)
    if groups > 0 and not by_block:
        total *= scale[None, :]
    if is_early:
        # Not before: what is started then would take shared memory from this.
        tl.extra.cuda.gdc_launch_dependents()
    out_at = out + (part * rows + row[:, None]) * columns + column[None, :]
    tl.store(out_at, total.T, mask=row[:, None] < rows)


@triton.jit
def load_row(
    x,
    scale,
    bias,
    number: tl.constexpr,
    rows,
    columns,
    row,
    column,
    inside,
    kind: tl.constexpr,
    is_parts: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
):
    """fp32, of one row of a tensor, or of a product in parts, rounded to ``kind``."""
    if not is_parts:
        return tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros(column.shape, tl.float32)
    for part in tl.static_range(number):  # all are on their way at once
        total += tl.load(x + (part * rows + row) * columns + column, mask=inside, other=0.0)
    if is_scaled:
        total *= tl.load(scale + column, mask=inside, other=0.0)
    if has_bias:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return total.to(kind).to(tl.float32)


@triton.jit
def triton_sum_of_parts(
    parts,
    scale,
    bias,
    number: tl.constexpr,
    residual,
    out,
    rows,
    columns,
    kind: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    take_turn(is_early)
    row = tl.program_id(1)
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < columns
    # Rounded before something is added to it, as a layer's own output is.
    total = load_row(
        parts, scale, bias, number, rows, columns, row, column, inside, kind, True, is_scaled,
        has_bias,
    )  # fmt: skip
    place = row * columns + column
    if has_residual:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(kind), mask=inside)


def operands(x: Tensor | Parts) -> tuple[tuple, tuple]:
    """What :func:`load_row` is given of ``x``: tensors and their number, and what to take them for.
    What is not there is another tensor, which is not read."""
    if not isinstance(x, Parts):
        return (x, x, x, 0), (KINDS[x.dtype], False, False, False)
    parts, is_scaled, has_bias = x.parts, x.scale is not None, x.bias is not None
    given = parts, x.scale if is_scaled else parts, x.bias if has_bias else parts, len(parts)
    return given, (KINDS[x.dtype], True, is_scaled, has_bias)


def reduce_partials(of: Parts, residual: Tensor | None = None) -> Tensor:
    """The product, of its shape and dtype, and what is added to it."""
    _, rows, columns = of.parts.shape
    out = of.parts.new_empty(of.shape, dtype=of.dtype)
    block, is_early = 512, overlaps(out.device)
    given, (kind, _, *flags) = operands(of)
    with torch.cuda.device_of(out):
        triton_sum_of_parts[triton.cdiv(columns, block), rows](
            *given, out if residual is None else residual.contiguous(), out, rows, columns, kind,
            *flags, residual is not None, block, is_early, launch_pdl=is_early,
        )  # fmt: skip
    return out


def split_k_matmul(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """``x @ weight.T``, as sums over parts of the width that are yet to be added: as many as fill
    the GPU, each of :data:`WIDTH` times :func:`k_blocks_per_split` channels, but the last.

    Args:
        x: ``(M, K)`` of bf16, fp16 or e4m3, at most :data:`MOST_ROWS` rows.
        weight: ``(N, K)`` of the same dtype, multiples of :data:`COLUMNS` and :data:`WIDTH`.
        scales: ``(M, 1)``, ``(M, P)`` or ``(M, K / WIDTH)`` fp32, contiguous, of ``x`` in e4m3.

    Returns:
        ``(P, M, N)`` fp32.

    Raises:
        ValueError: sizes that the kernel does not take.
    """
    (rows, width), columns = x.shape, len(weight)
    if rows > MOST_ROWS or columns % COLUMNS or width % WIDTH or width != weight.shape[1]:
        raise ValueError(
            f"a product of ({rows}, {width}) with ({columns}, {weight.shape[1]}).T: expected at "
            f"most {MOST_ROWS} rows, one width that is a multiple of {WIDTH}, and a multiple of "
            f"{COLUMNS} columns"
        )
    parts = num_splits(columns, width, num_sms(x.device))
    groups = 0 if scales is None else scales.shape[1]
    if groups not in {0, 1, parts, width // WIDTH}:
        raise ValueError(
            f"{groups} scales for each row of {width} channels: expected 1, {parts} or "
            f"{width // WIDTH}"
        )
    x, weight = x.contiguous(), weight.contiguous()
    out, is_early = x.new_empty(parts, rows, columns, dtype=torch.float32), overlaps(x.device)
    with torch.cuda.device_of(x):
        triton_product_of_few_rows[columns // COLUMNS, parts](
            x, x if scales is None else scales, weight, out, rows, columns, width,
            k_blocks_per_split(width, parts), 16 if rows <= 16 else MOST_ROWS, COLUMNS, WIDTH,
            parts, groups, is_early, launch_pdl=is_early, num_warps=4, num_stages=STAGES,
        )  # fmt: skip
    return out
