"""Checks of token ids, masks, labels and images before the model runs on them.

``image_layout.py`` defines expanded and unexpanded prompts, computes statistics of the batch on its
device, and calls these checks with the statistics.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

# Shapes: B sequences, L length of input_ids, P number of cache entries.


def is_exporting() -> bool:
    """Return whether ``torch.export`` runs.

    In torch 2.11, ``torch.compiler.is_exporting`` is also true in every graph of torch.compile.
    """
    return torch.compiler._is_exporting_flag


class PromptFormat(NamedTuple):
    """The ids that mark images in a prompt, and the model's limits on prompts."""

    begin_id: int
    end_id: int
    num_image_tokens: int  # tokens between an image's begin and end, its "inner tokens"
    vocab_size: int
    max_positions: int  # position ids are below this number


class InputBatch(NamedTuple):
    """A batch of unexpanded or expanded prompts, as it was passed to the model.

    Attributes:
        input_ids: ``(B, L)`` int64.
        attention_mask: ``(B, P + L)``, 0 at padding and 1 elsewhere; or a 4D mask, for an expanded
            prompt.
        position_ids: ``(B, L)`` or ``(1, L)``. The inner tokens of an expanded image may share one
            position id, or each have its own (from a collator that does not know about images).
            Where position ids restart at 0, a new packed sample begins; a mask of ones is then
            ignored.
        labels: ``(B, L)`` int64.
        last_shift_label: ``(B, 1)`` int64, the last column of ``shift_labels``: the label that the
            last token predicts.
        past_length: ``P``, the number of cache entries before ``input_ids``.
        next_position: ``(B, 1)``, the position id that follows the cache, -1 if it is unknown;
            default ``past_length``.
        num_cached_tokens: How many tokens at the beginning of ``input_ids``, after expansion, are
            in the cache. If it is above 0, ``past_length`` is 0.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    last_shift_label: Tensor | None = None
    past_length: int = 0
    next_position: Tensor | None = None
    num_cached_tokens: int = 0


def check_shapes(batch: InputBatch) -> None:
    """Raise ``ValueError`` for a tensor whose shape does not match ``input_ids``."""
    if batch.input_ids.ndim != 2 or not batch.input_ids.numel():
        nesting_hint = (
            "; like the published code, the tokenizer's apply_chat_template returns a batch even "
            "for one conversation: give a trainer the processor (AutoProcessor), or texts "
            "(tokenize=False)"
        )
        raise ValueError(
            f"input_ids has shape {tuple(batch.input_ids.shape)}: give at least one sequence with "
            "at least one token, (sequences, tokens)"
            f"{nesting_hint if batch.input_ids.ndim == 3 else ''}"
        )
    (batch_size, length), past_length = batch.input_ids.shape, batch.past_length
    mask, expected = batch.attention_mask, (batch_size, past_length + length)
    if mask is not None and mask.ndim == 2 and tuple(mask.shape) != expected:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} but input_ids {(batch_size, length)} "
            f"after {past_length} cache entries need {expected}: give one value for every "
            "cache entry and every input id; the model expands image placeholders and their "
            "mask itself"
        )
    for name, values in (("position_ids", batch.position_ids), ("labels", batch.labels)):
        # Compare complete shapes: in a graph, single sizes may be symbols without a value.
        if values is None or values.shape == batch.input_ids.shape:
            continue
        if name == "position_ids" and values.shape == (1, length):
            continue
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} but input_ids {(batch_size, length)}: give "
            "one for every input id (the label of an unsupervised token is -100); the model "
            f"expands image placeholders itself, and {name} with them"
        )


# Every batch has these statistics:
#   expanded_length, shortest_length  the expanded lengths of the longest and the shortest sequence
#   last_position                     the greatest position id
#   text_start                        see ExpandedBatch
#   num_begin_ids, num_end_ids        the numbers of begin- and end-of-image ids
#   num_spans, num_uncached_spans     images with begin and end: all, and those after the cache
#   inner_length                      1; if an image has a wrong number of inner ids, that number
#   smallest_id, largest_id           the range of input_ids
# Only batches with labels, position_ids, a mask or a cache have the following ones. num_restarts
# counts position ids of 0 that are not the first, num_decreases other ids below the previous one.
OPTIONAL_STATS = ["smallest_label", "largest_label", "num_labels_in_images"]
OPTIONAL_STATS += ["num_zero_positions_in_images", "num_unknown_positions", "num_padding"]
OPTIONAL_STATS += ["num_wrong_mask_values", "num_restarts", "num_decreases"]


def stats_to_host(stats: dict[str, Tensor]) -> dict[str, int]:
    """Copy all statistics to the host in one transfer; missing optional statistics become 0."""
    numbers = torch.stack([value.long() for value in stats.values()]).tolist()
    return dict.fromkeys(OPTIONAL_STATS, 0) | dict(zip(stats, numbers, strict=True))


def assert_in_graph(
    stats: dict[str, Tensor],
    batch: InputBatch,
    prompt_format: PromptFormat,
    num_images: int,
    may_expand: bool,
) -> dict[str, int]:
    """Assert in a compiled graph, each time it runs, that the batch is valid.

    Args:
        may_expand: Whether the graph takes unexpanded prompts, too.

    Returns:
        The statistics that every valid batch has, and the worst case for those that vary.
    """
    last_id = prompt_format.vocab_size - 1
    expected: dict = dict.fromkeys(("num_begin_ids", "num_end_ids", "num_spans"), num_images)
    expected |= {"inner_length": 1, "num_unknown_positions": 0, "num_wrong_mask_values": 0}
    expected |= {"num_restarts": 0, "num_decreases": 0, "num_zero_positions_in_images": 0}
    length = batch.input_ids.shape[1]
    if may_expand:
        length = cast(int, stats["expanded_length"].item())
        torch._check(length >= 3)  # the length is a symbol, and this declares its lower bound
    else:
        expected["expanded_length"] = length
    # If sequences may expand to different lengths, a batch without a mask gets one. A packed batch
    # must not get a mask, so its sequences must expand to equal lengths.
    has_equal_lengths = batch.input_ids.shape[0] == 1 or not may_expand
    if batch.position_ids is not None and batch.attention_mask is None:
        expected["shortest_length"] = stats["expanded_length"]
        has_equal_lengths = True
    is_valid = stats["last_position"] < prompt_format.max_positions
    for name, value in expected.items():
        if name in stats:
            is_valid = is_valid & (stats[name] == value)
    for kind in ("id", "label"):
        if f"smallest_{kind}" in stats:
            is_valid &= (stats[f"smallest_{kind}"] >= 0) & (stats[f"largest_{kind}"] <= last_id)
    torch._assert_async(
        is_valid,
        "this batch does not fit a compiled graph: its prompts are unexpanded (give expanded "
        "prompts, as this model's processor makes them), it has begin- or end-of-image ids without "
        "a partner, or another problem that the same call without compilation reports",
    )
    # A graph does not know text_start and num_padding: assume that images go to the end, and that
    # a mask has padding.
    host_stats = dict.fromkeys((*OPTIONAL_STATS, *stats), 0) | expected
    host_stats |= {"expanded_length": length, "shortest_length": length if has_equal_lengths else 0}
    return host_stats | {"text_start": length, "num_padding": int("num_padding" in stats)}


def check_images(
    stats: dict[str, int], prompt_format: PromptFormat, num_images: int, num_cached_tokens: int
) -> None:
    """Raise ``ValueError`` if begin- and end-of-image ids are invalid or do not fit the images."""
    num_begins, num_ends = stats["num_begin_ids"], stats["num_end_ids"]
    num_spans, num_uncached = stats["num_spans"], stats["num_uncached_spans"]
    if not num_begins == num_ends == num_spans:
        raise ValueError(
            f"input_ids has {num_begins} begin-of-image ids ({prompt_format.begin_id}) and "
            f"{num_ends} end-of-image ids ({prompt_format.end_id}), which form {num_spans} "
            "pairs: every begin needs its end later in the same sequence; "
            "was a sequence truncated inside an image?"
        )
    if stats["inner_length"] != 1:
        raise ValueError(
            f"an image has {stats['inner_length']} ids between its begin and its end, but takes 1 "
            f"(a placeholder to be expanded here) or {prompt_format.num_image_tokens} (expanded "
            "already, at this model's image_size)"
        )
    # The caller may pass all images or only those after the cache. If all images are cached, the
    # model reads none of them, so the caller may pass fewer.
    are_all_cached = num_cached_tokens > 0 and not num_uncached and num_images <= num_spans
    if num_images not in (num_spans, num_uncached) and not are_all_cached:
        raise ValueError(
            f"{num_images} images were given for {num_spans} begin-of-image ids in input_ids: give "
            "one image for each, in the order of their ids"
        )


def check_batch_values(
    stats: dict[str, int],
    batch: InputBatch,
    padding_mask: Tensor | None,
    prompt_format: PromptFormat,
    num_items_in_batch: Tensor | int | None,
) -> None:
    """Raise ``ValueError`` for ids, labels, masks or position ids that the model cannot take.

    Args:
        padding_mask: The 2D mask of ``batch``, with 1 inside images.
        num_items_in_batch: The divisor of the summed loss, if known.
    """
    for kind, subject, cure in (
        ("id", "input_ids has id", "use the tokenizer of this model, or resize_token_embeddings"),
        ("label", "labels has", "give an id of the vocabulary, or -100 for an unsupervised token"),
    ):
        smallest, largest = stats[f"smallest_{kind}"], stats[f"largest_{kind}"]
        extreme = smallest if smallest < 0 else largest
        if not 0 <= extreme < prompt_format.vocab_size:
            raise ValueError(
                f"{subject} {extreme}, but the vocabulary has {prompt_format.vocab_size} entries: "
                f"{cure}"
            )
    if padding_mask is not None and stats["num_wrong_mask_values"]:
        wrong = padding_mask[(padding_mask != 0) & (padding_mask != 1)]
        raise ValueError(
            f"attention_mask has {wrong[0].item()} and {len(wrong) - 1} more values other than 0 "
            "(padding) and 1: give 0 and 1; packed sequences have no mask but position_ids that "
            "restart at 0 with each sample"
        )
    if num_zeros := stats["num_zero_positions_in_images"]:
        raise ValueError(
            f"position_ids are 0 at {num_zeros} tokens between the begin and the end of an image, "
            "where they have to continue from the begin: leave position_ids out, or compute them "
            "from a mask that is 1 inside images"
        )
    num_padding = stats["num_padding"]
    num_restarts = stats["num_restarts"] + stats["num_decreases"]
    if stats["num_decreases"] or (num_restarts and (num_padding or batch.past_length)):
        raise ValueError(
            f"position_ids restart {num_restarts} times within sequences whose attention_mask has "
            f"{num_padding} zeros, after {batch.past_length} cache entries: packing needs no "
            "cache, no padding, and position_ids that restart at 0; give packed "
            "sequences no attention_mask"
        )
    if stats["num_unknown_positions"]:
        raise ValueError(
            f"{stats['num_unknown_positions']} sequences of the cache are not as this model filled "
            "them, so their next position id is unknown: give position_ids"
        )
    check_position(stats["last_position"], prompt_format.max_positions)
    num_in_images = stats["num_labels_in_images"]
    if num_in_images and num_items_in_batch is not None:
        _check_num_items_in_batch(int(num_items_in_batch), batch.labels, num_in_images)


def _check_num_items_in_batch(
    num_items_in_batch: int, labels: Tensor | None, num_in_images: int
) -> None:
    """Raise ``ValueError`` if ``num_items_in_batch`` may count labels inside images.

    The loss ignores these labels. ``num_items_in_batch`` may also count other batches of the step.
    If it is smaller than the number of labels in this batch, its caller left labels out.
    """
    assert labels is not None
    num_labels = int((labels[:, 1:] != -100).sum())
    if num_items_in_batch >= num_labels:
        raise ValueError(
            f"labels has {num_in_images} labels inside images, which the loss ignores, but "
            f"num_items_in_batch {num_items_in_batch} may count them, because it is not less than "
            f"all {num_labels} labels of this batch: the loss would be divided by too much; set "
            "labels inside images to -100"
        )


def check_position(last_position: int, max_positions: int) -> None:
    """Raise ``ValueError`` if a position id is not below ``seq_length`` of the config."""
    if last_position >= max_positions:
        raise ValueError(
            f"a sequence reaches position id {last_position}, but the position table ends at "
            f"{max_positions - 1} (seq_length {max_positions}): shorten the sequence"
        )
