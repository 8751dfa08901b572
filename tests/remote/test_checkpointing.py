"""Activation checkpointing: recomputes both towers, through every way in, and changes no gradient.

Under ZeRO-3: tests/distributed.
"""

import inspect

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from glm4v_patched.remote.modeling_chatglm import GLMBlock
from glm4v_patched.remote.visual import TransformerLayer
from tests.helpers.tiny import BOI, grown_image, padded, pictures, text, tiny_model

HAS_ACTIVATION_CHECKPOINTING = hasattr(
    transformers.PreTrainedModel, "activation_checkpointing_enable"
)
with_activation_checkpointing = pytest.mark.skipif(
    not HAS_ACTIVATION_CHECKPOINTING,
    reason="transformers has activation_checkpointing_enable, every_n_layers from 5.23 on",
)
# Versions before 5.23 have some of them or none, under the old name of the method.
ENABLE = getattr(
    transformers.PreTrainedModel,
    f"{'activation' if HAS_ACTIVATION_CHECKPOINTING else 'gradient'}_checkpointing_enable",
)
LAYER_OPTIONS = {"every_n_layers": 2, "offload": True}
TAKEN = LAYER_OPTIONS.keys() & inspect.signature(ENABLE).parameters.keys()


def with_option(name: str) -> pytest.MarkDecorator:
    reason = f"transformers is too old for {name}: pip install -U transformers"
    return pytest.mark.skipif(name not in TAKEN, reason=reason)


REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])


def batch(with_image: bool = True) -> dict[str, torch.Tensor]:
    image = grown_image() if with_image else []
    rows = [[*text(3, seed=1), *image, *text(6, seed=2)], text(7, seed=3)]
    inputs = padded(rows, "left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    images = {"pixel_values": pictures(1)} if with_image else {}
    return inputs | images | {"labels": labels}


def gradients(model, inputs=None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**(batch() if inputs is None else inputs)).loss
    loss.backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return got | {"loss": loss.detach()}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def layers(model) -> dict[str, torch.nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (GLMBlock, TransformerLayer))
    }


@pytest.fixture
def count_runs(monkeypatch):
    """Counts the runs of each layer: ``count_runs(model)`` returns a dict that fills."""

    def count(model) -> dict[str, int]:
        runs = {}
        for name, layer in layers(model).items():
            runs[name] = 0

            def counted(*inputs, name=name, original=layer.layer_forward):
                runs[name] += 1
                return original(*inputs)

            monkeypatch.setattr(layer, "layer_forward", counted)
        return runs

    return count


def test_both_towers_have_layers():
    assert [type(layer).__name__ for layer in layers(tiny_model()).values()] == [
        "GLMBlock",
        "GLMBlock",
        "TransformerLayer",
        "TransformerLayer",
    ]


@REENTRANT
def test_every_layer_of_both_towers_is_recomputed_and_gradients_are_equal(
    use_reentrant, count_runs
):
    model = tiny_model().train()
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    runs = count_runs(model)
    assert_equal(gradients(model), want)
    assert set(runs.values()) == {2}


def test_enabling_says_nothing_of_an_old_checkpointing_format(caplog):
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = tiny_model().train()
        model.gradient_checkpointing_enable()
        gradients(model)
    finally:
        logger.removeHandler(caplog.handler)
    assert "checkpointing format" not in caplog.text


@with_activation_checkpointing
@REENTRANT
def test_activation_checkpointing_enable_recomputes_every_layer(use_reentrant, count_runs):
    model = tiny_model().train()
    want = gradients(model)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    runs = count_runs(model)
    assert_equal(gradients(model), want)
    assert set(runs.values()) == {2}


def test_disabling_stops_the_recomputation(count_runs):
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    runs = count_runs(model)
    gradients(model)
    assert set(runs.values()) == {1}


