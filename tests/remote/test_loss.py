"""The loss: fp32, over supervised tokens, with and without logits, and with logits_to_keep."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model

from glm4v_patched.remote.loss import has_fused_cross_entropy, supervised_positions
from tests.helpers.refused import refused
from tests.helpers.tiny import (
    expanded_image,
    padded,
    random_pixels,
    text,
    tiny_model,
    unexpanded_image,
)
from tests.remote.inputs import assert_close, gradients

# fp32. The chunked path sums chunks where the other sums all at once: measured 4.8e-7 for losses of
# 7 (one unit in the last place), 5e-7 for gradients. A chunk left out must fail.
ATOL = 5e-6


def batch(image=None) -> dict[str, torch.Tensor]:
    """A sequence with an image and one without, supervised after the image; id 0 is a label."""
    image = expanded_image() if image is None else image
    rows = [[*text(3, seed=1), *image, 0, *text(7, seed=2), 0], text(16, seed=3)]
    inputs = padded(rows, "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :9] = -100
    return inputs | {"pixel_values": random_pixels(1), "labels": labels}


NUM_SUPERVISED = supervised_positions(batch()["labels"])[1].numel()


@pytest.mark.parametrize("chunk_size", [3, 1024])
def test_loss_without_logits_equals_loss_with_logits(chunk_size, image):
    model = tiny_model(loss_chunk_size=chunk_size).train()
    want, actual = (gradients(model, **batch(image), skip_logits=skip) for skip in (False, True))
    assert_close(actual, want, ATOL)
    if chunk_size == 1024:
        assert torch.equal(actual["loss"], want["loss"])


def test_skipped_logits_exist_for_one_chunk_at_a_time(monkeypatch):
    """Forward, and again in backward; and autograd keeps none of them. The output layer runs once:
    a sharded weight is gathered for that."""
    chunk_size = 3
    model = tiny_model(loss_chunk_size=chunk_size).train()
    projected, saved, runs = [], [], []
    original = F.linear

    def spy(input, weight, bias=None):
        output = original(input, weight, bias)
        if weight.shape[0] == 512:
            projected.append(output.numel())
        return output

    monkeypatch.setattr(F, "linear", spy)
    model.transformer.output_layer.register_forward_pre_hook(lambda *call: runs.append(call))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        loss = model(**batch(), skip_logits=True).loss
    starts = range(0, NUM_SUPERVISED, chunk_size)
    assert projected == [512 * min(chunk_size, NUM_SUPERVISED - start) for start in starts]
    assert not [t.shape for t in saved if t.shape[-1:] == (512,) and t.ndim > 1]
    loss.backward()
    assert len(projected) == 2 * len(starts) and max(projected) == 512 * chunk_size
    assert len(runs) == 1


def test_skip_logits_of_the_config_holds_in_training_only():
    model = tiny_model(skip_logits=True)
    assert model.train()(**batch()).logits is None
    assert model.train()(**batch(), skip_logits=False).logits is not None
    assert model.train()(**batch() | {"labels": None}).logits is not None
    assert model.eval()(**batch()).logits is not None
    assert model.eval()(**batch(), skip_logits=True).logits is None


@pytest.mark.parametrize("skip_logits", [True, False])
def test_num_items_in_batch_divides_the_sum_also_of_nothing(skip_logits):
    model = tiny_model().train()
    options = {"skip_logits": skip_logits}
    mean = model(**batch(), **options).loss.item()
    kind = torch.tensor if skip_logits else int
    for divisor in (NUM_SUPERVISED * 3, 1, 0):  # 0, of a step without labels, is 1
        actual = model(**batch(), **options, num_items_in_batch=kind(divisor)).loss.item()
        assert actual == pytest.approx(mean * NUM_SUPERVISED / max(divisor, 1), rel=1e-6)
    for number in (None, kind(0)):
        nothing = batch() | {"labels": torch.full_like(batch()["labels"], -100)}
        by_name = gradients(model, **nothing, **options, num_items_in_batch=number)
        assert len(by_name) > 50 and not any(value.any() for value in by_name.values())


@pytest.mark.parametrize("skip_logits", [True, False])
def test_the_loss_of_a_bf16_model_is_computed_in_fp32(skip_logits):
    model = tiny_model(torch.bfloat16).train()
    loss = model(**batch(), skip_logits=skip_logits).loss
    assert loss.dtype == torch.float32 and loss.item() != loss.bfloat16().item()
    logits = model(**batch()).logits
    rows, targets = supervised_positions(batch()["labels"])
    want = F.cross_entropy(logits[rows].float(), targets)
    assert loss.item() == pytest.approx(want.item(), abs=1e-6)
    of_32_bits = batch() | {"labels": batch()["labels"].int()}
    assert torch.equal(model(**of_32_bits, skip_logits=skip_logits).loss, loss)


def test_the_output_layer_is_a_plain_linear_to_whoever_asks_for_its_class():
    """compressed-tensors saves the layers that it ignores by their exact class."""
    model = tiny_model()
    layer = model.transformer.output_layer
    assert type(layer) is torch.nn.Linear
    copied = copy.deepcopy(model).transformer.output_layer
    assert has_fused_cross_entropy(copied) and copied.forward.__self__ is copied
    # An unpickled layer does not compute the loss itself.
    hidden = torch.randn(1, 2, model.config.hidden_size)
    for other in (layer, pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(hidden), F.linear(hidden, layer.weight))
    # Behind a hook of accelerate's, and as peft wraps it.
    assert has_fused_cross_entropy(add_hook_to_module(copied, ModelHook()))
    config = LoraConfig(target_modules=["query_key_value"], modules_to_save=["output_layer"])
    model, ids = get_peft_model(model, config), torch.tensor([text(9)])
    skipped, plain = (model(ids, labels=ids, skip_logits=skip) for skip in (True, False))
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, plain.loss)


def two_images(image: list[int]) -> dict[str, torch.Tensor]:
    """Two sequences with an image each, whose last 5 and 3 ids are supervised."""
    rows = [[*text(3, seed=1), *image, *text(6, seed=2)], [*image, *text(5, seed=3)]]
    inputs = padded(rows, "left") | {"pixel_values": random_pixels(2)}
    labels = inputs["input_ids"].clone()
    for row, number in enumerate((5, 3)):
        labels[row, :-number] = -100
    return inputs | {"labels": labels}


def cut(inputs: dict, way: str) -> tuple[dict, torch.Tensor]:
    """Return inputs with cut labels, and the selected positions ``(B, K)``."""
    labels = inputs["labels"]
    length = labels.shape[1]
    columns = torch.arange(length).expand_as(labels)
    if way == "last":
        selection, columns = 6, columns[:, -6:]
        labels = labels[:, -6:]
    else:
        # As ms-swift does: positions that predict a label, and the last one.
        is_label = (labels != -100).any(dim=0)
        labels = F.pad(labels[:, is_label], (1, 0), value=-100)
        selection = F.pad(is_label[1:], (0, 1), value=True)
        columns = columns[:, selection]
        if "indices" in way:
            selection = selection.nonzero().flatten() - (length if way == "negative indices" else 0)
    return inputs | {"labels": labels, "logits_to_keep": selection}, columns


def of_columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return values[torch.arange(len(values))[:, None], columns]


@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("way", ["last", "mask", "negative indices"])
def test_labels_cut_to_the_kept_positions_are_learned_as_whole_ones(way, skip_logits):
    model = tiny_model().train()
    whole = two_images(expanded_image()) | {"num_items_in_batch": 20 if skip_logits else None}
    inputs, columns = cut(whole, way)
    assert inputs["labels"].shape[1] < whole["labels"].shape[1]
    want = gradients(model, **whole)
    assert_close(gradients(model, **inputs, skip_logits=skip_logits), want, ATOL)
    every = model(**whole)
    assert (model(**inputs).logits - of_columns(every.logits, columns)).abs().max() <= ATOL
    # Labels of all positions count, whatever logits are returned.
    actual = model(**whole, logits_to_keep=inputs["logits_to_keep"])
    assert torch.equal(actual.loss, every.loss)
    assert torch.equal(actual.logits, of_columns(every.logits, columns))
    more = model(**whole, logits_to_keep=whole["labels"].shape[1] + 1)
    assert torch.equal(more.loss, every.loss) and torch.equal(more.logits, every.logits)
    last = model(**whole | {"labels": None}, return_last_logit=True).logits  # as published
    assert last.shape[1] == 1 and (last - every.logits[:, -1:]).abs().max() <= ATOL


def test_unexpanded_prompts_may_select_logits_of_text_after_images_only(model):
    whole = two_images(unexpanded_image())
    for way in ("last", "mask"):
        with pytest.raises(ValueError, match=r"prompts of 12 ids expand to 15 .* give expanded"):
            model(**cut(whole, way)[0])
    whole["labels"][:, :-4] = -100  # the one before predicts the first of these
    want = model(**whole)
    actual = model(**whole | {"labels": whole["labels"][:, -5:]}, logits_to_keep=5)
    assert (actual.loss - want.loss).abs() <= ATOL
    assert (actual.logits - want.logits[:, -5:]).abs().max() <= ATOL


SHORT = torch.arange(9) < 3
REFUSED = {
    "labels without rows": (torch.ones(15, dtype=torch.long), 3, "(15,)", "(2, 15)"),
    "labels of neither length": (torch.ones(2, 20, dtype=torch.long), 20, "20 col", "selects 15"),
    "below 0": (None, -3, "-3"),
    "a short mask": (two_images(expanded_image())["labels"][:, :3], SHORT, "9 columns"),
    "a mask of each row": (None, SHORT.expand(2, -1), "2 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_logits_to_keep_are_refused_with_both_numbers(model, case):
    labels, selection, *named = REFUSED[case]
    inputs = two_images(expanded_image())
    inputs["labels"] = inputs["labels"] if labels is None else labels
    with refused(ValueError, *named):
        model(**inputs, logits_to_keep=selection)
    labels = two_images(expanded_image())["labels"]
    twice = {"labels": labels[:, -4:], "shift_labels": labels.roll(-1, dims=1)}
    with pytest.raises(ValueError, match="labels of 4 selected columns were given together"):
        model(**inputs | twice, logits_to_keep=4)
