"""Logits of kept positions, with labels cut to them as trainers cut them, or in full length."""

import pytest
import torch

from tests.helpers.tiny import EOI, grown_image, padded, pictures, text, three_id_image, tiny_model
from tests.remote.rows import gradients

# fp32. The same sums in another order: measured 5e-7.
ATOL = 5e-6


def batch(image: list[int]) -> dict[str, torch.Tensor]:
    """Two rows with an image each, of which the last 5 and 3 ids are learned."""
    rows = [[*text(3, seed=1), *image, *text(6, seed=2)], [*image, *text(5, seed=3)]]
    inputs = padded(rows, "left") | {"pixel_values": pictures(2)}
    labels = inputs["input_ids"].clone()
    for row, number in enumerate((5, 3)):
        labels[row, :-number] = -100
    return inputs | {"labels": labels}


def cut(inputs: dict, way: str) -> tuple[dict, torch.Tensor]:
    """Inputs whose labels are cut, and the positions that are kept, ``(B, K)``."""
    labels = inputs["labels"]
    length = labels.shape[1]
    columns = torch.arange(length).expand_as(labels)
    if way == "last":
        kept, columns = 6, columns[:, -6:]
        labels = labels[:, -6:]
    else:
        # In the way of ms-swift: what predicts a label, and the last position.
        is_label = (labels != -100).any(dim=0)
        labels = torch.nn.functional.pad(labels[:, is_label], (1, 0), value=-100)
        kept = torch.nn.functional.pad(is_label[1:], (0, 1), value=True)
        columns = columns[:, kept]
        if "indices" in way:
            kept = kept.nonzero().flatten() - (length if way == "negative indices" else 0)
        elif way == "mask of rows":
            kept = kept.expand(len(labels), -1)
    return inputs | {"labels": labels, "logits_to_keep": kept}, columns


def of_columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return values[torch.arange(len(values))[:, None], columns]


WAYS = ["last", "mask", "mask of rows", "indices", "negative indices"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("divisor", "skip_logits"), [(None, False), (20, True)])
def test_labels_cut_to_the_kept_positions_are_learned_as_whole_ones(way, divisor, skip_logits):
    model, whole = tiny_model().train(), batch(grown_image()) | {"num_items_in_batch": divisor}
    inputs, columns = cut(whole, way)
    assert inputs["labels"].shape[1] < whole["labels"].shape[1]
    want = gradients(model, **whole)
    got = gradients(model, **inputs, skip_logits=skip_logits)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= ATOL, name
    logits, every = model(**inputs).logits, model(**whole).logits
    assert (logits - of_columns(every, columns)).abs().max() <= ATOL


def test_rows_may_keep_unlike_positions(model):
    whole = batch(grown_image())
    length = whole["labels"].shape[1]
    columns = torch.tensor([[length - 4, length - 3, length - 1], [1, length - 5, length - 4]])
    mask = torch.zeros(2, length, dtype=torch.bool).scatter(1, columns, True)
    every = model(**{n: v for n, v in whole.items() if n != "labels"}).logits
    cut_labels = torch.tensor([[-100, 7, 8], [-100, -100, 9]])
    got = model(**whole | {"labels": cut_labels}, logits_to_keep=mask)
    assert (got.logits - of_columns(every, columns)).abs().max() <= ATOL
    # Each kept position learns the label of the next kept one.
    logits = torch.stack((every[0, length - 4], every[0, length - 3], every[1, length - 5]))
    want = torch.nn.functional.cross_entropy(logits, torch.tensor([7, 8, 9]))
    assert (got.loss - want).abs() <= ATOL


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_whole_labels_count_everywhere_whatever_logits_are_returned(model, way):
    whole = batch(grown_image())
    kept, columns = cut(whole, way)
    want = model(**whole)
    got = model(**whole, logits_to_keep=kept["logits_to_keep"])
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.logits, of_columns(want.logits, columns))
    more = model(**whole, logits_to_keep=whole["labels"].shape[1] + 1)
    assert torch.equal(more.loss, want.loss) and torch.equal(more.logits, want.logits)
    # The published code's name for the last one.
    last = model(**whole | {"labels": None}, return_last_logit=True).logits
    assert last.shape == (2, 1, 512) and (last - want.logits[:, -1:]).abs().max() <= ATOL


def test_three_id_rows_may_keep_the_text_behind_their_images(model):
    whole = batch(three_id_image())
    whole["labels"][:, :-4] = -100  # the one before predicts the first of these
    want = model(**whole)
    got = model(**whole | {"labels": whole["labels"][:, -5:]}, logits_to_keep=5)
    assert (got.loss - want.loss).abs() <= ATOL
    assert (got.logits - want.logits[:, -5:]).abs().max() <= ATOL


@pytest.mark.parametrize("way", ["last", "mask", "indices"])
def test_three_id_rows_whose_kept_positions_would_be_others_are_refused(model, way):
    inputs, _ = cut(batch(three_id_image()), way)
    if way == "last":
        assert (inputs["input_ids"][:, -6:] == EOI).any()
    with pytest.raises(ValueError, match=r"rows of 12 ids take 15 positions .* give grown rows"):
        model(**inputs)


WHOLE, SHORT = torch.arange(15) >= 10, torch.arange(9) < 3
UNLIKE = torch.stack((torch.arange(15) > 11, torch.arange(15) > 13))
REFUSED = {
    "labels of neither length": (torch.ones(2, 4, dtype=torch.long), 6, "4 positions", "keeps 6"),
    "below 0": (None, -3, "-3"),
    "more of one row": (None, UNLIKE, "[3, 1]", "2 rows"),
    "a short mask and cut labels": (batch(grown_image())["labels"][:, :3], SHORT, "9 positions"),
    "a mask of other rows": (None, WHOLE.expand(3, -1), "3 rows", "2 are"),
    "indices of other rows": (None, torch.tensor([[1, 2], [3, 4], [5, 6]]), "3 rows", "2 are"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_positions_that_cannot_be_kept_are_refused_with_both_numbers(model, case, words):
    labels, kept, *named = REFUSED[case]
    inputs = batch(grown_image())
    inputs["labels"] = inputs["labels"] if labels is None else labels
    with words.refused(ValueError, *named):
        model(**inputs, logits_to_keep=kept)


def test_labels_are_not_given_twice(model):
    inputs = batch(grown_image())
    shifted = inputs["labels"].roll(-1, dims=1)
    inputs["labels"] = inputs["labels"][:, -4:]
    with pytest.raises(ValueError, match="labels were cut to 4 positions, and there are shift_la"):
        model(**inputs, shift_labels=shifted, logits_to_keep=4)
