"""The kernels of :mod:`inference_layers`.

Importing this module needs Triton, which torch's GPU builds include.
"""

from typing import Any

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor, nn

from ...remote.modeling_chatglm import RMSNorm
from .e4m3 import AMAX_FLOOR, E4M3, E4M3_MAX
from .fp8_matmul import Fp8Tensor
from .fp8_triton import store_quantized
from .pdl import pdl_wait_and_launch, supports_pdl
from .skinny_gemm import BLOCKS_PER_SM, SplitKPartials, num_sms
from .skinny_gemm_triton import TL_DTYPES, load_row, load_row_args

# Option of a kernel: no fused multiply-add. It would not round the product before the sum, as torch
# does.
NO_FP_FUSION = {"enable_fp_fusion": False}

# Sizes of flash_decode: keys in a block, query heads in a block (they share keys), and the largest
# number of splits of the keys.
BLOCK_KEYS, BLOCK_HEADS, MAX_KEY_SPLITS = 64, 16, 64
LOG2_E = 1.4426950408889634

# Shapes: B sequences, R positions, H query heads, G key-value heads, C channels of a head.
# scale and bias belong to the linear layer whose split-K partial sums a kernel adds up; the scale
# is that of the layer's fp8 weight. sin is signed: negative for the first channel of a rotated
# pair. Without fp8, out_scales may be any tensor, because it is not used. use_pdl says whether the
# kernel is started by programmatic dependent launch (pdl.py).


