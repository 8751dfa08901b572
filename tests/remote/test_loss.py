"""The loss: fp32, over supervised positions, the same with and without kept logits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import glm4v_patched.remote.loss as loss_module
from glm4v_patched.remote.loss import (
    computes_loss,
    next_token_loss,
    supervised_positions,
    with_loss,
)
from tests.helpers.tiny import (
    BOI,
    EOI,
    grown_image,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_model,
)

# fp32. The chunked path sums chunks where the other sums all at once: measured 4.8e-7 for losses of
# 7 (one unit in the last place), 1.3e-7 for gradients. A chunk left out must fail.
ATOL = 2e-6


def batch(image=None) -> dict[str, torch.Tensor]:
    """One row with an image and one without, supervised after the image; id 0 is one as others."""
    image = grown_image() if image is None else image
    rows = [[*text(3, seed=1), *image, 0, *text(7, seed=2), 0], text(16, seed=3)]
    inputs = padded(rows, "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :9] = -100
    return inputs | {"pixel_values": pictures(1), "labels": labels}


def step(model, inputs, **options):
    model.zero_grad()
    output = model(**inputs, **options)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_loss_is_the_cross_entropy_of_shifted_labels():
    inputs = batch()
    output = tiny_model()(**inputs)
    want = F.cross_entropy(
        output.logits[:, :-1].reshape(-1, 512).float(),
        inputs["labels"][:, 1:].flatten(),
    )
    assert output.loss.item() == pytest.approx(want.item(), abs=1e-6)


def test_loss_function_shifts_and_ignores():
    logits = torch.randn(2, 5, 7)
    labels = torch.tensor([[1, 2, -100, 3, 4], [-100, -100, 6, -100, -100]])
    kept = [(0, 0, 2), (0, 2, 3), (0, 3, 4), (1, 1, 6)]
    want = -sum(logits[b, p].log_softmax(-1)[label] for b, p, label in kept) / 4
    assert next_token_loss(logits, labels).item() == pytest.approx(want.item(), abs=1e-6)
    (rows, columns), targets = supervised_positions(labels)
    assert [*zip(rows.tolist(), columns.tolist(), targets.tolist(), strict=True)] == kept


@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 1024])
def test_loss_without_logits_equals_loss_with_logits(chunk_size, image):
    model = tiny_model(loss_chunk_size=chunk_size).train()
    plain, want = step(model, batch(image))
    chunked, got = step(model, batch(image), skip_logits=True)
    assert chunked.logits is None and plain.logits is not None
    assert chunked.loss.item() == pytest.approx(plain.loss.item(), abs=ATOL)
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= ATOL, name


def test_one_chunk_without_logits_gives_the_very_same_loss():
    model = tiny_model().train()
    plain, chunked = (model(**batch(), skip_logits=skip).loss for skip in (False, True))
    assert torch.equal(plain, chunked)


@pytest.mark.parametrize("chunk_size", [3, 6])
def test_skipped_logits_exist_for_one_chunk_at_a_time(chunk_size, monkeypatch):
    """Forward, and again in backward; and autograd keeps none of them."""
    model = tiny_model(loss_chunk_size=chunk_size).train()
    projected = []
    original = F.linear

    def spy(input, weight, bias=None):
        output = original(input, weight, bias)
        if weight.shape[0] == 512:
            projected.append(output.numel())
        return output

    monkeypatch.setattr(F, "linear", spy)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        loss = model(**batch(), skip_logits=True).loss
    supervised = int((supervised_positions(batch()["labels"])[1]).numel())
    assert supervised > 2 * chunk_size
    assert projected == [
        512 * min(chunk_size, supervised - start) for start in range(0, supervised, chunk_size)
    ]
    assert not [t.shape for t in kept if t.shape[-1:] == (512,) and t.ndim > 1]
    loss.backward()
    assert len(projected) == 2 * -(-supervised // chunk_size)
    assert max(projected) == 512 * chunk_size


def test_skip_logits_of_the_config_holds_in_training_only():
    model = tiny_model(skip_logits=True)
    assert model.train()(**batch()).logits is None
    assert model.train()(**batch(), skip_logits=False).logits is not None
    assert model.eval()(**batch()).logits is not None
    assert model.eval()(**batch(), skip_logits=True).logits is None
    without_labels = {k: v for k, v in batch().items() if k != "labels"}
    assert model.train()(**without_labels).logits is not None
    assert tiny_model().train()(**batch()).logits is not None


@pytest.mark.parametrize("skip_logits", [True, False])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_num_items_in_batch_divides_the_sum(as_tensor, skip_logits):
    model = tiny_model().train()
    number = supervised_positions(batch()["labels"])[1].numel()
    items = torch.tensor(number * 3) if as_tensor else number * 3
    mean = model(**batch(), skip_logits=skip_logits).loss
    got = model(**batch(), skip_logits=skip_logits, num_items_in_batch=items).loss
    assert got.item() == pytest.approx(mean.item() / 3, abs=1e-6)


@pytest.mark.parametrize("skip_logits", [True, False])
def test_accumulated_micro_batches_equal_one_batch(skip_logits):
    model = tiny_model(loss_chunk_size=4).train()
    whole = {name: value for name, value in batch().items() if name != "pixel_values"}
    halves = [{name: value[i : i + 1] for name, value in whole.items()} for i in range(2)]
    whole["pixel_values"] = halves[0]["pixel_values"] = pictures(1)
    _, want = step(model, whole)
    model.zero_grad()
    items = supervised_positions(whole["labels"])[1].numel()
    for half in halves:
        model(**half, num_items_in_batch=items, skip_logits=skip_logits).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - want[name]).abs().max() <= ATOL, name


@pytest.mark.parametrize("skip_logits", [True, False])
def test_nothing_supervised_gives_zero_with_a_graph(skip_logits):
    model = tiny_model().train()
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    output, gradients = step(model, inputs, skip_logits=skip_logits)
    assert output.loss.item() == 0
    assert output.loss.requires_grad
    assert all(gradient.abs().max() == 0 for gradient in gradients.values())


@pytest.mark.parametrize("skip_logits", [True, False])
def test_loss_of_a_bf16_model_is_computed_in_fp32(skip_logits):
    model = tiny_model(torch.bfloat16).train()
    output = model(**batch(), skip_logits=skip_logits)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() != output.loss.bfloat16().item()
    if not skip_logits:
        assert output.logits.dtype == torch.bfloat16
    logits = model(**batch()).logits
    rows, targets = supervised_positions(batch()["labels"])
    want = F.cross_entropy(logits[rows].float(), targets)
    assert output.loss.item() == pytest.approx(want.item(), abs=1e-6)


@pytest.mark.parametrize("skip_logits", [True, False])
def test_a_label_after_an_image_is_learned_at_the_image_end(skip_logits):
    """Of an image only its end predicts text, and what precedes it predicts its begin."""
    model = tiny_model().train()
    row = torch.tensor([[*text(2), *grown_image(), *text(2)]])
    inputs = {"input_ids": row, "pixel_values": pictures(1)}
    labels = torch.full_like(row, -100)
    labels[0, 8] = row[0, 8]
    got = model(**inputs, labels=labels, skip_logits=skip_logits).loss
    logits = model(**inputs).logits[0, 7]
    assert row[0, 7] == EOI and row[0, 2] == BOI
    want = F.cross_entropy(logits[None], row[0, 8:9])
    assert got.item() == pytest.approx(want.item(), abs=1e-6)


def test_labels_on_another_device_move_to_the_logits():
    """As the meta device can show: labels are not asked where they are before they are moved."""
    moved = []

    class Labels:
        def to(self, device):
            moved.append(device)
            return torch.tensor([[1, 2]])

    next_token_loss(torch.randn(1, 2, 4), Labels())
    with_loss(torch.nn.Linear(3, 4, bias=False))(torch.randn(1, 2, 3), Labels())
    assert moved == [torch.device("cpu")] * 2


def test_output_layer_without_labels_is_a_linear_layer():
    layer = with_loss(torch.nn.Linear(8, 16, bias=False))
    hidden = torch.randn(2, 3, 8)
    assert torch.equal(layer(hidden), F.linear(hidden, layer.weight))


def test_the_output_layer_is_a_plain_linear_to_whoever_asks_for_its_class():
    """compressed-tensors writes what it leaves alone by the exact class."""
    model = tiny_model()
    assert type(model.transformer.output_layer) is torch.nn.Linear
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Linear}
    copied = copy.deepcopy(model)
    assert computes_loss(copied.transformer.output_layer)
    assert copied.transformer.output_layer.forward.__self__ is copied.transformer.output_layer
    # What was pickled whole computes its loss outside of the layer.
    pickled = pickle.loads(pickle.dumps(model.transformer.output_layer))
    hidden = torch.randn(1, 2, model.config.hidden_size)
    assert torch.equal(pickled(hidden), model.transformer.output_layer(hidden))


def test_output_layer_runs_its_forward_once_a_step(monkeypatch):
    """A sharded weight is gathered for that forward, so chunks must not repeat it."""
    model = tiny_model(loss_chunk_size=2).train()
    calls = []
    model.transformer.output_layer.register_forward_pre_hook(lambda *call: calls.append(call))
    model(**batch(), skip_logits=True).loss.backward()
    assert len(calls) == 1
    assert loss_module.IGNORE_INDEX == -100


@pytest.mark.parametrize("targets", ["modules_to_save", "target_modules"])
def test_skipped_logits_stay_skipped_when_peft_wraps_the_output_layer(targets):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"target_modules": ["query_key_value"], targets: ["output_layer"]})
    model = get_peft_model(tiny_model(), config)
    ids = torch.tensor([text(9)])
    output = model(input_ids=ids, labels=ids, skip_logits=True)
    assert output.logits is None
    want = model(input_ids=ids, labels=ids, skip_logits=False).loss
    torch.testing.assert_close(output.loss, want)


@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("number", [0, torch.tensor(0)])
def test_no_items_in_the_batch_give_zero(number, skip_logits):
    ids = torch.tensor([text(9)])
    labels = torch.full_like(ids, -100)
    model = tiny_model()
    loss = model(
        input_ids=ids, labels=labels, skip_logits=skip_logits, num_items_in_batch=number
    ).loss
    assert loss.item() == 0


def test_labels_of_another_integer_type_are_taken():
    ids = torch.tensor([text(9)])
    model = tiny_model()
    assert torch.equal(
        model(input_ids=ids, labels=ids.int()).loss, model(input_ids=ids, labels=ids).loss
    )
