"""What rows of text and images are checked against before they are computed.

What can be wrong is counted on the device and comes to the host in one transfer.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

# Shapes: B rows, L length as given, P length of the cache.


class ImageFormat(NamedTuple):
    """How images are written in a row, and the limits rows are checked against."""

    begin_id: int
    end_id: int
    num_image_tokens: int
    vocab_size: int
    max_positions: int


class UnexpandedBatch(NamedTuple):
    """Rows of either form, and what comes with each of their ids.

    Attributes:
        input_ids: ``(B, L)`` int64.
        attention_mask: ``(B, P + L)``, 0 at padding and 1 elsewhere; or a 4D mask for grown rows.
        position_ids: ``(B, L)`` or ``(1, L)``. In the grown form both ways of counting are taken:
            with an image's positions shared, or one more for every position (what a collator
            makes that knows nothing of images). Where they restart at 0 a new sample of a packed
            row begins; a mask of ones beside them says nothing and is left out.
        labels: ``(B, L)`` int64.
        label_after: ``(B, 1)`` int64, the label of what follows the last id, if there is one.
        past_length: ``P``, positions already in the cache.
        next_position: ``(B, 1)``, the position that follows the cache, -1 where it is not known;
            default ``past_length``.
        num_cached: How many of these rows' own grown positions a cache holds.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    label_after: Tensor | None = None
    past_length: int = 0
    next_position: Tensor | None = None
    num_cached: int = 0


def check_shapes(given: UnexpandedBatch) -> None:
    """Raise ``ValueError`` for inputs of other shapes than the ids."""
    if given.input_ids.ndim != 2 or not given.input_ids.numel():
        batch_of_batches = (
            "; the tokenizer's apply_chat_template returns a batch also for one conversation, as "
            "published: give a trainer the processor (AutoProcessor), or texts (tokenize=False)"
        )
        raise ValueError(
            f"input_ids has shape {tuple(given.input_ids.shape)}: give at least one row with at "
            f"least one id, (rows, ids){batch_of_batches if given.input_ids.ndim == 3 else ''}"
        )
    (rows, length), past_length = given.input_ids.shape, given.past_length
    mask, wanted = given.attention_mask, (rows, past_length + length)
    if mask is not None and mask.ndim == 2 and tuple(mask.shape) != wanted:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} but input_ids {(rows, length)} after "
            f"{past_length} cached positions need {wanted}: give one entry for every cached "
            "position and every id as given; rows with images are grown inside, with their mask"
        )
    for name, values in (("position_ids", given.position_ids), ("labels", given.labels)):
        # Of sizes that are symbols, in a graph, only whole shapes can be compared.
        if values is None or values.shape == given.input_ids.shape:
            continue
        if name == "position_ids" and values.shape == (1, length):
            continue
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} but input_ids {(rows, length)}: give one for "
            "every id (a label of -100 where nothing is learned); rows with images grow inside, "
            "with all of these"
        )


# What is counted only where it is given: labels, positions, a mask, a cache.
OPTIONAL_FACTS = ["smallest_label", "largest_label", "labels_inside", "starts_inside"]
OPTIONAL_FACTS += ["unknown_positions", "wrong_mask_values", "masked", "restarts", "steps_back"]


def facts_on_host(facts: dict[str, Tensor]) -> dict[str, int]:
    """All that is checked, with 0 for what is not there: one transfer from the device."""
    numbers = torch.stack([fact.long() for fact in facts.values()]).tolist()
    return dict.fromkeys(OPTIONAL_FACTS, 0) | dict(zip(facts, numbers, strict=True))


def facts_in_graph(
    facts: dict[str, Tensor],
    given: UnexpandedBatch,
    image_format: ImageFormat,
    num_images: int,
    may_grow: bool,
) -> dict[str, int]:
    """What sound rows have, asserted of these rows whenever the graph runs.

    Args:
        may_grow: Whether the graph takes rows of either form; else they are grown.
    """
    last = image_format.vocab_size - 1
    wanted: dict = {"begins": num_images, "ends": num_images, "found": num_images, "misfit": 1}
    wanted |= {"unknown_positions": 0, "wrong_mask_values": 0}
    wanted |= {"restarts": 0, "steps_back": 0, "starts_inside": 0}
    length = given.input_ids.shape[1]
    if may_grow:
        length = cast(int, facts["length"].item())  # a symbol, of which this is known
        torch._check(length >= 3)
    else:
        wanted["length"] = length
    # Rows without a mask get one where they may grow to different lengths; packed ones must not.
    is_even = given.input_ids.shape[0] == 1 or not may_grow
    if given.position_ids is not None and given.attention_mask is None:
        wanted["shortest"], is_even = facts["length"], True
    is_sound = facts["last_position"] < image_format.max_positions
    for name, value in wanted.items():
        if name in facts:
            is_sound = is_sound & (facts[name] == value)
    for kind in ("id", "label"):
        if f"smallest_{kind}" in facts:
            is_sound &= (facts[f"smallest_{kind}"] >= 0) & (facts[f"largest_{kind}"] <= last)
    torch._assert_async(
        is_sound,
        "these rows do not fit a compiled graph: they are in the three-id form (give grown rows, "
        "as this model's processor makes them), hold stray begin- or end-of-image ids, or have a "
        "fault that the same call without compilation names",
    )
    # How much of a mask is padding is not known, nor how far positions go.
    known = dict.fromkeys((*OPTIONAL_FACTS, *facts), 0) | wanted
    shortest = length if is_even else 0
    masked = int("masked" in facts)
    return known | {"length": length, "shortest": shortest, "plain_from": length, "masked": masked}


