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
from tests.helpers.tiny import BOI, grown_image, padded, pictures, text, tiny_model
from tests.remote.rows import assert_equal, gradients

# transformers has it under another name, and with these options, from 5.23 on.
NAME = next(
    name
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    if hasattr(transformers.PreTrainedModel, name)
)
LAYER_OPTIONS = {"every_n_layers": 2, "offload": True}
PARAMETERS = inspect.signature(getattr(transformers.PreTrainedModel, NAME)).parameters
TAKEN = LAYER_OPTIONS.keys() & PARAMETERS.keys()


def with_option(name: str) -> pytest.MarkDecorator:
    reason = f"transformers is too old for {name}: pip install -U transformers"
    return pytest.mark.skipif(name not in TAKEN, reason=reason)


REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])


def batch(with_image: bool = True) -> dict[str, torch.Tensor]:
    image = grown_image() if with_image else []
    rows = [[*text(3, seed=1), *image, *text(6, seed=2)], text(7, seed=3)]
    inputs = padded(rows, "left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs | ({"pixel_values": pictures(1)} if with_image else {}) | {"labels": labels}


def packed_batch() -> dict[str, torch.Tensor]:
    row = [*text(3), *grown_image(), *text(4)]
    ids = torch.tensor([row + row])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == BOI, -100),
        "position_ids": torch.arange(len(row)).repeat(2)[None],
        "pixel_values": pictures(2),
        "skip_logits": True,
    }


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


INPUTS = {
    "an image": batch(),
    "text": batch(with_image=False),
    "packed, without logits": packed_batch(),
}


@REENTRANT
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_every_layer_is_recomputed_and_gradients_are_equal(inputs, use_reentrant):
    model = tiny_model().train()
    want = gradients(model, **inputs)
    # Either name: transformers 5.23 keeps the older one.
    method = NAME if use_reentrant else "gradient_checkpointing_enable"
    getattr(model, method)({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    runs = counted_runs(model)
    assert_equal(gradients(model, **inputs), want)
    idle = "vision" if "pixel_values" not in inputs else None
    assert all(number == (0 if idle and idle in name else 2) for name, number in runs.items())


@REENTRANT
def test_nothing_is_recomputed_in_eval_mode_without_gradients_or_once_disabled(use_reentrant):
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    runs = counted_runs(model)
    gradients(model, **batch())
    with torch.no_grad():
        model.train()(**batch())
    model.gradient_checkpointing_disable()
    gradients(model, **batch())
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
    gradients(model, **batch())
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
    want = gradients(adapted(target), **batch())
    model = adapted(target)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if target == LANGUAGE:
        model.enable_input_require_grads()
    got = gradients(model, **batch())
    assert_equal(got, want)
    assert all(gradient.norm() > 0 for gradient in got.values())
    assert set(got) == {"loss", *(n for n, p in model.named_parameters() if p.requires_grad)}


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_frozen_tower_is_neither_recomputed_nor_kept(use_reentrant):
    model = tiny_model().train()
    model.transformer.vision.requires_grad_(False)
    want = gradients(model, **batch())
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    runs, outputs = counted_runs(model), []
    model.transformer.vision.register_forward_hook(lambda *call: outputs.append(call[2]))
    assert_equal(gradients(model, **batch()), want)
    assert not outputs[0].requires_grad
    for name, number in runs.items():
        assert number == (1 if "vision" in name or use_reentrant is None else 2), name
    # What a caller asks for is another matter.
    pixels = pictures(1).requires_grad_()
    model(**batch() | {"pixel_values": pixels}).loss.backward()
    assert pixels.grad.norm() > 0


@REENTRANT
def test_a_layer_above_frozen_ones_alone_is_recomputed(use_reentrant):
    def half_frozen():
        model = tiny_model().train().requires_grad_(False)
        model.transformer.encoder.layers[1].requires_grad_(True)
        model.transformer.vision.transformer.layers[1].requires_grad_(True)
        return model

    want = gradients(half_frozen(), **batch())
    model = half_frozen()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    runs = counted_runs(model)
    assert_equal(gradients(model, **batch()), want)
    first = {name: number for name, number in runs.items() if "layers.0" in name}
    assert first.pop("transformer.vision.transformer.layers.0") == 1 and len(first) == 1


def enable(model, options=None, **layer_options) -> None:
    getattr(model, NAME)(options, **layer_options)


@with_option("every_n_layers")
def test_every_n_layers_is_honoured():
    model = tiny_model().train()
    want = gradients(model, **batch())
    enable(model, every_n_layers=2)
    runs = counted_runs(model)
    assert_equal(gradients(model, **batch()), want)
    assert sorted(runs.values()) == [1, 1, 2, 2], runs


@with_option("offload")
@REENTRANT
def test_offload_moves_what_goes_into_every_layer_of_both_towers(use_reentrant, monkeypatch):
    offloaded = set()

    class Recorded(torch.autograd.graph.save_on_cpu):
        """As torch's, without pinned memory, which only an accelerator has."""

        def __init__(self, pin_memory, **options):
            super().__init__(pin_memory=False, **options)
            pack = self.pack_hook

            def record(tensor):
                offloaded.add(tensor.data_ptr())
                return pack(tensor)

            self.pack_hook = record

    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", Recorded)
    model = tiny_model().train()
    want = gradients(model, **batch())
    enable(model, {"use_reentrant": use_reentrant}, offload=True)
    inputs = {}
    for name, layer in layers(model).items():
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
    assert_equal(gradients(model, **batch()), want)
    assert len(inputs) == 4
    for name, hidden in inputs.items():
        assert hidden.data_ptr() in offloaded, name


@pytest.mark.parametrize("option", LAYER_OPTIONS)
def test_layer_options_are_refused_where_they_have_no_effect(option):
    """Among those for torch, and where this transformers lacks them."""
    given = {option: LAYER_OPTIONS[option]}
    if option not in TAKEN:
        with pytest.raises(TypeError, match=option):
            tiny_model().train().gradient_checkpointing_enable(**given)
    for use_reentrant in (True, False):
        model = tiny_model().train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant, **given})
        with pytest.raises((TypeError, ValueError), match=option):
            gradients(model, **batch())


def test_a_cache_is_refused_if_filled_and_else_stays_empty():
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3]])
    filled = model(input_ids=ids, use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="holds 3 positions.*disable one"):
        model(input_ids=ids, past_key_values=filled)
    cache = DynamicCache(config=model.config)
    output = model(**batch(), past_key_values=cache, use_cache=True)
    output.loss.backward()
    assert output.past_key_values is None and cache.get_seq_length() == 0
