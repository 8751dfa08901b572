"""Activation checkpointing recomputes tower and decoder and changes no gradient.

Under ZeRO-3: tests/distributed.
"""

import inspect
from contextlib import nullcontext

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from glm4v_patched.remote.checkpointing import keep_frozen_parameters_gathered
from glm4v_patched.remote.modeling_chatglm import GLMBlock
from glm4v_patched.remote.visual import TransformerLayer
from tests.helpers.steps import count_runs
from tests.helpers.tiny import random_pixels, tiny_model
from tests.remote.inputs import assert_close, gradients, two_sequences

# transformers 5.23 renamed the method and added options.
NAME = next(
    name
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    if hasattr(transformers.PreTrainedModel, name)
)
TAKEN = inspect.signature(getattr(transformers.PreTrainedModel, NAME)).parameters
REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])


def layers(model) -> dict[str, torch.nn.Module]:
    kinds = GLMBlock, TransformerLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


@REENTRANT
def test_nothing_is_recomputed_in_eval_mode_without_gradients_or_once_disabled(use_reentrant):
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    runs = count_runs(model)
    gradients(model, **two_sequences())
    with torch.no_grad():
        model.train()(**two_sequences())
    model.gradient_checkpointing_disable()
    gradients(model, **two_sequences())
    assert set(runs.values()) == {3}  # once each


def test_a_replaced_checkpointing_function_gets_a_bound_method_and_hidden_states_first():
    """DeepSpeed, Megatron-style offloaders and Unsloth rely on both. Frameworks set the function
    by transformers' own setter."""
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []

    def spy(function, *inputs, **kwargs):
        calls.append((function, inputs))
        return checkpoint(function, *inputs, use_reentrant=False)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=spy)
    gradients(model, **two_sequences())
    assert {id(f.__self__) for f, _ in calls} == {id(layer) for layer in layers(model).values()}
    for function, inputs in calls:
        assert inspect.ismethod(function)
        width = 64 if isinstance(function.__self__, GLMBlock) else 32
        assert inputs[0].shape[-1] == width and inputs[0].requires_grad


def adapted(target: str):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=target, init_lora_weights=False)
    return get_peft_model(tiny_model(), config).train()


def half_frozen():
    """Freeze all but the last layers: inputs of frozen layers need no gradient, with which
    reentrant checkpoints alone would fail."""
    model = tiny_model().train().requires_grad_(False)
    model.transformer.encoder.layers[1].requires_grad_(True)
    model.transformer.vision.transformer.layers[1].requires_grad_(True)
    return model


def frozen_tower():
    model = tiny_model().train()
    model.transformer.vision.requires_grad_(False)
    return model


FROZEN = {
    "nothing": lambda: tiny_model().train(),
    "the tower": frozen_tower,
    "all but adapters": lambda: adapted(r".*encoder.*query_key_value"),
    "all but adapters of the tower": lambda: adapted(r".*vision.*layers\.1.*query_key_value"),
    "the first layers": half_frozen,
}


@REENTRANT
@pytest.mark.parametrize("make", FROZEN.values(), ids=FROZEN)
def test_checkpointing_recomputes_trained_layers_and_changes_no_gradient(make, use_reentrant):
    want = gradients(make(), **two_sequences())
    model = make()
    # Test both names: transformers 5.23 keeps the older one.
    method = NAME if use_reentrant else "gradient_checkpointing_enable"
    getattr(model, method)({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    if make in (FROZEN["all but adapters"], frozen_tower):
        model.enable_input_require_grads()
    runs = count_runs(model)
    actual = gradients(model, **two_sequences())
    assert_close(actual, want)
    assert all(gradient.norm() > 0 for gradient in actual.values())
    assert set(actual) == {"loss", *(n for n, p in model.named_parameters() if p.requires_grad)}
    for name, layer in layers(model).items():
        # One trained weight is enough: ZeRO-3 also needs a gradient of the input.
        if any(p.requires_grad for p in layer.parameters()):
            assert runs[name] == 2, name
        elif name == "transformer.vision.transformer.layers.0":
            assert runs[name] == 1, "nothing before it is trained"


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_frozen_tower_saves_nothing_for_backward_unless_inputs_train(use_reentrant):
    """Also if a framework makes the inputs of the tower's layers require grad."""
    model, outputs = frozen_tower(), []
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    tower = model.transformer.vision
    embeddings = tower.patch_embedding
    embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    tower.register_forward_hook(lambda *call: outputs.append(call[2].requires_grad))
    pixels = random_pixels(1).requires_grad_()
    for image_inputs in ({}, {"pixel_values": pixels}):
        model(**two_sequences() | image_inputs).loss.backward()
    with torch.no_grad():  # of whoever asks for features alone
        model(**two_sequences())
    tower.boi.requires_grad_(True)
    model(**two_sequences())
    assert outputs == [False, True, False, True]
    assert pixels.grad.norm() > 0


@pytest.mark.skipif(
    "every_n_layers" not in TAKEN, reason="transformers is too old: pip install -U transformers"
)
def test_layer_options_are_honored_and_refused_where_they_have_no_effect():
    model = tiny_model().train()
    want = gradients(model, **two_sequences())
    getattr(model, NAME)(every_n_layers=2)
    runs = count_runs(model)
    assert_close(gradients(model, **two_sequences()), want)
    assert sorted(runs.values()) == [1, 1, 2, 2], runs
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False, "every_n_layers": 2})
    with pytest.raises((TypeError, ValueError), match="every_n_layers"):
        gradients(model, **two_sequences())


