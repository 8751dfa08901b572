"""The kernels of :mod:`inference_layers`. Importing it takes Triton, which torch for GPUs has."""

from typing import Any

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor, nn

from ...remote.modeling_chatglm import RMSNorm
from .e4m3 import E4M3, LARGEST, SMALLEST
from .fp8_matmul import Quantized
from .fp8_triton import quantize
from .skinny_gemm import BLOCKS_A_PROCESSOR, Parts, num_sms, overlaps
from .skinny_gemm_triton import KINDS, load_row, operands, take_turn

# A compiler that fuses steps would leave out roundings between them.
EXACT = {"enable_fp_fusion": False}

# Keys of a block, the heads that share them, and the most parts that are joined at once.
BLOCK, BLOCK_HEADS, MOST_PARTS = 64, 16, 64
LOG2_E = 1.4426950408889634


@triton.jit
def triton_add_norm(  # profiles know kernels by their names
    x,
    y,
    weight,
    bias,
    out,
    numbers,
    scales,
    width,
    eps,
    block: tl.constexpr,
    quantizes: tl.constexpr,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # times the width it may pass 2**31
    at = tl.arange(0, block)
    inside = at < width
    value = tl.load(y + row * width + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / width
    centered = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=0) / width + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded before it is added, as the norm's own output is.
    kind: tl.constexpr = out.dtype.element_ty
    normed = (centered * scale * factor + shift).to(kind).to(tl.float32)
    added = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32) + normed
    added = added.to(kind)
    tl.store(out + row * width + at, added, mask=inside)
    if quantizes:
        value = added.to(tl.float32)
        numbers += row * width + at
        quantize(value, numbers, scales + row, inside, largest_number, smallest)


