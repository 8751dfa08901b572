"""The layout of images: where they stand in a row of ids, and what follows from that.

An image is written between a begin and an end id in one of two forms, told apart by what lies
between them: one id (the published three-id form), or one id for every position the image takes
(the grown form, which our processor makes). Everything downstream sees grown rows only.

An image costs three positions: begin keeps ``p``, all its inner positions share ``p + 1``, end
has ``p + 2``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .image_checks import (
    UnexpandedBatch,
    ImageFormat,
    check_images,
    check_rows,
    check_shapes,
    facts_in_graph,
    facts_on_host,
)

# Shapes: B rows, L length as given, R length of the grown rows, P length of the cache.


class ExpandedBatch(NamedTuple):
    """Rows in which every image takes its full number of positions.

    Attributes:
        input_ids: ``(B, R)`` int64.
        position_ids: ``(B, R)`` int64, with an image's inner positions shared.
        image_mask: ``(B, R)`` bool, true from begin to end.
        attention_mask: ``(B, P + R)``, ``None`` if none is needed, or a given 4D mask.
        labels: ``(B, R)`` int64 or ``None``; -100 inside images and where a row or sample starts.
            ``(B, R + 1)`` with a label after the last id.
        packed_position_ids: Of packed rows ``(B, R)``, counting every position and restarting at 0
            with each sample.
        last_position: The greatest of all rows, on the host.
        has_padding: Whether any column of any row is padding.
        plain_from: From this column on all rows hold text alone, each id at the position after
            that of the id before it: 0 if that goes on from what is cached.
    """

    input_ids: Tensor
    position_ids: Tensor
    image_mask: Tensor
    attention_mask: Tensor | None
    labels: Tensor | None
    packed_position_ids: Tensor | None
    last_position: int
    has_padding: bool
    plain_from: int


class _ImageSpans(NamedTuple):
    """``(B, L)`` each. Begin and end ids that belong together make an image."""

    begin_ids: Tensor  # of the prompt, all of them
    end_ids: Tensor
    is_begin: Tensor
    is_inside: Tensor
    is_end: Tensor
    is_placeholder: Tensor
    inner_length: Tensor  # at begin ids: how many ids lie before the end


class _ReadRows(NamedTuple):
    """Rows before they grow; ``padding_mask`` ``(B, P + L)`` and ``current_mask`` ``(B, L)``."""

    facts: dict[str, int]
    may_grow: bool
    padding_mask: Tensor | None
    current_mask: Tensor | None
    positions: Tensor
    width: Tensor


def expand_image_placeholders(
    given: UnexpandedBatch,
    image_format: ImageFormat,
    num_images: int,
    prompt_length: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
) -> ExpandedBatch:
    """Bring rows of either form, with any number of images each, to the grown form.

    Rows that end up shorter than the longest are filled up on the left, where generation wants it.
    All of this is computed on the host, for which it is hundreds of short steps, and a GPU would
    wait for each to be started; what is returned is where the ids are.

    Args:
        num_images: Images that come with these rows; with ``num_cached``, those of whole rows or
            of what follows the cache.
        prompt_length: Columns from here on were drawn by generation: a begin or end id among them
            is an ordinary token. Default: all columns are the prompt.
        num_items_in_batch: What the summed loss will be divided by, if that was given.

    Raises:
        ValueError: names both numbers and the cure. In a compiled or exported graph rows are taken
            to be grown; a ``RuntimeError`` when it runs says that they are not, or have a fault.
    """
    check_shapes(given)
    device = given.input_ids.device
    given = _moved(given, device if torch.compiler.is_compiling() else torch.device("cpu"))
    spans = _find_images(given.input_ids, image_format, prompt_length)
    read = _read_rows(given, spans, image_format, num_images)
    facts, labels = read.facts, given.labels
    check_images(facts, image_format, num_images, given.num_cached)
    check_rows(facts, given, read.padding_mask, image_format, num_items_in_batch)
    attention_mask = given.attention_mask if read.padding_mask is None else read.padding_mask
    is_packed = given.position_ids is not None and not given.past_length
    is_packed = is_packed and (attention_mask is None or facts["restarts"] > 0)
    if is_packed:
        # A mask of ones cannot tell the samples apart that the positions tell apart.
        attention_mask, read = None, read._replace(padding_mask=None, current_mask=None)
    if labels is not None:
        unlearned = spans.is_inside | _starts(read.positions, read.current_mask, is_packed)
        labels = labels.masked_fill(unlearned, -100)
    rows = ExpandedBatch(
        input_ids=given.input_ids,
        position_ids=read.positions,
        image_mask=spans.is_inside | spans.is_begin | spans.is_end,
        attention_mask=attention_mask,
        labels=labels,
        packed_position_ids=None,
        last_position=facts["last_position"],
        has_padding=attention_mask is not None and facts["masked"] > 0,
        plain_from=facts["plain_from"],
    )
    if read.may_grow:
        rows = _grow(rows, read, given.past_length, is_packed)
    if rows.labels is not None and given.label_after is not None:
        rows = rows._replace(labels=torch.cat((rows.labels, given.label_after), dim=1))
    if is_packed:
        rows = rows._replace(packed_position_ids=_count_within_samples(rows.position_ids))
    return _moved(rows, device)


def _moved(rows: Any, device: torch.device) -> Any:
    """With all that comes with ids on one device, and labels as int64; a 4D mask stays."""
    moved = {}
    for name, values in rows._asdict().items():
        if isinstance(values, Tensor) and values.ndim == 2:
            dtype = torch.long if name.startswith("label") else values.dtype
            moved[name] = values.to(device, dtype)
    return rows._replace(**moved)


def _grow(rows: ExpandedBatch, read: _ReadRows, past_length: int, is_packed: bool) -> ExpandedBatch:
    """``rows``, which are as long as given, with every image at its full length."""
    input_ids, facts, current_mask = rows.input_ids, read.facts, read.current_mask
    length, given_length = facts["length"], input_ids.shape[1]
    if rows.attention_mask is not None and current_mask is None:
        raise ValueError(
            f"a {rows.attention_mask.ndim}D attention_mask cannot be grown with its rows (from "
            f"{given_length} to {length} positions): give a 2D mask, or grown rows"
        )
    ends = read.width.cumsum(dim=1)
    left_fill = length - ends[:, -1:]
    # Of each column, how many ids end before it. (searchsorted wakes all threads for few ids.)
    ends_there = ends.new_zeros(ends.shape[0], length + 1)
    ends_there.scatter_(1, ends + left_fill, 1)
    source = ends_there.cumsum(dim=1)[:, :-1]
    is_fill = torch.arange(length, device=input_ids.device) < left_fill

    def grow(values: Tensor, fill) -> Tensor:
        return values.gather(1, source).masked_fill(is_fill, fill)

    padding_mask = read.padding_mask
    is_uneven = facts["shortest"] != length
    if padding_mask is None and is_uneven:
        if is_packed:
            raise ValueError(
                f"rows given with position_ids and without attention_mask grow to different "
                f"lengths (up to {length}): pack grown rows, or give an attention_mask"
            )
        current_mask = torch.ones_like(input_ids)
        padding_mask = current_mask.new_ones(input_ids.shape[0], past_length + given_length)
    if padding_mask is not None and current_mask is not None:
        padding_mask = torch.cat((padding_mask[:, :past_length], grow(current_mask, 0)), dim=1)
    return rows._replace(
        input_ids=grow(input_ids, 0),
        position_ids=grow(rows.position_ids, 0),
        image_mask=rows.image_mask.gather(1, source) & ~is_fill,
        attention_mask=padding_mask,
        labels=None if rows.labels is None else grow(rows.labels, -100),
        has_padding=padding_mask is not None and (is_uneven or facts["masked"] > 0),
    )


def _find_images(
    input_ids: Tensor, image_format: ImageFormat, prompt_length: int | None = None
) -> _ImageSpans:
    rows, length = input_ids.shape
    columns = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    is_prompt = columns < (length if prompt_length is None else prompt_length)
    begin_ids = (input_ids == image_format.begin_id) & is_prompt
    end_ids = (input_ids == image_format.end_id) & is_prompt
    is_marker = begin_ids | end_ids
    # The columns of all markers, between -1 and ``length``; what is none goes to the last entry,
    # which is read only where all of them are.
    count = is_marker.cumsum(dim=1)
    markers = count.new_full((rows, length + 2), length)
    markers[:, 0] = -1
    markers.scatter_(1, count.masked_fill(~is_marker, length + 1), columns)
    last, following = markers.gather(1, count), markers.gather(1, count + 1)
    # Where there is none, these columns hold no marker, or are themselves the last one.
    follows_begin = begin_ids.gather(1, last.clamp(min=0))
    precedes_end = end_ids.gather(1, following.clamp(max=length - 1))

    is_begin = begin_ids & precedes_end
    is_inside = ~is_marker & follows_begin & precedes_end
    inner_length = following - columns - 1
    return _ImageSpans(
        begin_ids=begin_ids,
        end_ids=end_ids,
        is_begin=is_begin,
        is_inside=is_inside,
        is_end=end_ids & _shift_right(is_inside),
        is_placeholder=_shift_right(is_begin & (inner_length == 1)),
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


def _count_anew(position_ids, attention_mask, current_mask, spans: _ImageSpans) -> Tensor:
    """As given, but in rows whose positions were counted by a mask that takes images for padding,
    as generate makes it where the placeholder is the padding id."""
    counted = attention_mask.long().cumsum(dim=1) - 1
    is_padding = attention_mask == 0
    is_counted = ((position_ids == counted) | is_padding).all(dim=1, keepdim=True)
    is_counted &= (is_padding & spans.is_inside).any(dim=1, keepdim=True)
    anew = (current_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return torch.where(is_counted, anew, position_ids)


def _share_image_positions(counted: Tensor, spans: _ImageSpans) -> Tensor:
    """Give all inner positions of a grown image one position, unless they have it already."""
    is_extra = spans.is_inside & _shift_right(spans.is_inside)
    stepped = torch.diff(counted, prepend=counted[:, :1], dim=1) == 1
    surplus = (is_extra & stepped).long().cumsum(dim=1)
    surplus_of_earlier_samples = running_max(surplus.masked_fill(counted != 0, 0))
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
    return columns - running_max(columns.masked_fill(positions != 0, 0))


def _read_rows(
    given: UnexpandedBatch, spans: _ImageSpans, image_format: ImageFormat, num_images: int
) -> _ReadRows:
    input_ids, past_length = given.input_ids, given.past_length
    attention_mask, position_ids = given.attention_mask, given.position_ids
    padding_mask = current_mask = None
    if attention_mask is not None and attention_mask.ndim == 2:
        current_mask = attention_mask[:, past_length:].masked_fill(spans.is_inside, 1)
        padding_mask = torch.cat((attention_mask[:, :past_length], current_mask), dim=1)
        if position_ids is not None and not past_length:
            position_ids = _count_anew(position_ids, attention_mask, current_mask, spans)
    counted = _count_positions(
        input_ids, position_ids, current_mask, past_length, given.next_position
    )
    positions = _share_image_positions(counted, spans)
    width = torch.where(spans.is_placeholder, image_format.num_image_tokens, 1)

    ends = width.cumsum(dim=1)
    length, shortest = ends[:, -1].max(), ends[:, -1].min()
    ends = ends + length - ends[:, -1:]  # one column after each id, in the grown rows
    facts = {"length": length, "shortest": shortest, "last_position": positions.max()}
    is_break = _breaks(given, spans, positions)
    if current_mask is not None:
        is_break = is_break | (current_mask == 0)
    facts["plain_from"] = ends.masked_fill(~is_break, 0).max()
    facts |= _facts_of_images(given, spans, image_format, ends)
    facts |= _facts_of_labels(given, spans)
    if position_ids is not None:
        within = spans.is_inside | spans.is_end
        facts["starts_inside"] = ((counted == 0) & within).sum()
    elif given.next_position is not None:
        facts["unknown_positions"] = (given.next_position < 0).sum()
    if padding_mask is not None and current_mask is not None:
        facts["wrong_mask_values"] = ((padding_mask != 0) & (padding_mask != 1)).sum()
        facts["masked"] = (padding_mask == 0).sum()
        if position_ids is not None:
            facts |= _facts_of_restarts(counted, current_mask)
    # An exported program takes images of either form. For other graphs shapes tell whether there
    # is room for that many grown ones.
    may_grow = torch.compiler.is_exporting() and num_images > 0
    has_room = may_grow or (num_images * (image_format.num_image_tokens + 2) <= input_ids.numel())
    if torch.compiler.is_compiling() and has_room:
        known = facts_in_graph(facts, given, image_format, num_images, may_grow)
    else:
        known = facts_on_host(facts)
        may_grow = known["length"] != input_ids.shape[1]
    return _ReadRows(known, may_grow, padding_mask, current_mask, positions, width)


def _breaks(given: UnexpandedBatch, spans: _ImageSpans, positions: Tensor) -> Tensor:
    """What is not text that goes on from the id before it."""
    steps = positions.diff(dim=1, prepend=positions[:, :1] - 1)
    if not given.past_length or given.position_ids is not None:
        steps[:, 0] = 0  # from what is cached, it is not known
    return spans.is_inside | spans.is_begin | spans.is_end | (steps != 1)


def _facts_of_images(
    given: UnexpandedBatch, spans: _ImageSpans, image_format: ImageFormat, ends: Tensor
) -> dict[str, Tensor]:
    """``ends``: the columns after each id, in the grown rows."""
    inner = spans.inner_length.masked_fill(~spans.is_begin, 1)
    misfits = inner.masked_fill(inner == image_format.num_image_tokens, 1).flatten()
    return {
        "begins": spans.begin_ids.sum(),
        "ends": spans.end_ids.sum(),
        "found": spans.is_begin.sum(),
        "found_after_cache": (spans.is_begin & (ends > given.num_cached)).sum(),
        "misfit": misfits.gather(0, (misfits - 1).abs().argmax(keepdim=True)).squeeze(),
        "smallest_id": given.input_ids.min(),
        "largest_id": given.input_ids.max(),
    }


def _facts_of_labels(given: UnexpandedBatch, spans: _ImageSpans) -> dict[str, Tensor]:
    labels = given.labels
    if labels is None:
        return {}
    every = labels if given.label_after is None else torch.cat((labels, given.label_after), dim=1)
    learned = every.masked_fill(every == -100, 0)
    return {
        "smallest_label": learned.min(),
        "largest_label": learned.max(),
        "labels_inside": ((labels != -100) & spans.is_inside).sum(),
    }


def _facts_of_restarts(counted: Tensor, current_mask: Tensor) -> dict[str, Tensor]:
    """How often positions begin anew, or go back, from one token to the next."""
    is_token = current_mask != 0
    columns = torch.arange(counted.shape[1], device=counted.device).expand_as(counted)
    last_token = running_max((columns + 1).masked_fill(~is_token, 0)) - 1
    token_before = _shift_right(last_token, fill=-1)
    before = counted.gather(1, token_before.clamp(min=0))
    follows = is_token & (token_before >= 0)
    return {
        "restarts": (follows & (counted == 0)).sum(),
        "steps_back": (follows & (counted < before) & (counted != 0)).sum(),
    }


def running_max(values: Tensor) -> Tensor:
    """Return the greatest value of ``(B, L)`` up to each column; of values that fall to 0 only."""
    if not torch.compiler.is_exporting():
        return values.cummax(dim=1).values
    # ONNX has no cummax.
    count = (values > 0).cumsum(dim=1)
    listed = values.new_zeros(values.shape[0], values.shape[1] + 1)
    listed = listed.scatter(1, count.masked_fill(values == 0, 0), values)
    return listed.gather(1, count)


def _shift_right(values: Tensor, fill: int = False) -> Tensor:
    # Padded first: a graph with ``values[:, :-1]`` in it would not run on rows of 2 ids.
    return torch.nn.functional.pad(values, (1, 0), value=fill)[:, :-1]
