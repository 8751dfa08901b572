"""Names of the published code that others call exist here, or docs/patching.md lists them.

The lists have the methods, parameters and attributes of models, tokenizer and config in the
published code of 2024. Modules inside a model have the names of the checkpoint.
"""

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from glm4v_patched.remote import modeling_chatglm, tokenization_chatglm
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.tiny import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "patching.md"


class Published(NamedTuple):
    """The methods of a class with their parameters, and the attributes of its objects."""

    methods: dict[str, str]
    attributes: str = ""


OF_MODEL = "input_ids images position_ids attention_mask past_key_values inputs_embeds use_cache"
OF_MODEL += " output_hidden_states return_dict"
MODELING = {
    "ChatGLMPreTrainedModel": Published(
        {
            "get_masks": "",
            "get_position_ids": "",
            "get_multimodal_position_ids": "",
            "gradient_checkpointing_enable": "gradient_checkpointing_kwargs",
        }
    ),
    "ChatGLMModel": Published(
        {
            "__init__": "config device empty_init",
            "get_input_embeddings": "",
            "set_input_embeddings": "value",
            "get_prompt": "",
            "forward": f"{OF_MODEL} full_attention_mask",
        },
        "embedding num_layers multi_query_group_num kv_channels seq_length rotary_pos_emb encoder "
        "output_layer pre_seq_len prefix_projection vision",
    ),
    "ChatGLMForConditionalGeneration": Published(
        {
            "__init__": "config empty_init device",
            "prepare_inputs_for_generation": "input_ids",
            "forward": f"{OF_MODEL} labels output_attentions return_last_logit",
            "_reorder_cache": "",
        },
        "max_sequence_length transformer config",
    ),
    "ChatGLMForSequenceClassification": Published(
        {
            "__init__": "config empty_init device",
            "forward": "input_ids position_ids attention_mask past_key_values inputs_embeds labels "
            "return_dict",
        },
        "num_labels transformer classifier_head classifier_dropout",
    ),
}
TOKENIZATION = {
    "ChatGLM4Tokenizer": Published(
        {
            "__init__": "vocab_file padding_side clean_up_tokenization_spaces "
            "encode_special_tokens image_size",
            "get_vocab": "",
            "convert_tokens_to_string": "tokens",
            "save_vocabulary": "save_directory filename_prefix",
            "_tokenize": "",
            "_convert_token_to_id": "",
            "_convert_id_to_token": "index",
            "get_prefix_tokens": "",
            "build_single_message": "role metadata message tokenize message_prefix",
            "apply_chat_template": "conversation add_generation_prompt tokenize padding truncation "
            "max_length return_tensors return_dict tokenizer_kwargs add_special_tokens",
            "build_inputs_with_special_tokens": "token_ids_0 token_ids_1",
            "_pad": "encoded_inputs max_length padding_strategy pad_to_multiple_of "
            "return_attention_mask",
        },
        "name vocab_file pat_str encode_special_tokens tokenizer mergeable_ranks decoder n_words "
        "image_size vocab_size",
    )
}
MODULES: dict[ModuleType, dict[str, Published]] = {
    modeling_chatglm: MODELING,
    tokenization_chatglm: TOKENIZATION,
}
FIELDS = (
    "num_layers padded_vocab_size hidden_size ffn_hidden_size kv_channels num_attention_heads "
    "seq_length hidden_dropout attention_dropout layernorm_epsilon rmsnorm "
    "apply_residual_connection_post_layernorm post_layer_norm add_bias_linear add_qkv_bias "
    "bias_dropout_fusion multi_query_attention multi_query_group_num rope_ratio "
    "apply_query_key_layer_scaling attention_softmax_in_fp32 fp32_residual_connection "
    "pre_seq_len boi_token_id eoi_token_id vocab_size original_rope vision_config"
)


@pytest.fixture
def objects(tokenizer) -> dict[type, Any]:
    """One object of each published class."""
    model = tiny_model(num_layers=1)
    classifier = modeling_chatglm.ChatGLMForSequenceClassification(model.config)
    instances = [*model.modules(), classifier, tokenizer]
    return {type(instance): instance for instance in instances}


def missing(objects: dict[type, Any]) -> set[str]:
    """Return the published names that do not exist here; parameters are ``name=``."""
    gone = set()
    for module, classes in MODULES.items():
        for class_name, published in classes.items():
            ours = getattr(module, class_name, None)
            if ours is None:
                gone.add(class_name)
                continue
            for name, parameters in published.methods.items():
                if not hasattr(ours, name):
                    gone.add(name)
                    continue
                gone |= {f"{parameter}=" for parameter in not_taken(ours, name, parameters)}
            names = published.attributes.split()
            gone |= {name for name in names if ours in objects and not hasattr(objects[ours], name)}
    config = ChatGLMConfig()
    return gone | {name for name in FIELDS.split() if not hasattr(config, name)}


def not_taken(ours: type, method: str, published: str) -> list[str]:
    """Return the published parameters that our method does not take."""
    parameters = inspect.signature(getattr(ours, method)).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if ours.__name__ == "ChatGLM4Tokenizer" and inspect.Parameter.VAR_KEYWORD in kinds:
        return []
    # The forward of a model with a head names its own keywords only.
    known = {*parameters, *(getattr(ours, "forward_names", ()) if method == "forward" else ())}
    return [name for name in published.split() if name not in known]


def listed() -> set[str]:
    """Return the names in the first column of the page's list."""
    section = PAGE.read_text().partition("## Names that are not here")[2]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    code = [word for cell in cells[1:] for word in re.findall(r"`([^`]+)`", cell)]
    return {match[0] for word in code if (match := re.fullmatch(r"\w+=?", word))}


def test_each_published_name_is_here_or_listed(objects):
    assert sorted(missing(objects) - listed()) == []
