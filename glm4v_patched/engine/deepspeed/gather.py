"""ZeRO-3 gathers each layer at once, and each weight of it straight to where it is used.

DeepSpeed gathers several weights into one buffer and then copies each out of it. That takes the
layer's memory twice, and bandwidth that the computation beside it needs. Here NCCL writes every
weight into a tensor of its own, all weights of a gather in one launch.
"""

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.distributed import distributed_c10d

from ..activation_checkpointing import checkpointed_layers
from .internals import (
    GATHERS_WHEN_LOADING,
    SHARDING_INIT,
    ZERO_PARAM_STATUS,
    Replacements,
    resolve,
    sharded_weights,
)

WAITS_FOR_EVERY_GATHER = Version("0.19.8")


@cache
def wait_for_every_gather() -> None:
    """Have an older DeepSpeed load what is in the files, where the CPU's processes share weights.

    Before 0.19.8 it gathers several weights at once and waits for the last one only (its PR 8539).
    gloo's threads finish them in any order, so that some are loaded, and saved, as random numbers.
    Here one is gathered at a time. NCCL keeps the order.

    Raises:
        RuntimeError: DeepSpeed has renamed what is replaced.
    """
    if torch.cuda.is_available() or Version(version("deepspeed")) >= WAITS_FOR_EVERY_GATHER:
        return

    def one_by_one(gather: Callable) -> Callable:
        def gather_each(self: Any, weights: list[nn.Parameter], *rest: Any, **options: Any) -> None:
            for weight in weights:
                gather(self, [weight], *rest, **options)

        return gather_each

    Replacements().apply([resolve(SHARDING_INIT)], GATHERS_WHEN_LOADING, one_by_one)


def gather_whole_layers(model: nn.Module) -> None:
    """Have ZeRO-3 gather each layer of the model at once, before ``deepspeed.initialize``."""
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, list({type(layer) for layer in checkpointed_layers(model)}))


def gather_in_place(model: nn.Module, replacements: Replacements) -> None:
    """Have ZeRO-3 gather every weight straight to where it is used, from the first forward pass on.

    Raises:
        RuntimeError: out of that forward pass, if DeepSpeed has renamed what is replaced.
    """

    def once(*_: Any) -> None:
        # By now every parameter is sharded, adapters too.
        hook.remove()
        replacements.apply(sharded_weights(model), "all_gather_coalesced", _in_place)

    if not hasattr(distributed_c10d, "_coalescing_manager"):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.distributed_c10d."
            "_coalescing_manager, with which weights are gathered in one launch; install a tested "
            "one (README, What you need)"
        )
    hook = model.register_forward_pre_hook(once)


class _Gather:
    """Weights on their way, as DeepSpeed's coordinator expects them to be represented."""

    def __init__(self, works: list[Any], parameters: list[Any]):
        self.works, self.parameters = works, parameters

    def wait(self, **_: Any) -> None:
        # Once: it is waited for by each parameter, and some may have been released again by then.
        for work in self.works:
            work.wait()
        available = resolve(ZERO_PARAM_STATUS).AVAILABLE
        for parameter in self.parameters:
            parameter.ds_status = available
        self.works, self.parameters = [], []  # which hold memory


def _in_place(gather: Callable) -> Callable:
    """``gather``, a parameter's ``all_gather_coalesced``, without copies where that is possible."""
    status = resolve(ZERO_PARAM_STATUS)

    def gather_in_place(parameters: Iterable[Any], quantize: bool = False, **options: Any) -> Any:
        # Every process in the same order; the coordinator passes a set.
        parameters = sorted(parameters, key=lambda parameter: parameter.ds_id)
        if quantize or options or not _are_plain(parameters):
            return gather(parameters, quantize=quantize, **options)
        group = parameters[0].ds_process_group
        processes = torch.distributed.get_world_size(group)
        shards = [parameter.ds_tensor for parameter in parameters]
        # Before the manager, which leaves the group unusable if there is no memory inside of it.
        wholes = [shard.new_empty(processes * shard.numel()) for shard in shards]
        works = []
        for dtype in dict.fromkeys(shard.dtype for shard in shards):  # one, and bytes
            with distributed_c10d._coalescing_manager(group, async_ops=True) as work:
                for whole, shard in zip(wholes, shards, strict=True):
                    if shard.dtype is dtype:
                        torch.distributed.all_gather_into_tensor(
                            whole, shard, group=group, async_op=True
                        )
            works.append(work)
        for whole, parameter in zip(wholes, parameters, strict=True):
            parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
            parameter.ds_status = status.INFLIGHT
        return _Gather(works, parameters)

    return gather_in_place


def _are_plain(parameters: list[Any]) -> bool:
    """Whether all are sharded over one group of processes, on their device, in one type or in fp8.

    Others are DeepSpeed's: offloaded or quantised weights, second shards (hpZ), shards within a
    part of the processes (MiCS, ``comm``), gathers in another type (autocast, ``comm_dtype``).
    """
    if not parameters:
        return False
    group = parameters[0].ds_process_group
    absent = resolve(ZERO_PARAM_STATUS).NOT_AVAILABLE
    types = {parameter.dtype for parameter in parameters} - {torch.uint8}  # of weights in fp8
    if len(types) > 1 or torch.distributed.get_world_size(group) == 1:
        return False
    return all(
        parameter.ds_status is absent
        and parameter.ds_secondary_tensor is None
        and parameter.ds_process_group is group
        and parameter.ds_tensor.device == parameter.device
        and parameter.ds_tensor.dtype == parameter.dtype
        and not hasattr(parameter, "comm")
        and not hasattr(parameter, "comm_dtype")
        for parameter in parameters
    )
