"""ZeRO-3 gathers each layer at once, and each weight of it straight to where it is used.

DeepSpeed gathers several weights into one buffer and then copies each out of it. That takes the
layer's memory twice, and bandwidth that the computation beside it needs. Here NCCL writes every
weight into a tensor of its own, all weights of a gather in one launch.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed import distributed_c10d

from .activations import checkpointed_layers


def gather_whole_layers(model: nn.Module, in_place: bool = True) -> None:
    """Have ZeRO-3 gather each layer of both towers at once, before ``deepspeed.initialize``.

    Args:
        in_place: Each weight straight to where it is used, not into a buffer that is copied from.
    """
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, list({type(layer) for layer in checkpointed_layers(model)}))

    if not in_place:
        return

    def once(*_) -> None:
        # By now every parameter is sharded, adapters too.
        hook.remove()
        for parameter in model.parameters():
            if hasattr(parameter, "all_gather_coalesced"):
                parameter.all_gather_coalesced = _in_place(parameter.all_gather_coalesced)

    hook = model.register_forward_pre_hook(once)


class _Gather:
    """Weights on their way, as DeepSpeed's coordinator expects them to be represented."""

    def __init__(self, work, parameters: list[nn.Parameter]):
        self.work, self.parameters = work, parameters

    def wait(self, **_) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self.work.wait()
        # Once: it is waited for by each parameter, and some may have been released again by then.
        while self.parameters:
            self.parameters.pop().ds_status = ZeroParamStatus.AVAILABLE


def _in_place(gather: Callable) -> Callable:
    """``gather``, a parameter's ``all_gather_coalesced``, without copies where that is possible."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    def gather_in_place(parameters: Iterable[nn.Parameter], quantize: bool = False, **options):
        # Every process in the same order; the coordinator passes a set.
        parameters = sorted(parameters, key=lambda parameter: parameter.ds_id)
        group = parameters[0].ds_process_group
        processes = torch.distributed.get_world_size(group)
        if quantize or processes == 1 or not _are_plain(parameters):
            return gather(parameters, quantize=quantize, **options)
        with distributed_c10d._coalescing_manager(group, async_ops=True) as work:
            for parameter in parameters:
                shard = parameter.ds_tensor
                whole = shard.new_empty(processes * shard.numel())
                torch.distributed.all_gather_into_tensor(whole, shard, group=group, async_op=True)
                parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
                parameter.ds_status = ZeroParamStatus.INFLIGHT
        return _Gather(work, parameters)

    return gather_in_place


def _are_plain(parameters: list[nn.Parameter]) -> bool:
    """Whether all are sharded over one group of processes, on their device and in their type."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    first = parameters[0]
    return all(
        parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE
        and parameter.ds_secondary_tensor is None
        and parameter.ds_process_group is first.ds_process_group
        and parameter.ds_tensor.device == parameter.device
        and parameter.ds_tensor.dtype == parameter.dtype == first.dtype
        for parameter in parameters
    )
