"""The configuration: the published fields, checked; and the range of transformers."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from transformers import BitsAndBytesConfig, GenerationConfig, PretrainedConfig

from glm4v_patched.remote import configuration_chatglm
from glm4v_patched.remote.configuration_chatglm import (
    AUTO_MAP,
    OLDEST_TRANSFORMERS,
    TESTED_TRANSFORMERS,
    ChatGLMConfig,
    check_transformers,
)
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.refused import refused
from tests.helpers.tiny import golden_json, tiny_config

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_the_published_model(expected):
    config = ChatGLMConfig()
    wanted = {"num_layers": 40, "hidden_size": 4096, "ffn_hidden_size": 13696, "kv_channels": 128}
    wanted |= {"num_attention_heads": 32, "multi_query_group_num": 2, "seq_length": 8192}
    wanted |= {"eos_token_id": [151329, 151336, 151338], "rope_in_fp32": False}
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert (config.vision.num_patches, config.vision.num_image_tokens) == (6400, 1600)
    assert config.image_token_id == expected["special"][ChatGLMProcessor.image_token]
    generation = GenerationConfig.from_model_config(tiny_config())
    assert generation.eos_token_id == [500, 507, 509] and generation.pad_token_id == 500


def saved(config: ChatGLMConfig, folder: Path) -> dict:
    config.save_pretrained(folder)
    assert ChatGLMConfig.from_pretrained(folder).to_dict() == config.to_dict()
    return json.loads((folder / "config.json").read_text())


def test_names_for_other_libraries_are_attributes_and_are_not_saved(tmp_path):
    new = {"image_token_id", "num_key_value_heads", "bos_token_id", "pre_seq_len"}
    config = ChatGLMConfig()
    assert new <= config.to_dict().keys() and not new & saved(config, tmp_path).keys()
    assert config.num_key_value_heads == config.to_dict()["num_key_value_heads"] == 2
    assert tiny_config().image_token_id is None, "151341 is no id of 512"
    published = {n: v for n, v in golden_json("config.json").items() if n != "torch_dtype"}
    written = saved(tiny_config(), tmp_path)
    assert {name: written.get(name) for name in published} == published and not new & written.keys()
    foreign = {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration", "Other": "a.b"}
    changed = tiny_config(image_token_id=499, num_key_value_heads=4, auto_map=foreign)
    assert changed.auto_map == AUTO_MAP
    # The published config class has our name; weights without code reference our model's class.
    where = {"AutoConfig": "org/repo--configuration_chatglm.ChatGLMConfig"}
    assert tiny_config(auto_map=where).auto_map == AUTO_MAP
    where["AutoModel"] = "org/repo--modeling_chatglm.GLM4VForCausalLM"
    assert tiny_config(auto_map=where).auto_map == AUTO_MAP | where
    changed = saved(changed, tmp_path)
    assert changed["image_token_id"] == 499 and changed["multi_query_group_num"] == 4
    assert saved(tiny_config(original_rope=False), tmp_path)["original_rope"] is False


def vision(**changes) -> dict:
    return {"vision_config": golden_json("config.json")["vision_config"] | changes}


REFUSED = {
    "multi_query_attention": ({"multi_query_attention": False}, "=False"),
    "pre_seq_len": ({"pre_seq_len": 8}, "=8"),
    "tied embeddings": ({"tie_word_embeddings": True}, "=True"),
    "heads": ({"multi_query_group_num": 3}, "num_attention_heads 4", "3"),
    "channels": ({"kv_channels": 18}, "kv_channels 18", "4"),
    "positions": (vision(num_positions=16), "num_positions is 16", "to 17"),
    "one patch": (vision(image_size=14, num_positions=2), "image_size 14", "2 x 2"),
    "tower heads": (vision(num_heads=5), "hidden_size 32", "num_heads 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_are_not_computed_are_refused(case):
    changes, *named = REFUSED[case]
    with refused(ValueError, *named):
        tiny_config(**changes)


def test_transformers_older_than_tested_is_refused_and_newer_warned_of_once(monkeypatch, warned):
    for version in (OLDEST_TRANSFORMERS, "5.24.0rc1", "5.24.9"):
        check_transformers(version)
    assert not warned.records
    for _ in range(2):
        check_transformers("5.1.0")
    (record,) = warned.records
    assert f"{TESTED_TRANSFORMERS}, but 5.1.0 is installed; if it fails" in record.message
    monkeypatch.setattr(transformers, "__version__", "4.57.5")
    message = f"{TESTED_TRANSFORMERS}, but 4.57.5 is installed, .*; install"
    with pytest.raises(ImportError, match=message):
        runpy.run_path(configuration_chatglm.__file__)  # when the file is imported
    assert f'"transformers{TESTED_TRANSFORMERS}"' in (ROOT / "pyproject.toml").read_text()


class Foreign(PretrainedConfig):
    """A config like vLLM's: other field names and no checks."""

    model_type = "chatglm"

    def __init__(self, padded_vocab_size=65024, seq_length=2048, **fields):
        self.padded_vocab_size = self.vocab_size = padded_vocab_size
        self.seq_length = self.max_position_embeddings = seq_length
        super().__init__(**fields)


