"""The layout of images: both forms of writing images, any padding, packing; and its errors."""

import re

import pytest
import torch

from glm4v_patched.remote.image_checks import ImageFormat
from glm4v_patched.remote.image_layout import GivenRows, GrownRows, grow_rows
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import (
    BOI,
    EOI,
    FILL,
    PAD,
    grown_image,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_config,
    tiny_model,
)

FORMAT = ImageFormat(BOI, EOI, num_image_tokens=4, vocab_size=512, max_positions=128)

# fp32, the same row at other columns of a batch. Measured 2.6e-6; packed samples that saw each
# other differed by 6.6.
ATOL = 2e-5


def grow(rows, num_images=None, image_format=FORMAT, **given) -> GrownRows:
    """``rows``: ids of one or of several, also as a tensor."""
    ids = torch.atleast_2d(torch.as_tensor(rows))
    return grow_rows(GivenRows(ids, **given), image_format, num_images)


def rows_with(image: list[int], counts=(0, 1, 2, 1, 1, 3)) -> list[list[int]]:
    """Rows of unlike lengths: no image, one inside, two adjacent, at the start, at the end, all."""
    rows = [
        text(9, seed=1),
        [*text(4, seed=2), *image, *text(6, seed=3)],
        [*text(2, seed=4), *image, *image, *text(3, seed=5)],
        [*image, *text(5, seed=6)],
        [*text(7, seed=7), *image],
        [*image, *text(1, seed=8), *image, *text(4, seed=9), *image, *text(2, seed=10)],
    ]
    assert [row.count(BOI) for row in rows] == list(counts)
    return rows


NUM_IMAGES = 8


def images_of(rows: list[list[int]]) -> list[torch.Tensor]:
    return list(pictures(NUM_IMAGES).split([row.count(BOI) for row in rows]))


@pytest.fixture(scope="module")
def model() -> GLM4VForCausalLM:
    return tiny_model(use_cache=False)


@torch.no_grad()
def logits_alone(model, row: list[int], images: torch.Tensor) -> torch.Tensor:
    return model(input_ids=torch.tensor([row]), pixel_values=images).logits[0]


def labels_for(batch: dict) -> torch.Tensor:
    """A label at every real position, the inside of images included.

    Except the first, which a row that is padded on the left would predict from its padding.
    """
    mask = batch["attention_mask"]
    return batch["input_ids"].masked_fill((mask == 0) | (mask.cumsum(dim=1) == 1), -100)


def gradients(model, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# One batch, many ways to write it


@pytest.mark.parametrize("side", ["left", "right"])
def test_three_id_rows_equal_grown_rows_bitwise_with_gradients(model, side):
    batches = [padded(rows_with(image), side) for image in (three_id_image(), grown_image())]
    if side == "right":  # rows with as many images each: inner filling comes on the left
        batches = [
            padded(rows_with(image)[3:5], side) for image in (three_id_image(), grown_image())
        ]
    images = pictures(int((batches[0]["input_ids"] == BOI).sum()))
    valid = batches[1]["attention_mask"].bool()
    with torch.no_grad():
        three, grown = (model(**batch, pixel_values=images).logits for batch in batches)
    assert torch.equal(three[valid], grown[valid])
    (loss, grads), (grown_loss, grown_grads) = (
        gradients(model, **batch, pixel_values=images, labels=labels_for(batch))
        for batch in batches
    )
    assert torch.equal(loss, grown_loss)
    for name, gradient in grads.items():
        assert torch.equal(gradient, grown_grads[name]), name


@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_labels_inside_images_are_ignored_and_those_on_their_ends_are_not(model, image):
    batch = padded(rows_with(image), "left")
    labels, ids = labels_for(batch), batch["input_ids"]
    inside = torch.zeros_like(ids, dtype=torch.bool)
    for row, begin in (ids == BOI).nonzero().tolist():
        inside[row, begin + 1 : begin + len(image) - 1] = True

    def loss(labels):
        with torch.no_grad():
            return model(**batch, pixel_values=pictures(NUM_IMAGES), labels=labels).loss.item()

    assert loss(labels) == loss(labels.masked_fill(inside, -100))
    assert loss(labels) != loss(labels.masked_fill(ids == BOI, -100))
    assert loss(labels) != loss(labels.masked_fill(ids == EOI, -100))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_each_row_of_a_padded_batch_equals_the_row_alone(model, image, side):
    rows = rows_with(image)
    with torch.no_grad():
        logits = model(**padded(rows, side), pixel_values=pictures(NUM_IMAGES)).logits
    given = padded(rows, side)["input_ids"].shape[1]
    for row, images, got in zip(rows, images_of(rows), logits, strict=True):
        want = logits_alone(model, row, images)
        end = len(got) - (given - len(row) if side == "right" else 0)
        if side == "right" and image == grown_image():
            end = len(row)
        assert (got[end - len(want) : end] - want).abs().max() <= ATOL


def test_rows_of_unlike_growth_need_no_mask(model):
    rows = [row for row in rows_with(three_id_image()) if row.count(BOI) in (0, 1)]
    rows = [row[: min(map(len, rows))] for row in rows[:2]]  # equal lengths, unlike growth
    images = pictures(1)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(rows), pixel_values=images).logits
    for row, got, of_row in zip(rows, logits, (None, images), strict=True):
        want = logits_alone(model, row, of_row)
        assert (got[-len(want) :] - want).abs().max() <= ATOL