@triton.jit
def triton_add_rms_norm(
    x,
    y,
    y_scale,
    y_bias,
    number: tl.constexpr,
    weight,
    added,
    out,
    scales,
    width,
    eps,
    kind: tl.constexpr,
    is_parts: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
    quantizes: tl.constexpr,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
    is_early: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, block)
    inside = at < width
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    take_turn(is_early)
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += load_row(
            y, y_scale, y_bias, number, rows, width, row, at, inside, kind, is_parts, is_scaled,
            has_bias,
        )  # fmt: skip
        value = value.to(kind).to(tl.float32)
        tl.store(added + row * width + at, value.to(kind), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    value = (value * scale * factor).to(kind)
    if quantizes:
        value = value.to(tl.float32)
        quantize(value, out + row * width + at, scales + row, inside, largest_number, smallest)
    else:
        tl.store(out + row * width + at, value, mask=inside)


@triton.jit
def triton_rotate_and_keep(
    heads,
    scale,
    bias,
    number: tl.constexpr,
    cos,
    sin,
    query,
    keys,
    values,
    length,
    width,
    query_heads,
    groups,
    room,
    kind: tl.constexpr,
    is_parts: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    angle_kind: tl.constexpr,
    channels: tl.constexpr,
    is_early: tl.constexpr,
):
    """One head of one row. Angles of the channels that are not rotated change nothing."""
    take_turn(is_early)
    row, rows, head = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    at = tl.arange(0, channels)
    place = head * channels + at
    inside = place < width
    value = load_row(
        heads, scale, bias, number, rows, width, row, place, inside, kind, is_parts, is_scaled,
        has_bias,
    )  # fmt: skip
    if head < query_heads + groups:
        neighbor = load_row(
            heads, scale, bias, number, rows, width, row, place ^ 1, inside, kind, is_parts,
            is_scaled, has_bias,
        )  # fmt: skip
        # Each product is rounded to the type of the angles, as the products of tensors are.
        left = value * tl.load(cos + row * channels + at).to(tl.float32)
        right = neighbor * tl.load(sin + row * channels + at).to(tl.float32)
        value = left.to(angle_kind).to(tl.float32) + right.to(angle_kind).to(tl.float32)
        value = value.to(angle_kind).to(tl.float32)
    if head < query_heads:
        tl.store(query + (row * query_heads + head) * channels + at, value.to(kind))
    else:
        position = tl.load(length)
        kept_at = (row * groups + (head - query_heads) % groups) * room + position
        kept = keys if head < query_heads + groups else values
        tl.store(kept + kept_at * channels + at, value.to(kind), mask=(position < room) & inside)


@triton.jit
def triton_rotate(
    heads,
    cos,
    sin,
    row_width,
    angle_width,
    rotated_heads,
    channels,
    pairs: tl.constexpr,
    block_heads: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads)[:, None]
    at = tl.arange(0, 2 * pairs)
    place = heads + row * row_width + head * channels + at[None, :]
    value = tl.load(place, mask=head < rotated_heads, other=0.0)
    even, odd = tl.split(tl.reshape(value, (block_heads, pairs, 2)))
    neighbor = tl.reshape(tl.join(odd, even), (block_heads, 2 * pairs))
    # Each product is rounded to the type of the angles, as the products of tensors are.
    kind: tl.constexpr = cos.dtype.element_ty
    cosine = tl.load(cos + row * angle_width + at).to(tl.float32)
    sine = tl.load(sin + row * angle_width + at).to(tl.float32)
    left = (value.to(tl.float32) * cosine[None, :]).to(kind).to(tl.float32)
    right = (neighbor.to(tl.float32) * sine[None, :]).to(kind).to(tl.float32)
    turned = (left + right).to(kind).to(heads.dtype.element_ty)
    tl.store(place, turned, mask=head < rotated_heads)


@triton.jit
def triton_attend_to_part(
    query,
    key,
    value,
    length,
    mask,
    largest,
    sums,
    out,
    mask_of_row,
    mask_width,
    room,
    groups,
    heads,
    k_blocks_per_split,
    scale,
    channels: tl.constexpr,
    block_heads: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    """One part of the keys, for the ``heads`` that share a group's; ``scale`` is to the base 2."""
    # Written a step ago: the kernel before writes the key that is not counted yet.
    keys = tl.minimum(tl.load(length) + 1, room)
    take_turn(is_early)
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    head, at = tl.arange(0, block_heads), tl.arange(0, channels)
    is_head = head < heads
    head += group * heads
    queries_at = query + (row * groups * heads + head[:, None]) * channels + at[None, :]
    queries = tl.load(queries_at, mask=is_head[:, None], other=0.0)
    highest = tl.full((block_heads,), float("-inf"), tl.float32)
    total = tl.zeros((block_heads,), tl.float32)
    weighed = tl.zeros((block_heads, channels), tl.float32)
    first = tl.program_id(1) * k_blocks_per_split
    for number in range(first, tl.minimum(first + k_blocks_per_split, tl.cdiv(keys, block))):
        position = number * block + tl.arange(0, block)
        inside = position < keys
        looks = tl.load(mask + row * mask_of_row + position * mask_width, mask=inside, other=0)
        kept_at = ((row * groups + group) * room + position[:, None]) * channels + at[None, :]
        keys_of_block = tl.load(key + kept_at, mask=inside[:, None], other=0.0)
        values = tl.load(value + kept_at, mask=inside[:, None], other=0.0)
        scores = tl.dot(queries, keys_of_block.T) * scale
        scores = tl.where((looks != 0)[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # where it looks at nothing yet
        weights = tl.exp2(scores - base[:, None])
        factor = tl.exp2(highest - base)
        total = total * factor + tl.sum(weights, axis=1)
        weighed = weighed * factor[:, None] + tl.dot(weights.to(values.dtype), values)
        highest = higher
    place = (row * groups * heads + head) * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest + place, highest, mask=is_head)
    tl.store(sums + place, total, mask=is_head)
    tl.store(out + place[:, None] * channels + at[None, :], weighed, mask=is_head[:, None])


@triton.jit
def triton_join_parts(
    largest,
    sums,
    parts,
    length,
    out,
    scales,
    number,
    kind: tl.constexpr,
    channels: tl.constexpr,
    block: tl.constexpr,
    quantizes: tl.constexpr,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
    is_early: tl.constexpr,
):
    take_turn(is_early)
    head, part, at = tl.program_id(0), tl.arange(0, block), tl.arange(0, channels)
    if head == 0:  # nothing reads the length any more
        tl.store(length, tl.load(length) + 1)
    place, is_part = head * number + part, part < number
    highest = tl.load(largest + place, mask=is_part, other=float("-inf"))
    factor = tl.exp2(highest - tl.max(highest, axis=0))
    total = tl.sum(factor * tl.load(sums + place, mask=is_part, other=0.0), axis=0)
    parts_at = parts + place[:, None] * channels + at[None, :]
    weighed = tl.load(parts_at, mask=is_part[:, None], other=0.0)
    joined = (tl.sum(weighed * factor[:, None], axis=0) / total).to(kind)
    out += head * channels + at
    if quantizes:
        value = joined.to(tl.float32)
        quantize(value, out, scales + head, at < channels, largest_number, smallest)
    else:
        tl.store(out, joined)


def rope_and_update_cache(
    heads: Tensor | Parts, sizes: tuple[int, int, int], cos_BR1C: Tensor, sin_BR1C: Tensor, kept
) -> Tensor:
    """Queries ``(B, H, C)`` of one id of each row, rotated. Keys, rotated, and values are written
    to ``kept``, a ``StaticLayer``, behind those that are there; :func:`flash_decode`
    counts them.

    Args:
        heads: ``(B, 1, (H + G + G) * C)``: of queries, keys and values.
        sizes: ``H, G, G``.
    """
    queries, groups, _ = sizes
    rows, _, width = heads.shape
    channels = width // sum(sizes)
    cos, sin = (x.expand(rows, -1, -1, -1).contiguous() for x in (cos_BR1C, sin_BR1C))
    query = kept.keys.new_empty(rows, queries, channels)
    heads = heads if isinstance(heads, Parts) else heads.contiguous()
    given, flags = operands(heads)
    is_early = overlaps(query.device)
    with torch.cuda.device_of(query):
        triton_rotate_and_keep[rows, sum(sizes)](
            *given, cos, sin, query, kept.keys, kept.values, kept.cumulative_length, width,
            queries, groups, kept.keys.shape[2], *flags, KINDS[cos.dtype], channels, is_early,
            launch_pdl=is_early, num_warps=1, **EXACT,
        )  # fmt: skip
    return query


def flash_decode(query_BHC: Tensor, kept, mask: Tensor, quantizes: bool) -> Tensor | Quantized:
    """``(B, 1, H * C)`` of attention to what ``kept``, a ``StaticLayer``, holds and
    :func:`rope_and_update_cache` has added, under a mask ``(B or 1, 1, 1, room)`` that is true where it
    looks. Quantized, a head's channels have a scale."""
    (batch, heads, channels), (_, groups, room, _) = query_BHC.shape, kept.keys.shape
    is_early, blocks = overlaps(query_BHC.device), triton.cdiv(room, BLOCK)
    # As many parts as fill the GPU once.
    wanted = BLOCKS_A_PROCESSOR * num_sms(query_BHC.device) // (batch * groups)
    k_blocks_per_split = triton.cdiv(blocks, min(max(wanted, 1), MOST_PARTS))
    parts = triton.cdiv(blocks, k_blocks_per_split)
    found = query_BHC.new_empty(batch * heads, parts, channels + 2, dtype=torch.float32)
    out = _room_for(query_BHC.view(batch, 1, heads * channels), channels if quantizes else 0)
    numbers, scales = out if isinstance(out, Quantized) else (out, out)
    # Three tensors in one: their elements are counted, not their rows.
    largest, sums, weighed = found.view(-1).split(
        [batch * heads * parts, batch * heads * parts, batch * heads * parts * channels]
    )
    with torch.cuda.device_of(query_BHC):
        triton_attend_to_part[batch * groups, parts](
            query_BHC, kept.keys, kept.values, kept.cumulative_length, mask, largest, sums,
            weighed, mask.stride(0) if len(mask) > 1 else 0, mask.stride(3), room, groups,
            heads // groups, k_blocks_per_split, channels**-0.5 * LOG2_E, channels, BLOCK_HEADS, BLOCK,
            is_early, launch_pdl=is_early, num_warps=4,
        )  # fmt: skip
        triton_join_parts[batch * heads,](
            largest, sums, weighed, kept.cumulative_length, numbers, scales, parts,
            KINDS[query_BHC.dtype], channels, triton.next_power_of_2(parts),
            quantizes, LARGEST, SMALLEST, is_early, launch_pdl=is_early, num_warps=4,
        )  # fmt: skip
    return out


def layer_norm_add(
    x: Tensor, norm: nn.LayerNorm, y: Tensor, quantizes: bool
) -> tuple[Tensor, Tensor | Quantized]:
    """``x + norm(y)``, of ``(..., width)`` in bf16 or fp16 each, and the same again, quantized if
    so."""
    x, y = x.contiguous(), y.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    quantized: Any = _room_for(x, width) if quantizes else None
    numbers, scales = quantized or (out, out)
    if rows := x.numel() // width:
        with torch.cuda.device_of(x):
            triton_add_norm[(rows,)](
                x, y, norm.weight, norm.bias, out, numbers, scales, width, norm.eps,
                triton.next_power_of_2(width), quantizes, LARGEST, SMALLEST, num_warps=4, **EXACT,
            )  # fmt: skip
    return out, quantized or out


def add_rms_norm(
    x: Tensor, norm: RMSNorm, y: Tensor | Parts | None, quantizes: bool
) -> tuple[Tensor, Tensor | Quantized]:
    """``x + y``, of ``(..., width)`` in bf16 or fp16 each, and ``norm`` of it, quantized if so."""
    x, width, is_early = x.contiguous(), x.shape[-1], overlaps(x.device)
    added = x if y is None else torch.empty_like(x)
    normed = _room_for(x, width if quantizes else 0)
    out, scales = normed if isinstance(normed, Quantized) else (normed, x)
    block = triton.next_power_of_2(width)
    if rows := x.numel() // width:
        y = x if y is None else y
        given, flags = operands(y if isinstance(y, Parts) else y.contiguous())
        with torch.cuda.device_of(x):
            triton_add_rms_norm[(rows,)](
                x, *given, norm.weight, added, out, scales, width, norm.eps, *flags, block,
                added is not x, quantizes, LARGEST, SMALLEST, is_early, launch_pdl=is_early,
                num_warps=8, **EXACT,
            )  # fmt: skip
    return added, normed


def _room_for(x: Tensor, group: int) -> Tensor | Quantized:
    *leading, width = x.shape
    if not group:
        return torch.empty_like(x)
    scales = x.new_empty(*leading, width // group, dtype=torch.float32)
    return Quantized(torch.empty_like(x, dtype=E4M3), scales)


def rotate(heads_BRHC: Tensor, rotated_heads: int, cos_BR1C: Tensor, sin_BR1C: Tensor) -> None:
    """Rotate the first heads in place, as ``apply_rotary`` does, of contiguous ``(B, R, H, C)``."""
    batch, length, heads, channels = heads_BRHC.shape
    cos, sin = (x.expand(batch, -1, -1, -1).contiguous() for x in (cos_BR1C, sin_BR1C))
    if rows := batch * length:
        # Half of the channels is rotated, in pairs.
        sizes = channels // 4, triton.next_power_of_2(rotated_heads)
        with torch.cuda.device_of(heads_BRHC):
            triton_rotate[(rows,)](
                heads_BRHC, cos, sin, heads * channels, channels, rotated_heads, channels, *sizes,
                num_warps=4, **EXACT,
            )  # fmt: skip