def check_images(
    facts: dict[str, int], image_format: ImageFormat, num_images: int, num_cached: int
) -> None:
    """Raise ``ValueError`` unless begin and end ids are those of the images that were given."""
    begins, ends, found = facts["begins"], facts["ends"], facts["found"]
    if not begins == ends == found:
        raise ValueError(
            f"input_ids holds {begins} begin-of-image ids ({image_format.begin_id}) and {ends} "
            f"end-of-image ids ({image_format.end_id}), of which {found} pairs belong together: "
            "every begin needs its end later in the same row; was a row truncated inside an image?"
        )
    if facts["misfit"] != 1:
        raise ValueError(
            f"an image has {facts['misfit']} ids between its begin and its end, but takes 1 (to be "
            f"grown here) or {image_format.num_image_tokens} (grown already, at this model's "
            "image_size)"
        )
    not_cached = facts["found_after_cache"]
    # Those of whole rows, or of what follows the cache; if it holds all of them, none is looked at.
    are_cached = num_cached > 0 and not not_cached and num_images <= found
    if num_images not in (found, not_cached) and not are_cached:
        raise ValueError(
            f"{num_images} images were given for {found} begin-of-image ids in input_ids: give one "
            "image for each, in the order of their ids"
        )


def check_rows(
    facts: dict[str, int],
    given: UnexpandedBatch,
    padding_mask: Tensor | None,
    image_format: ImageFormat,
    num_items_in_batch: Tensor | int | None,
) -> None:
    """Raise ``ValueError`` for rows that cannot be computed."""
    for kind, holds, cure in (
        ("id", "input_ids holds id", "use the tokenizer of this model, or resize_token_embeddings"),
        ("label", "labels holds", "give an id of the vocabulary, or -100 where nothing is learned"),
    ):
        smallest, largest = facts[f"smallest_{kind}"], facts[f"largest_{kind}"]
        offender = smallest if smallest < 0 else largest
        if not 0 <= offender < image_format.vocab_size:
            raise ValueError(
                f"{holds} {offender}, but the vocabulary has {image_format.vocab_size} entries: "
                f"{cure}"
            )
    if padding_mask is not None and facts["wrong_mask_values"]:
        wrong = padding_mask[(padding_mask != 0) & (padding_mask != 1)]
        raise ValueError(
            f"attention_mask holds {wrong[0].item()} and {len(wrong) - 1} more values other than 0 "
            "(padding) and 1: give 0 and 1; packed rows have no mask but position_ids that restart "
            "at 0 with each sample"
        )
    if facts["starts_inside"]:
        raise ValueError(
            f"position_ids are 0 at {facts['starts_inside']} places between the begin and the end "
            "of an image, whose positions go on from its begin: leave position_ids out, or count "
            "them by a mask that is 1 inside images"
        )
    restarts, masked = facts["restarts"] + facts["steps_back"], facts["masked"]
    if facts["steps_back"] or (restarts and (masked or given.past_length)):
        raise ValueError(
            f"position_ids restart {restarts} times within rows whose attention_mask has {masked} "
            f"zeros, after {given.past_length} cached positions: samples in one row are told apart "
            "without a cache, without padding and by positions that restart at 0; give packed rows "
            "no attention_mask"
        )
    if facts["unknown_positions"]:
        raise ValueError(
            f"{facts['unknown_positions']} rows of the cache are not rows as this model filled "
            "them: what position comes next in them is not known; give position_ids"
        )
    check_position(facts["last_position"], image_format.max_positions)
    if facts["labels_inside"] and num_items_in_batch is not None:
        _check_divisor(facts["labels_inside"], given.labels, int(num_items_in_batch))


def _check_divisor(labels_inside: int, labels: Tensor | None, divisor: int) -> None:
    """As a Trainer counts labels, which knows nothing of images; this is a further transfer."""
    assert labels is not None
    counted = int((labels[:, 1:] != -100).sum())
    if divisor >= counted:
        raise ValueError(
            f"labels holds {labels_inside} labels inside images, where nothing is learned, and "
            f"num_items_in_batch {divisor} may count them (this batch has {counted} labels, others "
            "of one step may have the rest): the loss would be divided by too much; set labels "
            "inside images to -100"
        )


def check_position(last_position: int, max_positions: int) -> None:
    if last_position >= max_positions:
        raise ValueError(
            f"a row reaches position {last_position}, but the position table ends at "
            f"{max_positions - 1} (seq_length {max_positions}): shorten the row"
        )
