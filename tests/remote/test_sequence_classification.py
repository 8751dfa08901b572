"""A score for each sequence at its last token, with any images and padding."""

import json
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

import glm4v_patched
from glm4v_patched.remote.modeling_chatglm import ChatGLMForSequenceClassification
from tests.helpers.legacy_repository import remote_code_under
from tests.helpers.tiny import (
    PAD,
    expanded_image,
    golden_weights,
    padded,
    random_pixels,
    text,
    tiny_config,
    tiny_model,
)

NAMES = "input_ids", "attention_mask"

# fp32, matmuls of other shapes. Measured 5e-7 on this CPU.
ATOL = 1e-5


class Judge(ChatGLMForSequenceClassification):
    """A user's subclass, whose name does not reveal its loss."""


def tiny_classifier(
    num_labels: int = 3, kind=ChatGLMForSequenceClassification, **changes
) -> ChatGLMForSequenceClassification:
    torch.manual_seed(0)
    config = tiny_config(num_labels=num_labels, **changes)
    model = kind._from_config(config, attn_implementation="sdpa")
    model.load_state_dict(golden_weights(), strict=False)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> ChatGLMForSequenceClassification:
    return tiny_classifier()


def batch(image: list[int], side: str = "right") -> dict[str, torch.Tensor]:
    """No image, two, one at the very end, and none but the padding id in the text."""
    rows = [
        text(9, seed=1),
        [*image, *text(1, seed=4), *image, *text(3, seed=5)],
        [*text(2, seed=6), *image],
        [*text(4, seed=8), PAD, *text(2, seed=9)],
    ]
    return padded(rows, side) | {"pixel_values": random_pixels(3)}


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_score_is_computed_at_the_last_token_that_is_no_padding(model, image, side):
    inputs = batch(image, side)
    actual, base = model(**inputs).logits, tiny_model().transformer
    images = inputs["pixel_values"].split([0, 2, 1, 0])
    for ids, mask, of_row, score in zip(*map(inputs.get, NAMES), images, actual, strict=True):
        of_row = of_row if len(of_row) else None
        hidden = base(input_ids=ids[mask.bool()][None], pixel_values=of_row).last_hidden_state
        assert (score - model.score(hidden[0, -1])).abs().max() <= ATOL


@torch.no_grad()
@pytest.mark.parametrize("has_mask", [True, False], ids=["mask", "no mask"])
def test_a_score_after_a_cache_is_read_at_the_last_token_of_the_sequence(image, has_mask):
    model, inputs = tiny_classifier(), batch(image)
    want = model(**inputs).logits[:1]
    ids, mask = inputs["input_ids"][:1], inputs["attention_mask"][:1] if has_mask else None
    cache = model(ids[:, :4], use_cache=True).past_key_values
    after = model(ids[:, 4:], attention_mask=mask, past_key_values=cache).logits
    assert (after - want).abs().max() <= ATOL


@torch.no_grad()
def test_a_classifier_takes_inputs_without_a_mask_and_positionally(image):
    """Without a mask a sequence ends before its padding; a text may contain the padding id, too."""
    model, inputs = tiny_classifier(), batch(image)
    ids, mask, images = (inputs[name] for name in (*NAMES, "pixel_values"))
    want = model(**inputs).logits
    for by_place in [(images,), (list(images), (mask.cumsum(1) - 1).clamp(min=0), mask)]:
        assert (model(ids, *by_place).logits - want).abs().max() <= ATOL
    model.config.pad_token_id = None
    assert (model(**inputs).logits - want).abs().max() <= ATOL
    assert model(torch.tensor([text(6)])).logits.shape == (1, 3)
    with pytest.raises(ValueError, match="2 sequences .* without attention_mask.*pad_token_id is"):
        model(ids[:2])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])  # packed
    with pytest.raises(ValueError, match="restart within the 1 sequences.*a sequence of its own"):
        model(input_ids=torch.tensor([text(6)]), position_ids=positions)
    with pytest.raises(ValueError, match="attention_mask has 4 dimensions"):
        model(torch.tensor([text(6)]), attention_mask=torch.ones(1, 1, 6, 6))


@pytest.mark.parametrize(
    ("num_labels", "labels", "loss"),
    [
        (3, torch.tensor([0, 2, 1, 0]), F.cross_entropy),
        (1, torch.tensor([0.5, -1.0, 0.0, 2.0]), lambda a, b: F.mse_loss(a.squeeze(), b)),
        (3, torch.eye(4, 3), F.binary_cross_entropy_with_logits),
    ],
)
def test_losses_are_those_of_transformers(num_labels, labels, loss):
    model = tiny_classifier(num_labels).train()
    output = model(**batch(expanded_image(), "left"), labels=labels)
    assert (output.loss - loss(output.logits, labels)).abs() <= ATOL
    output.loss.backward()
    # Each parameter has a gradient, for which other processes would wait.
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("smoothing, kind", [(0.0, Judge), (0.1, ChatGLMForSequenceClassification)])
def test_a_trainer_averages_over_accumulated_batches_and_smooths(smoothing, kind, tmp_path):
    model, labels = tiny_classifier(kind=kind), torch.tensor([2, 0, 1])
    ids = torch.tensor([text(5, seed=row) for row in range(3)])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    want = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    options = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    options |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    options |= {"save_strategy": "no", "learning_rate": 0.0, "label_smoothing_factor": smoothing}
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    arguments = TrainingArguments(str(tmp_path), **options)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    actual = trainer.state.log_history[0]["loss"], trainer.evaluate()["eval_loss"]
    assert actual == pytest.approx((want.item(), want.item()), rel=1e-4)  # logged as rounded


@torch.no_grad()
@pytest.mark.parametrize("applied", [False, True], ids=["without the package", "apply()"])
def test_a_classifier_starts_from_a_language_model_and_loads_again(applied, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")

    def load(name: str, **options):
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / name, **options)

    torch.manual_seed(1)
    with remote_code_under(tmp_path / "modules"):
        with glm4v_patched.applied() if applied else nullcontext():
            classifier = load("model", num_labels=1, trust_remote_code=not applied)
        assert (type(classifier) is ChatGLMForSequenceClassification) is applied
        want = classifier.eval()(**batch(expanded_image())).logits
        assert want.shape == (4, 1)
        classifier.save_pretrained(tmp_path / "saved")
        weights = load_file(tmp_path / "saved" / "model.safetensors")
        assert "score.weight" in weights and "transformer.output_layer.weight" not in weights
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert config["architectures"] == ["ChatGLMForSequenceClassification"]
        again = load("saved", trust_remote_code=True)
        assert (again.eval()(**batch(expanded_image())).logits - want).abs().max() <= ATOL
        assert again.config.num_labels == 1
