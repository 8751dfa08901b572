"""What rows of text and images are checked against before they are computed.

What can be wrong is counted on the device and comes to the host in one transfer.
"""

from collections.abc import Collection
from typing import NamedTuple

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


def check_shapes(input_ids, attention_mask, position_ids, labels, past_length) -> None:
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


class Facts(NamedTuple):
    """Numbers on the host, for all that is checked: one transfer from the device."""

    begins: int
    ends: int
    found: int
    found_after_cache: int
    misfit: int
    smallest_id: int
    largest_id: int
    smallest_label: int
    largest_label: int
    labels_inside: int
    last_position: int
    unknown_positions: int
    wrong_mask_values: int
    masked: int
    restarts: int
    steps_back: int
    starts_inside: int
    images_end: int
    length: int
    shortest: int
    plain_from: int


def facts_in_graph(
    facts: dict[str, Tensor],
    input_ids: Tensor,
    image_format: ImageFormat,
    num_images: int | None,
    allow_unpaired: bool,
) -> Facts:
    """What sound, grown rows have, asserted of these rows whenever the graph runs."""
    length = input_ids.shape[1]
    last = image_format.vocab_size - 1
    is_sound = (facts["misfit"] == 1) & (facts["length"] == length)
    is_sound &= (facts["smallest_id"] >= 0) & (facts["largest_id"] <= last)
    is_sound &= facts["last_position"] < image_format.max_positions
    if not allow_unpaired:
        is_sound &= (facts["begins"] == facts["found"]) & (facts["ends"] == facts["found"])
    if num_images is not None:
        is_sound &= facts["found"] == num_images
    if "smallest_label" in facts:
        is_sound &= (facts["smallest_label"] >= 0) & (facts["largest_label"] <= last)
    faults = ("unknown_positions", "wrong_mask_values", "restarts", "steps_back", "starts_inside")
    for name in faults:
        if name in facts:
            is_sound &= facts[name] == 0
    torch._assert_async(
        is_sound,
        "these rows do not fit a compiled graph: they are in the three-id form (give grown rows, "
        "as this model's processor makes them), hold stray begin- or end-of-image ids, or have a "
        "fault that the same call without compilation names",
    )
    images = num_images or 0
    expected = dict.fromkeys(Facts._fields, 0)
    expected |= {"begins": images, "ends": images, "found": images, "misfit": 1, "length": length}
    # How much of a mask is padding is not known, nor how far positions go.
    expected |= {"shortest": length, "plain_from": length, "masked": int("masked" in facts)}
    # Where the last image ends is not known: at the end of the rows, to be on the safe side.
    return Facts(**(expected | {"images_end": length if images else 0}))


def fault_of_images(
    facts: Facts, image_format: ImageFormat, num_images, allow_unpaired: bool
) -> str | None:
    """What is wrong with the images that were found, if anything."""
    begins, ends, found = facts.begins, facts.ends, facts.found
    if not allow_unpaired and not begins == ends == found:
        return (
            f"input_ids holds {begins} begin-of-image ids ({image_format.begin_id}) and {ends} "
            f"end-of-image ids ({image_format.end_id}), of which {found} pairs belong together: "
            "every begin needs its end later in the same row; was a row truncated inside an image?"
        )
    if facts.misfit != 1:
        return (
            f"an image has {facts.misfit} ids between its begin and its end, but takes 1 (to be "
            f"grown here) or {image_format.num_image_tokens} (grown already, at this model's "
            "image_size)"
        )
    if not is_number(facts, num_images):
        given = num_images if isinstance(num_images, int) else next(iter(num_images))[0]
        return (
            f"{given} images were given for {found} begin-of-image ids in input_ids: give one "
            "image for each, in the order of their ids"
        )
    return None


def is_number(facts: Facts, num_images: int | Collection[tuple[int, int]] | None) -> bool:
    if num_images is None or isinstance(num_images, int):
        return num_images is None or num_images == facts.found
    return (facts.found, facts.found_after_cache) in num_images


def check_rows(
    facts: Facts, padding_mask, image_format: ImageFormat, labels, past_length, num_items_in_batch
) -> None:
    """Raise ``ValueError`` for rows that cannot be computed."""
    offender = facts.smallest_id if facts.smallest_id < 0 else facts.largest_id
    if not 0 <= offender < image_format.vocab_size:
        raise ValueError(
            f"input_ids holds id {offender}, but the vocabulary has {image_format.vocab_size} "
            "entries: use the tokenizer of this model, or resize_token_embeddings"
        )
    offender = facts.smallest_label if facts.smallest_label < 0 else facts.largest_label
    if not 0 <= offender < image_format.vocab_size:
        raise ValueError(
            f"labels holds {offender}, but the vocabulary has {image_format.vocab_size} entries: "
            "give an id of the vocabulary, or -100 where nothing is learned"
        )
    if padding_mask is not None and facts.wrong_mask_values:
        wrong = padding_mask[(padding_mask != 0) & (padding_mask != 1)]
        raise ValueError(
            f"attention_mask holds {wrong[0].item()} and {facts.wrong_mask_values - 1} more values "
            "other than 0 (padding) and 1: give 0 and 1; packed rows have no mask but position_ids "
            "that restart at 0 with each sample"
        )
    if facts.starts_inside:
        raise ValueError(
            f"position_ids are 0 at {facts.starts_inside} places between the begin and the end of "
            "an image, whose positions go on from its begin: leave position_ids out, or count "
            "them by a mask that is 1 inside images"
        )
    if facts.steps_back or (facts.restarts and (facts.masked or past_length)):
        raise ValueError(
            f"position_ids restart {facts.restarts + facts.steps_back} times within rows whose "
            f"attention_mask has {facts.masked} zeros, after {past_length} cached positions: "
            "samples in one row are told apart without a cache, without padding and by positions "
            "that restart at 0; give packed rows no attention_mask"
        )
    if facts.unknown_positions:
        raise ValueError(
            f"{facts.unknown_positions} rows of the cache are not rows as this model filled them: "
            "what position comes next in them is not known; give position_ids"
        )
    check_position(facts.last_position, image_format.max_positions)
    if facts.labels_inside and num_items_in_batch is not None:
        # As a Trainer counts them, which knows nothing of images. The only further transfer.
        counted, divisor = int((labels[:, 1:] != -100).sum()), int(num_items_in_batch)
        if divisor >= counted:
            raise ValueError(
                f"labels holds {facts.labels_inside} labels inside images, where nothing is "
                f"learned, and num_items_in_batch {divisor} may count them (this batch has "
                f"{counted} labels, others of one step may have the rest): the loss would be "
                "divided by too much; set labels inside images to -100"
            )


def check_position(last_position: int, max_positions: int) -> None:
    if last_position >= max_positions:
        raise ValueError(
            f"a row reaches position {last_position}, but the position table ends at "
            f"{max_positions - 1} (seq_length {max_positions}): shorten the row"
        )
