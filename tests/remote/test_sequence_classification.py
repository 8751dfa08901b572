"""A score for every row, read at its last token whatever the row's form and padding."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from glm4v_patched.remote.modeling_chatglm import ChatGLMForSequenceClassification
from tests.helpers.legacy_repository import remote_code_under
from tests.helpers.tiny import (
    PAD,
    golden_weights,
    grown_image,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_config,
    tiny_model,
)

# fp32, products of other shapes. Measured 5e-7 on this CPU.
ATOL = 1e-5


def tiny_classifier(num_labels: int = 3, **changes) -> ChatGLMForSequenceClassification:
    torch.manual_seed(0)
    config = tiny_config(num_labels=num_labels, **changes)
    model = ChatGLMForSequenceClassification._from_config(config, attn_implementation="sdpa")
    model.load_state_dict(golden_weights(), strict=False)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> ChatGLMForSequenceClassification:
    return tiny_classifier()


@pytest.fixture
def code_of_repositories(tmp_path):
    with remote_code_under(tmp_path / "modules"):
        yield


def rows(image: list[int]) -> list[list[int]]:
    """No image, one, two, and one at the very end."""
    return [
        text(9, seed=1),
        [*text(3, seed=2), *image, *text(2, seed=3)],
        [*image, *text(1, seed=4), *image, *text(3, seed=5)],
        [*text(2, seed=6), *image],
    ]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_reads_the_last_token_of_every_row(model, image, side):
    pixels = pictures(4)
    got = model(**padded(rows(image), side), pixel_values=pixels).logits
    base = tiny_model()
    used = 0
    for row, number, score in zip(rows(image), [0, 1, 2, 1], got, strict=True):
        alone = {"input_ids": torch.tensor([row])}
        if number:
            alone["pixel_values"] = pixels[used : used + number]
            used += number
        hidden = base.transformer(**alone).last_hidden_state[0, -1]
        assert (score - model.score(hidden)).abs().max() <= ATOL


@torch.no_grad()
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_without_a_mask_a_row_ends_before_its_padding(model, image):
    """The padding id may stand in a text, too."""
    with_padding_id = [*text(4, seed=8), PAD, *text(2, seed=9)]
    given = padded([*rows(image), with_padding_id], "right") | {"pixel_values": pictures(4)}
    want = model(**given).logits
    given.pop("attention_mask")
    assert (model(**given).logits - want).abs().max() <= ATOL


@torch.no_grad()
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_images_by_their_place_in_the_published_code(model, image):
    given = padded(rows(image), "right")
    ids, mask, images = given["input_ids"], given["attention_mask"], pictures(4)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    want = model(**given, pixel_values=images).logits
    for by_place in [(images,), (list(images),), (images, None, mask), (images, positions, mask)]:
        assert (model(ids, *by_place).logits - want).abs().max() <= ATOL
    only_text = torch.tensor([text(6)])
    got = model(only_text, None, None, torch.ones_like(only_text)).logits
    assert torch.equal(got, model(only_text).logits)


@torch.no_grad()
def test_rows_end_where_the_mask_says_if_there_is_no_padding_id():
    model = tiny_classifier()
    given = padded(rows(grown_image()), "right") | {"pixel_values": pictures(4)}
    want = model(**given).logits
    alone = torch.tensor([rows(grown_image())[0]])
    one = model(alone).logits
    model.config.pad_token_id = None
    assert torch.equal(model(**given).logits, want)
    assert torch.equal(model(alone).logits, one)
    del given["attention_mask"]
    with pytest.raises(
        ValueError,
        match="4 rows .* without attention_mask .*config.pad_token_id is None.*give either",
    ):
        model(**given)


def test_packed_rows_are_refused(model):
    ids = torch.tensor([text(6)])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="restart within 1 rows.*give a row for every sample"):
        model(input_ids=ids, position_ids=positions)


@pytest.mark.parametrize(
    ("num_labels", "labels", "loss"),
    [
        (3, torch.tensor([0, 2, 1, 0]), F.cross_entropy),
        (1, torch.tensor([0.5, -1.0, 0.0, 2.0]), lambda a, b: F.mse_loss(a.squeeze(), b)),
        (3, torch.eye(4, 3), F.binary_cross_entropy_with_logits),
    ],
    ids=["classes", "values", "several classes"],
)
def test_losses_are_those_of_transformers(num_labels, labels, loss):
    model = tiny_classifier(num_labels).train()
    batch = padded(rows(grown_image()), "left") | {"pixel_values": pictures(4)}
    output = model(**batch, labels=labels)
    assert (output.loss - loss(output.logits, labels)).abs() <= ATOL
    output.loss.backward()
    # Each has a gradient, which processes that train together wait for.
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("applied", [False, True], ids=["without the package", "apply()"])
def test_begins_from_a_language_model_and_loads_again(applied, tmp_path, code_of_repositories):
    tiny_model().save_pretrained(tmp_path / "model")
    torch.manual_seed(1)
    if applied:
        import glm4v_patched

        with glm4v_patched.applied():
            made = AutoModelForSequenceClassification.from_pretrained(
                tmp_path / "model", num_labels=1
            )
        assert type(made) is ChatGLMForSequenceClassification
    else:
        made = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "model", num_labels=1, trust_remote_code=True
        )
    batch = padded(rows(grown_image()), "left") | {"pixel_values": pictures(4)}
    want = made.eval()(**batch).logits
    assert want.shape == (4, 1)
    made.save_pretrained(tmp_path / "saved")
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert "score.weight" in weights and "transformer.output_layer.weight" not in weights
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["ChatGLMForSequenceClassification"]
    again = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", trust_remote_code=True
    )
    assert torch.equal(again.eval()(**batch).logits, want)
    assert again.config.num_labels == 1