@triton.jit
def triton_layer_norm_add(  # the prefix makes our kernels easy to find in profiles
    x,
    y,
    weight,
    bias,
    out,
    quantized,
    out_scales,
    hidden_size,
    eps,
    BLOCK: tl.constexpr,
    quantizes: tl.constexpr,
    fp8_max: tl.constexpr,
    amax_floor: tl.constexpr,
):
    """Write ``x + layer_norm(y)`` of one row to ``out``; if ``quantizes``, write it in fp8, too."""
    row = tl.program_id(0).to(tl.int64)  # row * hidden_size may pass 2**31
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden_size
    values = tl.load(y + row * hidden_size + columns, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / hidden_size
    centered = tl.where(mask, values - mean, 0.0)
    inverse_std = tl.rsqrt(tl.sum(centered * centered, axis=0) / hidden_size + eps)
    norm_weight = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    norm_bias = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    # Round before the addition, as torch rounds the output of the norm.
    dtype: tl.constexpr = out.dtype.element_ty
    normalized = (centered * inverse_std * norm_weight + norm_bias).to(dtype).to(tl.float32)
    residual = tl.load(x + row * hidden_size + columns, mask=mask, other=0.0).to(tl.float32)
    total = (residual + normalized).to(dtype)
    tl.store(out + row * hidden_size + columns, total, mask=mask)
    if quantizes:
        quantized += row * hidden_size + columns
        store_quantized(
            total.to(tl.float32), quantized, out_scales + row, mask, fp8_max, amax_floor
        )


@triton.jit
def triton_add_rms_norm(
    x,
    y,
    y_scale,
    y_bias,
    NUM_PARTIALS: tl.constexpr,
    weight,
    total,
    out,
    out_scales,
    hidden_size,
    eps,
    dtype: tl.constexpr,
    is_partials: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    BLOCK: tl.constexpr,
    adds: tl.constexpr,
    quantizes: tl.constexpr,
    fp8_max: tl.constexpr,
    amax_floor: tl.constexpr,
    use_pdl: tl.constexpr,
):
    """Write ``x + y`` of one row to ``total`` if ``adds``, and the normalized sum to ``out``.

    Without ``adds``, the sum is ``x``. ``y`` may be split-K partial sums: see :func:`load_row`.
    """
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden_size
    norm_weight = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    pdl_wait_and_launch(use_pdl)
    values = tl.load(x + row * hidden_size + columns, mask=mask, other=0.0).to(tl.float32)
    if adds:
        values += load_row(
            y, y_scale, y_bias, NUM_PARTIALS, num_rows, hidden_size, row, columns, mask, dtype,
            is_partials, is_scaled, has_bias,
        )  # fmt: skip
        values = values.to(dtype).to(tl.float32)
        tl.store(total + row * hidden_size + columns, values.to(dtype), mask=mask)
    inverse_rms = tl.rsqrt(tl.sum(values * values, axis=0) / hidden_size + eps)
    values = (values * inverse_rms * norm_weight).to(dtype)
    out += row * hidden_size + columns
    if quantizes:
        store_quantized(values.to(tl.float32), out, out_scales + row, mask, fp8_max, amax_floor)
    else:
        tl.store(out, values, mask=mask)


@triton.jit
def triton_rope_and_update_cache(
    qkv,
    scale,
    bias,
    NUM_PARTIALS: tl.constexpr,
    cos,
    sin,
    query,
    keys,
    values,
    cache_length,
    num_channels,
    query_heads,
    kv_heads,
    max_cache_len,
    dtype: tl.constexpr,
    is_partials: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    angle_dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DISTANCE: tl.constexpr,
    use_pdl: tl.constexpr,
):
    """Write one head of one sequence: a query, or a key or value of the cache.

    ``qkv`` may be split-K partial sums: see :func:`load_row`. RoPE does not rotate all channels of
    a head: for the others, the cosine is 1 and the sine 0. ``DISTANCE`` is a power of two, so
    ``channel ^ DISTANCE`` is the other channel of the rotated pair that contains ``channel``.
    """
    pdl_wait_and_launch(use_pdl)
    row, num_rows, head = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    channels = tl.arange(0, HEAD_DIM)
    columns = head * HEAD_DIM + channels
    mask = columns < num_channels
    x = load_row(
        qkv, scale, bias, NUM_PARTIALS, num_rows, num_channels, row, columns, mask, dtype,
        is_partials, is_scaled, has_bias,
    )  # fmt: skip
    if head < query_heads + kv_heads:
        neighbor = load_row(
            qkv, scale, bias, NUM_PARTIALS, num_rows, num_channels, row, columns ^ DISTANCE, mask,
            dtype, is_partials, is_scaled, has_bias,
        )  # fmt: skip
        # Round each product to the dtype of the angles, as torch does.
        cos_term = x * tl.load(cos + row * HEAD_DIM + channels).to(tl.float32)
        sin_term = neighbor * tl.load(sin + row * HEAD_DIM + channels).to(tl.float32)
        x = cos_term.to(angle_dtype).to(tl.float32) + sin_term.to(angle_dtype).to(tl.float32)
        x = x.to(angle_dtype).to(tl.float32)
    if head < query_heads:
        tl.store(query + (row * query_heads + head) * HEAD_DIM + channels, x.to(dtype))
    else:
        position = tl.load(cache_length)
        cache_row = (row * kv_heads + (head - query_heads) % kv_heads) * max_cache_len + position
        cache = keys if head < query_heads + kv_heads else values
        fits = (position < max_cache_len) & mask
        tl.store(cache + cache_row * HEAD_DIM + channels, x.to(dtype), mask=fits)


@triton.jit
def triton_rope_in_place(
    qkv,
    cos,
    sin,
    row_stride,
    angle_stride,
    num_rotated_heads,
    head_dim,
    NUM_PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Rotate the first heads of one position of one sequence.

    Each head has ``NUM_PAIRS`` rotated pairs of channels, which are ``DISTANCE`` channels apart.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    channels = tl.arange(0, 2 * NUM_PAIRS)
    pointers = qkv + row * row_stride + head * head_dim + channels[None, :]
    value = tl.load(pointers, mask=head < num_rotated_heads, other=0.0)
    paired = tl.reshape(value, (BLOCK_HEADS, NUM_PAIRS // DISTANCE, 2, DISTANCE))
    first, second = tl.split(tl.permute(paired, (0, 1, 3, 2)))
    swapped = tl.permute(tl.join(second, first), (0, 1, 3, 2))
    neighbor = tl.reshape(swapped, (BLOCK_HEADS, 2 * NUM_PAIRS))
    # Round each product to the dtype of the angles, as torch does.
    angle_dtype: tl.constexpr = cos.dtype.element_ty
    cosine = tl.load(cos + row * angle_stride + channels).to(tl.float32)
    sine = tl.load(sin + row * angle_stride + channels).to(tl.float32)
    cos_term = (value.to(tl.float32) * cosine[None, :]).to(angle_dtype).to(tl.float32)
    sin_term = (neighbor.to(tl.float32) * sine[None, :]).to(angle_dtype).to(tl.float32)
    rotated = (cos_term + sin_term).to(angle_dtype).to(qkv.dtype.element_ty)
    tl.store(pointers, rotated, mask=head < num_rotated_heads)


@triton.jit
def triton_attend_to_split(
    query,
    key_cache,
    value_cache,
    cache_length,
    mask,
    split_max,
    split_sum,
    split_out,
    mask_row_stride,
    mask_key_stride,
    max_cache_len,
    kv_heads,
    heads_per_kv_head,
    blocks_per_split,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    use_pdl: tl.constexpr,
):
    """Attend to one split of the keys, for the query heads that share one key-value head.

    The kernel writes the online softmax's state: maximum, sum and unnormalized output of each head.
    The softmax is computed with powers of 2, so ``scale`` includes log2(e).
    """
    # The previous decode step wrote the length, so it can be read before the PDL wait. The kernel
    # just before this one writes the new key. The length does not count that key yet, so add 1.
    num_keys = tl.minimum(tl.load(cache_length) + 1, max_cache_len)
    pdl_wait_and_launch(use_pdl)
    row, kv_head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    head, channels = tl.arange(0, BLOCK_HEADS), tl.arange(0, HEAD_DIM)
    is_head = head < heads_per_kv_head
    head += kv_head * heads_per_kv_head
    query_rows = row * kv_heads * heads_per_kv_head + head
    query_pointers = query + query_rows[:, None] * HEAD_DIM + channels[None, :]
    queries = tl.load(query_pointers, mask=is_head[:, None], other=0.0)
    highest = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    weighted = tl.zeros((BLOCK_HEADS, HEAD_DIM), tl.float32)
    first = tl.program_id(1) * blocks_per_split
    for block in range(first, tl.minimum(first + blocks_per_split, tl.cdiv(num_keys, BLOCK_KEYS))):
        positions = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        is_key = positions < num_keys
        mask_pointers = mask + row * mask_row_stride + positions * mask_key_stride
        attends = tl.load(mask_pointers, mask=is_key, other=0)
        cache_rows = (row * kv_heads + kv_head) * max_cache_len + positions[:, None]
        offsets = cache_rows * HEAD_DIM + channels[None, :]
        keys = tl.load(key_cache + offsets, mask=is_key[:, None], other=0.0)
        values = tl.load(value_cache + offsets, mask=is_key[:, None], other=0.0)
        scores = tl.dot(queries, keys.T) * scale
        scores = tl.where((attends != 0)[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A head that has met only masked keys so far has a maximum of -inf: avoid -inf - -inf.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(highest - base)
        total = total * correction + tl.sum(weights, axis=1)
        weighted = weighted * correction[:, None] + tl.dot(weights.to(values.dtype), values)
        highest = new_highest
    split_rows = query_rows * tl.num_programs(1) + tl.program_id(1)
    tl.store(split_max + split_rows, highest, mask=is_head)
    tl.store(split_sum + split_rows, total, mask=is_head)
    out_pointers = split_out + split_rows[:, None] * HEAD_DIM + channels[None, :]
    tl.store(out_pointers, weighted, mask=is_head[:, None])


@triton.jit
def triton_combine_splits(
    split_max,
    split_sum,
    split_out,
    cache_length,
    out,
    out_scales,
    num_splits,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    quantizes: tl.constexpr,
    fp8_max: tl.constexpr,
    amax_floor: tl.constexpr,
    use_pdl: tl.constexpr,
):
    """Combine the splits of one query head, and increment the cache's length."""
    pdl_wait_and_launch(use_pdl)
    head, split, channels = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    if head == 0:  # no kernel of this step reads the length any more
        tl.store(cache_length, tl.load(cache_length) + 1)
    split_rows, is_split = head * num_splits + split, split < num_splits
    highest = tl.load(split_max + split_rows, mask=is_split, other=float("-inf"))
    correction = tl.exp2(highest - tl.max(highest, axis=0))
    sums = tl.load(split_sum + split_rows, mask=is_split, other=0.0)
    total = tl.sum(correction * sums, axis=0)
    pointers = split_out + split_rows[:, None] * HEAD_DIM + channels[None, :]
    weighted = tl.load(pointers, mask=is_split[:, None], other=0.0)
    combined = (tl.sum(weighted * correction[:, None], axis=0) / total).to(dtype)
    out += head * HEAD_DIM + channels
    if quantizes:
        store_quantized(
            combined.to(tl.float32), out, out_scales + head, channels < HEAD_DIM, fp8_max,
            amax_floor,
        )  # fmt: skip
    else:
        tl.store(out, combined)


def rope_and_update_cache(
    qkv: Tensor | SplitKPartials,
    head_counts: tuple[int, int, int],
    cos_BR1C: Tensor,
    sin_BR1C: Tensor,
    distance: int,
    cache_layer,
) -> Tensor:
    """Rotate the queries and keys of one new token per sequence, and cache its keys and values.

    Args:
        qkv: ``(B, 1, (H + G + G) * C)``: queries, keys and values.
        head_counts: ``H, G, G``.
        distance: Number of channels between the two of a rotated pair.
        cache_layer: A ``StaticLayer``. The new keys and values are written after the cached ones;
            :func:`flash_decode` then increments the layer's length.

    Returns:
        The rotated queries ``(B, H, C)``.
    """
    query_heads, kv_heads, _ = head_counts
    rows, _, num_channels = qkv.shape
    head_dim = num_channels // sum(head_counts)
    cos, sin = (x.expand(rows, -1, -1, -1).contiguous() for x in (cos_BR1C, sin_BR1C))
    query = cache_layer.keys.new_empty(rows, query_heads, head_dim)
    qkv = qkv if isinstance(qkv, SplitKPartials) else qkv.contiguous()
    row_args, row_constexprs = load_row_args(qkv)
    use_pdl = supports_pdl(query.device)
    with torch.cuda.device_of(query):
        triton_rope_and_update_cache[rows, sum(head_counts)](
            *row_args, cos, sin, query, cache_layer.keys, cache_layer.values,
            cache_layer.cumulative_length, num_channels, query_heads, kv_heads,
            cache_layer.keys.shape[2], *row_constexprs, TL_DTYPES[cos.dtype], head_dim, distance,
            use_pdl, launch_pdl=use_pdl, num_warps=1, **NO_FP_FUSION,
        )  # fmt: skip
    return query


def flash_decode(
    query_BHC: Tensor, cache_layer, mask: Tensor, quantizes: bool
) -> Tensor | Fp8Tensor:
    """Attend from one new token per sequence to a cache, whose keys are split over thread blocks.

    Args:
        query_BHC: The queries that :func:`rope_and_update_cache` returned; it has also cached the
            new keys and values.
        cache_layer: The same ``StaticLayer``; its length is incremented.
        mask: ``(B or 1, 1, 1, max_cache_len)``, true where the token attends.
        quantizes: Return fp8 with one scale per head.

    Returns:
        ``(B, 1, H * C)``.
    """
    batch, num_heads, head_dim = query_BHC.shape
    _, kv_heads, max_cache_len, _ = cache_layer.keys.shape
    use_pdl, num_blocks = supports_pdl(query_BHC.device), triton.cdiv(max_cache_len, BLOCK_KEYS)
    # Choose the splits so that all thread blocks fit on the GPU at once (one wave).
    splits_per_wave = BLOCKS_PER_SM * num_sms(query_BHC.device) // (batch * kv_heads)
    blocks_per_split = triton.cdiv(num_blocks, min(max(splits_per_wave, 1), MAX_KEY_SPLITS))
    splits = triton.cdiv(num_blocks, blocks_per_split)
    # One allocation for three tensors, which are split by their numbers of elements.
    num_states = batch * num_heads * splits
    buffer = query_BHC.new_empty(num_states * (head_dim + 2), dtype=torch.float32)
    split_max, split_sum, split_out = buffer.split([num_states, num_states, num_states * head_dim])
    out = _empty_like(query_BHC.view(batch, 1, num_heads * head_dim), head_dim if quantizes else 0)
    out_data, out_scales = out if isinstance(out, Fp8Tensor) else (out, out)
    with torch.cuda.device_of(query_BHC):
        triton_attend_to_split[batch * kv_heads, splits](
            query_BHC, cache_layer.keys, cache_layer.values, cache_layer.cumulative_length, mask,
            split_max, split_sum, split_out, mask.stride(0) if len(mask) > 1 else 0, mask.stride(3),
            max_cache_len, kv_heads, num_heads // kv_heads, blocks_per_split,
            head_dim**-0.5 * LOG2_E,
            head_dim, BLOCK_HEADS, BLOCK_KEYS, use_pdl, launch_pdl=use_pdl, num_warps=4,
        )  # fmt: skip
        triton_combine_splits[batch * num_heads,](
            split_max, split_sum, split_out, cache_layer.cumulative_length, out_data, out_scales,
            splits, TL_DTYPES[query_BHC.dtype], head_dim, triton.next_power_of_2(splits),
            quantizes, E4M3_MAX, AMAX_FLOOR, use_pdl, launch_pdl=use_pdl, num_warps=4,
        )  # fmt: skip
    return out


def layer_norm_add(
    x: Tensor, norm: nn.LayerNorm, y: Tensor, quantizes: bool
) -> tuple[Tensor, Tensor | Fp8Tensor]:
    """Return ``x + norm(y)``, and a copy in fp8 if ``quantizes`` (else the same tensor again).

    ``x`` and ``y`` are ``(..., hidden_size)`` in bf16 or fp16.
    """
    x, y = x.contiguous(), y.contiguous()
    out, hidden_size = torch.empty_like(x), x.shape[-1]
    quantized: Any = _empty_like(x, hidden_size) if quantizes else None
    data, scales = quantized or (out, out)
    if rows := x.numel() // hidden_size:
        with torch.cuda.device_of(x):
            triton_layer_norm_add[(rows,)](
                x, y, norm.weight, norm.bias, out, data, scales, hidden_size, norm.eps,
                triton.next_power_of_2(hidden_size), quantizes, E4M3_MAX, AMAX_FLOOR, num_warps=4,
                **NO_FP_FUSION,
            )  # fmt: skip
    return out, quantized or out


def add_rms_norm(
    x: Tensor, norm: RMSNorm, y: Tensor | SplitKPartials | None, quantizes: bool
) -> tuple[Tensor, Tensor | Fp8Tensor]:
    """Return ``x + y`` and ``norm(x + y)``; if ``quantizes``, the latter is in fp8.

    ``x`` and ``y`` are ``(..., hidden_size)`` in bf16 or fp16; None for ``y`` means zero.
    """
    x, hidden_size, use_pdl = x.contiguous(), x.shape[-1], supports_pdl(x.device)
    total = x if y is None else torch.empty_like(x)
    normalized = _empty_like(x, hidden_size if quantizes else 0)
    out, out_scales = normalized if isinstance(normalized, Fp8Tensor) else (normalized, x)
    block = triton.next_power_of_2(hidden_size)
    if rows := x.numel() // hidden_size:
        y = x if y is None else y
        y = y if isinstance(y, SplitKPartials) else y.contiguous()
        row_args, row_constexprs = load_row_args(y)
        with torch.cuda.device_of(x):
            triton_add_rms_norm[(rows,)](
                x, *row_args, norm.weight, total, out, out_scales, hidden_size, norm.eps,
                *row_constexprs, block, total is not x, quantizes, E4M3_MAX, AMAX_FLOOR, use_pdl,
                launch_pdl=use_pdl, num_warps=8, **NO_FP_FUSION,
            )  # fmt: skip
    return total, normalized


def _empty_like(x: Tensor, group_size: int) -> Tensor | Fp8Tensor:
    """Allocate an output like ``x``.

    If ``group_size`` is not 0, the output is in fp8, with one scale per group of so many channels.
    """
    *leading, channels = x.shape
    if not group_size:
        return torch.empty_like(x)
    scales = x.new_empty(*leading, channels // group_size, dtype=torch.float32)
    return Fp8Tensor(torch.empty_like(x, dtype=E4M3), scales)


def rope_in_place(
    heads_BRHC: Tensor, num_rotated_heads: int, cos_BR1C: Tensor, sin_BR1C: Tensor, distance: int
) -> None:
    """Rotate the first heads of a contiguous ``(B, R, H, C)`` in place, like ``apply_rotary``."""
    batch, length, num_heads, head_dim = heads_BRHC.shape
    cos, sin = (x.expand(batch, -1, -1, -1).contiguous() for x in (cos_BR1C, sin_BR1C))
    if rows := batch * length:
        pairs = head_dim // 4  # RoPE rotates the first half of the channels
        block_heads = triton.next_power_of_2(num_rotated_heads)
        with torch.cuda.device_of(heads_BRHC):
            triton_rope_in_place[(rows,)](
                heads_BRHC, cos, sin, num_heads * head_dim, head_dim, num_rotated_heads, head_dim,
                pairs, distance, block_heads, num_warps=4, **NO_FP_FUSION,
            )  # fmt: skip