def test_mixed_forms_in_one_row_equal_one_form(model):
    def row(first, second):
        return [[*text(3, seed=1), *first, *text(2, seed=2), *second, *text(4, seed=3)]]

    three, grown = three_id_image(), grown_image()
    with torch.no_grad():
        want, *got = (
            model(input_ids=torch.tensor(row(*forms)), pixel_values=pictures(2)).logits
            for forms in [(grown, grown), (three, grown), (grown, three), (three, three)]
        )
    for logits in got:
        assert torch.equal(logits, want)


def test_what_fills_an_image_does_not_matter(model):
    row = rows_with(grown_image())[1]
    other = [7 if token == FILL else token for token in row]
    images = pictures(1)
    assert torch.equal(logits_alone(model, row, images), logits_alone(model, other, images))


def test_images_belong_to_rows_in_the_order_of_their_ids(model):
    batch = padded(rows_with(grown_image()), "left")
    images = pictures(NUM_IMAGES)
    with torch.no_grad():
        plain = model(**batch, pixel_values=images).logits
        for index in range(NUM_IMAGES):
            changed = images.clone()
            changed[index] += 1
            moved = (model(**batch, pixel_values=changed).logits - plain).abs().amax(dim=(1, 2))
            owner = [row for row in range(6) for _ in range([0, 1, 2, 1, 1, 3][row])][index]
            assert (moved > 1e-3).nonzero().flatten().tolist() == [owner]


def test_forms_coincide_when_an_image_takes_one_position():
    vision = tiny_config().vision_config | {"image_size": 28, "num_positions": 5}
    torch.manual_seed(0)
    model = GLM4VForCausalLM(tiny_config(vision_config=vision, use_cache=False)).eval()
    images = torch.randn(2, 3, 28, 28)
    rows = [[*text(3), BOI, fill, EOI, BOI, fill, EOI, *text(4)] for fill in (PAD, FILL)]
    batches = [padded([row, text(6)], "left") for row in rows]
    with torch.no_grad():
        three, grown = (model(**batch, pixel_values=images).logits for batch in batches)
        alone = model(input_ids=torch.tensor(rows[:1]), pixel_values=images).logits[0]
    assert three.shape[1] == len(rows[0])
    assert torch.equal(three, grown)
    assert (three[0] - alone).abs().max() <= ATOL
    rows = grow(batches[0]["input_ids"], 2, FORMAT._replace(num_image_tokens=1))
    assert rows.position_ids[0].tolist() == list(range(13))


