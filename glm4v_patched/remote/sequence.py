"""The sequence contract: where images stand in a row of ids, and what follows from that.

An image is written between a begin and an end id in one of two forms, told apart by what lies
between them: one id (the published three-id form), or one id for every position the image takes
(the grown form, which our processor makes). Everything downstream sees grown rows only.

An image costs three positions: begin keeps ``p``, all its inner positions share ``p + 1``, end
has ``p + 2``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Shapes: B rows, L length as given, R length of the grown rows, P length of the cache.


class GrownRows(NamedTuple):
    """Rows in which every image takes its full number of positions.

    Attributes:
        input_ids: ``(B, R)`` int64.
        position_ids: ``(B, R)`` int64, with an image's inner positions shared.
        image_mask: ``(B, R)`` bool, true from an image's begin to its end.
        attention_mask: ``(B, P + R)``, ``None`` if none was given and none is needed, or a given
            4D mask unchanged.
        labels: ``(B, R)`` int64 or ``None``; -100 inside images and where a row or sample starts.
        packed_position_ids: ``(B, R)`` counting every position and restarting at 0 with each
            sample; ``None`` unless positions were given without a mask, as packed rows have them.
    """

    input_ids: Tensor
    position_ids: Tensor
    image_mask: Tensor
    attention_mask: Tensor | None
    labels: Tensor | None
    packed_position_ids: Tensor | None


class ImageFormat(NamedTuple):
    """How images are written in a row, and the limits rows are checked against."""

    begin_id: int
    end_id: int
    num_image_tokens: int
    vocab_size: int
    max_positions: int


def grow_rows(
    input_ids: Tensor,
    image_format: ImageFormat,
    num_images: int | None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    past_length: int = 0,
    next_position: Tensor | None = None,
    prompt_length: int | None = None,
    allow_unpaired: bool = False,
) -> GrownRows:
    """Bring rows of either form, with any number of images each, to the grown form.

    Rows that end up shorter than the longest are filled up on the left, where generation wants it.

    Args:
        input_ids: ``(B, L)`` int64.
        num_images: Pictures that come with these rows; ``None`` skips that check.
        attention_mask: ``(B, P + L)``, 0 at padding; or a 4D mask for rows that need no growing.
            See :func:`unmask_images`.
        position_ids: ``(B, L)`` or ``(1, L)``. In the grown form both ways of counting are taken:
            with an image's positions shared, or one more for every position (what a collator
            makes that knows nothing of images).
        labels: ``(B, L)`` int64.
        past_length: ``P``, positions already in the cache.
        next_position: ``(B, 1)``, the position that follows the cache; default ``past_length``.
        prompt_length: Columns from here on were drawn by generation: a begin or end id among them
            is an ordinary token. Default: all columns are the prompt.
        allow_unpaired: Take begin and end ids that enclose no image for ordinary tokens too.

    Raises:
        ValueError: names both numbers and the cure.
    """
    _check_shapes(input_ids, attention_mask, position_ids, labels, past_length)
    spans = _find_images(input_ids, image_format, prompt_length)
    padding_mask = current_mask = None
    if attention_mask is not None and attention_mask.ndim == 2:
        current_mask = attention_mask[:, past_length:].masked_fill(spans.is_inside, 1)
        padding_mask = torch.cat((attention_mask[:, :past_length], current_mask), dim=1)
        attention_mask = padding_mask

    counted = _count_positions(input_ids, position_ids, current_mask, past_length, next_position)
    positions = _share_image_positions(counted, spans)
    width = torch.where(spans.is_placeholder, image_format.num_image_tokens, 1)
    length = _check_rows(
        input_ids, image_format, spans, positions, width, num_images, allow_unpaired
    )
    image_mask = spans.is_inside | spans.is_begin | spans.is_end
    packed = position_ids is not None and attention_mask is None and past_length == 0
    if labels is not None:
        unlearned = spans.is_inside | _starts(positions, current_mask, packed)
        labels = labels.to(input_ids.device, torch.long).masked_fill(unlearned, -100)

    if length == input_ids.shape[1]:
        packed_ids = _count_within_samples(positions) if packed else None
        return GrownRows(input_ids, positions, image_mask, attention_mask, labels, packed_ids)

    if attention_mask is not None and padding_mask is None:
        raise ValueError(
            f"a {attention_mask.ndim}D attention_mask cannot be grown with its rows (from "
            f"{input_ids.shape[1]} to {length} positions): give a 2D mask, or grown rows"
        )
    ends = width.cumsum(dim=1)
    left_fill = length - ends[:, -1:]
    columns = torch.arange(length, device=input_ids.device).repeat(len(input_ids), 1)
    source = torch.searchsorted(ends + left_fill, columns, right=True)
    is_fill = columns < left_fill

    def grow(values: Tensor, fill) -> Tensor:
        return values.gather(1, source).masked_fill(is_fill, fill)

    grown_positions = grow(positions, 0)
    if padding_mask is None and bool((width.sum(1) != length).any()):
        if packed:
            raise ValueError(
                f"rows given with position_ids and without attention_mask grow to different "
                f"lengths (up to {length}): pack grown rows, or give an attention_mask"
            )
        current_mask = torch.ones_like(input_ids)
        padding_mask = current_mask.new_ones(len(input_ids), past_length + input_ids.shape[1])
    if padding_mask is not None:
        padding_mask = torch.cat((padding_mask[:, :past_length], grow(current_mask, 0)), dim=1)
    return GrownRows(
        input_ids=grow(input_ids, 0),
        position_ids=grown_positions,
        image_mask=grow(image_mask, False),
        attention_mask=padding_mask,
        labels=None if labels is None else grow(labels, -100),
        packed_position_ids=_count_within_samples(grown_positions) if packed else None,
    )


def unmask_images(attention_mask: Tensor, input_ids: Tensor, image_format: ImageFormat) -> Tensor:
    """The mask ``(B, L)`` with ones inside images, where nothing is padding.

    The published placeholder is the padding id: masks made by comparing ids take it out.
    """
    return attention_mask.masked_fill(_find_images(input_ids, image_format).is_inside, 1)


def count_images(input_ids: Tensor, image_format: ImageFormat) -> Tensor:
    """Images in each row ``(B,)`` int64."""
    return _find_images(input_ids, image_format).is_begin.sum(dim=1)


class _ImageSpans(NamedTuple):
    """``(B, L)`` each. Only begin and end ids of the prompt that belong together count."""

    is_prompt: Tensor
    is_begin: Tensor
    is_inside: Tensor
    is_end: Tensor
    is_placeholder: Tensor
    inner_length: Tensor  # at begin ids: how many ids lie before the end


def _find_images(
    input_ids: Tensor, image_format: ImageFormat, prompt_length: int | None = None
) -> _ImageSpans:
    length = input_ids.shape[1]
    columns = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    is_prompt = columns < (length if prompt_length is None else prompt_length)
    is_begin = (input_ids == image_format.begin_id) & is_prompt
    is_end = (input_ids == image_format.end_id) & is_prompt
    last_begin = columns.masked_fill(~is_begin, -1).cummax(dim=1).values
    last_end = columns.masked_fill(~is_end, -1).cummax(dim=1).values
    next_begin = _cummin_from_right(columns.masked_fill(~is_begin, length))
    next_end = _cummin_from_right(columns.masked_fill(~is_end, length))
    begin_after = torch.nn.functional.pad(next_begin[:, 1:], (0, 1), value=length)

    is_begin = is_begin & (next_end < begin_after)
    is_inside = (last_begin > last_end) & (columns > last_begin) & (next_end < next_begin)
    inner_length = next_end - columns - 1
    is_placeholder = _shift_right(is_begin & (inner_length == 1))
    return _ImageSpans(
        is_prompt=is_prompt,
        is_begin=is_begin,
        is_inside=is_inside,
        is_end=is_end & _shift_right(is_inside),
        is_placeholder=is_placeholder,
        inner_length=inner_length,
    )


def _count_positions(input_ids, position_ids, current_mask, past_length, next_position) -> Tensor:
    if position_ids is not None:
        return position_ids.expand_as(input_ids)
    if current_mask is None:
        counted = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    else:
        counted = (current_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return counted + (past_length if next_position is None else next_position)


def _share_image_positions(counted: Tensor, spans: _ImageSpans) -> Tensor:
    """Give all inner positions of a grown image one position, unless they have it already."""
    is_extra = spans.is_inside & _shift_right(spans.is_inside)
    stepped = torch.diff(counted, prepend=counted[:, :1], dim=1) == 1
    surplus = (is_extra & stepped).long().cumsum(dim=1)
    surplus_of_earlier_samples = surplus.masked_fill(counted != 0, 0).cummax(dim=1).values
    return (counted - surplus + surplus_of_earlier_samples).clamp(min=0)


def _starts(positions: Tensor, current_mask: Tensor | None, packed: bool) -> Tensor:
    """First columns of rows and packed samples: nothing of theirs comes before to predict them."""
    starts = torch.zeros_like(positions, dtype=torch.bool)
    starts[:, 0] = True
    if current_mask is not None:
        starts |= _shift_right(current_mask == 0)
    if packed:
        starts |= positions == 0
    return starts


def _count_within_samples(positions: Tensor) -> Tensor:
    columns = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    return columns - columns.masked_fill(positions != 0, 0).cummax(dim=1).values


def _check_shapes(input_ids, attention_mask, position_ids, labels, past_length) -> None:
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: give at least one row with at least "
            "one id, (rows, ids)"
        )
    rows, length = input_ids.shape
    if attention_mask is not None and attention_mask.ndim == 2:
        wanted = (rows, past_length + length)
        if tuple(attention_mask.shape) != wanted:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)} but input_ids "
                f"{(rows, length)} after {past_length} cached positions need {wanted}: give one "
                "entry for every cached position and every id as given; rows with images are "
                "grown inside, and the mask with them"
            )
    if position_ids is not None and (
        position_ids.shape[-1] != length or position_ids.shape[0] not in (1, rows)
    ):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)} but input_ids {(rows, length)}: "
            "give one position for every id"
        )
    if labels is not None and labels.shape != input_ids.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} but input_ids {(rows, length)}: give one "
            "label (or -100) for every id; rows with images are grown inside, and labels with them"
        )


def _check_rows(
    input_ids, image_format, spans, positions, width, num_images, allow_unpaired
) -> int:
    """Raise ``ValueError`` for rows that cannot be computed; return the grown length."""
    inner = spans.inner_length.masked_fill(~spans.is_begin, 1)
    misfits = inner.masked_fill(inner == image_format.num_image_tokens, 1).flatten()
    # One transfer from the device for all that is checked.
    facts = torch.stack(
        [
            ((input_ids == image_format.begin_id) & spans.is_prompt).sum(),
            ((input_ids == image_format.end_id) & spans.is_prompt).sum(),
            spans.is_begin.sum(),
            misfits[(misfits - 1).abs().argmax()],
            input_ids.amin(),
            input_ids.amax(),
            positions.amax(),
            width.sum(dim=1).amax(),
        ]
    ).tolist()
    begins, ends, found, misfit, smallest_id, largest_id, last_position, length = facts
    offender = smallest_id if smallest_id < 0 else largest_id
    if not 0 <= offender < image_format.vocab_size:
        raise ValueError(
            f"input_ids holds id {offender}, but the vocabulary has {image_format.vocab_size} "
            "entries: use the tokenizer of this model, or resize_token_embeddings"
        )
    if not allow_unpaired and not begins == ends == found:
        raise ValueError(
            f"input_ids holds {begins} begin-of-image ids ({image_format.begin_id}) and {ends} "
            f"end-of-image ids ({image_format.end_id}), of which {found} pairs belong together: "
            "every begin needs its end later in the same row; was a row truncated inside an image?"
        )
    if misfit != 1:
        raise ValueError(
            f"an image has {misfit} ids between its begin and its end, but takes 1 (to be grown "
            f"here) or {image_format.num_image_tokens} (grown already, at this model's image_size)"
        )
    if num_images is not None and num_images != found:
        raise ValueError(
            f"{num_images} images were given for {found} begin-of-image ids in input_ids: give "
            "one image for each, in the order of their ids"
        )
    if last_position >= image_format.max_positions:
        raise ValueError(
            f"a row reaches position {last_position}, but the position table ends at "
            f"{image_format.max_positions - 1} (seq_length {image_format.max_positions}): shorten "
            "the row"
        )
    return length


def _cummin_from_right(values: Tensor) -> Tensor:
    return values.flip(1).cummin(dim=1).values.flip(1)


def _shift_right(flags: Tensor) -> Tensor:
    return torch.nn.functional.pad(flags[:, :-1], (1, 0), value=False)
