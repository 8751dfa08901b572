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


def test_rows_of_unlike_growth_need_no_mask(model):
    rows = [row for row in rows_with(three_id_image()) if row.count(BOI) in (0, 1)]
    rows = [row[: min(map(len, rows))] for row in rows[:2]]  # equal lengths, unlike growth
    images = pictures(1)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(rows), pixel_values=images).logits
    for row, got, of_row in zip(rows, logits, (None, images), strict=True):
        want = logits_alone(model, row, of_row)
        assert (got[-len(want) :] - want).abs().max() <= ATOL


def test_what_fills_an_image_does_not_matter(model):
    row = rows_with(grown_image())[1]
    other = [7 if token == FILL else token for token in row]
    images = pictures(1)
    assert torch.equal(logits_alone(model, row, images), logits_alone(model, other, images))


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


# Packing: several samples in one row, positions that restart, no mask


def pack(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """As transformers' DataCollatorWithFlattening."""
    return {
        "input_ids": torch.tensor([sum(rows, [])]),
        "position_ids": torch.tensor([[i for row in rows for i in range(len(row))]]),
        "labels": torch.tensor([[token for row in rows for token in [-100, *row[1:]]]]),
    }


def test_transformers_flattening_collator_makes_rows_the_model_takes(model):
    from transformers import DataCollatorWithFlattening

    rows = rows_with(grown_image())
    collator = DataCollatorWithFlattening(return_tensors="pt")
    batch = collator([{"input_ids": row, "labels": row} for row in rows])
    with torch.no_grad():
        got = model(**batch, pixel_values=pictures(NUM_IMAGES)).loss
        want = model(**pack(rows), pixel_values=pictures(NUM_IMAGES)).loss
    assert got.item() == want.item()


# Wrong use: what is given, to a model whose cache may hold rows already, and what it says.

IDS = torch.tensor([text(6)])
WITH_IMAGE = torch.tensor([[*text(2), *grown_image()]])
THREE_IDS = torch.tensor([[*text(2), *three_id_image()]])
TWO_IMAGES = torch.tensor([[*text(2), *grown_image(), *grown_image()]])
COUNTED = "images were given for 2 begin-of-image ids"
RESTARTS = "position_ids restart {} times.*no attention_mask"
OUTSIDE = "holds {}, but the vocabulary has 512"


def labelled(wrong: int) -> torch.Tensor:
    return torch.tensor([[1, 2, 3, wrong, 5, 6]])


def masked(*mask: float) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS[:, : len(mask)], "attention_mask": torch.tensor([mask])}


