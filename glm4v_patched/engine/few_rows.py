"""Products of a few rows with large weights, whose time is what reading the weights takes.

The kernel (:mod:`few_rows_triton`) reads them at more of the memory's bandwidth than cuBLAS's for
so few rows do, and than the reductions that inductor makes of one row's products:
docs/benchmarks has the figures.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Sizes of the kernel's blocks: the fastest of 400 settings on an H200, or within 2 % of it, for all
# products of a step. Each has 80 KiB of weights and rows under way, so two fit a multiprocessor.
COLUMNS, WIDTH = 64, 128
BLOCKS_A_PROCESSOR = 2
MOST_ROWS = 32

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Parts(NamedTuple):
    """A product ``(..., N)`` as sums that are yet to be added, scaled and rounded, which the kernel
    that takes it does: of a layer in a step that is recorded."""

    parts: Tensor  # (P, M, N) fp32
    shape: torch.Size
    dtype: torch.dtype
    left_scale: Tensor | None  # (M, 1) fp32, of factors in fp8
    right_scale: Tensor | None  # (N, 1) fp32
    bias: Tensor | None  # (N,)

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "Parts":
        return self  # how channels are counted is for what takes them


@torch.library.custom_op("glm4v_patched::parts_of_product", mutates_args=())
def parts_of_product(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """``x @ weight.T``, as sums over parts of the width that are yet to be added.

    Args:
        x: ``(M, K)`` of one of :data:`DTYPES`; a GPU takes at most :data:`MOST_ROWS` rows.
        weight: ``(N, K)`` of the same dtype. A GPU takes multiples of :data:`COLUMNS` and
            :data:`WIDTH`.
        parts: How many of them there are, of :data:`WIDTH` times :func:`blocks_a_part` each but the
            last. 0: as many as fill the GPU.

    Returns:
        ``(parts, M, N)`` fp32.
    """
    size = blocks_a_part(x.shape[1], _number(parts, x, weight)) * WIDTH
    pieces = zip(x.float().split(size, dim=1), weight.float().split(size, dim=1), strict=True)
    return torch.stack([piece @ of_weight.T for piece, of_weight in pieces])


@parts_of_product.register_fake
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    return x.new_empty(_number(parts, x, weight), len(x), len(weight), dtype=torch.float32)


@parts_of_product.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    from . import few_rows_triton  # takes Triton

    parts = _number(parts, x, weight)
    blocks = blocks_a_part(x.shape[1], parts)
    sizes = 16 if len(x) <= 16 else MOST_ROWS, COLUMNS, WIDTH
    return few_rows_triton.parts_of_product(x, weight, parts, blocks, sizes)


def _number(parts: int, x: Tensor, weight: Tensor) -> int:
    columns, width = weight.shape
    return parts or parts_for(columns, width, multiprocessors(x.device))


def blocks_a_part(width: int, parts: int) -> int:
    return -(-(width // WIDTH) // parts)


def parts_for(columns: int, width: int, processors: int) -> int:
    """Into how many parts a product is cut, so that its blocks fill the GPU once. A product that
    fills it already is one part."""
    wanted = max(BLOCKS_A_PROCESSOR * processors // (columns // COLUMNS), 1)
    # Parts of whole blocks: the last ones would be empty where they do not go up.
    return -(-(width // WIDTH) // blocks_a_part(width, min(wanted, width // WIDTH)))


def multiprocessors(device: torch.device) -> int:
    """That the kernel runs on: of GPUs since Ampere, whose shared memory holds its blocks. A CPU,
    for tests, is one."""
    if device.type != "cuda":
        return 1
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count if facts.major >= 8 else 0
