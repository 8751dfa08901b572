"""A tiny model with its processor, in a folder of the current one, for suites that load one."""

from pathlib import Path

import torch

from glm4v_patched.demo.tiny_model import build_processor, save, tiny_config
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

FOLDER = "tiny-glm-4v"
PROCESSOR = build_processor(["What is in the image?", "A cat sits on the mat."])


def build() -> GLM4VForCausalLM:
    torch.manual_seed(0)
    return GLM4VForCausalLM(tiny_config(PROCESSOR.tokenizer)).eval()


def write() -> str:
    """Write the folder if it is not there."""
    if not Path(FOLDER).exists():
        save(build(), PROCESSOR, Path(FOLDER))
    return FOLDER


def image_prompts(texts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Put an image, as an expanded prompt, before each sequence of ids."""
    config, count = tiny_config(PROCESSOR.tokenizer), len(texts)
    inner = [config.image_token_id] * PROCESSOR.num_image_tokens
    image = torch.tensor([[config.boi_token_id, *inner, config.eoi_token_id]]).expand(count, -1)
    pixels = torch.randn(count, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    ids = torch.cat((image, texts), dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
