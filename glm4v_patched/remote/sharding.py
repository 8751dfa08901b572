"""Checks for training in several processes, independent of the framework that starts them."""

import torch
from torch import nn


def has_process_group() -> bool:
    """Return whether this process is one of several that may wait for each other."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gathers_weights(module: nn.Module) -> bool:
    """Return whether ZeRO-3 or FSDP gathers weights of a module whenever the module runs."""
    # ZeRO-3 adds ds_status to the parameters that it shards.
    if any(hasattr(parameter, "ds_status") for parameter in module.parameters()):
        return True
    if not has_process_group():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in module.parameters()) or any(
        isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules()
    )


def must_run_on_every_process(module: nn.Module) -> bool:
    """Return whether a module has to run in every process, even in one that has no input for it.

    Sharded weights (ZeRO-3, FSDP) require this, because gathering them is a collective. Trained
    weights that are replicated (ZeRO-1, ZeRO-2, DDP) require it, too, because every process has to
    fill the same gradient buckets.
    """
    if gathers_weights(module):
        return True
    is_trained = torch.is_grad_enabled() and any(
        parameter.requires_grad for parameter in module.parameters()
    )
    return is_trained and has_process_group() and torch.distributed.get_world_size() > 1


def greatest_over_processes(value: int, device: torch.device) -> int:
    """Return the greatest of the values that all processes pass."""
    greatest = torch.tensor(value, device=device)
    torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
    return int(greatest)


def refuse_device_map_in_several_processes(model: nn.Module) -> None:
    """Raise ``ValueError`` if ``device_map`` split a model that several processes train.

    Each process would use all devices of the model. Not all frameworks report this.
    """
    device_map = getattr(model, "hf_device_map", None)
    if device_map is None or not torch.distributed.is_available():
        return
    # One device may be written as 0, "cuda:0" or torch.device("cuda:0").
    devices = sorted({str(device).removeprefix("cuda:") for device in device_map.values()})
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if len(devices) > 1 and world_size > 1:
        raise ValueError(
            f"this model was split over {len(devices)} devices ({', '.join(devices)}) by "
            f"device_map, which cannot be trained by {world_size} processes: load it without "
            'device_map or with device_map={"": local_rank}, or train it in 1 process'
        )
