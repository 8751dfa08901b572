"""The configuration: the published fields, checked; and the range of transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PretrainedConfig

from glm4v_patched.remote.configuration_chatglm import (
    AUTO_MAP,
    OLDEST_TRANSFORMERS,
    TESTED_TRANSFORMERS,
    ChatGLMConfig,
    check_transformers,
)
from glm4v_patched.remote.configuration_chatglm import FIRST_UNTESTED_TRANSFORMERS as NEWER
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.fresh_process import run_without_package
from tests.helpers.tiny import golden_json, tiny_config

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_the_published_model():
    config = ChatGLMConfig()
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (40, 4096, 13696)
    assert (config.num_attention_heads, config.multi_query_group_num, config.kv_channels) == (
        32,
        2,
        128,
    )
    assert config.seq_length == 8192
    assert config.eos_token_id == [151329, 151336, 151338]
    assert config.vision.num_patches == 6400
    assert config.vision.num_image_tokens == 1600
    assert not (config.rope_in_fp32 or config.skip_logits)


def test_transformers_names_read_and_write_the_published_fields():
    config = tiny_config()
    assert (config.num_hidden_layers, config.vocab_size, config.max_position_embeddings) == (
        2,
        512,
        128,
    )
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (16, 2, 128)
    config.vocab_size = 520
    assert config.padded_vocab_size == 520


def test_names_that_others_look_for_are_there_and_the_file_is_as_it_was(tmp_path):
    config = ChatGLMConfig()
    assert config.image_token_id == 151341 and config.to_dict()["image_token_id"] == 151341
    assert config.num_key_value_heads == config.to_dict()["num_key_value_heads"] == 2
    assert config.bos_token_id is None and config.pre_seq_len is None
    assert {"bos_token_id", "pre_seq_len"} <= config.to_dict().keys()
    assert tiny_config().image_token_id is None, "151341 is no id of 512"
    assert ChatGLMConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()

    def saved(changed: ChatGLMConfig) -> dict:
        changed.save_pretrained(tmp_path)
        again = ChatGLMConfig.from_pretrained(tmp_path)
        for name in ("image_token_id", "num_key_value_heads", "bos_token_id", "pre_seq_len"):
            assert getattr(again, name) == getattr(changed, name), name
        return json.loads((tmp_path / "config.json").read_text())

    new = {"image_token_id", "num_key_value_heads", "bos_token_id", "pre_seq_len"}
    assert not new & saved(config).keys()
    assert not new & saved(tiny_config()).keys()
    assert saved(tiny_config(image_token_id=499, num_key_value_heads=4))["image_token_id"] == 499


def test_the_image_token_is_the_processors(real_dir):
    processor = ChatGLMProcessor.from_pretrained(real_dir)
    assert ChatGLMConfig().image_token_id == processor.image_token_id


def test_published_fields_survive_saving(tmp_path):
    published = golden_json("config.json")
    tiny_config().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved.get(name) for name in published if name != "torch_dtype"} == {
        name: value for name, value in published.items() if name != "torch_dtype"
    }
    again = ChatGLMConfig.from_pretrained(tmp_path)
    assert again.to_dict() == tiny_config().to_dict()


def test_auto_map_is_ours_whatever_it_was():
    foreign = {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration", "Other": "a.b"}
    assert tiny_config(auto_map=foreign).auto_map == AUTO_MAP
    assert ChatGLMConfig.from_dict(tiny_config().to_dict() | {"auto_map": foreign}).auto_map == (
        AUTO_MAP
    )


def test_unknown_vision_fields_are_left_alone():
    vision = golden_json("config.json")["vision_config"] | {"a_new_field": 3}
    config = tiny_config(vision_config=vision)
    assert config.vision.image_size == 56
    assert config.to_dict()["vision_config"]["a_new_field"] == 3


@pytest.mark.parametrize(
    "field, value",
    [
        ("multi_query_attention", False),
        ("original_rope", False),
        ("rmsnorm", False),
        ("post_layer_norm", False),
        ("apply_residual_connection_post_layernorm", True),
        ("fp32_residual_connection", True),
        ("hidden_dropout", 0.1),
    ],
)
def test_refuses_what_the_model_does_not_compute(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} is not supported"):
        tiny_config(**{field: value})


def test_refuses_tied_embeddings():
    with pytest.raises(ValueError, match="tie_word_embeddings=True is not supported"):
        tiny_config(tie_word_embeddings=True)


def test_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_attention_heads 4 is not a multiple of .* 3"):
        tiny_config(multi_query_group_num=3)
    with pytest.raises(ValueError, match="kv_channels 18 is not a multiple of 4"):
        tiny_config(kv_channels=18)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_positions": 16}, "num_positions is 16, but image_size 56 .* 16 patches .* to 17"),
        ({"image_size": 70}, "num_positions is 17, but image_size 70 .* 25 patches .* to 26"),
        ({"image_size": 14, "num_positions": 2}, "image_size 14 is less than two patches of 14"),
        ({"num_heads": 5}, "hidden_size 32 is not a multiple of num_heads 5"),
        ({"dropout_prob": 0.1}, "dropout_prob is 0.1; only 0.0"),
    ],
)
def test_refuses_a_vision_config_that_does_not_fit(changes, message):
    vision = golden_json("config.json")["vision_config"] | changes
    with pytest.raises(ValueError, match=message):
        tiny_config(vision_config=vision)


def test_generation_config_follows():
    generation = GenerationConfig.from_model_config(tiny_config())
    assert generation.eos_token_id == [500, 507, 509]
    assert generation.pad_token_id == 500


@pytest.mark.parametrize("version", ["4.40.0", "4.57.5"])
def test_refuses_transformers_older_than_tested(version):
    said = f"{TESTED_TRANSFORMERS} and found {version}, .*; install"
    with pytest.raises(ImportError, match=said):
        check_transformers(version)


@pytest.mark.parametrize("version", [NEWER, f"{NEWER}.0", "6.0.1"])
def test_warns_once_of_transformers_newer_than_tested(version, warned):
    for _ in range(2):
        check_transformers(version)
    (record,) = warned.records
    assert record.levelname == "WARNING"
    assert f"{TESTED_TRANSFORMERS} and found {version}; if it fails" in record.message


@pytest.mark.parametrize("version", [OLDEST_TRANSFORMERS, "4.57.7", "5.0.0", "5.24.9"])
def test_takes_transformers_inside_of_the_tested_range(version, warned):
    check_transformers(version)
    assert not warned.records


def test_the_range_is_that_of_the_package():
    assert TESTED_TRANSFORMERS.startswith(f">={OLDEST_TRANSFORMERS},")
    assert f'"transformers{TESTED_TRANSFORMERS}"' in (ROOT / "pyproject.toml").read_text()


def test_configs_of_other_classes_with_the_same_fields_become_ours():
    ours = tiny_config()
    assert ChatGLMConfig.of(ours) is ours
    theirs = foreign_config_class()(**golden_json("config.json"))
    theirs.dtype = torch.float16
    theirs._attn_implementation = "flex_attention"
    theirs._commit_hash = "0123abc"
    config = ChatGLMConfig.of(theirs)
    assert config._commit_hash == "0123abc"
    assert type(config) is ChatGLMConfig
    for name in golden_json("config.json"):
        if name not in ("auto_map", "torch_dtype", "dtype", "transformers_version"):
            assert getattr(config, name) == getattr(ours, name), name
    assert config.dtype == torch.float16 and config._attn_implementation == "flex_attention"
    assert config.auto_map == AUTO_MAP
    assert not set(ChatGLMConfig.attribute_map) & vars(config).keys()


@pytest.mark.parametrize("change", [{"vision_config": None}, {"model_type": "other"}])
def test_configs_of_other_models_are_refused(change):
    cls = foreign_config_class(change.pop("model_type", "chatglm"))
    theirs = cls(**golden_json("config.json") | change)
    with pytest.raises(ValueError, match="Foreign has model_type .*: give the config of a glm-4v"):
        ChatGLMConfig.of(theirs)


def test_importing_under_an_old_transformers_says_so(tmp_path):
    code = (
        "import transformers; transformers.__version__ = '4.40.0'\n"
        "import glm4v_patched.remote.configuration_chatglm"
    )
    said = f"ImportError: .*{TESTED_TRANSFORMERS} and found 4.40.0"
    with pytest.raises(AssertionError, match=said):
        run_without_package(code, tmp_path, PYTHONPATH=str(ROOT))


def foreign_config_class(type_of_model: str = "chatglm") -> type:
    """A config class as vLLM has one: the fields under names of their own, and no checks."""

    class Foreign(PretrainedConfig):
        model_type = type_of_model

        def __init__(self, padded_vocab_size=65024, seq_length=2048, **fields):
            self.padded_vocab_size = self.vocab_size = padded_vocab_size
            self.seq_length = self.max_position_embeddings = seq_length
            self.interleaved_qkv = False
            super().__init__(**fields)

    return Foreign


FETCHED = [
    {"attn_implementation": "someone/repo"},
    {"attn_implementation": "kernels-community/flash-attn@v1:forward"},
    {"_attn_implementation": "someone/repo"},
    {"_attn_implementation_internal": "paged|someone/repo"},
    {"attn_implementation": {"": "sdpa", "vision_config": "someone/repo"}},
    {"vision_config": {"attn_implementation": "someone/repo"}},
    {"experts_implementation": "someone/repo"},
    {"use_kernels": True},
    {"kernel_config": {"RMSNorm": "someone/repo"}},
    {"custom_generate": "someone/repo"},
]


@pytest.mark.parametrize("named", FETCHED, ids=str)
def test_a_folder_names_no_code_that_would_be_fetched(tmp_path, named):
    values = golden_json("config.json")
    inside = named.get("vision_config")
    changed = {"vision_config": values["vision_config"] | inside} if inside else named
    (tmp_path / "config.json").write_text(json.dumps(values | changed))
    for load in (ChatGLMConfig.from_pretrained, GLM4VForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="fetched and run"):
            load(tmp_path)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention", "paged|sdpa", None])
def test_a_folder_may_name_transformers_own_attention(tmp_path, name):
    values = golden_json("config.json") | {"attn_implementation": name}
    (tmp_path / "config.json").write_text(json.dumps(values))
    ChatGLMConfig.from_pretrained(tmp_path)
