"""Tells whether a module has to run on every process of a training, whatever its batch holds."""

import torch
from torch import nn


def must_run_on_every_process(module: nn.Module) -> bool:
    """True if processes would wait for each other, or reduce unlike gradients, otherwise.

    That is so when the weights are spread over processes, which gather them together (DeepSpeed
    ZeRO-3, FSDP), and when the weights are whole everywhere but trained (ZeRO-1 and 2, DDP):
    gradients are reduced in buckets that every process has to fill alike.
    """
    if any(hasattr(parameter, "ds_status") for parameter in module.parameters()):
        return True
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    is_sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters()) or any(
        isinstance(part, FullyShardedDataParallel) for part in module.modules()
    )
    is_trained = torch.is_grad_enabled() and any(
        parameter.requires_grad for parameter in module.parameters()
    )
    return is_sharded or (is_trained and torch.distributed.get_world_size() > 1)
