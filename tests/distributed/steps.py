"""What both sides of the distributed tests do: the batches, and the low-rank adapters."""

import torch
from tiny import BOI, EOI, PAD, pictures, text


def rank_batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    """One row for this rank; only rank 0 has an image, in every step."""
    image = [BOI, PAD, EOI] if rank == 0 else []
    row = [*text(5, seed=step), *image, *text(9, seed=10 * step + rank + 1)]
    labels = [-100] * (len(row) - 6) + row[-6:]
    batch = {"input_ids": torch.tensor([row]), "labels": torch.tensor([labels])}
    if rank == 0:
        batch["pixel_values"] = pictures(1, seed=step)
    return batch


def add_adapters(model):
    """LoRA on every fused attention projection of both towers, not zero, same on every process."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
    return get_peft_model(model, config)
