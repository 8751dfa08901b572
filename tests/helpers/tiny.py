"""The tiny glm-4v of the golden data, and inputs for it. Used by the tests of all folders."""

import json
import zipfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load
from torch.nn.utils.rnn import pad_sequence

from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

DATA = Path(__file__).parents[1] / "golden"
BOI, EOI, PAD, FILL = 510, 511, 500, 501
NUM_IMAGE_TOKENS = 4


@cache
def golden_bytes(name: str) -> bytes:
    archive = "golden_bf16.zip" if ".bf16." in name else "golden_fp32.zip"
    with zipfile.ZipFile(DATA / archive) as files:
        return files.read(name)


def golden_json(name: str) -> dict:
    return json.loads(golden_bytes(name))


def golden_case(name: str) -> tuple[dict, dict, dict]:
    """Return inputs, outputs and gradients of one case, by their names without the prefix."""
    tensors = load(golden_bytes(f"{name}.safetensors"))
    groups = {"in": {}, "out": {}, "grad": {}}
    for key, value in tensors.items():
        group, _, rest = key.partition(".")
        groups[group][rest] = value
    return groups["in"], groups["out"], groups["grad"]


def update_json(path: Path, **values: object) -> None:
    """Set keys of the object in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tiny_config(**changes) -> ChatGLMConfig:
    return ChatGLMConfig(**(golden_json("config.json") | changes))


def golden_weights() -> dict[str, torch.Tensor]:
    return load(golden_bytes("state_dict.safetensors"))


def tiny_model(dtype=torch.float32, attn_implementation="sdpa", **changes) -> GLM4VForCausalLM:
    """Build the golden model in eval mode."""
    config = tiny_config(**changes)
    model = GLM4VForCausalLM._from_config(config, attn_implementation=attn_implementation)
    model.load_state_dict(golden_weights(), strict=False)
    return model.to(dtype).eval()


def shallow_model(**changes) -> GLM4VForCausalLM:
    """Build the golden model with one layer in each tower, for what takes long to compile."""
    vision = tiny_config().vision_config | {"num_hidden_layers": 1}
    return tiny_model(num_layers=1, vision_config=vision, **changes)


def small_model(dtype: torch.dtype = torch.float32) -> GLM4VForCausalLM:
    """Build a model of the golden sizes with small random weights.

    The golden weights amplify a rounding of bf16 to a third of the gradient within three steps;
    these, without the division of the image vectors by 8, to 7 %.
    """
    torch.manual_seed(0)
    vision = golden_json("config.json")["vision_config"] | {"scaling_factor": 1}
    config = tiny_config(initializer_range=0.05, vision_config=vision)
    return GLM4VForCausalLM._from_config(config, attn_implementation="sdpa").to(dtype)


def encoded(model: GLM4VForCausalLM, pixels: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of images, from begin to end."""
    return model.get_image_features(pixels, return_dict=True).pooler_output


def unexpanded_image() -> list[int]:
    return [BOI, PAD, EOI]


def expanded_image() -> list[int]:
    return [BOI, *[FILL] * NUM_IMAGE_TOKENS, EOI]


def random_pixels(number: int, seed: int = 0, side: int = 56) -> torch.Tensor:
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(seed))


def images_of(rows: list[list[int]]) -> list[torch.Tensor]:
    """Return random images for each sequence."""
    counts = [row.count(BOI) for row in rows]
    return list(random_pixels(sum(counts)).split(counts))


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def padded(rows: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    """Pad sequences on one side, to ``input_ids`` and ``attention_mask``."""
    ids = [torch.tensor(row) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    options = {"batch_first": True, "padding_side": side}
    return {
        "input_ids": pad_sequence(ids, padding_value=PAD, **options),
        "attention_mask": pad_sequence(masks, **options),
    }