# Training sees its images


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_padded_training_batches_learn_from_every_image(image, side):
    model = tiny_model().train()
    rows = [row for row in rows_with(image) if row[-1] != EOI]  # nothing follows the image there
    batch = padded(rows, side)
    images = pictures(sum(row.count(BOI) for row in rows)).requires_grad_()
    loss, grads = gradients(model, **batch, pixel_values=images, labels=labels_for(batch))
    assert (images.grad.flatten(1).norm(dim=1) > 1e-4).all()
    for name, gradient in grads.items():
        if "vision" in name:
            assert gradient.norm() > 1e-6, name
    with torch.no_grad():
        other = model(**batch, pixel_values=images + 1, labels=labels_for(batch)).loss
    assert abs(other - loss) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_of_a_padded_batch_is_that_of_its_rows(model, side):
    rows = rows_with(grown_image())
    batch = padded(rows, side)
    with torch.no_grad():
        got = model(**batch, pixel_values=pictures(NUM_IMAGES), labels=labels_for(batch)).loss
        total = number = 0
        for row, images in zip(rows, images_of(rows), strict=True):
            ids = torch.tensor([row])
            total += model(
                input_ids=ids, pixel_values=images, labels=ids, num_items_in_batch=1
            ).loss
            number += len(row) - 1 - row.count(FILL)
    assert got.item() == pytest.approx((total / number).item(), abs=1e-5)


# Positions


def positions(rows, **inputs) -> list[list[int]]:
    return grow(rows, **inputs).position_ids.tolist()


@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_an_image_costs_three_positions(image):
    row = [*text(2), *image, *image, *text(2)]
    want = [[0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 6, 6, 6, 7, 8, 9]]
    assert positions([row]) == want
    counted = torch.arange(len(row))[None]
    assert positions([row], position_ids=counted) == want
    assert positions([row], attention_mask=torch.ones_like(counted)) == want


def test_shared_positions_stay_as_given():
    row = [*text(2), *grown_image(), *grown_image(), *text(2)]
    want = [[0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 6, 6, 6, 7, 8, 9]]
    assert positions([row], position_ids=torch.tensor(want)) == want
    offset = torch.tensor(want) + 20
    assert positions([row], position_ids=offset) == offset.tolist()


