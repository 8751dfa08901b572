"""Expansion of image placeholders, with any padding and packing, and its errors."""

import pytest
import torch

from glm4v_patched.remote.image_checks import PromptFormat
from glm4v_patched.remote.image_layout import ExpandedBatch, InputBatch, expand_image_placeholders
from tests.helpers.refused import refused
from tests.helpers.tiny import (
    BOI,
    EOI,
    FILL,
    expanded_image,
    padded,
    random_pixels,
    text,
    unexpanded_image,
)

FORMAT = PromptFormat(BOI, EOI, num_image_tokens=4, vocab_size=512, max_positions=128)


def expand(rows, **fields) -> ExpandedBatch:
    """Expand one or several sequences of ids."""
    ids = torch.atleast_2d(torch.as_tensor(rows))
    return expand_image_placeholders(InputBatch(ids, **fields), FORMAT, int((ids == BOI).sum()))


def test_sequences_that_expand_differently_need_no_mask():
    rows = [[*text(2, seed=1), *unexpanded_image()], text(5, seed=2)]
    expanded = expand(rows, past_length=20, labels=torch.tensor(rows))
    assert expanded.attention_mask.tolist() == [[1] * 28, [1] * 20 + [0] * 3 + [1] * 5]
    labels = [-100, rows[0][1], BOI, *[-100] * 4, EOI], [*[-100] * 4, *rows[1][1:]]
    assert expanded.labels.tolist() == [*labels], "padding and images are not supervised"


def test_an_image_takes_three_position_ids_and_the_last_one_may_be_used(image):
    row = [*text(2), *image, *image, *text(2)]
    want = torch.tensor([[0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 6, 6, 6, 7, 8, 9]])
    assert torch.equal(expand(row, position_ids=torch.arange(len(row))[None]).position_ids, want)
    if FILL in image:  # those that are shared already stay
        assert torch.equal(expand(row, position_ids=want + 20).position_ids, want + 20)
    assert expand([*expanded_image(), *text(125)]).position_ids.max() == 127
    assert expand(text(128)).last_position == 127


# Wrong inputs, and what the error contains.

IDS = torch.tensor([text(6)])
WITH_IMAGE = torch.tensor([[*text(2), *expanded_image(), *text(3)]])
UNEXPANDED = torch.tensor([[*text(2), *unexpanded_image()]])
IMAGE = {"pixel_values": random_pixels(1)}


def ids_of(*rows: list[int], **more) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(rows), **more}


def masked(*mask: float) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS[:, : len(mask)], "attention_mask": torch.tensor([mask])}


def restarting(mask: list[int], *positions: int) -> dict[str, torch.Tensor]:
    return masked(*mask) | {"position_ids": torch.tensor([positions])}


def restarting_inside(column: int) -> dict[str, torch.Tensor]:
    positions = torch.arange(WITH_IMAGE.shape[1])[None]
    positions[0, column] = 0
    return {"input_ids": WITH_IMAGE, **IMAGE, "position_ids": positions}


