"""Names of the published code that others call exist here, or docs/patching.md lists them.

The lists have the methods, parameters and attributes of models, tokenizer and config in the
published code of 2024. Modules inside a model have the names of the checkpoint.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from glm4v_patched.remote import configuration_chatglm, modeling_chatglm, tokenization_chatglm
from tests.helpers.tiny import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "patching.md"
MODULES = modeling_chatglm, tokenization_chatglm, configuration_chatglm
MODEL = """input_ids images position_ids attention_mask past_key_values inputs_embeds use_cache
    output_hidden_states return_dict"""
# Of each class: its methods with their parameters, and last the attributes of its objects.
PUBLISHED = {
    "ChatGLMPreTrainedModel": {
        "get_masks": "",
        "get_position_ids": "",
        "get_multimodal_position_ids": "",
        "gradient_checkpointing_enable": "gradient_checkpointing_kwargs",
    },
    "ChatGLMModel": {
        "__init__": "config device empty_init",
        "get_input_embeddings": "",
        "set_input_embeddings": "value",
        "get_prompt": "",
        "forward": f"{MODEL} full_attention_mask",
        "attributes": """embedding num_layers multi_query_group_num kv_channels seq_length
            rotary_pos_emb encoder output_layer pre_seq_len prefix_projection vision""",
    },
    "ChatGLMForConditionalGeneration": {
        "__init__": "config empty_init device",
        "prepare_inputs_for_generation": "input_ids",
        "forward": f"{MODEL} labels output_attentions return_last_logit",
        "_reorder_cache": "",
        "attributes": "max_sequence_length transformer config",
    },
    "ChatGLMForSequenceClassification": {
        "__init__": "config empty_init device",
        "forward": """input_ids position_ids attention_mask past_key_values inputs_embeds labels
            return_dict""",
        "attributes": "num_labels transformer classifier_head classifier_dropout",
    },
    "ChatGLM4Tokenizer": {
        "__init__": """vocab_file padding_side clean_up_tokenization_spaces encode_special_tokens
            image_size""",
        "get_vocab": "",
        "convert_tokens_to_string": "tokens",
        "save_vocabulary": "save_directory filename_prefix",
        "_tokenize": "",
        "_convert_token_to_id": "",
        "_convert_id_to_token": "index",
        "get_prefix_tokens": "",
        "build_single_message": "role metadata message tokenize message_prefix",
        "apply_chat_template": """conversation add_generation_prompt tokenize padding truncation
            max_length return_tensors return_dict tokenizer_kwargs add_special_tokens""",
        "build_inputs_with_special_tokens": "token_ids_0 token_ids_1",
        "_pad": """encoded_inputs max_length padding_strategy pad_to_multiple_of
            return_attention_mask""",
        "attributes": """name vocab_file pat_str encode_special_tokens tokenizer mergeable_ranks
            decoder n_words image_size vocab_size""",
    },
    "ChatGLMConfig": {
        "attributes": """num_layers padded_vocab_size hidden_size ffn_hidden_size kv_channels
            num_attention_heads seq_length hidden_dropout attention_dropout layernorm_epsilon
            rmsnorm apply_residual_connection_post_layernorm post_layer_norm add_bias_linear
            add_qkv_bias bias_dropout_fusion multi_query_attention multi_query_group_num rope_ratio
            apply_query_key_layer_scaling attention_softmax_in_fp32 fp32_residual_connection
            pre_seq_len boi_token_id eoi_token_id vocab_size original_rope vision_config""",
    },
}


@pytest.fixture
def objects(tokenizer) -> dict[type, Any]:
    """One object of each class."""
    model = tiny_model(num_layers=1)
    classifier = modeling_chatglm.ChatGLMForSequenceClassification(model.config)
    instances = [*model.modules(), classifier, tokenizer, configuration_chatglm.ChatGLMConfig()]
    return {type(instance): instance for instance in instances}


def missing(objects: dict[type, Any]) -> set[str]:
    """Return the published names that do not exist here; parameters are ``name=``."""
    gone = set()
    for class_name, members in PUBLISHED.items():
        classes = [getattr(module, class_name, None) for module in MODULES]
        ours_class = next(filter(None, classes), None)
        if ours_class is None:
            gone.add(class_name)
            continue
        ours = objects.get(ours_class, ours_class)
        for name, words in members.items():
            if name == "attributes":
                gone |= {word for word in words.split() if not hasattr(ours, word)}
            elif not hasattr(ours, name):
                gone.add(name)
            else:
                gone |= {f"{word}=" for word in not_taken(ours, name, words.split())}
    return gone


def not_taken(ours: Any, method: str, published: list[str]) -> list[str]:
    """Return the published parameters that our method does not take."""
    parameters = inspect.signature(getattr(ours, method)).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    is_tokenizer = isinstance(ours, tokenization_chatglm.ChatGLM4Tokenizer)
    if is_tokenizer and inspect.Parameter.VAR_KEYWORD in kinds:
        return []
    # The forward of a model with a head names its own keywords only.
    known = {*parameters, *(getattr(ours, "forward_names", ()) if method == "forward" else ())}
    return [name for name in published if name not in known]


def listed() -> set[str]:
    """Return the names in the first column of the page's list."""
    section = PAGE.read_text("utf-8").partition("## Names that are not here")[2]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    code = [word for cell in cells[1:] for word in re.findall(r"`([^`]+)`", cell)]
    return {match[0] for word in code if (match := re.fullmatch(r"\w+=?", word))}


def test_each_published_name_is_here_or_listed(objects):
    assert sorted(missing(objects) - listed()) == []
