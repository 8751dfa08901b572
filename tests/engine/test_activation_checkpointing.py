"""Activation checkpointing: every policy gives the same gradients and recomputes as promised."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm4v_patched.engine.activation_checkpointing import checkpoint_layers, compile_layers
from glm4v_patched.engine.options import LoraOptions
from glm4v_patched.engine.trainable import select_weights
from tests.helpers.tiny import expanded_image, random_pixels, shallow_model, text, tiny_model

LINEARS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
LAYERS = 2  # of each tower
# Recomputed operators in one tower layer and one block together: linear layers (a block's last one
# is not needed in backward; the tower's is, because a norm follows it), and attention.
RECOMPUTED = {
    ("linear", "linear"): (0, 0),
    ("selective", "none"): (2, 0),
    ("attention", "full"): (7, 1),
    ("full", "full"): (7, 2),
    ("every 2", "every 2"): (3.5, 1),
}


class OperatorCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.linears = self.attention = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        name = str(operator)
        self.linears += operator in LINEARS
        self.attention += "scaled_dot_product" in name and "backward" not in name
        return operator(*arguments, **(options or {}))


def train_once(tower, language, make=tiny_model, compiled=False):
    """Return loss, gradients, and the operators of the backward pass if it is not compiled."""
    model = make().train()
    checkpoint_layers(model, tower, language)
    if compiled:
        torch._dynamo.reset()
        compile_layers(model)
    ids = torch.tensor([text(5) + expanded_image() + text(9)])
    loss = model(input_ids=ids, labels=ids, pixel_values=random_pixels(1)).loss
    counter = OperatorCounter()
    with nullcontext() if compiled else counter:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, counter


@pytest.mark.parametrize("policies", RECOMPUTED)
def test_every_policy_gives_the_same_gradients_and_recomputes_what_it_promises(policies):
    loss, gradients, plain = train_once("none", "none")
    other_loss, others, counter = train_once(*policies)
    assert torch.equal(loss, other_loss) and gradients.keys() == others.keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    recomputed = counter.linears - plain.linears, counter.attention
    assert recomputed == tuple(LAYERS * number for number in RECOMPUTED[policies])


def test_outputs_of_loras_second_factor_are_recomputed_where_others_are_saved():
    ids, counts = torch.tensor([text(9)]), []
    for policy in ("none", "linear"):
        model = select_weights(tiny_model(), "lora_lm", LoraOptions(rank=2)).train()
        checkpoint_layers(model, policy, policy)
        loss = model(input_ids=ids, labels=ids).loss
        with OperatorCounter() as counter:
            loss.backward()
        counts.append(counter.linears)
    assert counts[1] - counts[0] == LAYERS


def test_every_second_layer_is_checkpointed_from_the_first():
    model = tiny_model(num_layers=5)
    checkpoint_layers(model, "none", "every 2")
    layers = model.transformer.encoder.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False, True]
    tower = model.transformer.vision.transformer.layers
    assert not any(layer.gradient_checkpointing for layer in tower)


@pytest.mark.newest
def test_compiled_layers_give_the_gradients_of_plain_ones(monkeypatch):
    """Uses inductor's graphs without its kernels, whose compilation takes most of the time. The
    kernels, and layers with adapters, are in tests/distributed/test_recipe_choices.py."""
    backend = "aot_eager_decomp_partition"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    loss, gradients, _ = train_once("none", "none", shallow_model)
    other_loss, others, _ = train_once("attention", "selective", shallow_model, compiled=True)
    torch.testing.assert_close(other_loss, loss, atol=1e-5, rtol=0)
    assert gradients.keys() == others.keys()
    for name in gradients:
        torch.testing.assert_close(others[name], gradients[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_dropout_is_the_same_when_a_layer_is_recomputed(policy):
    """Otherwise gradients would belong to another network than the loss."""
    ids = torch.tensor([text(9) + expanded_image() + text(9)])
    results = []
    for current in ("none", policy):
        torch.manual_seed(0)
        lora = LoraOptions(dropout=0.5, targets=("query_key_value", "dense_h_to_4h"))
        model = select_weights(tiny_model(), "lora_lm", lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        checkpoint_layers(model.train(), current, current)
        torch.manual_seed(1)
        model(input_ids=ids, labels=ids, pixel_values=random_pixels(1)).loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, msg=name)
