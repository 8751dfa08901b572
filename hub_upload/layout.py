"""What a build consists of: names of files, classes and ids."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import glm4v_patched
from glm4v_patched.remote import configuration_chatglm, tokenization_chatglm
from glm4v_patched.remote.configuration_chatglm import AUTO_MAP, EVA2CLIPVisionConfig

UPSTREAM = "zai-org/glm-4v-9b"
ARCHITECTURE = "GLM4VForCausalLM"
REMOTE = Path(glm4v_patched.__file__).parent / "remote"
PROCESSOR = {"AutoProcessor": "processing_chatglm.ChatGLMProcessor"}
IMAGES = {"AutoImageProcessor": "image_processing_chatglm.ChatGLMImageProcessor"}
TOKENIZER = {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]}
# By file, in the order in which the loader looks.
AUTO_MAPS: dict[str, dict[str, Any]] = {
    "config.json": AUTO_MAP | IMAGES | PROCESSOR | TOKENIZER,
    "tokenizer_config.json": PROCESSOR | TOKENIZER,
    "preprocessor_config.json": IMAGES | PROCESSOR,
    "processor_config.json": PROCESSOR,
}
# Options of generation that a build may have: numbers and ids, by which no other code runs.
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
ID, COMMIT = "[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", "[0-9a-f]{40}"
SHARD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors"


def our_code() -> dict[str, bytes]:
    """This clone's, by file."""
    files = {path.name: path.read_bytes() for path in sorted(REMOTE.glob("*.py"))}
    del files["__init__.py"]
    return files
