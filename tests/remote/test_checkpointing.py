"""Activation checkpointing: recomputes both towers, through every way in, and changes no gradient.

Under ZeRO-3: tests/distributed.
"""

import inspect

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from glm4v_patched.remote.modeling_chatglm import GLMBlock
from glm4v_patched.remote.visual import TransformerLayer
from tests.helpers.tiny import grown_image, pictures, tiny_model
from tests.remote.rows import assert_equal, gradients, two_rows

# transformers has it under another name, and with these options, from 5.23 on.
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


def counted_runs(model) -> dict[str, int]:
    """Fills with the runs of each layer."""
    runs = {}
    for name, layer in layers(model).items():
        runs[name] = 0

        def counted(*inputs, name=name, original=layer.layer_forward):
            runs[name] += 1
            return original(*inputs)

        layer.layer_forward = counted
    assert len(runs) == 4
    return runs


@REENTRANT
@pytest.mark.parametrize("image", [grown_image(), []], ids=["an image", "text"])
def test_every_layer_is_recomputed_and_gradients_are_equal(image, use_reentrant):
    inputs = two_rows(image)
    model = tiny_model().train()
    want = gradients(model, **inputs)
    # Either name: transformers 5.23 keeps the older one.
    method = NAME if use_reentrant else "gradient_checkpointing_enable"
    getattr(model, method)({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    runs = counted_runs(model)
    assert_equal(gradients(model, **inputs), want)
    assert all(
        number == (2 if image or "vision" not in name else 0) for name, number in runs.items()
    )


@REENTRANT
def test_nothing_is_recomputed_in_eval_mode_without_gradients_or_once_disabled(use_reentrant):
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    runs = counted_runs(model)
    gradients(model, **two_rows())
    with torch.no_grad():
        model.train()(**two_rows())
    model.gradient_checkpointing_disable()
    gradients(model, **two_rows())
    assert set(runs.values()) == {3}  # once each


def test_a_replaced_checkpointing_function_gets_a_bound_method_and_hidden_states_first():
    """What DeepSpeed, Megatron-style offloaders and Unsloth look for; frameworks set it through
    transformers' own setter."""
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []

    def spy(function, *inputs, **kwargs):
        calls.append((function, inputs))
        return checkpoint(function, *inputs, use_reentrant=False)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=spy)
    gradients(model, **two_rows())
    assert {id(f.__self__) for f, _ in calls} == {id(layer) for layer in layers(model).values()}
    for function, inputs in calls:
        assert inspect.ismethod(function)
        width = 64 if isinstance(function.__self__, GLMBlock) else 32
        assert inputs[0].shape[-1] == width and inputs[0].requires_grad


def adapted(target: str):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=target, init_lora_weights=False)
    return get_peft_model(tiny_model(), config).train()


LANGUAGE = r".*encoder.*query_key_value"
LAST_VISION = r".*vision.*layers\.1.*query_key_value"


@REENTRANT
@pytest.mark.parametrize("target", [LANGUAGE, LAST_VISION])
def test_adapters_on_frozen_weights_get_plain_gradients(target, use_reentrant):
    want = gradients(adapted(target), **two_rows())
    model = adapted(target)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if target == LANGUAGE:
        model.enable_input_require_grads()
    got = gradients(model, **two_rows())
    assert_equal(got, want)
    assert all(gradient.norm() > 0 for gradient in got.values())
    assert set(got) == {"loss", *(n for n, p in model.named_parameters() if p.requires_grad)}


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_frozen_tower_is_neither_recomputed_nor_kept(use_reentrant):
    model = tiny_model().train()
    model.transformer.vision.requires_grad_(False)
    want = gradients(model, **two_rows())
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    runs, outputs = counted_runs(model), []
    model.transformer.vision.register_forward_hook(lambda *call: outputs.append(call[2]))
    assert_equal(gradients(model, **two_rows()), want)
    assert not outputs[0].requires_grad
    for name, number in runs.items():
        assert number == (1 if "vision" in name or use_reentrant is None else 2), name
    # What a caller asks for is another matter.
    pixels = pictures(1).requires_grad_()
    model(**two_rows() | {"pixel_values": pixels}).loss.backward()
    assert pixels.grad.norm() > 0


@REENTRANT
def test_a_layer_above_frozen_ones_alone_is_recomputed(use_reentrant):
    def half_frozen():
        model = tiny_model().train().requires_grad_(False)
        model.transformer.encoder.layers[1].requires_grad_(True)
        model.transformer.vision.transformer.layers[1].requires_grad_(True)
        return model

    want = gradients(half_frozen(), **two_rows())
    model = half_frozen()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    runs = counted_runs(model)
    assert_equal(gradients(model, **two_rows()), want)
    first = {name: number for name, number in runs.items() if "layers.0" in name}
    assert first.pop("transformer.vision.transformer.layers.0") == 1 and len(first) == 1


@pytest.mark.skipif(
    "every_n_layers" not in TAKEN, reason="transformers is too old: pip install -U transformers"
)
def test_layer_options_are_honoured_and_refused_where_they_have_no_effect():
    model = tiny_model().train()
    want = gradients(model, **two_rows())
    getattr(model, NAME)(every_n_layers=2)
    runs = counted_runs(model)
    assert_equal(gradients(model, **two_rows()), want)
    assert sorted(runs.values()) == [1, 1, 2, 2], runs
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False, "every_n_layers": 2})
    with pytest.raises((TypeError, ValueError), match="every_n_layers"):
        gradients(model, **two_rows())


def test_a_cache_is_refused_if_filled_and_else_stays_empty():
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3]])
    filled = model(input_ids=ids, use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="holds 3 positions.*disable one"):
        model(input_ids=ids, past_key_values=filled)
    cache = DynamicCache(config=model.config)
    output = model(**two_rows(), past_key_values=cache, use_cache=True)
    assert output.past_key_values is None and cache.get_seq_length() == 0
