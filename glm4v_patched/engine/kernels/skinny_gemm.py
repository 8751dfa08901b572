"""Products of a few rows with large weights, whose time is what reading the weights takes.

The kernel (:mod:`skinny_gemm_triton`) reads them at more of the memory's bandwidth than cuBLAS's
for so few rows do: docs/benchmarks has the figures. In fp8, groups of a row's channels have scales,
so that several blocks of a kernel's grid quantize one row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Sizes of the kernel's blocks: the fastest of 400 settings on an H200, or within 2 % of it, for the
# products of a layer. Each has up to 96 KiB of weights and rows under way, so two fit a
# multiprocessor.
COLUMNS, WIDTH = 64, 128
BLOCKS_A_PROCESSOR = 2
MOST_ROWS = 32


class Parts(NamedTuple):
    """A product ``(..., N)`` as sums that are yet to be added, scaled and rounded, which the kernel
    that takes it does."""

    parts: Tensor  # (P, M, N) fp32
    shape: torch.Size
    dtype: torch.dtype
    scale: Tensor | None  # (N, 1) fp32, of weights in fp8
    bias: Tensor | None  # (N,)


def takes(rows: int, weight: Tensor) -> bool:
    """Whether the kernel multiplies so many rows by a weight ``(N, K)``."""
    columns, width = weight.shape
    return (
        0 < rows <= MOST_ROWS
        and not columns % COLUMNS
        and not width % WIDTH
        and weight.is_cuda
        and not torch.compiler.is_compiling()
        and num_sms(weight.device) > 0
    )


def k_blocks_per_split(width: int, parts: int) -> int:
    return -(-(width // WIDTH) // parts)


def num_splits(columns: int, width: int, processors: int) -> int:
    """Into how many parts a product is cut, so that its blocks fill the GPU once. A product that
    fills it already is one part."""
    wanted = max(BLOCKS_A_PROCESSOR * processors // (columns // COLUMNS), 1)
    # Parts of whole blocks: the last ones would be empty where they do not go up.
    return -(-(width // WIDTH) // k_blocks_per_split(width, min(wanted, width // WIDTH)))


def channels_per_split(weight: Tensor) -> int:
    """Of a product with a weight ``(N, K)``. The last part may have less."""
    columns, width = weight.shape
    parts = num_splits(columns, width, num_sms(weight.device))
    return k_blocks_per_split(width, parts) * WIDTH


def num_sms(device: torch.device) -> int:
    """Of a GPU that the kernel runs on: since Ampere, whose shared memory holds its blocks."""
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count if facts.major >= 8 else 0


def overlaps(device: torch.device) -> bool:
    """Whether a GPU starts kernels that ask for it while the one before them ends: from Hopper
    on."""
    return torch.cuda.get_device_capability(device)[0] >= 9
