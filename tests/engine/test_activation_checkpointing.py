"""What layers keep and compute again, with and without compilation: the same gradients, as little
work as promised."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from glm4v_patched.engine.activation_checkpointing import checkpoint_layers, checkpointed_layers
from glm4v_patched.engine.compilation import compile_layers
from glm4v_patched.engine.options import TRAINED, LoraOptions
from glm4v_patched.engine.trainable import continue_adapters, select_weights
from tests.helpers.tiny import grown_image, pictures, text, tiny_model

LINEARS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
LAYERS = 2  # of each tower
# What is computed again in one layer of each tower together: linear layers (the last of a layer of
# the language model has no use in its backward; a norm follows the tower's), and attention.
AGAIN = {
    ("none", "none"): (0, 0),
    ("linear", "linear"): (0, 0),
    ("none", "selective"): (2, 0),
    ("selective", "none"): (2, 0),
    ("attention", "attention"): (7, 0),
    ("attention", "full"): (7, 1),
    ("full", "full"): (7, 2),
}


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.linears = self.attention = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        name = str(operator)
        self.linears += operator in LINEARS
        self.attention += "scaled_dot_product" in name and "backward" not in name
        return operator(*arguments, **(options or {}))


def train_once(tower, language, trained="full", compiled=False):
    torch.manual_seed(0)
    model = select_weights(tiny_model(), trained).train()
    checkpoint_layers(model, tower, language)
    if compiled:
        torch._dynamo.reset()
        compile_layers(model)
    ids = torch.tensor([text(5) + grown_image() + text(9)])
    loss = model(input_ids=ids, labels=ids, pixel_values=pictures(1)).loss
    if compiled:
        loss.backward()
        counted = None
    else:
        with Counted() as counted:
            loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, counted


@pytest.mark.parametrize("policies", [*AGAIN, ("every 2", "every 2")])
def test_every_policy_gives_the_gradients_of_keeping_everything(policies):
    loss, gradients, _ = train_once("none", "none")
    other_loss, others, _ = train_once(*policies)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("policies", AGAIN)
def test_a_policy_computes_again_what_it_does_not_keep(policies):
    _, _, plain = train_once("none", "none")
    _, _, counted = train_once(*policies)
    again = counted.linears - plain.linears, counted.attention
    assert again == tuple(LAYERS * number for number in AGAIN[policies])


def test_every_second_layer_is_checkpointed():
    model = tiny_model(num_layers=5)
    checkpoint_layers(model, "none", "every 2")
    layers = [layer.gradient_checkpointing for layer in checkpointed_layers(model)]
    assert layers.count(True) == 3
    assert [layer.gradient_checkpointing for layer in model.transformer.encoder.layers] == [
        True,
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("policy", ["some", "every", "every 0", "every two", "full 2", ""])
def test_a_policy_that_there_is_not_is_refused(policy):
    model = tiny_model()
    expected = "expected none, linear, selective, attention, full or 'every N'"
    with pytest.raises(ValueError, match=expected):
        checkpoint_layers(model, "full", policy)


@pytest.mark.newest
@pytest.mark.parametrize("trained", ["full", "lora_all"])
def test_compiled_layers_give_the_gradients_of_plain_ones(trained, monkeypatch):
    """By inductor's graphs, without its kernels: their building takes most of the time. They are in
    test_bench_command.py (full) and test_recipe_choices.py (lora_all) of tests/distributed."""
    backend = "aot_eager_decomp_partition"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    loss, gradients, _ = train_once("none", "none", trained)
    other_loss, others, _ = train_once("attention", "selective", trained, compiled=True)
    torch.testing.assert_close(other_loss, loss, atol=1e-5, rtol=0)
    assert gradients.keys() == others.keys()
    for name in gradients:
        torch.testing.assert_close(others[name], gradients[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("trained", "inside", "outside"),
    [
        ("full", "vision", None),
        ("lm", "encoder", "vision"),
        ("lora_lm", "encoder", "vision"),
        ("lora_all", "vision", None),
    ],
)
def test_what_is_trained(trained, inside, outside):
    model = select_weights(tiny_model(), trained)
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(inside in name for name in learned)
    assert not any(outside and outside in name for name in learned)
    assert all("lora_" in name for name in learned) == trained.startswith("lora")


@pytest.mark.parametrize(
    ("said", "alpha"), [({}, 6), ({"alpha": 5}, 5), ({"dropout": 0.25, "use_rslora": True}, 6)]
)
def test_what_is_said_of_lora_reaches_peft(said, alpha):
    model = select_weights(tiny_model(), "lora_lm", LoraOptions(rank=3, **said))
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (3, alpha)
    assert config.lora_dropout == said.get("dropout", 0)
    assert config.use_rslora is said.get("use_rslora", False) and not config.use_dora


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_adapters_that_do_not_fit_their_config_are_refused(tmp_path, change):
    """peft would warn, and leave what it does not find as new adapters begin."""
    select_weights(tiny_model(), "lora_lm").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(tensors))
    if change == "more":
        tensors[name.replace("lora", "lara")] = tensors[name].clone()
    else:
        del tensors[name]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    told = f"holds {len(tensors)} tensors, of which 1 do not fit its adapter_config.json"
    with pytest.raises(ValueError, match=told):
        continue_adapters(tiny_model(), tmp_path)


def test_an_unknown_choice_of_weights_is_refused():
    with pytest.raises(ValueError, match=f"'all'; expected one of {', '.join(TRAINED)}"):
        select_weights(tiny_model(), "all")