@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
@pytest.mark.parametrize("pad_position", [0, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_takes_no_positions(side, pad_position, image):
    batch = padded([[*text(1), *image, *text(6)], [*text(1), *image, *text(2)]], side)
    mask = batch["attention_mask"]
    counted = (mask.cumsum(1) - 1).masked_fill(mask == 0, pad_position)
    for given in (None, counted):
        grown = grow(batch["input_ids"], 2, attention_mask=mask, position_ids=given)
        valid = grown.attention_mask.bool()
        got = [row[keep].tolist() for row, keep in zip(grown.position_ids, valid, strict=True)]
        assert got == [
            [0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9],
            [0, 1, 2, 2, 2, 2, 3, 4, 5],
        ]


@pytest.mark.parametrize("counted", ["one by one", "shared"])
def test_grown_rows_give_the_same_logits_with_either_counting(model, counted):
    rows = rows_with(grown_image())[1:3]
    batch = padded(rows, "left")
    mask = batch["attention_mask"]
    given = (mask.cumsum(1) - 1).clamp(min=0)
    if counted == "shared":
        given = grow(batch["input_ids"], 3, attention_mask=mask).position_ids
    with torch.no_grad():
        want = model(**batch, pixel_values=pictures(3)).logits
        got = model(**batch, pixel_values=pictures(3), position_ids=given).logits
    assert torch.equal(got[mask.bool()], want[mask.bool()])


# Packing: several samples in one row, positions that restart, no mask


def pack(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """As transformers' DataCollatorWithFlattening."""
    return {
        "input_ids": torch.tensor([sum(rows, [])]),
        "position_ids": torch.tensor([[i for row in rows for i in range(len(row))]]),
        "labels": torch.tensor([[token for row in rows for token in [-100, *row[1:]]]]),
    }


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("form", ["grown", "grown and shared", "three ids"])
def test_packed_samples_equal_samples_alone(form, training, implementation):
    model = tiny_model(attn_implementation=implementation).train(training)
    rows = rows_with(three_id_image() if form == "three ids" else grown_image())
    batch = pack(rows)
    if form == "grown and shared":
        batch["position_ids"] = torch.tensor([sum((positions([row])[0] for row in rows), [])])
    images = pictures(NUM_IMAGES)
    with torch.no_grad():
        output = model(**batch, pixel_values=images)
        start = 0
        for row, of_row in zip(rows, images_of(rows), strict=True):
            want = logits_alone(model, row, of_row)
            got = output.logits[0, start : start + len(want)]
            assert (got - want).abs().max() <= ATOL
            start += len(want)
    assert start == output.logits.shape[1]


def test_packed_loss_and_gradients_equal_those_of_the_samples():
    model = tiny_model().train()
    rows = rows_with(grown_image())
    loss, grads = gradients(model, **pack(rows), pixel_values=pictures(NUM_IMAGES))
    batch = padded(rows, "left")
    labels = labels_for(batch)
    want_loss, want = gradients(model, **batch, pixel_values=pictures(NUM_IMAGES), labels=labels)
    assert loss.item() == pytest.approx(want_loss.item(), abs=1e-5)
    for name, gradient in grads.items():
        assert (gradient - want[name]).abs().max() <= ATOL, name


def test_transformers_flattening_collator_makes_rows_the_model_takes(model):
    from transformers import DataCollatorWithFlattening

    rows = rows_with(grown_image())
    collator = DataCollatorWithFlattening(return_tensors="pt")
    batch = collator([{"input_ids": row, "labels": row} for row in rows])
    with torch.no_grad():
        got = model(**batch, pixel_values=pictures(NUM_IMAGES)).loss
        want = model(**pack(rows), pixel_values=pictures(NUM_IMAGES)).loss
    assert got.item() == want.item()


def test_two_packed_rows_that_grow_unlike_are_refused(model):
    ids = torch.tensor([[*text(3), *three_id_image()], text(6)])
    with pytest.raises(ValueError, match=r"grow to different lengths \(up to 9\).*pack grown rows"):
        model(input_ids=ids, position_ids=torch.arange(6)[None], pixel_values=pictures(1))


# Wrong use


def test_refuses_another_number_of_images_than_begin_ids(model):
    row = torch.tensor([[*text(2), *grown_image(), *grown_image()]])
    with pytest.raises(ValueError, match="3 images were given for 2 begin-of-image ids"):
        model(input_ids=row, pixel_values=pictures(3))
    with pytest.raises(ValueError, match="1 images were given for 2 begin-of-image ids"):
        model(input_ids=row, pixel_values=pictures(1))
    with pytest.raises(ValueError, match="0 images were given for 2 begin-of-image ids"):
        model(input_ids=row)
    with pytest.raises(ValueError, match="1 images were given for 0 begin-of-image ids"):
        model(input_ids=torch.tensor([text(4)]), pixel_values=pictures(1))


@pytest.mark.parametrize(
    "row, begins, ends, pairs",
    [
        ([1, BOI, FILL, FILL], 1, 0, 0),
        ([1, BOI], 1, 0, 0),
        ([1, FILL, EOI, 2], 0, 1, 0),
        ([EOI, 1, BOI], 1, 1, 0),
        ([BOI, 1, BOI, 1, EOI], 2, 1, 1),
        ([BOI, 1, EOI, EOI], 1, 2, 1),
    ],
    ids=["cut inside", "cut after begin", "no begin", "reversed", "nested", "two ends"],
)
def test_refuses_begin_and_end_ids_that_are_no_pairs(row, begins, ends, pairs):
    message = rf"{begins} begin-of-image ids \(510\) and {ends} end-of-image ids \(511\), of which "
    with pytest.raises(ValueError, match=rf"{message}{pairs} pairs belong together.*truncated"):
        grow(row, 1)


# Three-id rows whose pictures are missing, with fillers as frameworks write them, and what is left
# of images after a cut.
LEFT_OVER = {
    "filler": [*text(3), BOI, 7, EOI, *text(3)],
    "pad id": [*text(3), BOI, PAD, EOI, *text(3)],
    "grown": [*text(3), *grown_image(), *text(3)],
    "grown, unlike ids": [*text(3), BOI, 5, 6, 7, 8, EOI, *text(3)],
    "empty": [*text(3), BOI, EOI, *text(3)],
    "cut after begin": [*text(3), BOI],
    "cut after one": [*text(3), BOI, 7],
    "cut before end": [EOI, *text(3)],
    "cut before one": [7, EOI, *text(3)],
    "end lost": [*text(3), BOI, 7, BOI, PAD],
    "begin lost": [*text(3), PAD, EOI, 7, EOI, *text(3)],
}


@pytest.mark.parametrize("row", LEFT_OVER.values(), ids=LEFT_OVER.keys())
@pytest.mark.parametrize("pad_token_id", [PAD, 7, None])
def test_places_of_pictures_never_become_words(row, pad_token_id):
    model = tiny_model()
    model.config.pad_token_id = pad_token_id
    other = [*text(2), *three_id_image(), *text(3)]
    for rows, images in ([row], None), ([row, other], pictures(1)), ([other, row], pictures(1)):
        message = "(begin-of-image ids|has 0 ids)"
        for side in ("left", "right"):
            batch = padded(rows, side)
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            for more in ({}, {"labels": labels}):
                with pytest.raises(ValueError, match=message):
                    model(**batch, **more, pixel_values=images)
        with pytest.raises(ValueError, match=message):
            model.generate(**padded(rows, "left"), pixel_values=images, max_new_tokens=2)
    # Packed: what is left stands where samples meet.
    ids = torch.tensor([[*text(4, seed=1), *row, *text(4, seed=2)]])
    places = torch.cat([torch.arange(number) for number in (4, len(row), 4)])[None]
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, position_ids=places)


def test_stray_ids_are_not_learned(model):
    """Between unlike ids of text they cannot be an image, but what is learned must be meant."""
    ids = torch.tensor([[*text(4), BOI, 7, 8, *text(4)]])
    with torch.no_grad():
        model(input_ids=ids)
    for labels in ({"labels": ids}, {"shift_labels": ids}):
        with pytest.raises(ValueError, match="1 begin-of-image ids .* 0 end-of-image ids"):
            model(input_ids=ids, **labels)


def test_refuses_pairs_across_rows():
    with pytest.raises(ValueError, match="1 begin.*1 end.*of which 0 pairs"):
        grow([[1, BOI, FILL], [FILL, EOI, 1]], 1)


@pytest.mark.parametrize("number", [0, 2, 3, 5])
def test_refuses_another_number_of_ids_inside_an_image(number):
    rows = [[1, BOI, *[FILL] * number, EOI, 1], [1, BOI, *[FILL] * 4, EOI, 1]]
    rows = padded(rows, "left")["input_ids"].tolist()
    with pytest.raises(ValueError, match=rf"an image has {number} ids .* takes 1 .* or 4 "):
        grow(rows, 2)


def test_refuses_images_of_another_size(model):
    row = torch.tensor([[*text(2), *grown_image()]])
    with pytest.raises(ValueError, match=r"\(1, 3, 28, 28\).*\(number of images, 3, 56, 56\)"):
        model(input_ids=row, pixel_values=torch.zeros(1, 3, 28, 28))
    with pytest.raises(ValueError, match=r"\(1, 1, 56, 56\)"):
        model(input_ids=row, pixel_values=torch.zeros(1, 1, 56, 56))


def test_refuses_one_image_without_its_own_dimension(model):
    with pytest.raises(ValueError, match=re.escape("shape (3, 56, 56); give (number of images")):
        model(input_ids=torch.tensor([three_id_image()]), pixel_values=pictures(1)[0])


def test_refuses_a_row_longer_than_the_position_table(model):
    assert grow(text(128)).position_ids.max() == 127
    with pytest.raises(ValueError, match="position 128, but the position table ends at 127"):
        grow(text(129))
    # What counts are positions: an image of four costs three.
    grow([*grown_image(), *text(125)], 1)
    with pytest.raises(ValueError, match="reaches position 128"):
        model(input_ids=torch.tensor([[*grown_image(), *text(126)]]), pixel_values=pictures(1))


def test_refuses_a_mask_of_another_length(model):
    ids = torch.tensor([text(5)])
    with pytest.raises(ValueError, match=r"\(1, 4\).*\(1, 5\) after 0 cached .* need \(1, 5\)"):
        model(input_ids=ids, attention_mask=torch.ones(1, 4))
    row = torch.tensor([[*text(2), *three_id_image()]])
    with pytest.raises(ValueError, match=r"\(1, 8\).*\(1, 5\)"):
        model(input_ids=row, pixel_values=pictures(1), attention_mask=torch.ones(1, 8))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 2\) after 5 cached .* need \(1, 7\)"):
        model(input_ids=ids[:, :2], past_key_values=cache, attention_mask=torch.ones(1, 2))


def test_refuses_labels_and_positions_of_another_shape(model):
    ids = torch.tensor([text(5)])
    with pytest.raises(ValueError, match=r"labels has shape \(1, 4\) but input_ids \(1, 5\)"):
        model(input_ids=ids, labels=ids[:, 1:])
    with pytest.raises(ValueError, match=r"position_ids has shape \(1, 4\) but input_ids \(1, 5\)"):
        model(input_ids=ids, position_ids=torch.arange(4)[None])
    with pytest.raises(ValueError, match=r"position_ids has shape \(3, 5\)"):
        model(input_ids=ids, position_ids=torch.arange(5).expand(3, 5))


@pytest.mark.parametrize("wrong", [-1, 512, -100, 151329])
def test_refuses_ids_outside_the_vocabulary(model, wrong):
    with pytest.raises(ValueError, match=f"holds id {wrong}, but the vocabulary has 512 entries"):
        model(input_ids=torch.tensor([[1, wrong, 2]]))


def labelled_alone(model, row: list[int], images) -> tuple[float, int]:
    """Summed loss of a row on which every id is a label, and how many are."""
    ids = torch.tensor([row])
    labels = ids.masked_fill(ids >= 500, -100)
    output = model(input_ids=ids, labels=labels, pixel_values=images, num_items_in_batch=1)
    return output.loss.item(), int((labels[:, 1:] != -100).sum())


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_start_of_a_padded_row_is_not_learned_from_its_padding(model, side):
    rows = [[1, 2, *three_id_image(), 3, 4], [5, 6, 7], [8, *three_id_image(), *three_id_image()]]
    batch = padded(rows, side) | {"pixel_values": pictures(3)}
    labels = batch["input_ids"].masked_fill(batch["input_ids"] >= 500, -100)
    images = (pictures(3)[:1], None, pictures(3)[1:])
    alone = [labelled_alone(model, *pair) for pair in zip(rows, images, strict=True)]
    got = model(**batch, labels=labels).loss.item()
    want = sum(total for total, _ in alone) / sum(number for _, number in alone)
    assert got == pytest.approx(want, abs=1e-5)


def test_the_start_of_a_packed_sample_is_not_learned_from_the_sample_before(model):
    rows = [[1, 2, 3, 4], [5, 6, 7]]
    ids = torch.tensor([sum(rows, [])])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    alone = [labelled_alone(model, row, None) for row in rows]
    got = model(input_ids=ids, position_ids=positions, labels=ids).loss.item()
    want = sum(total for total, _ in alone) / sum(number for _, number in alone)
    assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (3,)])