def test_configs_of_other_classes_with_the_same_fields_become_ours():
    ours = tiny_config()
    assert ChatGLMConfig.from_config(ours) is ours
    theirs = Foreign(**golden_json("config.json"))
    theirs.dtype = torch.float16
    theirs.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    theirs._attn_implementation, theirs._commit_hash = "flex_attention", "0123abc"
    config = ChatGLMConfig.from_config(theirs)
    assert type(config) is ChatGLMConfig and config._commit_hash == "0123abc"
    for name in golden_json("config.json"):
        if name not in ("auto_map", "torch_dtype", "dtype", "transformers_version"):
            assert getattr(config, name) == getattr(ours, name), name
    assert config.dtype == torch.float16 and config._attn_implementation == "flex_attention"
    assert config.auto_map == AUTO_MAP
    assert config.quantization_config is theirs.quantization_config
    assert not set(ChatGLMConfig.attribute_map) & vars(config).keys()
    theirs = Foreign(**golden_json("config.json") | {"vision_config": None})
    with pytest.raises(ValueError, match="Foreign has model_type .*: give the config of a glm-4v"):
        ChatGLMConfig.from_config(theirs)


NOT_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "1e39", "1" + "0" * 400]


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path, text):
    """Values as JSON has them, also in nested sections, in lists and in unknown fields."""
    tiny_config().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    value = json.loads(text)
    for name, changed in {
        "rope_ratio": {"rope_ratio": value},
        "layernorm_epsilon": {"layernorm_epsilon": value},
        "vision_config: layer_norm_eps": {
            "vision_config": values["vision_config"] | {"layer_norm_eps": value}
        },
        "of_others: 1": {"of_others": [1.0, value]},
    }.items():
        with pytest.raises(ValueError, match=f"config.json: {name} is "):
            ChatGLMConfig(**values | changed)
        (tmp_path / "config.json").write_text(json.dumps(values | changed))
        with pytest.raises(ValueError, match=f"config.json: {name} is "):
            ChatGLMConfig.from_pretrained(tmp_path)
    largest = ChatGLMConfig(**values | {"of_others": [3.4e38, -1e38, 2**100, 0.0, True]})
    assert largest.of_others[0] == 3.4e38


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"sequence_bias": [[[7], NAN]]}, "sequence_bias: 0 is nan"),
        ({"sequence_bias": {(7,): INF}}, "sequence_bias: 0 is inf"),
        ({"exponential_decay_length_penalty": (0, NAN)}, "length_penalty: 1 is nan"),
    ],
)
def test_options_that_are_not_finite_are_refused_before_anything_is_generated(
    model, options, named
):
    with pytest.raises(ValueError, match=f"generation_config: .*{named}"):
        model.generate(torch.ones(1, 3, dtype=torch.long), do_sample=True, **options)


def test_an_infinite_max_time_and_a_bias_of_minus_infinity_are_accepted(model):
    ids = torch.ones(1, 3, dtype=torch.long)
    greedy = {"do_sample": False, "max_new_tokens": 2}
    token = model.generate(ids, max_time=INF, **greedy)[0, 3].item()
    others = model.generate(ids, sequence_bias=[[[token], -INF]], **greedy)
    assert others[0, 3] != token


def test_keywords_of_from_pretrained_are_checked_like_the_file(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_pretrained: rope_ratio is nan"):
        ChatGLMConfig.from_pretrained(tmp_path, rope_ratio=NAN)
    with pytest.raises(ValueError, match="layernorm_epsilon is -5"):
        tiny_config(layernorm_epsilon=-5)
    for name, value in (("layer_norm_eps", -1), ("scaling_factor", 0)):
        vision = tiny_config().vision_config | {name: value}
        with pytest.raises(ValueError, match="layer_norm_eps is .* and scaling_factor"):
            tiny_config(vision_config=vision)
    # A config may be named by its folder.
    loaded = type(model).from_pretrained(tmp_path, config=str(tmp_path))
    assert type(loaded) is type(model)


def test_null_settings_are_ignored_and_num_labels_is_read():
    config = golden_json("config.json") | {"rope_scaling": None, "text_config": None}
    read = ChatGLMConfig.from_dict(config | {"attribute_map": None, "num_labels": 3})
    assert read.num_labels == 3 and read.attribute_map["vocab_size"] == "padded_vocab_size"
    with pytest.raises(ValueError, match="has attribute_map, which is an attribute of"):
        ChatGLMConfig.from_dict(config | {"attribute_map": {}})
