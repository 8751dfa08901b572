"""Gradients wait on the GPU for their update, also where the optimizer is on the CPU.

With an offloaded optimizer, DeepSpeed keeps each process's share of the gradients, in the weights'
type, on the CPU, beside the fp32 gradients that the update reads: for all weights of the real model
28 GB of the machine's memory. With accumulation each of its rows then travels to the GPU, is added
to, and travels back. On the GPUs they take a share of as much, and only an update moves them.
"""

from typing import Any

import torch
from torch import nn

from .internals import attribute, gradient_views, set_gradient_views, zero3_optimizers


def keep_gradients_on_gpu(model: nn.Module) -> None:
    """Move ZeRO-3's gradients to where the weights are, in the first forward pass.

    Raises:
        RuntimeError: out of that forward pass, if DeepSpeed has renamed what is moved.
    """

    def once(*_: Any) -> None:
        hook.remove()
        device = next(model.parameters()).device
        for optimizer in zero3_optimizers(model):
            _move(optimizer, device)

    hook = model.register_forward_pre_hook(once)


def _move(optimizer: Any, device: torch.device) -> None:
    """No gradient is kept yet: the buffer is new zeros on the device, and the old one is freed."""
    views = gradient_views(optimizer)
    buffer = attribute(optimizer, "grad_partitions_flat_buffer")
    moved = torch.zeros_like(buffer, device=device)
    parts = {
        name: moved.narrow(0, view.storage_offset(), view.numel()) for name, view in views.items()
    }
    optimizer.grad_partitions_flat_buffer = moved
    set_gradient_views(optimizer, parts)