def test_refuses_empty_rows(model, shape):
    with pytest.raises(ValueError, match=re.escape(f"shape {shape}: give at least one row")):
        model(input_ids=torch.zeros(shape, dtype=torch.long))


def test_refuses_to_grow_a_row_under_a_4d_mask(model):
    row = [*text(2), *three_id_image()]
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"a 4D attention_mask cannot be grown .*from 5 to 8"):
        model(input_ids=torch.tensor([row]), pixel_values=pictures(1), attention_mask=mask)


def test_takes_a_4d_mask_for_grown_rows(model):
    row = torch.tensor([[*text(2), *grown_image(), *text(3)]])
    length = row.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    with torch.no_grad():
        got = model(input_ids=row, pixel_values=pictures(1), attention_mask=mask).logits
        want = model(input_ids=row, pixel_values=pictures(1)).logits
    assert (got - want).abs().max() <= ATOL


# Masks and positions that contradict each other


@pytest.mark.parametrize(
    "mask, named",
    [
        ([1, 1, 2, 2], "2"),
        ([0, 1, 3, 1], "3"),
        ([-1, 1, 1, 1], "-1"),
        ([0.0, 0.5, 1.0, 1.0], "0.5"),
        ([float("-inf"), 0.0, 0.0, 0.0], "-inf"),
        ([float("nan"), 1.0, 1.0, 1.0], "nan"),
    ],
    ids=str,
)
def test_refuses_mask_values_other_than_zero_and_one(model, mask, named):
    with pytest.raises(ValueError, match=f"attention_mask holds {re.escape(named)} and"):
        model(input_ids=torch.tensor([text(4)]), attention_mask=torch.tensor([mask]))


