"""The kernel of :mod:`few_rows`; importing it takes Triton, which torch for GPUs brings."""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .early_kernels import overlaps
from .few_rows import Parts

# Blocks of weights on their way at a time: of bf16 16 KiB each, with the rows' 4 or 8.
STAGES = 4

KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def triton_product_of_few_rows(  # profiles know kernels by their names
    x,
    weight,
    out,
    rows,
    columns,
    width,
    blocks_a_part,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_width: tl.constexpr,
    is_early: tl.constexpr,
):
    part = tl.program_id(1)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    row = tl.arange(0, block_rows)[:, None]
    at = tl.arange(0, block_width)[None, :]
    weights_at = weight + column.to(tl.int64)[:, None] * width + at  # it may pass 2**31
    rows_at = x + row * width + at
    # Weights are the left factor: tensor cores take 64 of those, and as few as 8 of the right one.
    total = tl.zeros((block_columns, block_rows), tl.float32)
    first = part * blocks_a_part
    last = tl.minimum(first + blocks_a_part, width // block_width)
    if is_early:
        tl.extra.cuda.gdc_wait()  # until the kernel before has written the rows
    for block in range(first, last):
        # Each weight is read once: what else is cached is to stay.
        weights = tl.load(weights_at + block * block_width, eviction_policy="evict_first")
        values = tl.load(rows_at + block * block_width, mask=row < rows, other=0.0)
        # Of fp8, tensor cores keep 14 bits of a sum: it is added to fp32 after each block.
        total = tl.dot(weights, values.T, total, max_num_imprecise_acc=block_width)
    if is_early:
        # Not before: what is started then would take shared memory from this.
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + (part * rows + row) * columns + column[None, :], total.T, mask=row < rows)


@triton.jit
def sum_parts(
    parts,
    left_scale,
    right_scale,
    bias,
    number,
    rows,
    columns,
    row,
    column,
    inside,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
):
    """fp32, of one row."""
    total = tl.zeros(column.shape, tl.float32)
    for part in range(number):
        total += tl.load(parts + (part * rows + row) * columns + column, mask=inside, other=0.0)
    if is_scaled:
        total *= tl.load(left_scale + row) * tl.load(right_scale + column, mask=inside, other=0.0)
    if has_bias:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def load_row(
    x,
    left_scale,
    right_scale,
    bias,
    number,
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
    if is_parts:
        value = sum_parts(
            x, left_scale, right_scale, bias, number, rows, columns, row, column, inside,
            is_scaled, has_bias,
        )  # fmt: skip
        value = value.to(kind).to(tl.float32)
    else:
        value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def triton_sum_of_parts(
    parts,
    left_scale,
    right_scale,
    bias,
    number,
    residual,
    out,
    rows,
    columns,
    kind: tl.constexpr,
    is_parts: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < columns
    # Rounded before something is added to it, as a layer's own output is.
    total = load_row(
        parts, left_scale, right_scale, bias, number, rows, columns, row, column, inside, kind,
        is_parts, is_scaled, has_bias,
    )  # fmt: skip
    place = row * columns + column
    if has_residual:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(kind), mask=inside)


def operands(x: Tensor | Parts) -> tuple[tuple, tuple]:
    """What :func:`load_row` is given of ``x``: tensors and their number, and what to take them for.
    What is not there is another tensor, which is not read."""
    if not isinstance(x, Parts):
        return (x, x, x, x, 0), (KINDS[x.dtype], False, False, False)
    parts, is_scaled, has_bias = x.parts, x.left_scale is not None, x.bias is not None
    scales = (x.left_scale, x.right_scale) if is_scaled else (parts, parts)
    given = (parts, *scales, x.bias if has_bias else parts, len(parts))
    return given, (KINDS[x.dtype], True, is_scaled, has_bias)


def sum_of_parts(of: Parts, residual: Tensor | None = None) -> Tensor:
    """The product, of its shape and dtype, and what is added to it."""
    _, rows, columns = of.parts.shape
    out = of.parts.new_empty(of.shape, dtype=of.dtype)
    block, is_early = 512, overlaps(out.device)
    given, flags = operands(of)
    with torch.cuda.device_of(out):
        triton_sum_of_parts[triton.cdiv(columns, block), rows](
            *given, out if residual is None else residual.contiguous(), out, rows, columns, *flags,
            residual is not None, block, is_early, launch_pdl=is_early,
        )  # fmt: skip
    return out


def parts_of_product(
    x: Tensor, weight: Tensor, parts: int, blocks: int, sizes: tuple[int, int, int]
) -> Tensor:
    """As :func:`few_rows.parts_of_product`.

    Args:
        blocks: Of the width, in each part.
        sizes: Rows, columns and width of a block.

    Raises:
        ValueError: sizes that the kernel does not take.
    """
    most, block_columns, block_width = sizes
    (rows, width), columns = x.shape, len(weight)
    if rows > most or columns % block_columns or width % block_width or width != weight.shape[1]:
        raise ValueError(
            f"a product of ({rows}, {width}) with ({columns}, {weight.shape[1]}).T: expected at "
            f"most {most} rows, one width that is a multiple of {block_width}, and a multiple of "
            f"{block_columns} columns"
        )
    x, weight = x.contiguous(), weight.contiguous()
    out, is_early = x.new_empty(parts, rows, columns, dtype=torch.float32), overlaps(x.device)
    with torch.cuda.device_of(x):
        triton_product_of_few_rows[columns // block_columns, parts](
            x, weight, out, rows, columns, width, blocks, *sizes, is_early, launch_pdl=is_early,
            num_warps=4, num_stages=STAGES,
        )  # fmt: skip
    return out
