"""Write a tiny model, adapters that change its answers, and a data file with images."""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers.dynamic_module_utils import custom_object_save

from glm4v_patched.data.rows import write_conversations
from glm4v_patched.demo.images import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.engine.options import LoraOptions
from glm4v_patched.engine.trainable import select_weights
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM


class Files(NamedTuple):
    model: Path
    adapters: Path
    data: Path


def write_adapters(folder: Path, model: Path, scale: float = 0.3) -> None:
    """Write LoRA adapters with nonzero ``B``, as training saves them."""
    base = GLM4VForCausalLM.from_pretrained(model, dtype="auto")
    adapted = select_weights(base, "lora_all", LoraOptions(rank=4))
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=scale)
    adapted.save_pretrained(folder)
    custom_object_save(base, folder)


def write_files(folder: Path) -> Files:
    """Write model, adapters and data; in fp32, so that rounding decides no token."""
    conversations = draw_data_set(folder / "images", 6, seed=0, side=IMAGE_SIDE)
    conversations[2] = [{"role": "user", "content": "Hello, which shapes and colors are there?"}]
    conversations[4] += [{"role": "user", "content": "And now?"}]
    write_conversations(folder / "rows.jsonl", conversations)
    build_from_scratch(folder / "model", conversations, seed=0)
    model = GLM4VForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    # With its usual random weights, the tiny model repeats one token.
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(folder / "model")
    write_adapters(folder / "adapters", folder / "model")
    return Files(folder / "model", folder / "adapters", folder / "rows.jsonl")