def test_refuses_mask_values_over_the_cache(model):
    ids = torch.tensor([text(4)])
    cache = model(input_ids=ids, use_cache=True).past_key_values
    mask = torch.tensor([[2, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="attention_mask holds 2 and 0 more"):
        model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
@torch.no_grad()
def test_masks_of_zeros_and_ones_may_have_any_dtype(model, dtype):
    batch = padded(rows_with(grown_image()), "left") | {"pixel_values": pictures(NUM_IMAGES)}
    want = model(**batch).logits
    got = model(**batch | {"attention_mask": batch["attention_mask"].to(dtype)}).logits
    assert torch.equal(got, want)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_a_mask_of_ones_beside_positions_that_restart_changes_nothing(image, implementation):
    model = tiny_model(attn_implementation=implementation, use_cache=False)
    batch = pack(rows_with(image)) | {"pixel_values": pictures(NUM_IMAGES)}
    ones = torch.ones_like(batch["input_ids"])
    loss, grads = gradients(model, **batch)
    got_loss, got = gradients(model, **batch, attention_mask=ones)
    assert torch.equal(got_loss, loss)
    for name, gradient in grads.items():
        assert torch.equal(got[name], gradient), name
    with torch.no_grad():
        assert torch.equal(model(**batch, attention_mask=ones).logits, model(**batch).logits)


@pytest.mark.parametrize(
    "mask, positions, times",
    [
        ([1, 1, 1, 1, 1, 0], [0, 1, 2, 0, 1, 0], 1),
        ([0, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1], 2),
        ([1, 1, 0, 0, 1, 1], [0, 1, 0, 0, 0, 1], 1),
        ([1, 1, 1, 1, 1, 1], [0, 1, 2, 1, 2, 3], 1),
        ([1, 1, 1, 0, 1, 1], [4, 5, 6, 0, 5, 6], 1),
    ],
    ids=str,
)
def test_refuses_positions_that_restart_under_a_mask(model, mask, positions, times):
    with pytest.raises(ValueError, match=f"position_ids restart {times} times.*no attention_mask"):
        model(
            input_ids=torch.tensor([text(6)]),
            attention_mask=torch.tensor([mask]),
            position_ids=torch.tensor([positions]),
        )


def test_refuses_positions_that_restart_after_a_cache(model):
    ids = torch.tensor([text(4)])
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="position_ids restart 1 times.*after 4 cached positions"):
        model(
            input_ids=ids,
            past_key_values=cache,
            attention_mask=torch.ones(1, 8),
            position_ids=torch.tensor([[4, 5, 0, 1]]),
        )


# Labels


@pytest.mark.parametrize("wrong", [512, -1, -101, 151329])
@pytest.mark.parametrize("skip_logits", [False, True])
def test_refuses_labels_outside_the_vocabulary(model, skip_logits, wrong):
    ids = torch.tensor([text(5)])
    labels = ids.clone()
    labels[0, 3] = wrong
    with pytest.raises(ValueError, match=f"labels holds {wrong}, but the vocabulary has 512"):
        model(input_ids=ids, labels=labels, skip_logits=skip_logits)
    with pytest.raises(ValueError, match=f"labels holds {wrong}, but the vocabulary has 512"):
        model(input_ids=ids, shift_labels=labels.roll(1, dims=1), skip_logits=skip_logits)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_refuses_a_count_of_labels_that_holds_those_inside_images(model, image, as_tensor):
    """As a Trainer counts, which knows nothing of images."""
    ids = torch.tensor([[*text(3), *image, *text(4)]])
    batch = {"input_ids": ids, "labels": ids, "pixel_values": pictures(1)}
    inside = len(image) - 2
    count = torch.tensor(ids.numel()) if as_tensor else ids.numel()
    message = f"{inside} labels inside images.*num_items_in_batch {ids.numel()} may count them"
    with pytest.raises(ValueError, match=f"{message}.*set labels inside images to -100"):
        model(**batch, num_items_in_batch=count)
    # Over several batches, and with the first label left out.
    for divisor in (10 * ids.numel(), ids.numel() - 1):
        with pytest.raises(ValueError, match=f"num_items_in_batch {divisor}"):
            model(**batch, num_items_in_batch=divisor)
    # A number that cannot hold them: the labels that are learned, or a divisor of one's own.
    learned = ids.numel() - 1 - inside
    with torch.no_grad():
        mean = model(**batch).loss
        assert model(**batch, num_items_in_batch=learned).loss.item() == mean.item()
        model(**batch, num_items_in_batch=1)
        masked = ids.clone()
        masked[0, 4 : 4 + inside] = -100
        got = model(**batch | {"labels": masked}, num_items_in_batch=10 * ids.numel()).loss
    assert got.item() == pytest.approx(mean.item() * learned / (10 * ids.numel()))


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]


