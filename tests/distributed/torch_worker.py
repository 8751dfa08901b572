"""Two processes take one step under DDP and one under FSDP2; rank 0 writes the full gradients.

Started by test_torch.py with the folder that holds ``model``.
"""

import sys
from pathlib import Path

import torch
from steps import rank_batch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM


def step(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    model = GLM4VForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        transformer = model.transformer
        for layer in (*transformer.vision.transformer.layers, *transformer.encoder.layers):
            fully_shard(layer)
        wrapped = fully_shard(model)
    wrapped(**rank_batch(torch.distributed.get_rank(), 0)).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if kind == "fsdp2":
        gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    return gradients


def main() -> None:
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    for kind in ("ddp", "fsdp2"):
        gradients = step(kind, folder)
        if torch.distributed.get_rank() == 0:
            torch.save(gradients, folder / f"{kind}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
