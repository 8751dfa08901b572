"""The kernel of :mod:`small_batch_matmul`.

Importing it takes Triton, which torch for GPUs brings.
"""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

# Blocks of weights on their way at a time, of 16 KiB with the rows' 4.
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
    for block in range(first, last):
        # Each weight is read once: what else is cached is to stay.
        weights = tl.load(weights_at + block * block_width, eviction_policy="evict_first")
        values = tl.load(rows_at + block * block_width, mask=row < rows, other=0.0)
        total = tl.dot(weights, values.T, total)
    tl.store(out + (part * rows + row) * columns + column[None, :], total.T, mask=row < rows)


def parts_of_product(
    x: Tensor, weight: Tensor, parts: int, blocks: int, sizes: tuple[int, int, int]
) -> Tensor:
    """As :func:`small_batch_matmul.parts_of_product`.

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
    out = x.new_empty(parts, rows, columns, dtype=torch.float32)
    with torch.cuda.device_of(x):
        triton_product_of_few_rows[columns // block_columns, parts](
            x, weight, out, rows, columns, width, blocks, *sizes, num_warps=4, num_stages=STAGES
        )
    return out
