"""A model built from the published code becomes ours in place: numbers, training, saving, wrappers.

The stand-in for the published code is tests/helpers/legacy.
"""

import copy
import inspect
import re
from functools import partial
from types import MethodType

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard

from glm4v_patched.patch.convert import patch_model
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.loss import computes_loss
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM, GLMBlock
from tests.helpers.legacy_repository import image_row
from tests.helpers.sharded import as_sharded
from tests.helpers.steps import count_runs
from tests.helpers.tiny import (
    golden_case,
    golden_json,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_model,
)
from tests.remote.rows import assert_close, gradients

# As in parity/test_golden.py. Measured: logits 1.8e-5, gradients 6.0e-6 (Intel, AVX-512).
ATOL = 4e-5
GRADIENT_ATOL = 2e-5

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 500}
LORA = {"r": 2, "target_modules": ["query_key_value"], "init_lora_weights": False}
LANGUAGE_LORA = {"target_modules": r".*encoder.*query_key_value"}
TOKENS = {"trainable_token_indices": {"word_embeddings": [1, 2], "output_layer": [1, 2]}}
EVERYWHERE = {"target_modules": ["output_layer", "word_embeddings", "conv", "dense", "fc1"]}


def padded_images() -> dict[str, torch.Tensor]:
    rows = [[*text(3), *three_id_image(), *text(length, seed=1)] for length in (4, 7)]
    inputs = padded(rows, "left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs | {"labels": labels, "images": pictures(2)}


def unlabelled_row() -> dict[str, torch.Tensor]:
    return {name: value for name, value in image_row(0).items() if name != "labels"}


@torch.no_grad()
def logits(model, inputs=None) -> torch.Tensor:
    return model(**(unlabelled_row() if inputs is None else inputs)).logits


def gradients_of(model) -> dict[str, torch.Tensor]:
    return gradients(model, **padded_images())


def snapshot_of(model: nn.Module) -> dict:
    """Classes, attributes, children, hooks and tensors of all modules, by identity."""
    found = {}
    for name, module in model.named_modules():
        found[name] = (id(module), type(module), {k: id(v) for k, v in vars(module).items()})
        for table in [v for v in vars(module).values() if isinstance(v, dict)]:
            found[name] += ({k: id(v) for k, v in table.items()},)
    return found


def test_logits_loss_gradients_and_answers_are_the_published_ones(legacy):
    """Of our class parity/test_golden.py has all cases."""
    model = patch_model(legacy.train())
    inputs, want, want_gradients = golden_case("image_batch2_left_pad_labels.fp32")
    output = model(**{name: inputs[name] for name in inputs if not name.endswith("_expanded")})
    valid = inputs["attention_mask_expanded"].bool()
    torch.testing.assert_close(output.logits[valid], want["logits"][valid], rtol=0, atol=ATOL)
    assert output.loss.item() == pytest.approx(want["loss_fp32"].item(), abs=GRADIENT_ATOL)
    output.loss.backward()
    got = {name: model.get_parameter(name).grad for name in want_gradients}
    torch.testing.assert_close(got, want_gradients, rtol=0, atol=GRADIENT_ATOL)
    inputs, want, _ = golden_case("generate_image_left_pad.fp32")
    new = model.eval().generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    assert torch.equal(new, want["sequences"][:, -8:])


def test_the_same_object_comes_back_with_our_classes_and_the_same_tensors(legacy):
    def tensors():
        found = [*legacy.named_parameters(), *legacy.named_buffers()]
        return [(name, id(tensor), tensor.data_ptr()) for name, tensor in found]

    before, state = tensors(), {n: t.clone() for n, t in legacy.state_dict().items()}
    random_state = torch.get_rng_state()
    assert patch_model(legacy) is legacy and tensors() == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_close(legacy.state_dict(), state)
    got = {name: list(value.shape) for name, value in legacy.state_dict().items()}
    assert got == golden_json("param_shapes.json")
    ours = {name: type(module) for name, module in tiny_model().named_modules()}
    assert {name: type(module) for name, module in legacy.named_modules()} == ours


def test_modes_frozen_parameters_and_hooks_stay(legacy):
    legacy.train().transformer.vision.eval()
    legacy.transformer.encoder.layers[0].requires_grad_(False)

    def state(model):
        modules = {n: m.training for n, m in model.named_modules() if "activation_fn" not in n}
        return modules, {n: p.requires_grad for n, p in model.named_parameters()}

    before, fired = state(legacy), []

    def note(name):
        return lambda *_: fired.append(name)

    block, tower = legacy.transformer.encoder.layers[1], legacy.transformer.vision
    legacy.register_forward_pre_hook(note("model"))
    block.register_forward_hook(note("block"))
    block.self_attention.register_full_backward_hook(note("backward"))
    tower.register_forward_hook(note("tower"))
    tower.boi.register_hook(note("boi"))
    patch_model(legacy)
    assert state(legacy) == before
    assert not tower.transformer.layers[0].mlp.activation_fn.training
    gradients_of(legacy)
    assert fired[:3] == ["model", "tower", "block"] and set(fired[3:]) == {"backward", "boi"}


def test_attributes_and_methods_that_others_set_stay(legacy):
    """As LLaMA-Factory replaces transformers' own methods."""
    legacy.hf_device_map = {"": "cpu"}
    legacy.get_memory_footprint = MethodType(lambda self: 7, legacy)
    generation_config = legacy.generation_config = tiny_model().generation_config
    other = copy.deepcopy(legacy)
    other.generation_config = None
    patch_model(legacy)
    assert legacy.hf_device_map == {"": "cpu"} and legacy.get_memory_footprint() == 7
    assert legacy.generation_config is generation_config
    assert patch_model(other).generation_config.eos_token_id == other.config.eos_token_id


def test_the_config_is_ours_with_its_values_wherever_it_is_held(legacy):
    before = legacy.config.to_dict()
    wrapper = nn.Sequential(legacy)
    wrapper.config = wrapper.model_config = legacy.config
    patch_model(wrapper)
    assert isinstance(legacy.config, ChatGLMConfig)
    held = [vars(m)["config"] for m in wrapper.modules() if "config" in vars(m)]
    assert all(config is legacy.config for config in [*held, wrapper.model_config])
    after = legacy.config.to_dict()
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed <= {"auto_map", "vocab_size", "transformers_version"}
    assert legacy.config.vocab_size == before["vocab_size"]
    assert legacy.config.name_or_path == before["_name_or_path"] != ""
    assert legacy.config.dtype == torch.float32


@pytest.mark.parametrize("theirs, ours", [("eager", "sdpa"), ("flex_attention",) * 2])
def test_attention_is_sdpa_as_published_unless_another_than_eager_is_configured(
    theirs, ours, legacy
):
    legacy.config._attn_implementation = theirs
    assert patch_model(legacy).config._attn_implementation == ours


def test_what_only_the_published_modules_have_is_dropped(legacy):
    """It has core_attention with a dropout, activations, and attributes that would hide ours."""
    for layer in legacy.transformer.encoder.layers:
        kind = type("CoreAttention", (nn.Module,), {"__module__": type(legacy).__module__})
        layer.self_attention.core_attention = kind()
        layer.self_attention.core_attention.attention_dropout = nn.Dropout(0.0)
        layer.self_attention.is_causal = False
    tower = legacy.transformer.vision
    tower.linear_proj.act1 = nn.GELU()
    tower.transformer.layers[0].attention.num_key_value_groups = 3
    patch_model(legacy)
    ours = {name for name, _ in tiny_model().named_modules()}
    assert {name for name, _ in legacy.named_modules()} == ours
    assert legacy.transformer.encoder.layers[0].self_attention.is_causal is True
    assert torch.equal(logits(legacy), logits(tiny_model()))


@pytest.mark.parametrize("was_on", [True, False])
def test_checkpointing_stays_as_it_was_and_can_be_switched_after(was_on, legacy, recwarn, caplog):
    if was_on:  # as transformers did for the form that the published code has
        legacy.apply(partial(legacy._set_gradient_checkpointing, value=True))
    patch_model(legacy.train())
    # Nothing is said of an old format or name.
    assert "checkpointing" not in caplog.text
    assert not [warning for warning in recwarn if "checkpointing" in str(warning.message)]
    assert legacy.is_gradient_checkpointing is was_on
    if was_on:
        block = legacy.transformer.encoder.layers[0]
        assert block._gradient_checkpointing_func.keywords["use_reentrant"] is False
    assert not hasattr(legacy.transformer.encoder, "gradient_checkpointing")
    runs = count_runs(legacy)
    assert_close(gradients_of(legacy), gradients_of(tiny_model().train()))
    assert set(runs.values()) == {2 if was_on else 1}
    legacy.gradient_checkpointing_disable()
    gradients_of(legacy)
    assert set(runs.values()) == {3 if was_on else 2}


# Saving


@pytest.fixture
def generating(loaded, monkeypatch):
    """With what peft asks a causal language model for, as the published code has it."""
    cls = type(loaded)
    monkeypatch.setattr(cls, "prepare_inputs_for_generation", lambda self: None, raising=False)
    return copy.deepcopy(loaded).eval()


def adapted(model, **options):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **(LORA | options)))


