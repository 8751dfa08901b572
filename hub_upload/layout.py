"""What a build consists of: names of files, classes and ids."""

from pathlib import Path
from typing import Any

import glm4v_patched
from glm4v_patched.remote.configuration_chatglm import AUTO_MAP

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
SPECIAL_IDS = {"boi_token_id": "<|begin_of_image|>", "eoi_token_id": "<|end_of_image|>"}
SPECIAL_IDS |= {"pad_token_id": "<|endoftext|>"}

MANIFEST = "CODE_MANIFEST.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# All that a build writes beside code, weights and its manifest.
FILES = {*AUTO_MAPS, INDEX, "MODEL_LICENSE", "LICENSE", "README.md", "chat_template.jinja"}
FILES |= {"generation_config.json", "requirements.txt", "tokenizer.json"}
ID, COMMIT = "[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", "[0-9a-f]{40}"
SHARD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors"


def our_code() -> dict[str, bytes]:
    """This clone's, by file."""
    files = {path.name: path.read_bytes() for path in sorted(REMOTE.glob("*.py"))}
    del files["__init__.py"]
    return files
