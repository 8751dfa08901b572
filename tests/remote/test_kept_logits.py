"""Logits of kept positions, with labels cut to them as trainers cut them, or in full length."""

import pytest
import torch

from tests.helpers.tiny import EOI, grown_image, padded, pictures, text, three_id_image, tiny_model

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
        if way == "indices":
            kept = kept.nonzero().flatten()
        elif way == "negative indices":
            kept = kept.nonzero().flatten() - length
        elif way == "mask of rows":
            kept = kept.expand(len(labels), -1)
    return inputs | {"labels": labels, "logits_to_keep": kept}, columns


def of_columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return values[torch.arange(len(values))[:, None], columns]


WAYS = ["last", "mask", "mask of rows", "indices", "negative indices"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("divisor", [None, 20])
def test_labels_cut_to_the_kept_positions_give_the_loss_of_whole_ones(model, way, divisor):
    whole = batch(grown_image())
    inputs, columns = cut(whole, way)
    assert inputs["labels"].shape[1] < whole["labels"].shape[1]
    want = model(**whole, num_items_in_batch=divisor)
    got = model(**inputs, num_items_in_batch=divisor)
    assert (got.loss - want.loss).abs() <= ATOL
    assert (got.logits - of_columns(want.logits, columns)).abs().max() <= ATOL


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skip_logits", [False, True])
def test_gradients_are_those_of_whole_labels(way, skip_logits):
    def gradients(inputs):
        model = tiny_model().train()
        model(**inputs, skip_logits=skip_logits).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    whole = batch(grown_image())
    want, got = gradients(whole), gradients(cut(whole, way)[0])
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= ATOL, name


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
@pytest.mark.parametrize("way", ["last", "mask"])
def test_whole_labels_count_everywhere_whatever_logits_are_returned(model, way):
    whole = batch(grown_image())
    kept, columns = cut(whole, way)
    want = model(**whole)
    got = model(**whole, logits_to_keep=kept["logits_to_keep"])
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.logits, of_columns(want.logits, columns))
    more = model(**whole, logits_to_keep=whole["labels"].shape[1] + 1)
    assert torch.equal(more.loss, want.loss)
    assert torch.equal(more.logits, want.logits)


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


@pytest.mark.parametrize(("labels", "kept", "keeps"), [(4, 6, 6), (20, 20, 15)])
def test_labels_of_neither_length_are_refused(model, labels, kept, keeps):
    inputs = batch(grown_image())
    inputs["labels"] = torch.ones(2, labels, dtype=torch.long)
    told = f"labels have {labels} positions and the rows 15, .* keeps {keeps}:"
    with pytest.raises(ValueError, match=told):
        model(**inputs, logits_to_keep=kept)


def test_a_mask_that_keeps_more_of_one_row_is_refused(model):
    mask = torch.zeros(2, 15, dtype=torch.bool)
    mask[0, -3:] = mask[1, -1:] = True
    with pytest.raises(ValueError, match=r"keeps \[3, 1\] positions of 2 rows"):
        model(**batch(grown_image()), logits_to_keep=mask)


@pytest.mark.parametrize("labels", ["whole", "cut", None])
@pytest.mark.parametrize(("length", "shape"), [(9, "row"), (9, "rows"), (17, "row")])
def test_a_mask_of_another_length_is_refused(model, length, shape, labels):
    inputs = batch(grown_image())
    mask = torch.zeros(length, dtype=torch.bool)
    mask[:3] = True
    inputs["labels"] = {"whole": inputs["labels"], "cut": inputs["labels"][:, :3]}.get(labels)
    with pytest.raises(ValueError, match=f"a mask of {length} positions, but rows of 15 ids take"):
        model(**inputs, logits_to_keep=mask if shape == "row" else mask.expand(2, -1))


def test_less_than_no_position_is_refused(model):
    with pytest.raises(ValueError, match=r"logits_to_keep is -3; expected 0"):
        model(**batch(grown_image()), logits_to_keep=-3)


def test_labels_are_not_given_twice(model):
    inputs = batch(grown_image())
    shifted = inputs["labels"].roll(-1, dims=1)
    inputs["labels"] = inputs["labels"][:, -4:]
    with pytest.raises(ValueError, match="labels were cut to 4 positions, and there are shift_la"):
        model(**inputs, shift_labels=shifted, logits_to_keep=4)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (torch.eye(8, dtype=torch.bool)[:2], "logits_to_keep is for 2 rows, and 1 are given"),
        (torch.tensor([[1, 2], [3, 4]]), "logits_to_keep is for 2 rows, and 1 are given"),
        (torch.tensor(1), "a tensor of 0 dimensions; expected a plain number"),
    ],
)
def test_positions_of_more_rows_than_are_given_are_refused(model, kept, message):
    with pytest.raises(ValueError, match=message):
        model(torch.tensor([text(8, seed=1)]), logits_to_keep=kept)