@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_shifted_labels_are_learned_as_labels(image, side, skip_logits):
    model = tiny_model().train()
    batch = padded(rows_with(image), side) | {"pixel_values": pictures(NUM_IMAGES)}
    labels = labels_for(batch)
    want, grads = gradients(model, **batch, labels=labels, skip_logits=skip_logits)
    # transformers lets them win over labels, which Trainer gives along.
    for also in ({}, {"labels": torch.full_like(labels, 7)}):
        got, got_grads = gradients(
            model, **batch, **also, shift_labels=shifted(labels), skip_logits=skip_logits
        )
        assert torch.equal(got, want)
        for name, gradient in grads.items():
            assert torch.equal(got_grads[name], gradient), name


@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
@torch.no_grad()
def test_the_last_id_learns_the_shifted_label_after_it(model, image, skip_logits):
    """As in a part of a row that goes on on another process."""
    row = [*text(3, seed=1), *image, *text(4, seed=2)]
    labels = torch.full((1, len(row)), -100)
    labels[0, -1] = 9
    options = {"pixel_values": pictures(1), "skip_logits": skip_logits}
    got = model(input_ids=torch.tensor([row]), shift_labels=labels, **options).loss
    labels = torch.tensor([[-100] * len(row) + [9]])
    want = model(input_ids=torch.tensor([[*row, 5]]), labels=labels, **options).loss
    assert got.item() == pytest.approx(want.item(), abs=1e-5)


def test_rows_after_a_longer_cache_that_grow_unlike_get_a_mask_over_all_of_it(model):
    """Without a mask; the cache holds more than the rows do."""
    rows = [[*text(2, seed=1), *three_id_image()], text(5, seed=2)]
    grown = grow(rows, 1, past_length=20)
    assert grown.attention_mask.tolist() == [[1] * 28, [1] * 20 + [0] * 3 + [1] * 5]
    # And as a model computes it.
    cached = [text(20, seed=3), text(20, seed=4)]
    with torch.no_grad():
        cache = model(input_ids=torch.tensor(cached), use_cache=True).past_key_values
        got = model(
            input_ids=torch.tensor(rows), past_key_values=cache, pixel_values=pictures(1)
        ).logits
    for first, row, logits, images in zip(cached, rows, got, (pictures(1), None), strict=True):
        want = logits_alone(model, first + row, images)[20:]
        assert (logits[-len(want) :] - want).abs().max() <= ATOL
