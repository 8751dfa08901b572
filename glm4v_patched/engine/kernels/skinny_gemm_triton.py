"""The split-K kernels of :mod:`skinny_gemm`.

Importing this module needs Triton, which torch's GPU builds include.
"""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from .pdl import pdl_wait_and_launch, supports_pdl
from .skinny_gemm import (
    BLOCK_K,
    BLOCK_N,
    MAX_M,
    SplitKPartials,
    k_blocks_per_split,
    num_sms,
    num_splits,
)

# Stages of Triton's software pipeline. In bf16, a stage has 16 KiB of weights, 4 or 8 of inputs.
NUM_STAGES = 4

# Triton's dtype for each of torch's.
TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def triton_skinny_gemm(  # the prefix makes our kernels easy to find in profiles
    x,
    x_scales,
    weight,
    out,
    M,
    N,
    K,
    k_blocks,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    use_pdl: tl.constexpr,
):
    """Write one block of output columns of one split of K.

    ``k_blocks`` is the number of blocks of K in a split. Each row of ``x`` has ``NUM_GROUPS``
    scales, one for each group of its channels. ``NUM_GROUPS`` is 0, 1, ``NUM_SPLITS`` or the number
    of blocks in K.
    """
    split = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows = tl.arange(0, BLOCK_ROWS)
    channels = tl.arange(0, BLOCK_CHANNELS)[None, :]
    weight_pointers = weight + columns.to(tl.int64)[:, None] * K + channels  # may pass 2**31
    x_pointers = x + rows[:, None] * K + channels
    # The weight is the left operand of tl.dot: Hopper's tensor cores (wgmma) multiply 64 rows of a
    # left operand by as few as 8 columns of a right one.
    total = tl.zeros((BLOCK_COLUMNS, BLOCK_ROWS), tl.float32)
    first = split * k_blocks
    end = tl.minimum(first + k_blocks, K // BLOCK_CHANNELS)
    if use_pdl:
        tl.extra.cuda.gdc_wait()  # until the previous kernel has written x
    scale_by_block: tl.constexpr = NUM_GROUPS > 1 and NUM_GROUPS != NUM_SPLITS
    if NUM_GROUPS > 0:
        scale_pointers = x_scales + rows * NUM_GROUPS
        if NUM_GROUPS == NUM_SPLITS:
            scale_pointers += split
        if scale_by_block:
            scale_pointers += first
        scale = tl.load(scale_pointers, mask=rows < M, other=0.0)
    for block in range(first, end):
        # Each weight is read only once, so let the cache evict it before other data.
        weights = tl.load(weight_pointers + block * BLOCK_CHANNELS, eviction_policy="evict_first")
        values = tl.load(x_pointers + block * BLOCK_CHANNELS, mask=rows[:, None] < M, other=0.0)
        if scale_by_block:  # load the next scale while this block is multiplied
            scale_pointers += 1
            next_scale = tl.load(scale_pointers, mask=(rows < M) & (block + 1 < end), other=0.0)
            total += tl.dot(weights, values.T) * scale[None, :]
            scale = next_scale
        else:
            # Tensor cores accumulate fp8 products in 14 bits: add to fp32 after each block.
            total = tl.dot(weights, values.T, total, max_num_imprecise_acc=BLOCK_CHANNELS)
    if NUM_GROUPS > 0 and not scale_by_block:
        total *= scale[None, :]
    if use_pdl:
        # Not earlier: the next kernel would take shared memory from this one.
        tl.extra.cuda.gdc_launch_dependents()
    out_pointers = out + (split * M + rows[:, None]) * N + columns[None, :]
    tl.store(out_pointers, total.T, mask=rows[:, None] < M)


@triton.jit
def load_row(
    x,
    scale,
    bias,
    NUM_PARTIALS: tl.constexpr,
    num_rows,
    num_columns,
    row,
    columns,
    mask,
    dtype: tl.constexpr,
    is_partials: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
):
    """Load columns of one row of ``x`` as fp32.

    If ``is_partials``, ``x`` is ``NUM_PARTIALS`` split-K partial sums. They are added up,
    multiplied by ``scale`` if ``is_scaled``, added to ``bias`` if ``has_bias``, and rounded to
    ``dtype``.
    """
    if not is_partials:
        return tl.load(x + row * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros(columns.shape, tl.float32)
    for partial in tl.static_range(NUM_PARTIALS):  # unrolled: all loads are in flight together
        pointers = x + (partial * num_rows + row) * num_columns + columns
        total += tl.load(pointers, mask=mask, other=0.0)
    if is_scaled:
        total *= tl.load(scale + columns, mask=mask, other=0.0)
    if has_bias:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def triton_reduce_partials(
    partials,
    scale,
    bias,
    NUM_PARTIALS: tl.constexpr,
    residual,
    out,
    num_rows,
    num_columns,
    dtype: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    BLOCK: tl.constexpr,
    use_pdl: tl.constexpr,
):
    """Reduce one block of columns of one row of partial sums, and add the residual."""
    pdl_wait_and_launch(use_pdl)
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    # load_row rounds to dtype before the residual is added, as a linear layer rounds its output.
    total = load_row(
        partials, scale, bias, NUM_PARTIALS, num_rows, num_columns, row, columns, mask, dtype, True,
        is_scaled, has_bias,
    )  # fmt: skip
    offsets = row * num_columns + columns
    if has_residual:
        total += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(dtype), mask=mask)


def load_row_args(x: Tensor | SplitKPartials) -> tuple[tuple, tuple]:
    """Return the arguments that a kernel needs to pass ``x`` to :func:`load_row`.

    Returns:
        ``(x, scale, bias, NUM_PARTIALS)`` and ``(dtype, is_partials, is_scaled, has_bias)``. A
        missing scale or bias is replaced by another tensor, which the kernel does not read.
    """
    if not isinstance(x, SplitKPartials):
        return (x, x, x, 0), (TL_DTYPES[x.dtype], False, False, False)
    partials, is_scaled, has_bias = x.partials, x.scale is not None, x.bias is not None
    scale, bias = x.scale if is_scaled else partials, x.bias if has_bias else partials
    constexprs = TL_DTYPES[x.dtype], True, is_scaled, has_bias
    return (partials, scale, bias, len(partials)), constexprs


def reduce_partials(x: SplitKPartials, residual: Tensor | None = None) -> Tensor:
    """Return the product that partial sums add up to, plus ``residual`` of the same shape."""
    _, rows, columns = x.partials.shape
    out = x.partials.new_empty(x.shape, dtype=x.dtype)
    block, use_pdl = 512, supports_pdl(out.device)
    row_args, (dtype, _, *has_scale_and_bias) = load_row_args(x)
    with torch.cuda.device_of(out):
        triton_reduce_partials[triton.cdiv(columns, block), rows](
            *row_args, out if residual is None else residual.contiguous(), out, rows, columns,
            dtype, *has_scale_and_bias, residual is not None, block, use_pdl, launch_pdl=use_pdl,
        )  # fmt: skip
    return out


def split_k_matmul(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T`` as split-K partial sums, with as many splits as fill the GPU.

    Each split has :func:`k_blocks_per_split` blocks of K, except the last, which may have fewer.

    Args:
        x: ``(M, K)`` in bf16, fp16 or e4m3; M is at most :data:`MAX_M`.
        weight: ``(N, K)`` of the same dtype; N is a multiple of :data:`BLOCK_N`, K of
            :data:`BLOCK_K`.
        scales: Scales of ``x`` in e4m3: ``(M, 1)``, ``(M, num_splits)`` or ``(M, K / BLOCK_K)``,
            fp32, contiguous.

    Returns:
        ``(num_splits, M, N)`` in fp32.
    """
    (m, k), n = x.shape, len(weight)
    assert m <= MAX_M and not (n % BLOCK_N or k % BLOCK_K), "skinny_gemm.is_supported() comes first"
    splits = num_splits(n, k, num_sms(x.device))
    groups = 0 if scales is None else scales.shape[1]
    assert groups in (0, 1, splits, k // BLOCK_K), (groups, splits, k)
    x, weight = x.contiguous(), weight.contiguous()
    out, use_pdl = x.new_empty(splits, m, n, dtype=torch.float32), supports_pdl(x.device)
    with torch.cuda.device_of(x):
        triton_skinny_gemm[n // BLOCK_N, splits](
            x, x if scales is None else scales, weight, out, m, n, k,
            k_blocks_per_split(k, splits), 16 if m <= 16 else MAX_M, BLOCK_N, BLOCK_K,
            splits, groups, use_pdl, launch_pdl=use_pdl, num_warps=4, num_stages=NUM_STAGES,
        )  # fmt: skip
    return out