def restarting(mask: list[int], *positions: int) -> dict[str, torch.Tensor]:
    return masked(*mask) | {"position_ids": torch.tensor([positions])}


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"input_ids": TWO_IMAGES, "pixel_values": pictures(3)}, f"3 {COUNTED}"),
        ({"input_ids": TWO_IMAGES, "pixel_values": pictures(1)}, f"1 {COUNTED}"),
        ({"input_ids": TWO_IMAGES}, f"0 {COUNTED}"),
        ({"input_ids": IDS, "pixel_values": pictures(1)}, "1 images were given for 0 begin-of-"),
        (
            {"input_ids": torch.tensor([[1, BOI, FILL], [FILL, EOI, 1]])},
            "1 begin.*1 end.*of which 0 pairs",
        ),
        (
            {"input_ids": WITH_IMAGE, "pixel_values": torch.zeros(1, 3, 28, 28)},
            r"\(1, 3, 28, 28\).*\(number of images, 3, 56, 56\)",
        ),
        ({"input_ids": WITH_IMAGE, "pixel_values": torch.zeros(1, 1, 56, 56)}, "1, 1, 56, 56"),
        (
            {"input_ids": WITH_IMAGE, "pixel_values": pictures(1)[0]},
            r"shape \(3, 56, 56\); give \(number of images",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(1, 4)},
            r"\(1, 4\).*\(1, 6\) after 0 cached .* need \(1, 6\)",
        ),
        (
            {
                "input_ids": THREE_IDS,
                "pixel_values": pictures(1),
                "attention_mask": torch.ones(1, 8),
            },
            r"\(1, 8\).*\(1, 5\)",
        ),
        (
            {
                "input_ids": THREE_IDS,
                "pixel_values": pictures(1),
                "attention_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(),
            },
            "a 4D attention_mask cannot be grown .*from 5 to 8",
        ),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, r"labels has shape \(1, 5\) but .* \(1, 6\)"),
        (
            {"input_ids": IDS, "position_ids": torch.arange(4)[None]},
            r"position_ids has shape \(1, 4\) but input_ids \(1, 6\)",
        ),
        (
            {"input_ids": IDS, "position_ids": torch.arange(6).expand(3, 6)},
            r"position_ids has shape \(3, 6\)",
        ),
        *(
            ({"input_ids": torch.tensor([[1, wrong, 2]])}, f"holds id {wrong}, but the vocabulary")
            for wrong in (-1, 512, -100, 151329)
        ),
        *(
            ({"input_ids": torch.zeros(shape, dtype=torch.long)}, re.escape(f"shape {shape}: give"))
            for shape in ((1, 0), (0, 3), (3,))
        ),
        *(
            (masked(*mask), f"attention_mask holds {named} and")
            for mask, named in (
                ((1, 1, 2, 2), "2"),
                ((0, 1, 3, 1), "3"),
                ((-1, 1, 1, 1), "-1"),
                ((0.0, 0.5, 1.0, 1.0), "0.5"),
                ((float("-inf"), 0.0, 0.0, 0.0), "-inf"),
                ((float("nan"), 1.0, 1.0, 1.0), "nan"),
            )
        ),
        (restarting([1, 1, 1, 1, 1, 0], 0, 1, 2, 0, 1, 0), RESTARTS.format(1)),
        (restarting([0, 1, 1, 1, 1, 1], 0, 0, 1, 0, 0, 1), RESTARTS.format(2)),
        (restarting([1, 1, 0, 0, 1, 1], 0, 1, 0, 0, 0, 1), RESTARTS.format(1)),
        (restarting([1, 1, 1, 1, 1, 1], 0, 1, 2, 1, 2, 3), RESTARTS.format(1)),
        (restarting([1, 1, 1, 0, 1, 1], 4, 5, 6, 0, 5, 6), RESTARTS.format(1)),
        (
            {
                "input_ids": torch.tensor([[*text(3), *three_id_image()], text(6)]),
                "position_ids": torch.arange(6)[None],
                "pixel_values": pictures(1),
            },
            r"grow to different lengths \(up to 9\).*pack grown rows",
        ),
        *(
            ({"input_ids": IDS, "skip_logits": skip, **labels}, OUTSIDE.format(wrong))
            for wrong in (512, -1, -101, 151329)
            for skip in (False, True)
            for labels in ({"labels": labelled(wrong)}, {"shift_labels": labelled(wrong)})
        ),
    ],
)
def test_rows_that_cannot_be_computed_are_refused_with_both_numbers(model, inputs, told):
    with pytest.raises(ValueError, match=told):
        model(**inputs)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({"attention_mask": torch.ones(1, 2)}, r"\(1, 2\).*\(1, 2\) after 6 .* need \(1, 8\)"),
        (
            {"attention_mask": torch.tensor([[2, *[1] * 7]])},
            "attention_mask holds 2 and 0 more",
        ),
        (
            {"attention_mask": torch.ones(1, 8), "position_ids": torch.tensor([[6, 0]])},
            "position_ids restart 1 times.*after 6 cached positions",
        ),
    ],
    ids=["length", "values", "restart"],
)
def test_rows_that_do_not_fit_the_cache_are_refused_with_both_numbers(model, after, told):
    cache = model(input_ids=IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=told):
        model(input_ids=IDS[:, :2], past_key_values=cache, **after)


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


@pytest.mark.parametrize("number", [0, 2, 3, 5])
def test_refuses_another_number_of_ids_inside_an_image(number):
    rows = [[1, BOI, *[FILL] * number, EOI, 1], [1, BOI, *[FILL] * 4, EOI, 1]]
    rows = padded(rows, "left")["input_ids"].tolist()
    with pytest.raises(ValueError, match=rf"an image has {number} ids .* takes 1 .* or 4 "):
        grow(rows, 2)


def test_refuses_a_row_longer_than_the_position_table(model):
    assert grow(text(128)).position_ids.max() == 127
    with pytest.raises(ValueError, match="position 128, but the position table ends at 127"):
        grow(text(129))
    # What counts are positions: an image of four costs three.
    grow([*grown_image(), *text(125)], 1)
    with pytest.raises(ValueError, match="reaches position 128"):
        model(input_ids=torch.tensor([[*grown_image(), *text(126)]]), pixel_values=pictures(1))


def test_takes_a_4d_mask_for_grown_rows(model):
    row = torch.tensor([[*text(2), *grown_image(), *text(3)]])
    length = row.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    with torch.no_grad():
        got = model(input_ids=row, pixel_values=pictures(1), attention_mask=mask).logits
        want = model(input_ids=row, pixel_values=pictures(1)).logits
    assert (got - want).abs().max() <= ATOL


# Masks and positions that contradict each other


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


# Labels


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