def test_a_cache_is_refused_if_filled_and_else_stays_empty():
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3]])
    filled = model(input_ids=ids, use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="holds 3 entries.*pass no cache"):
        model(input_ids=ids, past_key_values=filled)
    cache = DynamicCache(config=model.config)
    output = model(**two_sequences(), past_key_values=cache, use_cache=True)
    assert output.past_key_values is None and cache.get_seq_length() == 0


# What it does to ZeRO-3's bookkeeping, on parameters that only look like ZeRO-3's

OUTER_MODULE = 99  # the id of a module outside of the layer


@pytest.fixture
def layer() -> nn.Sequential:
    """A frozen layer with the attributes that ZeRO-3 adds to modules and parameters."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).requires_grad_(False)
    for number, part in enumerate(layer.modules()):
        part.ds_id = number
        part.ds_recompute_parameters = set()
        for parameter in part.parameters(recurse=False):
            parameter.ds_active_sub_modules = set()
    return layer


def users(layer: nn.Module) -> list[set[int]]:
    return [parameter.ds_active_sub_modules.copy() for parameter in layer.parameters()]


def in_backward(function) -> None:
    """Call ``function`` where a checkpoint recomputes: inside a running backward pass."""
    called = []

    def recompute(gradient):
        called.append(True)
        function()

    output = torch.ones(1, requires_grad=True).clone()
    output.register_hook(recompute)
    output.backward()
    assert called


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_parameters_stay_gathered_through_the_recomputation_and_no_longer(layer, fails):
    """ZeRO-3 partitions a parameter after a module's forward unless it still has a user. DeepSpeed
    0.19.3 enters the module whose backward is under way, and keeps a list there."""
    trained = layer[0].weight.requires_grad_(True)  # is left alone
    trained.ds_active_sub_modules.add(OUTER_MODULE)

    def recompute():
        with keep_frozen_parameters_gathered(layer):
            for module in layer:
                frozen = [p for p in module.parameters() if not p.requires_grad]
                for parameter in frozen:
                    # As ZeRO-3's hooks do around a forward.
                    parameter.ds_active_sub_modules.add(module.ds_id)
                    parameter.ds_active_sub_modules.discard(module.ds_id)
                    assert parameter.ds_active_sub_modules
                    # Of the backward pass.
                    parameter.ds_active_sub_modules |= {module.ds_id, OUTER_MODULE}
                module.ds_recompute_parameters.update(frozen)
            assert trained.ds_active_sub_modules == {OUTER_MODULE}
            if fails:
                raise RuntimeError("in the layer")

    with pytest.raises(RuntimeError, match="in the layer") if fails else nullcontext():
        in_backward(recompute)
    want = [{OUTER_MODULE}, {layer[0].ds_id}, *[{layer[1].ds_id}] * 2]
    assert users(layer) == want
    assert [module.ds_recompute_parameters for module in layer.modules()] == [set()] * 3
    with keep_frozen_parameters_gathered(layer):  # outside of a backward pass
        assert users(layer) == want