WRONG = {
    "an image cut in two rows": (ids_of([1, BOI, FILL], [FILL, EOI, 1]), "1 begin-of", "0 pairs"),
    "an image of three": (ids_of([1, BOI, *[FILL] * 3, EOI], **IMAGE), "3 ids", "takes 1", "or 4"),
    "another size": (
        ids_of(expanded_image(), pixel_values=random_pixels(1, side=28)),
        "28)",
        "3, 56, 56",
    ),
    "a short mask": (masked(1, 1, 1, 1) | {"input_ids": IDS}, "(1, 4)", "(1, 6)"),
    "a 4D mask of an unexpanded prompt": (
        {"input_ids": UNEXPANDED, **IMAGE, "attention_mask": torch.ones(1, 1, 5, 5).bool().tril()},
        "from 5 to 8",
    ),
    "positions of more rows": (ids_of([1, 2], position_ids=torch.zeros(3, 2)), "(3, 2)", "(1, 2)"),
    "labels of one row": (ids_of([1, 2], [3, 4], labels=IDS[:, :2]), "(1, 2)", "(2, 2)"),
    "an id of no vocabulary": (ids_of([1, 512, 2]), "id 512", "512"),
    "no ids": (masked(), "(1, 0)"),
    "a batch of a batch": ({"input_ids": IDS[None]}, "(1, 1, 6)", "give a trainer the processor"),
    "a mask to be added": (masked(float("-inf"), 0.0, 0.0, 0.0), "-inf"),
    "a restart before padding": (restarting([1, 1, 1, 1, 1, 0], 0, 1, 2, 0, 1, 0), "restart 1 ti"),
    "positions that go back": (restarting([1, 1, 1, 1, 1, 1], 0, 1, 2, 1, 2, 3), "restart 1 ti"),
    "back over padding": (restarting([1, 1, 1, 0, 1, 1], 4, 5, 6, 0, 5, 6), "restart 1 times"),
    "a restart at an image's first": (restarting_inside(3), "0 at 1 tokens"),
    "packed prompts that expand differently": (
        ids_of(
            [*text(3), *unexpanded_image()], text(6), position_ids=torch.arange(6)[None], **IMAGE
        ),
        "up to 9",
    ),
    "a label below 0": (
        ids_of([1, 2], labels=torch.tensor([[1, -1]])),
        "has -1",
    ),
    "no position left": (
        ids_of([*expanded_image(), *text(126)], **IMAGE),
        "position id 128",
        "127",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_batches_are_refused_with_both_numbers(model, case):
    inputs, *named = WRONG[case]
    with refused(ValueError, *named):
        model(**inputs)


def test_prompts_that_are_padded_on_the_right_are_refused(model):
    batch = padded([text(9), text(4), text(7)], "right")
    with pytest.raises(
        ValueError, match=r"prompts \[1, 2\] of 3 end in padding.*padding_side=\"le"
    ):
        model.generate(**batch)


def test_batches_that_do_not_fit_the_cache_are_refused_with_both_numbers(model):
    cache = model(input_ids=IDS, use_cache=True).past_key_values
    inputs = {"input_ids": IDS[:, :2], "past_key_values": cache}
    with pytest.raises(ValueError, match=r"\(1, 2\) after 6 .* \(1, 8\)"):
        model(**inputs, attention_mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match="1 times .*, after 6 cache"):
        positions = torch.tensor([[6, 0]])
        model(**inputs, attention_mask=torch.ones(1, 8), position_ids=positions)


# Unexpanded prompts whose images are missing, with fillers as frameworks write them, and leftovers
# of images after truncation or generation.
LEFT_OVER = {
    "filler": [*text(3), BOI, 7, EOI, *text(3)],
    "expanded, other ids": [*text(3), BOI, 5, 6, 7, 8, EOI, *text(3)],
    "empty": [*text(3), BOI, EOI, *text(3)],
    "cut after begin": [*text(3), BOI],
    "cut before end": [*text(3), EOI, *text(3)],
}


@pytest.mark.parametrize("row", LEFT_OVER.values(), ids=LEFT_OVER.keys())
def test_image_placeholders_never_become_text(model, row):
    other = [*text(2), *unexpanded_image(), *text(3)]
    refused = "(begin-of-image ids|has 0 ids)"
    for rows, images in ([row], None), ([row, other], random_pixels(1)):
        batch = padded(rows, "left") | {"pixel_values": images}
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=refused):
                call(**batch)
    cache = model(torch.tensor([text(3)]), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=refused):
        model(torch.tensor([row]), past_key_values=cache)


def test_a_divisor_that_counts_labels_inside_images_is_refused(model, image):
    ids = torch.tensor([[*text(3), *image, *text(4)]])
    batch = {"input_ids": ids, "labels": ids, "pixel_values": random_pixels(1)}
    inside, every = len(image) - 2, ids.numel()
    # The labels of this batch, of several, and without the first label.
    for divisor in (every, 10 * every, every - 1):
        message = f"{inside} labels inside images.*num_items_in_batch {divisor} may count them"
        with pytest.raises(ValueError, match=f"{message}.*set labels inside images to -100"):
            model(**batch, num_items_in_batch=torch.tensor(divisor))
    # Divisors that cannot count them: the supervised labels, or any other number.
    learned = every - 1 - inside
    with torch.no_grad():
        mean = model(**batch).loss.item()
        assert model(**batch, num_items_in_batch=learned).loss.item() == mean
        assert model(**batch, num_items_in_batch=1).loss.item() == pytest.approx(mean * learned)
