"""Cogagents that compute what a glm-4v computes: with its weights, permuted.

cogagent-9b rotates by halves (``original_rope: false``). Reordering the rotated channels of queries
and keys turns one rotation into the other.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.tiny import update_json

# Weights, biases and LoRA's second matrices, whose rows are those of the projection.
PERMUTED = re.compile(r"encoder\.layers\.\d+\.self_attention\.query_key_value\.(?!.*lora_A)")


def permuted(weights: Mapping[str, Tensor], config: ChatGLMConfig) -> dict[str, Tensor]:
    """Return the weights of a cogagent: channel 2i of a rotated half goes to i, and channel 2i + 1
    to i + half of the rotated channels, in each query and key."""
    channels, rotated = config.kv_channels, config.kv_channels // 2
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, channels)]
    heads = config.num_attention_heads + config.multi_query_group_num
    rows = [head * channels + channel for head in range(heads) for channel in order]
    rows += range(len(rows), len(rows) + config.multi_query_group_num * channels)
    return {
        name: weight[rows].clone() if PERMUTED.search(name) else weight
        for name, weight in weights.items()
    }


def write_cogagent(model: Path, folder: Path) -> Path:
    """Write the cogagent of a glm-4v's folder, with one file of weights, to a new folder."""
    shutil.copytree(model, folder)
    update_json(folder / "config.json", original_rope=False)
    permute_file(folder / "model.safetensors", model)
    return folder


def permute_file(path: Path, model: Path) -> None:
    weights = permuted(load_file(path), ChatGLMConfig.from_pretrained(model))
    save_file(weights, path, metadata={"format": "pt"})