def patched_and_ours(model, **options):
    """An adapter on a published model that is patched then; and the same one on ours."""
    model, ours = adapted(model, **options), adapted(tiny_model(), **options)
    assert patch_model(model) is model
    assert isinstance(model.get_base_model(), GLM4VForCausalLM)
    set_peft_model_state_dict(ours, get_peft_model_state_dict(model))
    return model, ours


@pytest.mark.parametrize("options", [{}, LANGUAGE_LORA, EVERYWHERE, TOKENS])
def test_an_adapter_on_it_before_computes_what_it_does_on_ours(options, generating, tmp_path):
    model, ours = patched_and_ours(generating, **options)
    assert not torch.equal(logits(ours), logits(tiny_model()))
    assert torch.equal(logits(model), logits(ours))
    assert_close(gradients_of(model.train()), gradients_of(ours.train()))
    learned = [name for name, weight in model.named_parameters() if weight.grad is not None]
    assert all("lora" in name or "token_adapter" in name for name in learned)
    layer = model.get_base_model().transformer.output_layer
    for wrapped in ("token_adapter", "base_layer"):
        layer = getattr(layer, wrapped, layer)
    assert computes_loss(layer)
    if not options:  # merged, it is saved as ours
        merged = model.eval().merge_and_unload()
        merged.save_pretrained(tmp_path)
        assert torch.equal(logits(GLM4VForCausalLM.from_pretrained(tmp_path)), logits(merged))


