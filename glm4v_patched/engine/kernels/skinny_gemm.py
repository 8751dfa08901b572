"""Skinny GEMM: memory-bound products of at most 32 rows with a large weight.

For so few rows, the split-K kernel of :mod:`skinny_gemm_triton` reaches more of the memory
bandwidth than cuBLAS does (figures: docs/benchmarks). An fp8 input may have one scale per group of
a row's channels, so that several thread blocks can quantize one row.

Shapes: ``x`` is ``(M, K)``, the weight ``(N, K)``, the product ``(M, N)``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Block sizes. For the products of a layer on an H200, they are within 2 % of the fastest of 400
# configurations. A thread block has up to 96 KiB of weights and inputs in flight, so two fit on an
# SM.
BLOCK_N, BLOCK_K = 64, 128
BLOCKS_PER_SM = 2
MAX_M = 32


class SplitKPartials(NamedTuple):
    """Split-K partial sums of a product ``(..., N)``: K is split, and each split has its own sum.

    The next kernel, whose input they are, adds them up, scales and rounds them.
    """

    partials: Tensor  # (num_splits, M, N) fp32
    shape: torch.Size  # of the product
    dtype: torch.dtype  # of the product
    scale: Tensor | None  # (N, 1) fp32: scales of an fp8 weight
    bias: Tensor | None  # (N,)


def is_supported(m: int, weight: Tensor) -> bool:
    """Return whether the kernel can multiply ``m`` rows by ``weight``."""
    n, k = weight.shape
    return (
        0 < m <= MAX_M
        and not n % BLOCK_N
        and not k % BLOCK_K
        and weight.is_cuda
        and not torch.compiler.is_compiling()
        and num_sms(weight.device) > 0
    )


def k_blocks_per_split(k: int, splits: int) -> int:
    """Return the number of :data:`BLOCK_K` blocks in a split; the last split may have fewer."""
    return -(-(k // BLOCK_K) // splits)


def num_splits(n: int, k: int, sms: int) -> int:
    """Return the number of splits of K with which the thread blocks of a product fill the GPU once.

    A product whose N alone fills the GPU has one split.
    """
    splits_to_fill = max(BLOCKS_PER_SM * sms // (n // BLOCK_N), 1)
    # Each split has an integer number of blocks, so fewer splits than that may cover K. Divide once
    # more, so that no split is empty.
    return -(-(k // BLOCK_K) // k_blocks_per_split(k, min(splits_to_fill, k // BLOCK_K)))


def channels_per_split(weight: Tensor) -> int:
    """Return the channels of K in a split of a product with ``weight``; the last may have fewer."""
    n, k = weight.shape
    return k_blocks_per_split(k, num_splits(n, k, num_sms(weight.device))) * BLOCK_K


def num_sms(device: torch.device) -> int:
    """Return a GPU's number of streaming multiprocessors; 0 if the kernel cannot run on it.

    The kernel's blocks fit the shared memory of Ampere (compute capability 8.0) and newer.
    """
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major >= 8 else 0
