"""A setting of a model or of adapters that has a wrong type is refused by its file and name."""

import json
from collections import Counter
from contextlib import nullcontext
from itertools import product

import pytest

from glm4v_patched.engine.options import QUANTIZER_PACKAGES
from glm4v_patched.models.base import (
    PEFT_SETTING_TYPES,
    UNSUPPORTED_SETTINGS,
    ModelSource,
    source_of_adapters,
)
from glm4v_patched.models.find import find_source
from glm4v_patched.models.limits import TOKENIZER_SETTINGS
from glm4v_patched.models.loading import load_processor
from glm4v_patched.patch.config_json import why_not_glm4v
from glm4v_patched.remote.configuration_chatglm import (
    GENERAL_FIELD_CHECKS,
    SAVED_CONFIG_FIELDS,
    VISION_FIELD_CHECKS,
    ChatGLMConfig,
)
from tests.helpers.tiny import golden_json, update_json

VALUES = [None, True, -1, 0, 1.5, float("inf"), 10**30, "", "x", [], [[1]], {}, {"a": {"b": 1}}]
# Of transformers' class of configs, and of configs of other models.
OTHERS = ["attribute_map", "sub_configs", "to_dict", "from_dict", "_auto_class", "__class__"]
OTHERS += ["__dict__", "vision", "keys_to_ignore_at_inference", "num_hidden_layers", "vocab_size"]
OTHERS += ["rope_parameters", "layer_types", "per_layer_config", "num_labels", "pruned_heads"]
OTHERS += ["attn_implementation", "_attn_implementation_internal", "tokenizer_class", "model_type"]
SETTINGS = [
    *sorted({*SAVED_CONFIG_FIELDS, *GENERAL_FIELD_CHECKS}),
    *OTHERS,
    *(f"vision_config.{name}" for name in VISION_FIELD_CHECKS),
]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_config_of_wrong_types_is_read_or_refused_by_the_settings_name(name):
    for value in VALUES:
        config = golden_json("config.json")
        outer, _, inner = name.rpartition(".")
        (config[outer] if outer else config)[inner] = value
        try:
            read = ChatGLMConfig.from_dict(config)
        except ValueError as error:
            assert inner in str(error) and len(str(error)) < 1_000
            continue
        read.to_diff_dict(), repr(read)
        if name in ("num_layers", "hidden_size", "vision_config.patch_size", "id2label"):
            assert value in (None, {}) and name == "id2label"


def test_two_names_of_one_setting_that_differ_are_refused():
    config = golden_json("config.json")
    with pytest.raises(ValueError, match="num_hidden_layers and num_layers, .* of them$"):
        ChatGLMConfig.from_dict(config | {"num_hidden_layers": 3})
    alone = {name: value for name, value in config.items() if name != "num_layers"}
    assert ChatGLMConfig.from_dict(alone | {"num_hidden_layers": 3}).num_layers == 3
    assert why_not_glm4v(config | {"vision_config": {}}) is None


@pytest.mark.parametrize("name", ["hidden_act", "text_config", "decoder", "generator"])
def test_names_of_functions_and_of_other_configs_are_refused_before_a_model_is_built(model, name):
    vision = json.loads((model / "config.json").read_text())["vision_config"]
    for value in ("evil", {"model_type": "llama"}):
        changed = (
            {"vision_config": vision | {name: value}} if name == "hidden_act" else {name: value}
        )
        update_json(model / "config.json", **changed)
        with pytest.raises(ValueError, match=rf"config.json.* {name}\b.*expected"):
            find_source(str(model))


@pytest.mark.parametrize("name", [*PEFT_SETTING_TYPES, *UNSUPPORTED_SETTINGS, "another"])
def test_adapters_of_wrong_types_are_refused_by_the_settings_name(adapters, name):
    path = adapters / "adapter_config.json"
    values = json.loads(path.read_text())
    refused = 0
    for value in VALUES:
        path.write_text(json.dumps(values | {name: value}))
        try:
            source_of_adapters(adapters)
        except ValueError as error:
            assert str(path) in str(error) and name in str(error)
            refused += 1
    assert refused >= (3 if name != "another" else 1)
    path.write_text(json.dumps(values))
    source_of_adapters(adapters)


@pytest.mark.parametrize("name", ["r", "rank_pattern", "alpha_pattern"])
def test_a_rank_or_alpha_of_0_is_refused(adapters, name):
    for value, fits in ((1, True), (0, False)):
        value = value if name == "r" else {"query_key_value": value}
        update_json(adapters / "adapter_config.json", **{name: value})
        with nullcontext() if fits else pytest.raises(ValueError, match=f"{name} is .*; expected"):
            source_of_adapters(adapters)


def test_a_tokenizer_of_wrong_types_is_read_or_refused_by_the_settings_name(model):
    """Also when the first text is encoded."""
    values = json.loads((model / "tokenizer_config.json").read_text())
    refused: Counter[str] = Counter()
    others = product(["tokenizer_file", "vocab_file"], VALUES[1:])
    for name, value in [*product(TOKENIZER_SETTINGS, VALUES), *others]:
        (model / "tokenizer_config.json").write_text(json.dumps(values | {name: value}))
        try:
            load_processor(ModelSource(str(model))).tokenizer("x")
        except ValueError as error:
            assert name in str(error) and str(model) in str(error) and len(str(error)) < 1_000
            refused[name] += 1
    assert min(refused[name] for name in TOKENIZER_SETTINGS) >= 7 and refused["vocab_file"] == 12


def test_adapters_of_variants_that_were_not_tried_are_refused_with_their_defaults_too(adapters):
    """Of an empty object, peft makes that variant with its defaults."""
    path = adapters / "adapter_config.json"
    values = json.loads(path.read_text()) | {"loftq_config": {}}
    for name in UNSUPPORTED_SETTINGS:
        path.write_text(json.dumps(values | {name: {}}))
        if name == "loftq_config":
            assert source_of_adapters(adapters)
            continue
        with pytest.raises(ValueError, match=rf"{name} is {{}}; expected null"):
            source_of_adapters(adapters)


@pytest.mark.parametrize("keys", [{}, {"quantization_config": None}])
def test_a_config_that_names_another_one_is_refused(model, keys):
    """transformers reads that one, which nobody has looked at."""
    update_json(model / "config.json", **keys)
    assert find_source(str(model)).model == str(model)
    (model / "config.4.0.0.json").write_text((model / "config.json").read_text())
    update_json(model / "config.json", configuration_files=["config.4.0.0.json"])
    with pytest.raises(ValueError, match=r"config.json .*configuration_files .*: remove it"):
        find_source(str(model))


METHODS = [*QUANTIZER_PACKAGES, "higgs", "evil", None, 1, "", [], {}]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_quantizer_that_is_absent_or_unknown_is_named(model, method, monkeypatch):
    quantized = {"quant_method": method, "bits": 4}
    update_json(model / "config.json", quantization_config=quantized)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises((ValueError, RuntimeError), match=r"config.json|needs .*: .*install"):
        find_source(str(model))