def test_copies_that_peft_trains_whole_become_ours(generating):
    """Also the output layer, and a module inside a copy."""
    options = {"modules_to_save": ["vision.linear_proj", "output_layer"]}
    model, ours = patched_and_ours(generating, **options)
    wrapper = model.get_base_model().transformer.vision.linear_proj
    types = {type(wrapper.original_module), type(wrapper.modules_to_save["default"])}
    assert types == {type(tiny_model().transformer.vision.linear_proj)}
    output_layer = model.get_base_model().transformer.output_layer
    assert computes_loss(output_layer.modules_to_save["default"])
    got, want = gradients_of(model.train()), gradients_of(ours.train())
    assert any("modules_to_save" in name for name in got)
    assert_close(got, want)
    for inputs in (padded_images(), padded_images() | {"skip_logits": True}):
        assert torch.equal(model(**inputs).loss, ours(**inputs).loss)


def hooked(module: nn.Module) -> bool:
    return "_hf_hook" in vars(module)


def dispatch(model) -> None:
    """accelerate's device hooks on the parts of the model, and on each layer."""
    names = ("embedding", "rotary_pos_emb", "encoder.final_layernorm", "output_layer", "vision")
    layers = [f"encoder.layers.{i}" for i in range(2)]
    device_map = {f"transformer.{name}": "cpu" for name in (*names, *layers)}
    accelerate.dispatch_model(model, device_map, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("how", ["device_map", "cpu_offload"])
def test_device_hooks_stay_and_run_our_code(how, legacy):
    if how == "device_map":
        dispatch(legacy)
    else:
        accelerate.cpu_offload(legacy, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in legacy.parameters())
    hooks = {name: module._hf_hook for name, module in legacy.named_modules() if hooked(module)}
    assert "transformer.encoder.layers.0.mlp.dense_4h_to_h" in hooks
    patch_model(legacy)
    assert {n: m._hf_hook for n, m in legacy.named_modules() if hooked(m)} == hooks
    for module in filter(hooked, legacy.modules()):
        is_ours = module._old_forward.__func__ is type(module).forward
        assert is_ours or computes_loss(module)
    assert "pixel_values" in inspect.signature(legacy.forward).parameters
    assert torch.equal(logits(legacy), logits(tiny_model()))
    new, want = (of.generate(**unlabelled_row(), **GREEDY) for of in (legacy, tiny_model()))
    assert torch.equal(new, want)
    remove_hook_from_module(legacy, recurse=True)
    assert torch.equal(logits(legacy), logits(tiny_model()))


class PackedLinear(nn.Linear):
    """As bitsandbytes' Linear4bit: a Linear whose weight has another shape and dtype."""

    def forward(self, x):
        weight = self.weight.reshape(self.out_features, -1).to(x.dtype) * self.scale
        return nn.functional.linear(x, weight, self.bias)


def packed(model: nn.Module) -> nn.Module:
    for linear in [module for module in model.modules() if type(module) is nn.Linear]:
        linear.__class__ = PackedLinear
        linear.register_buffer("scale", linear.weight.detach().abs().amax() / 127)
        numbers = (linear.weight / linear.scale).round().to(torch.int8)
        linear.weight = nn.Parameter(numbers.reshape(-1, 1), requires_grad=False)
    return model


def test_quantised_layers_stay_and_compute_the_same(legacy):
    model = packed(legacy)
    want = logits(model)
    quantised = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Linear")}
    assert len(quantised) == 21, len(quantised)
    assert type(quantised["transformer.output_layer"]) is not nn.Linear
    patch_model(model)
    assert isinstance(model, GLM4VForCausalLM)
    assert {n: m for n, m in model.named_modules() if n in quantised} == quantised
    torch.testing.assert_close(logits(model), want, rtol=0, atol=ATOL)
    skipped = model.train()(**padded_images(), skip_logits=True)
    assert torch.equal(skipped.loss, model(**padded_images()).loss)


def test_a_model_that_is_ours_is_returned_unchanged(legacy):
    adapted_ours = get_peft_model(tiny_model(), LoraConfig(**LORA))
    for model in (tiny_model(), adapted_ours, patch_model(legacy)):
        before = snapshot_of(model)
        assert patch_model(model) is model
        assert snapshot_of(model) == before


def with_a_hook_on_what_would_be_dropped(model):
    model.transformer.vision.linear_proj.act1 = nn.GELU()
    model.transformer.vision.linear_proj.act1.register_forward_hook(lambda *_: None)


def with_a_method_in_a_wrapper(model):
    wrapper = nn.Sequential(model)
    wrapper.span = model.image_span
    return wrapper


def compiled(model):
    layers = model.transformer.encoder.layers
    layers[1] = torch.compile(layers[1])


def derived(model):
    model.__class__ = type("Reader", (type(model),), {"__module__": "reader"})


def replaced(layer: nn.Module, forward) -> None:
    """By somebody, before accelerate hooks the layer."""
    layer.forward = MethodType(forward, layer)
    add_hook_to_module(layer, ModelHook())


def first(change):
    """What is changed is the first layer."""
    return lambda model: change(model.transformer.encoder.layers[0])


def forward_of_others(self, *inputs):
    return inputs[0]


LAYER = "transformer.encoder.layers.0"
WHOSE = f"{LAYER}.forward was replaced by"
REFUSED = {
    "another model": (lambda model: nn.Linear(2, 2), "this Linear holds 0 glm-4v models"),
    "two": (lambda model: nn.ModuleList([model, tiny_model()]), "ModuleList holds 2 glm-4v"),
    "no model": (lambda model: "glm-4v-9b", "this str holds 0 glm-4v models"),
    "cogagent": (lambda model: setattr(model.config, "original_rope", False), "holds 0 glm-4v"),
    "more": (
        lambda model: setattr(model.transformer.vision, "scale", nn.Parameter(torch.ones(1))),
        "vision.scale has shape (1,), and None by its config",
    ),
    "less": (
        lambda model: delattr(model.transformer.rotary_pos_emb, "inv_freq"),
        "inv_freq has shape None, and (4,) by its config",
    ),
    "a hook": (with_a_hook_on_what_would_be_dropped, "act1 is not in our model, with 0 tensors "),
    "a method in use": (with_a_method_in_a_wrapper, "image_span is in use"),
    "compiled": (compiled, "layers.1 is a OptimizedModule"),
    "compiled in place": (first(nn.Module.compile), f"{LAYER}._compiled_call_impl"),
    "derived": (derived, "the model is a Reader of reader, where a GLM4VForCausalLM of"),
    "a partial": (
        first(lambda layer: setattr(layer, "forward", partial(forward_of_others, layer))),
        f"{WHOSE} {__name__}.forward_of_others",
    ),
    "behind a device hook": (
        first(lambda layer: replaced(layer, forward_of_others)),
        f"{WHOSE} accelerate.hooks.",
    ),
    "a sharded layer": (first(fully_shard), "is a FSDPGLMBlock"),
    "a sharded model": (lambda model: fully_shard(model) and None, "is a FSDPChatGLM"),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    place = f"file://{tmp_path_factory.mktemp('group')}/group"
    init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.parametrize("change, named", REFUSED.values(), ids=REFUSED)
def test_what_differs_in_more_than_its_code_is_refused(change, named, legacy, one_process):
    """And nothing of the model is changed."""
    model = change(legacy)
    model = model if isinstance(model, (str, nn.Linear, nn.Sequential, nn.ModuleList)) else legacy
    before = snapshot_of(model) if isinstance(model, nn.Module) else None
    with pytest.raises(ValueError, match=re.escape(named)):
        patch_model(model)
    assert before is None or snapshot_of(model) == before


def test_weights_that_zero3_spread_are_compared_by_their_whole_shape(legacy):
    for parameter in legacy.parameters():
        as_sharded(parameter, ds_shape=parameter.shape)
        parameter.data = torch.empty(0)
    patch_model(legacy)
    assert type(legacy.transformer.encoder.layers[0]) is GLMBlock