@REENTRANT
def test_nothing_is_recomputed_in_eval_mode_or_without_gradients(use_reentrant, count_runs):
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    runs = count_runs(model)
    gradients(model)
    with torch.no_grad():
        model.train()(**batch())
    assert set(runs.values()) == {2}  # once each


def test_the_checkpointing_function_gets_a_bound_method_and_hidden_states_first():
    """What DeepSpeed, Megatron-style offloaders and Unsloth look for."""
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []

    def spy(function, *inputs):
        calls.append((function, inputs))
        return checkpoint(function, *inputs, use_reentrant=False)

    for layer in layers(model).values():
        layer._gradient_checkpointing_func = spy
    gradients(model)
    by_layer = {id(function.__self__): inputs for function, inputs in calls}
    assert set(by_layer) == {id(layer) for layer in layers(model).values()}
    for (function, inputs), layer in zip(
        calls, [*layers(model).values()][2:] + [*layers(model).values()][:2], strict=True
    ):
        assert inspect.ismethod(function) and function.__self__ is layer
        width = 64 if isinstance(layer, GLMBlock) else 32
        assert isinstance(inputs[0], torch.Tensor) and inputs[0].shape[-1] == width
        assert inputs[0].requires_grad


def test_a_replaced_checkpointing_function_is_used():
    """Frameworks set ``_gradient_checkpointing_func`` through transformers' own setter."""
    model = tiny_model().train()
    used = []

    def function(layer_function, *inputs, **kwargs):
        used.append(layer_function)
        return checkpoint(layer_function, *inputs, use_reentrant=False)

    model.gradient_checkpointing_enable()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    gradients(model)
    assert len(used) == 4


def adapted(target: str):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=target, init_lora_weights=False)
    return get_peft_model(tiny_model(), config).train()


BOTH = r".*query_key_value"
LANGUAGE = r".*encoder.*query_key_value"
VISION = r".*vision.*query_key_value"
LAST_VISION = r".*vision.*layers\.1.*query_key_value"


@REENTRANT
@pytest.mark.parametrize("inputs_require_grads", [True, False])
@pytest.mark.parametrize("target", [BOTH, LANGUAGE, VISION, LAST_VISION])
def test_adapters_on_frozen_weights_get_plain_gradients(
    target, inputs_require_grads, use_reentrant
):
    want = gradients(adapted(target))
    model = adapted(target)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if inputs_require_grads:
        model.enable_input_require_grads()
    got = gradients(model)
    assert_equal(got, want)
    assert all(gradient.norm() > 0 for gradient in got.values())
    adapters = [name for name, p in model.named_parameters() if p.requires_grad]
    assert set(got) == {*adapters, "loss"}


@REENTRANT
def test_a_frozen_tower_is_neither_recomputed_nor_kept(use_reentrant, count_runs):
    model = tiny_model().train()
    model.transformer.vision.requires_grad_(False)
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    runs = count_runs(model)
    outputs = []
    model.transformer.vision.register_forward_hook(lambda *call: outputs.append(call[2]))
    assert_equal(gradients(model), want)
    assert not outputs[0].requires_grad
    for name, number in runs.items():
        assert number == (1 if "vision" in name else 2), name


@REENTRANT
def test_freezing_all_below_a_layer_trains_that_layer(use_reentrant):
    """Its input needs no gradient, which reentrant checkpoints alone would not survive."""

    def half_frozen():
        model = tiny_model().train().requires_grad_(False)
        model.transformer.encoder.layers[1].requires_grad_(True)
        model.transformer.vision.transformer.layers[1].requires_grad_(True)
        return model

    want = gradients(half_frozen())
    model = half_frozen()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equal(gradients(model), want)


@REENTRANT
def test_a_text_batch_checkpoints_too(use_reentrant):
    model = tiny_model().train()
    want = gradients(model, batch(with_image=False))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equal(gradients(model, batch(with_image=False)), want)


