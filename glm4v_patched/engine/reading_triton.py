"""The kernels of :mod:`reading`; importing it takes Triton, which torch for GPUs brings."""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor, nn

from ..remote.modeling_chatglm import RMSNorm
from .e4m3 import E4M3, LARGEST, SMALLEST
from .early_kernels import overlaps
from .few_rows import BLOCKS_A_PROCESSOR, Parts, multiprocessors
from .few_rows_triton import KINDS, load_row, operands
from .fp8_numbers import Quantised
from .fp8_triton import quantise_row

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
    quantises: tl.constexpr,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # times the width it may pass 2**31
    at = tl.arange(0, block)
    inside = at < width
    value = tl.load(y + row * width + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / width
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded before it is added, as the norm's own output is.
    kind: tl.constexpr = out.dtype.element_ty
    normed = (centred * scale * factor + shift).to(kind).to(tl.float32)
    added = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32) + normed
    added = added.to(kind)
    tl.store(out + row * width + at, added, mask=inside)
    if quantises:
        value = added.to(tl.float32)
        quantise_row(value, numbers, scales, row, at, width, largest_number, smallest)


@triton.jit
def triton_add_rms_norm(
    x,
    y,
    left_scale,
    right_scale,
    y_bias,
    number,
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
    quantises: tl.constexpr,
    largest_number: tl.constexpr,
    smallest: tl.constexpr,
    is_early: tl.constexpr,
):
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, block)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += load_row(
            y, left_scale, right_scale, y_bias, number, rows, width, row, at, inside, kind,
            is_parts, is_scaled, has_bias,
        )  # fmt: skip
        value = value.to(kind).to(tl.float32)
        tl.store(added + row * width + at, value.to(kind), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    value = (value * scale * factor).to(kind)
    if quantises:
        value = value.to(tl.float32)
        quantise_row(value, out, scales, row, at, width, largest_number, smallest)
    else:
        tl.store(out + row * width + at, value, mask=inside)


@triton.jit
def triton_rotate_parts(
    parts,
    left_scale,
    right_scale,
    bias,
    number,
    cos,
    sin,
    out,
    width,
    rotated_heads,
    kind: tl.constexpr,
    is_parts: tl.constexpr,
    is_scaled: tl.constexpr,
    has_bias: tl.constexpr,
    angle_kind: tl.constexpr,
    channels: tl.constexpr,
    is_early: tl.constexpr,
):
    """One head of one row. Angles of the channels that are not rotated change nothing."""
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, rows, head = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    at = tl.arange(0, channels)
    place = head * channels + at
    inside = place < width
    value = load_row(
        parts, left_scale, right_scale, bias, number, rows, width, row, place, inside, kind,
        is_parts, is_scaled, has_bias,
    )  # fmt: skip
    if head < rotated_heads:
        neighbour = load_row(
            parts, left_scale, right_scale, bias, number, rows, width, row, place ^ 1, inside,
            kind, is_parts, is_scaled, has_bias,
        )  # fmt: skip
        left = value * tl.load(cos + row * channels + at).to(tl.float32)
        right = neighbour * tl.load(sin + row * channels + at).to(tl.float32)
        value = left.to(angle_kind).to(tl.float32) + right.to(angle_kind).to(tl.float32)
        value = value.to(angle_kind).to(tl.float32)
    tl.store(out + row * width + place, value.to(kind), mask=inside)


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
    neighbour = tl.reshape(tl.join(odd, even), (block_heads, 2 * pairs))
    # Each product is rounded to the type of the angles, as the products of tensors are.
    kind: tl.constexpr = cos.dtype.element_ty
    cosine = tl.load(cos + row * angle_width + at).to(tl.float32)
    sine = tl.load(sin + row * angle_width + at).to(tl.float32)
    left = (value.to(tl.float32) * cosine[None, :]).to(kind).to(tl.float32)
    right = (neighbour.to(tl.float32) * sine[None, :]).to(kind).to(tl.float32)
    turned = (left + right).to(kind).to(heads.dtype.element_ty)
    tl.store(place, turned, mask=head < rotated_heads)


@triton.jit
def triton_attend_to_part(
    query,
    key,
    value,
    mask,
    largest,
    sums,
    out,
    query_of_row,
    query_of_head,
    key_of_row,
    key_of_group,
    key_width,
    value_of_row,
    value_of_group,
    value_width,
    mask_of_row,
    mask_width,
    keys,
    groups,
    heads,
    blocks_a_part,
    scale,
    channels: tl.constexpr,
    block_heads: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    """One part of the keys, for the ``heads`` that share a group's; ``scale`` is to the base 2."""
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    head, at = tl.arange(0, block_heads), tl.arange(0, channels)
    is_head = head < heads
    head += group * heads
    queries_at = query + row * query_of_row + head[:, None] * query_of_head + at[None, :]
    queries = tl.load(queries_at, mask=is_head[:, None], other=0.0)
    highest = tl.full((block_heads,), float("-inf"), tl.float32)
    total = tl.zeros((block_heads,), tl.float32)
    weighed = tl.zeros((block_heads, channels), tl.float32)
    first = tl.program_id(1) * blocks_a_part
    for number in range(first, tl.minimum(first + blocks_a_part, tl.cdiv(keys, block))):
        position = number * block + tl.arange(0, block)
        inside = position < keys
        looks = tl.load(mask + row * mask_of_row + position * mask_width, mask=inside, other=0)
        keys_at = key + row * key_of_row + group * key_of_group + position[:, None] * key_width
        keys_of_block = tl.load(keys_at + at[None, :], mask=inside[:, None], other=0.0)
        values_at = value + row * value_of_row + group * value_of_group
        values_at += position[:, None] * value_width
        values = tl.load(values_at + at[None, :], mask=inside[:, None], other=0.0)
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
    out,
    number,
    channels: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, part, at = tl.program_id(0), tl.arange(0, block), tl.arange(0, channels)
    place, is_part = head * number + part, part < number
    highest = tl.load(largest + place, mask=is_part, other=float("-inf"))
    factor = tl.exp2(highest - tl.max(highest, axis=0))
    total = tl.sum(factor * tl.load(sums + place, mask=is_part, other=0.0), axis=0)
    parts_at = parts + place[:, None] * channels + at[None, :]
    weighed = tl.load(parts_at, mask=is_part[:, None], other=0.0)
    joined = tl.sum(weighed * factor[:, None], axis=0) / total
    tl.store(out + head * channels + at, joined.to(out.dtype.element_ty))


@triton.jit
def triton_write_one(
    key,
    value,
    keys,
    values,
    length,
    key_of_row,
    key_of_group,
    value_of_row,
    value_of_group,
    rows,
    groups,
    room,
    channels: tl.constexpr,
    block_rows: tl.constexpr,
    block_groups: tl.constexpr,
    is_early: tl.constexpr,
):
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(length)
    group = tl.arange(0, block_groups)[None, :, None]
    at = tl.arange(0, channels)[None, None, :]
    for first in range(0, rows, block_rows):
        row = first + tl.arange(0, block_rows)[:, None, None]
        inside = (row < rows) & (group < groups) & (position < room)
        place = ((row.to(tl.int64) * groups + group) * room + position) * channels + at
        new = tl.load(key + row * key_of_row + group * key_of_group + at, mask=inside)
        tl.store(keys + place, new, mask=inside)
        new = tl.load(value + row * value_of_row + group * value_of_group + at, mask=inside)
        tl.store(values + place, new, mask=inside)
    tl.debug_barrier()  # all have read where to write
    tl.store(length, position + 1)


def write_one(keys: Tensor, values: Tensor, length: Tensor, key: Tensor, value: Tensor) -> None:
    """Write a key and a value of each row ``(B, G, 1, C)`` behind those that are there, and count
    them: ``keys`` and ``values`` are ``(B, G, K, C)`` and contiguous, ``length`` one number."""
    batch, groups, room, channels = keys.shape
    is_early = overlaps(keys.device)
    with torch.cuda.device_of(keys):
        triton_write_one[1,](
            key, value, keys, values, length, *key.stride()[:2], *value.stride()[:2], batch,
            groups, room, channels, min(triton.next_power_of_2(batch), 32),
            triton.next_power_of_2(groups),
            is_early, launch_pdl=is_early, num_warps=8,
        )  # fmt: skip


def attend_to_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As :func:`reading.attend_to_parts`."""
    (batch, heads, _, channels), (_, groups, keys, _) = query.shape, key.shape
    is_early, blocks = overlaps(query.device), triton.cdiv(keys, BLOCK)
    # As many parts as fill the GPU once.
    wanted = BLOCKS_A_PROCESSOR * multiprocessors(query.device) // (batch * groups)
    blocks_a_part = triton.cdiv(blocks, min(max(wanted, 1), MOST_PARTS))
    parts = triton.cdiv(blocks, blocks_a_part)
    found = query.new_empty(batch * heads, parts, channels + 2, dtype=torch.float32)
    out = query.new_empty(batch, 1, heads * channels)
    # Three tensors in one: their elements are counted, not their rows.
    largest, sums, weighed = found.view(-1).split(
        [batch * heads * parts, batch * heads * parts, batch * heads * parts * channels]
    )
    with torch.cuda.device_of(query):
        triton_attend_to_part[batch * groups, parts](
            query, key, value, mask, largest, sums, weighed,
            query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3],
            mask.stride(0) if len(mask) > 1 else 0, mask.stride(3),
            keys, groups, heads // groups, blocks_a_part, channels**-0.5 * LOG2_E,
            channels, BLOCK_HEADS, BLOCK, is_early, launch_pdl=is_early, num_warps=4,
        )  # fmt: skip
        triton_join_parts[batch * heads,](
            largest, sums, weighed, out, parts, channels, triton.next_power_of_2(parts), is_early,
            launch_pdl=is_early, num_warps=4,
        )  # fmt: skip
    return out


def add_norm(
    x: Tensor, norm: nn.LayerNorm, y: Tensor, quantises: bool
) -> tuple[Tensor, Tensor | Quantised]:
    """``x + norm(y)``, of ``(..., width)`` in bf16 or fp16 each, and the same again, quantised if
    so."""
    x, y = x.contiguous(), y.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    quantised = _room_for(x) if quantises else None
    numbers, scales = quantised or (out, out)
    if rows := x.numel() // width:
        with torch.cuda.device_of(x):
            triton_add_norm[(rows,)](
                x, y, norm.weight, norm.bias, out, numbers, scales, width, norm.eps,
                triton.next_power_of_2(width), quantises, LARGEST, SMALLEST, num_warps=4, **EXACT,
            )  # fmt: skip
    return out, quantised or out


def add_rms_norm(
    x: Tensor, norm: RMSNorm, y: Tensor | Parts | None, quantises: bool
) -> tuple[Tensor, Tensor | Quantised]:
    """``x + y``, of ``(..., width)`` in bf16 or fp16 each, and ``norm`` of it, quantised if so."""
    x, width, is_early = x.contiguous(), x.shape[-1], overlaps(x.device)
    added = x if y is None else torch.empty_like(x)
    normed = _room_for(x) if quantises else torch.empty_like(x)
    out, scales = normed if isinstance(normed, Quantised) else (normed, x)
    if rows := x.numel() // width:
        given, flags = operands(x if y is None else y)
        with torch.cuda.device_of(x):
            triton_add_rms_norm[(rows,)](
                x, *given, norm.weight, added, out, scales, width, norm.eps, *flags,
                triton.next_power_of_2(width), y is not None, quantises, LARGEST, SMALLEST,
                is_early, launch_pdl=is_early, num_warps=8, **EXACT,
            )  # fmt: skip
    return added, normed


def _room_for(x: Tensor) -> Quantised:
    scales = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    return Quantised(torch.empty_like(x, dtype=E4M3), scales)


def rotate_parts(
    heads: Parts, rotated_heads: int, cos_BR1C: Tensor, sin_BR1C: Tensor, channels: int
) -> Tensor:
    """``(B, R, H, C)`` of a product's heads, of which the first are rotated."""
    *leading, width = heads.shape
    cos, sin = (x.expand(*leading, -1, -1).contiguous() for x in (cos_BR1C, sin_BR1C))
    out = heads.parts.new_empty(*leading, width // channels, channels, dtype=heads.dtype)
    given, flags = operands(heads)
    is_early = overlaps(out.device)
    with torch.cuda.device_of(out):
        triton_rotate_parts[heads.parts.shape[1], width // channels](
            *given, cos, sin, out, width, rotated_heads, *flags, KINDS[cos.dtype], channels,
            is_early, launch_pdl=is_early, num_warps=1, **EXACT,
        )  # fmt: skip
    return out


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
