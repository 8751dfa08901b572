"""Expansion of image placeholders, with the position ids, mask and labels of the expanded tokens.

A begin id and an end id mark an image. In an unexpanded prompt (the form of the published code),
one placeholder id is between them. In an expanded prompt (which our processor makes), there is one
id for each of the image's inner tokens. The rest of the model takes expanded prompts only.

An image takes ``num_image_tokens + 2`` tokens but only three position ids: its begin has ``p``, all
of its inner tokens share ``p + 1``, and its end has ``p + 2``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .image_checks import (
    InputBatch,
    PromptFormat,
    assert_in_graph,
    check_batch_values,
    check_images,
    check_shapes,
    is_exporting,
    stats_to_host,
)

# Shapes: B sequences, L length of input_ids, R expanded length, P number of cache entries.


class ExpandedBatch(NamedTuple):
    """A batch in which every image has its full number of tokens.

    Attributes:
        input_ids: ``(B, R)`` int64.
        position_ids: ``(B, R)`` int64; the inner tokens of an image share one position id.
        image_mask: ``(B, R)`` bool, true from begin to end of an image, both included.
        attention_mask: ``(B, P + R)``, or the 4D mask that was passed; ``None`` if not needed.
        labels: ``(B, R)`` int64 or ``None``; -100 inside images and at the first token of a
            sequence or packed sample. ``(B, R + 1)`` if ``last_shift_label`` was passed: that is
            then the last column.
        packed_position_ids: ``(B, R)``, for packed sequences only: the index of each token in its
            sample. Unlike in ``position_ids``, each inner token of an image has its own index.
        last_position: The greatest position id of the batch, on the host.
        has_padding: Whether any token is padding.
        text_start: First column from which every sequence of the batch is only text whose position
            ids increase by 1. It is 0 only if the entire batch is text that continues the cache.
    """

    input_ids: Tensor
    position_ids: Tensor
    image_mask: Tensor
    attention_mask: Tensor | None
    labels: Tensor | None
    packed_position_ids: Tensor | None
    last_position: int
    has_padding: bool
    text_start: int


class _ImageSpans(NamedTuple):
    """Masks ``(B, L)`` of images and their parts.

    An image is a begin id, the next end id, and the ids between them, none of which is a begin id.
    """

    is_begin_id: Tensor  # all begin ids of the prompt, also those without an end
    is_end_id: Tensor  # all end ids of the prompt, also those without a begin
    is_image_begin: Tensor  # begin ids that have an end
    is_inner: Tensor  # ids between begin and end
    is_image_end: Tensor  # end ids after an inner id (check_images refuses images of no inner id)
    is_placeholder: Tensor  # the only id between begin and end
    inner_length: Tensor  # int64, for each begin id: the number of ids to the next begin or end id


class _BatchAnalysis(NamedTuple):
    """Statistics, masks and position ids of a batch, from which its expansion is computed."""

    stats: dict[str, int]  # statistics on the host, by name
    may_expand: bool  # whether the expanded length may differ from L
    padding_mask: Tensor | None  # (B, P + L), the 2D mask that was passed, with 1 inside images
    current_mask: Tensor | None  # (B, L), the columns of padding_mask after the cache
    position_ids: Tensor  # (B, L)
    repeats: Tensor  # (B, L) int64, the number of expanded tokens of each id


def expand_image_placeholders(
    batch: InputBatch,
    prompt_format: PromptFormat,
    num_images: int,
    prompt_length: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
) -> ExpandedBatch:
    """Expand the image placeholders of a batch, and everything that is aligned with its tokens.

    A sequence may have any number of images; expanded images stay as they are. Sequences that
    become shorter than the longest are padded on the left, as generation needs it. Outside of
    compiled graphs the CPU computes the expansion: on a GPU, each of its hundreds of small
    operations would be a kernel launch. The result is on the device of ``input_ids``.

    Compiled graphs take expanded prompts only. An exported program with images takes expanded and
    unexpanded prompts.

    Args:
        num_images: Number of images that come with the batch: all images of ``input_ids``, or only
            those after its cached tokens (``InputBatch.num_cached_tokens``).
        prompt_length: Number of columns that are prompt. All later columns are generated, and begin
            and end ids among them are ordinary tokens. Default: all columns are prompt.
        num_items_in_batch: The divisor of the summed loss, if known.

    Raises:
        ValueError: The batch is invalid; the message has the numbers and the cure.
        RuntimeError: A compiled or exported graph runs on an invalid batch.
    """
    check_shapes(batch)
    device = batch.input_ids.device
    batch = _move_inputs(batch, device if torch.compiler.is_compiling() else torch.device("cpu"))
    spans = _find_image_spans(batch.input_ids, prompt_format, prompt_length)
    analysis = _analyze_batch(batch, spans, prompt_format, num_images)
    stats, labels = analysis.stats, batch.labels
    check_images(stats, prompt_format, num_images, batch.num_cached_tokens)
    check_batch_values(stats, batch, analysis.padding_mask, prompt_format, num_items_in_batch)
    padding_mask = analysis.padding_mask
    attention_mask = batch.attention_mask if padding_mask is None else padding_mask
    is_packed = batch.position_ids is not None and not batch.past_length
    is_packed = is_packed and (attention_mask is None or stats["num_restarts"] > 0)
    if is_packed:
        # Position ids separate the samples of a packed sequence; a mask would join them. It has
        # only ones, because check_batch_values refuses packed batches with padding.
        attention_mask = None
        analysis = analysis._replace(padding_mask=None, current_mask=None)
    if labels is not None:
        is_first = _mark_first_tokens(analysis.position_ids, analysis.current_mask, is_packed)
        labels = labels.masked_fill(spans.is_inner | is_first, -100)
    expanded = ExpandedBatch(
        input_ids=batch.input_ids,
        position_ids=analysis.position_ids,
        image_mask=spans.is_inner | spans.is_image_begin | spans.is_image_end,
        attention_mask=attention_mask,
        labels=labels,
        packed_position_ids=None,
        last_position=stats["last_position"],
        has_padding=attention_mask is not None and stats["num_padding"] > 0,
        text_start=stats["text_start"],
    )
    if analysis.may_expand:
        expanded = _expand(expanded, analysis, batch.past_length, is_packed)
    if expanded.labels is not None and batch.last_shift_label is not None:
        labels = torch.cat((expanded.labels, batch.last_shift_label), dim=1)
        expanded = expanded._replace(labels=labels)
    if is_packed:
        packed_position_ids = _count_within_samples(expanded.position_ids)
        expanded = expanded._replace(packed_position_ids=packed_position_ids)
    return _move_inputs(expanded, device)


def _move_inputs(batch: Any, device: torch.device) -> Any:
    """Move all 2D tensors to a device and cast labels to int64. A 4D mask stays where it is."""
    moved = {}
    for name, values in batch._asdict().items():
        if isinstance(values, Tensor) and values.ndim == 2:
            dtype = torch.long if "label" in name else values.dtype
            moved[name] = values.to(device, dtype)
    return batch._replace(**moved)


def _expand(
    batch: ExpandedBatch, analysis: _BatchAnalysis, past_length: int, is_packed: bool
) -> ExpandedBatch:
    """Expand a batch whose tensors still have the length of ``input_ids``."""
    input_ids, stats, current_mask = batch.input_ids, analysis.stats, analysis.current_mask
    length, unexpanded_length = stats["expanded_length"], input_ids.shape[1]
    if batch.attention_mask is not None and current_mask is None:
        raise ValueError(
            f"a {batch.attention_mask.ndim}D attention_mask cannot be expanded with its image "
            f"placeholders (from {unexpanded_length} to {length} tokens): give a 2D mask, or "
            "expanded prompts"
        )
    ends = analysis.repeats.cumsum(dim=1)  # after each id, the number of expanded tokens so far
    num_padding = length - ends[:, -1:]
    # source_columns[b, c] is the column of input_ids whose id is expanded to column c. It is the
    # number of ids whose expanded tokens end before column c. (searchsorted computes the same, but
    # is slower for a few ids, because it starts all threads.)
    is_end_column = ends.new_zeros(ends.shape[0], length + 1)
    is_end_column.scatter_(1, ends + num_padding, 1)
    source_columns = is_end_column.cumsum(dim=1)[:, :-1]
    is_padding = torch.arange(length, device=input_ids.device) < num_padding

    def expand(values: Tensor, fill) -> Tensor:
        return values.gather(1, source_columns).masked_fill(is_padding, fill)

    padding_mask = analysis.padding_mask
    is_uneven = stats["shortest_length"] != length
    if padding_mask is None and is_uneven:
        if is_packed:
            raise ValueError(
                "sequences with position_ids and without attention_mask are packed, but their "
                f"image placeholders expand to different lengths (up to {length}): pack expanded "
                "prompts, or give an attention_mask"
            )
        current_mask = torch.ones_like(input_ids)
        padding_mask = current_mask.new_ones(input_ids.shape[0], past_length + unexpanded_length)
    if padding_mask is not None and current_mask is not None:
        padding_mask = torch.cat((padding_mask[:, :past_length], expand(current_mask, 0)), dim=1)
    return batch._replace(
        input_ids=expand(input_ids, 0),
        position_ids=expand(batch.position_ids, 0),
        image_mask=batch.image_mask.gather(1, source_columns) & ~is_padding,
        attention_mask=padding_mask,
        labels=None if batch.labels is None else expand(batch.labels, -100),
        has_padding=padding_mask is not None and (is_uneven or stats["num_padding"] > 0),
    )


def _find_image_spans(
    input_ids: Tensor, prompt_format: PromptFormat, prompt_length: int | None = None
) -> _ImageSpans:
    """Find images by their begin and end ids, in the first ``prompt_length`` columns."""
    batch_size, length = input_ids.shape
    columns = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    is_prompt = columns < (length if prompt_length is None else prompt_length)
    is_begin_id = (input_ids == prompt_format.begin_id) & is_prompt
    is_end_id = (input_ids == prompt_format.end_id) & is_prompt
    is_marker = is_begin_id | is_end_id
    # ``markers`` has for each sequence: -1, the columns of all markers (begin and end ids) in
    # order, then ``length``. The columns of all other ids are written to the last entry, which is
    # read only if there are no other ids.
    num_markers = is_marker.cumsum(dim=1)
    markers = num_markers.new_full((batch_size, length + 2), length)
    markers[:, 0] = -1
    markers.scatter_(1, num_markers.masked_fill(~is_marker, length + 1), columns)
    # For each column: the last marker up to it (-1: none) and the next marker after it (``length``:
    # none). "None" is clamped to the first or the last column, whose id is then no marker, so
    # ``follows_begin`` or ``precedes_end`` is false. Only an end id in the last column is clamped
    # to itself, but ``precedes_end`` is not used for end ids.
    last_marker, next_marker = markers.gather(1, num_markers), markers.gather(1, num_markers + 1)
    follows_begin = is_begin_id.gather(1, last_marker.clamp(min=0))
    precedes_end = is_end_id.gather(1, next_marker.clamp(max=length - 1))

    is_image_begin = is_begin_id & precedes_end
    is_inner = ~is_marker & follows_begin & precedes_end
    inner_length = next_marker - columns - 1
    return _ImageSpans(
        is_begin_id=is_begin_id,
        is_end_id=is_end_id,
        is_image_begin=is_image_begin,
        is_inner=is_inner,
        is_image_end=is_end_id & _shift_right(is_inner),
        is_placeholder=_shift_right(is_image_begin & (inner_length == 1)),
        inner_length=inner_length,
    )


def _count_positions(input_ids, position_ids, current_mask, past_length, next_position) -> Tensor:
    """Return ``position_ids``, or if they are ``None``, count the ids that are not padding.

    Counting starts at ``next_position``, or if it is ``None``, at ``past_length``.
    """
    if position_ids is not None:
        return position_ids.expand_as(input_ids)
    if current_mask is None:
        counts = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    else:
        counts = (current_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return counts + (past_length if next_position is None else next_position)


def _recount_positions(position_ids, attention_mask, current_mask, spans: _ImageSpans) -> Tensor:
    """Recount position ids that were computed from a mask with 0 inside images.

    ``generate`` makes such a mask, and position ids from it, if the placeholder is the padding id.
    """
    mask_counts = attention_mask.long().cumsum(dim=1) - 1
    is_padding = attention_mask == 0
    is_from_mask = ((position_ids == mask_counts) | is_padding).all(dim=1, keepdim=True)
    is_from_mask &= (is_padding & spans.is_inner).any(dim=1, keepdim=True)
    recounted = (current_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return torch.where(is_from_mask, recounted, position_ids)


def _share_image_positions(position_ids: Tensor, spans: _ImageSpans) -> Tensor:
    """Give all inner tokens of an expanded image one position id, unless they share one already."""
    # If each inner token has its own position id, all later position ids of the sample are too
    # high. ``excess`` counts by how much, over the whole sequence. Position ids restart with each
    # packed sample, so the excess of earlier samples is added back.
    is_after_inner = spans.is_inner & _shift_right(spans.is_inner)
    increases = torch.diff(position_ids, prepend=position_ids[:, :1], dim=1) == 1
    excess = (is_after_inner & increases).long().cumsum(dim=1)
    excess_of_earlier_samples = exportable_cummax(excess.masked_fill(position_ids != 0, 0))
    return (position_ids - excess + excess_of_earlier_samples).clamp(min=0)


def _mark_first_tokens(
    position_ids: Tensor, current_mask: Tensor | None, is_packed: bool
) -> Tensor:
    """Mark the first tokens of sequences and packed samples, which no token predicts."""
    is_first = torch.zeros_like(position_ids, dtype=torch.bool)
    is_first[:, 0] = True
    if current_mask is not None:
        is_first |= _shift_right(current_mask == 0)
    if is_packed:
        is_first |= position_ids == 0
    return is_first


def _count_within_samples(position_ids: Tensor) -> Tensor:
    """Count the tokens of each packed sample from 0."""
    columns = torch.arange(position_ids.shape[1], device=position_ids.device)
    columns = columns.expand_as(position_ids)
    return columns - exportable_cummax(columns.masked_fill(position_ids != 0, 0))


def _analyze_batch(
    batch: InputBatch, spans: _ImageSpans, prompt_format: PromptFormat, num_images: int
) -> _BatchAnalysis:
    """Compute masks, position ids and statistics, and copy the statistics to the host."""
    input_ids, past_length = batch.input_ids, batch.past_length
    attention_mask, position_ids = batch.attention_mask, batch.position_ids
    padding_mask = current_mask = None
    if attention_mask is not None and attention_mask.ndim == 2:
        current_mask = attention_mask[:, past_length:].masked_fill(spans.is_inner, 1)
        padding_mask = torch.cat((attention_mask[:, :past_length], current_mask), dim=1)
        if position_ids is not None and not past_length:
            position_ids = _recount_positions(position_ids, attention_mask, current_mask, spans)
    initial_position_ids = _count_positions(
        input_ids, position_ids, current_mask, past_length, batch.next_position
    )
    final_position_ids = _share_image_positions(initial_position_ids, spans)
    repeats = torch.where(spans.is_placeholder, prompt_format.num_image_tokens, 1)

    ends = repeats.cumsum(dim=1)
    length, shortest = ends[:, -1].max(), ends[:, -1].min()
    # For each id, the column after its expanded tokens, with the padding on the left.
    expanded_ends = ends + length - ends[:, -1:]
    stats = {"expanded_length": length, "shortest_length": shortest}
    stats["last_position"] = final_position_ids.max()
    interrupts_text = _mark_text_interruptions(batch, spans, final_position_ids)
    if current_mask is not None:
        interrupts_text = interrupts_text | (current_mask == 0)
    stats["text_start"] = expanded_ends.masked_fill(~interrupts_text, 0).max()
    stats |= _image_stats(batch, spans, prompt_format, expanded_ends)
    stats |= _label_stats(batch, spans)
    if position_ids is not None:
        is_zero_in_image = (initial_position_ids == 0) & (spans.is_inner | spans.is_image_end)
        stats["num_zero_positions_in_images"] = is_zero_in_image.sum()
    elif batch.next_position is not None:
        stats["num_unknown_positions"] = (batch.next_position < 0).sum()  # -1: unknown
    if padding_mask is not None and current_mask is not None:
        stats["num_wrong_mask_values"] = ((padding_mask != 0) & (padding_mask != 1)).sum()
        stats["num_padding"] = (padding_mask == 0).sum()
        if position_ids is not None:
            stats |= _restart_stats(initial_position_ids, current_mask)
    # A graph asserts its statistics, and assumes the worst case for those that vary. Only exported
    # programs take unexpanded prompts in a graph. A batch with fewer ids than its images have
    # tokens is certainly unexpanded: to expand it outside of a compiled graph, break the graph by
    # copying the statistics to the host.
    may_expand = is_exporting() and num_images > 0
    num_tokens_of_images = num_images * (prompt_format.num_image_tokens + 2)
    if torch.compiler.is_compiling() and (may_expand or num_tokens_of_images <= input_ids.numel()):
        host_stats = assert_in_graph(stats, batch, prompt_format, num_images, may_expand)
    else:
        host_stats = stats_to_host(stats)
        may_expand = host_stats["expanded_length"] != input_ids.shape[1]
    return _BatchAnalysis(
        stats=host_stats,
        may_expand=may_expand,
        padding_mask=padding_mask,
        current_mask=current_mask,
        position_ids=final_position_ids,
        repeats=repeats,
    )


def _mark_text_interruptions(batch: InputBatch, spans: _ImageSpans, position_ids: Tensor) -> Tensor:
    """Mark all tokens of images, and text whose position id is not the previous one + 1."""
    steps = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1)
    if not batch.past_length or batch.position_ids is not None:
        steps[:, 0] = 0  # the first token does not necessarily continue the cache
    return spans.is_inner | spans.is_image_begin | spans.is_image_end | (steps != 1)


def _image_stats(
    batch: InputBatch, spans: _ImageSpans, prompt_format: PromptFormat, expanded_ends: Tensor
) -> dict[str, Tensor]:
    """Compute the range of the ids, and the numbers of begin ids, of end ids and of images.

    Args:
        expanded_ends: For each id, the column after its expanded tokens.
    """
    # Valid inner lengths are 1 and num_image_tokens. Replace all valid ones by 1, and report the
    # one that differs most from 1.
    lengths = spans.inner_length.masked_fill(~spans.is_image_begin, 1).flatten()
    lengths = lengths.masked_fill(lengths == prompt_format.num_image_tokens, 1)
    is_uncached = expanded_ends > batch.num_cached_tokens
    return {
        "num_begin_ids": spans.is_begin_id.sum(),
        "num_end_ids": spans.is_end_id.sum(),
        "num_spans": spans.is_image_begin.sum(),
        "num_uncached_spans": (spans.is_image_begin & is_uncached).sum(),
        "inner_length": lengths.gather(0, (lengths - 1).abs().argmax(keepdim=True)).squeeze(),
        "smallest_id": batch.input_ids.min(),
        "largest_id": batch.input_ids.max(),
    }


def _label_stats(batch: InputBatch, spans: _ImageSpans) -> dict[str, Tensor]:
    """Compute the range of the supervised labels, and the number of labels inside images."""
    labels = batch.labels
    if labels is None:
        return {}
    all_labels = labels
    if batch.last_shift_label is not None:
        all_labels = torch.cat((labels, batch.last_shift_label), dim=1)
    supervised = all_labels.masked_fill(all_labels == -100, 0)
    return {
        "smallest_label": supervised.min(),
        "largest_label": supervised.max(),
        "num_labels_in_images": ((labels != -100) & spans.is_inner).sum(),
    }


def _restart_stats(position_ids: Tensor, current_mask: Tensor) -> dict[str, Tensor]:
    """Count how often position ids restart at 0, or decrease, from one token to the next."""
    is_token = current_mask != 0
    columns = torch.arange(position_ids.shape[1], device=position_ids.device)
    columns = columns.expand_as(position_ids)
    last_token = exportable_cummax((columns + 1).masked_fill(~is_token, 0)) - 1
    previous_token = _shift_right(last_token, fill=-1)
    previous_position = position_ids.gather(1, previous_token.clamp(min=0))
    has_previous, is_zero = is_token & (previous_token >= 0), position_ids == 0
    return {
        "num_restarts": (has_previous & is_zero).sum(),
        "num_decreases": (has_previous & ~is_zero & (position_ids < previous_position)).sum(),
    }


def exportable_cummax(values: Tensor) -> Tensor:
    """Return ``cummax`` of ``(B, L)`` values, also in an export to ONNX, which has no cummax.

    Apart from zeros, the values must not decrease along a sequence.
    """
    if not is_exporting():
        return values.cummax(dim=1).values
    count = (values > 0).cumsum(dim=1)
    positive_values = values.new_zeros(values.shape[0], values.shape[1] + 1)
    positive_values = positive_values.scatter(1, count.masked_fill(values == 0, 0), values)
    return positive_values.gather(1, count)


def _shift_right(values: Tensor, fill: int = False) -> Tensor:
    """Move all columns one to the right, and fill the first one."""
    # Pad before slicing, because a graph with ``values[:, :-1]`` fails on sequences of 2 ids.
    return torch.nn.functional.pad(values, (1, 0), value=fill)[:, :-1]
