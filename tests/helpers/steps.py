"""What both sides of the distributed tests do: the model, the batches, what is trained."""

import torch

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.cells import Cell
from tests.helpers.tiny import BOI, EOI, PAD, golden_json, pictures, text, tiny_config

LEARNING_RATE = 0.002
# Which of the two ranks have an image, step by step: all four combinations, in every order.
CHANGING = ["10", "01", "11", "00", "10", "00", "01", "00", "11", "10", "11", "01", "10", "10"]
CHANGING += ["00", "00", "11", "11", "01", "01"]


def small_model(dtype: torch.dtype = torch.float32) -> GLM4VForCausalLM:
    """The golden data's sizes with small random weights.

    The golden weights amplify a rounding of bf16 to a third of the gradient within three steps;
    these, without the division of the image vectors by 8, to 7 %.
    """
    torch.manual_seed(0)
    vision = golden_json("config.json")["vision_config"] | {"scaling_factor": 1}
    config = tiny_config(initializer_range=0.05, vision_config=vision)
    return GLM4VForCausalLM._from_config(config, attn_implementation="sdpa").to(dtype)


def has_image(images: str, rank: int, step: int) -> bool:
    return rank == 0 if images == "rank0" else CHANGING[step % len(CHANGING)][rank] == "1"


def device() -> str:
    """The current GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def rank_batch(cell: Cell, rank: int, step: int) -> dict[str, torch.Tensor]:
    """One row for this rank, with or without an image, on :func:`device`."""
    image = has_image(cell.images, rank, step)
    row = [*text(5, seed=step), *([BOI, PAD, EOI] if image else [])]
    row += text(9, seed=10 * step + rank + 1)
    labels = [-100] * (len(row) - 6) + row[-6:]
    batch = {"input_ids": torch.tensor([row]), "labels": torch.tensor([labels])}
    if image:
        batch["pixel_values"] = pictures(1, seed=2 * step + rank)
    return {name: values.to(device()) for name, values in batch.items()}


def select_weights(model, weights: str):
    """The model in training mode, with what ``weights`` names trainable and the rest frozen."""
    if weights == "frozen_vision":
        model.transformer.vision.requires_grad_(False)
    elif weights == "frozen_language":
        model.requires_grad_(False).transformer.vision.requires_grad_(True)
    elif weights != "all":
        model = _add_adapters(model, weights)
    return model.train()


def _add_adapters(model, weights: str):
    """LoRA on the fused attention projections, not zero, the same on every process."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=2,
        target_modules=r".*query_key_value"
        if weights == "lora_both"
        else r".*encoder.*query_key_value",
        modules_to_save=["output_layer", "conv"] if weights == "lora_modules_to_save" else None,
        init_lora_weights=False,
    )
    # peft would keep adapters in fp32 beside bf16 weights, which DeepSpeed 0.19.2 cannot gather.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def weights_dtype(cell: Cell) -> torch.dtype:
    return torch.bfloat16 if cell.precision == "bf16" else torch.float32


def autocast(cell: Cell):
    return torch.autocast(device(), torch.bfloat16, enabled=cell.precision == "bf16_autocast")


def trainable(model) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def largest(gradients: dict[str, torch.Tensor]) -> float:
    return max(gradient.abs().max().item() for gradient in gradients.values())


def count_runs(model) -> dict[str, int]:
    """How often each layer of both towers has run from now on, which checkpointing doubles."""
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "layer_forward")}
    runs = dict.fromkeys(layers, 0)
    for name, layer in layers.items():

        def counted(*inputs, name=name, original=layer.layer_forward):
            runs[name] += 1
            return original(*inputs)

        layer.layer_forward = counted
    assert len(runs) == 4
    return runs