@REENTRANT
def test_asking_for_a_cache_changes_no_gradient(use_reentrant):
    model = tiny_model().train()
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equal(gradients(model, batch() | {"use_cache": True}), want)
    assert model(**batch(), use_cache=True).past_key_values is None


@REENTRANT
def test_packed_rows_and_skipped_logits_checkpoint_too(use_reentrant):
    row = [*text(3), *grown_image(), *text(4)]
    ids = torch.tensor([row + row])
    inputs = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == BOI, -100),
        "position_ids": torch.arange(len(row)).repeat(2)[None],
        "pixel_values": pictures(2),
        "skip_logits": True,
    }
    model = tiny_model().train()
    want = gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equal(gradients(model, inputs), want)


def enable(model, options=None, **layer_options) -> None:
    name = "activation" if HAS_ACTIVATION_CHECKPOINTING else "gradient"
    getattr(model, f"{name}_checkpointing_enable")(options, **layer_options)


@with_option("every_n_layers")
def test_every_n_layers_is_honoured(count_runs):
    model = tiny_model().train()
    want = gradients(model)
    enable(model, every_n_layers=2)
    runs = count_runs(model)
    assert_equal(gradients(model), want)
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
    want = gradients(model)
    enable(model, {"use_reentrant": use_reentrant}, offload=True)
    inputs = {}
    for name, layer in layers(model).items():
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
    assert_equal(gradients(model), want)
    assert len(inputs) == 4
    for name, hidden in inputs.items():
        assert hidden.data_ptr() in offloaded, name


@pytest.mark.parametrize("option", sorted(LAYER_OPTIONS.keys() - TAKEN))
def test_layer_options_are_refused_where_transformers_lacks_them(option):
    with pytest.raises(TypeError, match=option):
        tiny_model().train().gradient_checkpointing_enable(**{option: LAYER_OPTIONS[option]})


@REENTRANT
@pytest.mark.parametrize("option", [{"every_n_layers": 2}, {"offload": True}])
def test_layer_options_among_those_for_torch_are_refused(option, use_reentrant):
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant, **option})
    with pytest.raises((TypeError, ValueError), match=next(iter(option))):
        gradients(model)


def test_checkpointing_keeps_less_memory():
    """Bytes that autograd keeps for one step; the point of it all."""

    def kept(model) -> int:
        sizes = {}

        def keep(tensor):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        parameters = {p.data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**batch(), skip_logits=True).loss
        del loss
        return sum(size for pointer, size in sizes.items() if pointer not in parameters)

    model = tiny_model().train()
    plain = kept(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert kept(model) < plain / 2


def test_refuses_a_filled_cache_in_checkpointed_training():
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3]])
    cache = model(input_ids=ids, use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="holds 3 positions.*disable one"):
        model(input_ids=ids, past_key_values=cache)


@REENTRANT
def test_an_empty_cache_stays_empty_in_checkpointed_training(use_reentrant):
    """Recomputed layers would enter their keys a second time."""
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    cache = DynamicCache(config=model.config)
    inputs = batch()
    output = model(**inputs, past_key_values=cache, use_cache=True)
    assert output.past_key_values is None
    assert cache.get_seq_length() == 0
    output.loss.backward()
    assert cache.get_seq_length() == 0
    want = tiny_model().train()
    want(**inputs).loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_embeddings_of_a_caller_stay_as_they_were(use_reentrant):
    """What goes into a layer is made to require grad; the caller's own tensor is not."""
    model = tiny_model().train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    ids = torch.tensor([[1, 2, 3, 4]])
    embeds = model.get_input_embeddings()(ids).detach()
    before = embeds.clone()
    model(inputs_embeds=embeds, labels=ids).loss.backward()
    assert not embeds.requires_grad and embeds.grad is None and embeds.is_leaf
    assert torch.equal(embeds, before)
    assert model.transformer.encoder.layers[0].mlp.dense_h_to_4h.weight.grad.norm() > 0
