"""The kernel of :mod:`few_rows`; importing it takes Triton, which torch for GPUs brings."""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .early_kernels import overlaps

# Blocks of weights on their way at a time: of bf16 16 KiB each, with the rows' 4 or 8.
STAGES = 4


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
def triton_sum_of_parts(
    parts,
    left_scale,
    right_scale,
    bias,
    out,
    number,
    rows,
    columns,
    has_bias: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < columns
    total = tl.zeros((block,), tl.float32)
    for part in range(number):
        total += tl.load(parts + (part * rows + row) * columns + column, mask=inside, other=0.0)
    total *= tl.load(left_scale + row) * tl.load(right_scale + column, mask=inside, other=0.0)
    if has_bias:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


def sum_of_parts(
    parts: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """bf16 ``(M, N)`` of :func:`parts_of_product`'s ``(parts, M, N)``, scaled by ``(M, 1)`` and
    ``(N, 1)``, and a bias ``(N,)``."""
    number, rows, columns = parts.shape
    out = parts.new_empty(rows, columns, dtype=torch.bfloat16)
    block, is_early = 512, overlaps(parts.device)
    with torch.cuda.device_of(parts):
        triton_sum_of_parts[triton.cdiv(columns, block), rows](
            parts, left_scale, right_scale, parts if bias is None else bias.contiguous(), out,
            number, rows, columns, bias is not None, block, is_early, launch_pdl=is_early,
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
