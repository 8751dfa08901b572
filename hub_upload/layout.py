"""The names of files, classes, config keys and ids in a build."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import glm4v_patched
from glm4v_patched.remote import configuration_chatglm, tokenization_chatglm
from glm4v_patched.remote.configuration_chatglm import AUTO_MAP, EVA2CLIPVisionConfig

UPSTREAM = "zai-org/glm-4v-9b"
ARCHITECTURE = "GLM4VForCausalLM"
REMOTE_FOLDER = Path(glm4v_patched.__file__).parent / "remote"
PROCESSOR_CLASS = {"AutoProcessor": "processing_chatglm.ChatGLMProcessor"}
IMAGE_PROCESSOR_CLASS = {"AutoImageProcessor": "image_processing_chatglm.ChatGLMImageProcessor"}
TOKENIZER_CLASS = {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]}
# The auto_map of each file, in the order in which the loader reads them.
AUTO_MAPS: dict[str, dict[str, Any]] = {
    "config.json": AUTO_MAP | IMAGE_PROCESSOR_CLASS | PROCESSOR_CLASS | TOKENIZER_CLASS,
    "tokenizer_config.json": PROCESSOR_CLASS | TOKENIZER_CLASS,
    "preprocessor_config.json": IMAGE_PROCESSOR_CLASS | PROCESSOR_CLASS,
    "processor_config.json": PROCESSOR_CLASS,
}
# Generation options that a build may have; none of them makes transformers run other code.
GENERATION_KEYS = {
    *str.split(
        "_from_model_config transformers_version bos_token_id eos_token_id pad_token_id "
        "decoder_start_token_id forced_bos_token_id forced_eos_token_id do_sample temperature "
        "top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty "
        "encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length "
        "min_new_tokens max_time stop_strings early_stopping num_beams num_beam_groups "
        "num_return_sequences diversity_penalty bad_words_ids suppress_tokens "
        "begin_suppress_tokens sequence_bias guidance_scale renormalize_logits "
        "remove_invalid_values use_cache output_attentions output_hidden_states output_logits "
        "output_scores return_dict_in_generate"
    )
}
TOKENIZER_KEYS = tokenization_chatglm.SAVED_TOKENIZER_FIELDS - {"backend", "chat_template"} | {
    *(f"{name}_token" for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk"))
}
CONFIG_KEYS = configuration_chatglm.SAVED_CONFIG_FIELDS - {"quantization_config"}
VISION_KEYS = {field.name for field in fields(EVA2CLIPVisionConfig)}
SPECIAL_IDS = {"boi_token_id": "<|begin_of_image|>", "eoi_token_id": "<|end_of_image|>"}
SPECIAL_IDS |= {"pad_token_id": "<|endoftext|>"}

MANIFEST = "CODE_MANIFEST.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ID_PATTERN, COMMIT_PATTERN = "[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", "[0-9a-f]{40}"
SHARD_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors"


def read_our_code() -> dict[str, bytes]:
    """Return the code files of this clone that a build publishes, by name."""
    files = {path.name: path.read_bytes() for path in sorted(REMOTE_FOLDER.glob("*.py"))}
    del files["__init__.py"]
    return files
