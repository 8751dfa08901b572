"""The loss: fp32, over supervised positions, the same with and without kept logits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from glm4v_patched.remote.loss import (
    computes_loss,
    next_token_loss,
    supervised_positions,
)
from tests.helpers.tiny import EOI, grown_image, padded, pictures, text, tiny_model
from tests.remote.rows import gradients

# fp32. The chunked path sums chunks where the other sums all at once: measured 4.8e-7 for losses of
# 7 (one unit in the last place), 1.3e-7 for gradients. A chunk left out must fail.
ATOL = 2e-6
SKIPPED_OR_NOT = pytest.mark.parametrize("skip_logits", [True, False])


def batch(image=None) -> dict[str, torch.Tensor]:
    """One row with an image and one without, supervised after the image; id 0 is one as others."""
    image = grown_image() if image is None else image
    rows = [[*text(3, seed=1), *image, 0, *text(7, seed=2), 0], text(16, seed=3)]
    inputs = padded(rows, "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :9] = -100
    return inputs | {"pixel_values": pictures(1), "labels": labels}


NUM_SUPERVISED = supervised_positions(batch()["labels"])[1].numel()


def assert_close(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= ATOL, name


def test_the_loss_is_the_cross_entropy_of_what_follows():
    logits = torch.randn(2, 5, 7)
    labels = torch.tensor([[1, 2, -100, 3, 4], [-100, -100, 6, -100, -100]])
    kept = [(0, 0, 2), (0, 2, 3), (0, 3, 4), (1, 1, 6)]
    want = -sum(logits[b, p].log_softmax(-1)[label] for b, p, label in kept) / 4
    assert next_token_loss(logits, labels).item() == pytest.approx(want.item(), abs=1e-6)
    (rows, columns), targets = supervised_positions(labels)
    assert [*zip(rows.tolist(), columns.tolist(), targets.tolist(), strict=True)] == kept


@pytest.mark.parametrize("chunk_size", [3, 1024])
def test_loss_without_logits_equals_loss_with_logits(chunk_size, image):
    model = tiny_model(loss_chunk_size=chunk_size).train()
    want, got = (gradients(model, **batch(image), skip_logits=skip) for skip in (False, True))
    assert_close(got, want)
    if chunk_size == 1024:
        assert torch.equal(got["loss"], want["loss"])


def test_skipped_logits_exist_for_one_chunk_at_a_time(monkeypatch):
    """Forward, and again in backward; and autograd keeps none of them. The output layer runs once:
    a sharded weight is gathered for that."""
    chunk_size = 3
    model = tiny_model(loss_chunk_size=chunk_size).train()
    projected, kept, runs = [], [], []
    original = F.linear

    def spy(input, weight, bias=None):
        output = original(input, weight, bias)
        if weight.shape[0] == 512:
            projected.append(output.numel())
        return output

    monkeypatch.setattr(F, "linear", spy)
    model.transformer.output_layer.register_forward_pre_hook(lambda *call: runs.append(call))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        loss = model(**batch(), skip_logits=True).loss
    starts = range(0, NUM_SUPERVISED, chunk_size)
    assert len(starts) > 2
    assert projected == [512 * min(chunk_size, NUM_SUPERVISED - start) for start in starts]
    assert not [t.shape for t in kept if t.shape[-1:] == (512,) and t.ndim > 1]
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


@SKIPPED_OR_NOT
@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_num_items_in_batch_divides_the_sum(kind, skip_logits):
    model = tiny_model().train()
    mean = model(**batch(), skip_logits=skip_logits).loss.item()
    for divisor in (NUM_SUPERVISED * 3, 1, 0):  # 0, of a step without labels, is 1
        options = {"skip_logits": skip_logits, "num_items_in_batch": kind(divisor)}
        got = model(**batch(), **options).loss.item()
        assert got == pytest.approx(mean * NUM_SUPERVISED / max(divisor, 1), rel=1e-6)


@SKIPPED_OR_NOT
def test_accumulated_micro_batches_equal_one_batch(skip_logits):
    model = tiny_model(loss_chunk_size=4).train()
    whole = {name: value for name, value in batch().items() if name != "pixel_values"}
    halves = [{name: value[i : i + 1] for name, value in whole.items()} for i in range(2)]
    whole["pixel_values"] = halves[0]["pixel_values"] = pictures(1)
    want = gradients(model, **whole)
    options = {"num_items_in_batch": NUM_SUPERVISED, "skip_logits": skip_logits}
    first, second = (gradients(model, **half, **options) for half in halves)
    assert_close({name: first[name] + second.get(name, 0) for name in first}, want)


@SKIPPED_OR_NOT
@pytest.mark.parametrize("number", [None, torch.tensor(0)])
def test_nothing_supervised_gives_zero_with_a_graph(number, skip_logits):
    inputs = batch() | {"num_items_in_batch": number, "skip_logits": skip_logits}
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    found = gradients(tiny_model().train(), **inputs)
    assert len(found) > 50 and not any(value.any() for value in found.values())


@SKIPPED_OR_NOT
def test_the_loss_of_a_bf16_model_is_computed_in_fp32(skip_logits):
    model = tiny_model(torch.bfloat16).train()
    loss = model(**batch(), skip_logits=skip_logits).loss
    assert loss.dtype == torch.float32 and loss.item() != loss.bfloat16().item()
    logits = model(**batch()).logits
    assert logits.dtype == torch.bfloat16
    rows, targets = supervised_positions(batch()["labels"])
    want = F.cross_entropy(logits[rows].float(), targets)
    assert loss.item() == pytest.approx(want.item(), abs=1e-6)


@SKIPPED_OR_NOT
def test_a_label_after_an_image_is_learned_at_the_image_end(skip_logits):
    """Of an image only its end predicts text, and what precedes it predicts its begin."""
    model = tiny_model().train()
    row = torch.tensor([[*text(2), *grown_image(), *text(2)]])
    inputs = {"input_ids": row, "pixel_values": pictures(1)}
    labels = torch.full_like(row, -100)
    labels[0, 8] = row[0, 8]
    got = model(**inputs, labels=labels.int(), skip_logits=skip_logits).loss
    assert row[0, 7] == EOI
    want = F.cross_entropy(model(**inputs).logits[0, 7:8], row[0, 8:9])
    assert got.item() == pytest.approx(want.item(), abs=1e-6)


def test_the_output_layer_is_a_plain_linear_to_whoever_asks_for_its_class():
    model = tiny_model()
    layer = model.transformer.output_layer
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Linear}
    copied = copy.deepcopy(model).transformer.output_layer
    assert computes_loss(copied) and copied.forward.__self__ is copied
    # What was pickled whole computes its loss outside of the layer.
    hidden = torch.randn(1, 2, model.config.hidden_size)
    for other in (layer, pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(hidden), F.linear(hidden, layer.weight))


@pytest.mark.parametrize("targets", ["modules_to_save", "target_modules"])
def test_skipped_logits_stay_skipped_when_peft_wraps_the_output_layer(targets):
    config = LoraConfig(**{"target_modules": ["query_key_value"], targets: ["output_layer"]})
    model = get_peft_model(tiny_model(), config)
    ids = torch.tensor([text(9)])
    output = model(input_ids=ids, labels=ids, skip_logits=True)
    assert output.logits is None
    want = model(input_ids=ids, labels=ids, skip_logits=False).loss
    torch.testing.assert_close(output.loss, want)
