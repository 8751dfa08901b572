"""What ZeRO-3 does otherwise than DeepSpeed alone; ``docs/benchmarks`` has what each brings.

- It gathers each layer at once, and NCCL writes every weight straight to where it is used, all of a
  gather in one launch. DeepSpeed gathers into one buffer and copies each weight out of it: the
  layer's memory twice, and bandwidth that the computation beside it needs.
- A norm of gradients reads each once, where it is. DeepSpeed copies all to fp64, in every step.
- Gradients wait on the GPU for their update, also where the optimizer is on the CPU. DeepSpeed
  keeps them there, too, beside the fp32 ones: for all weights of the real model 28 GB of the
  machine's memory, and with accumulation every row's travel to the GPU and back.
- The CPU does not run far ahead of the GPU. A gathered layer is released when the CPU has queued
  its work, but its memory can be used again only when the GPU has done it: a CPU that is twenty
  layers ahead has twenty gathered layers in memory.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, distributed, nn

from ..activation_checkpointing import checkpointed_layers
from ..options import EngineOptions
from . import internals

WAITS_FOR_EVERY_GATHER = Version("0.19.8")
GATHERS_AT_ONCE = "allgather_into_tensor_coalesced"
MAX_LAYERS_IN_FLIGHT = 3
"""Of the GPU, that the CPU may be. Any number of them would be 2 % faster and take 6 % more memory
(docs/benchmarks)."""


@cache
def serialize_gloo_gathers() -> None:
    """Have an older DeepSpeed load what is in the files, where the CPU's processes share weights.

    Before 0.19.8 it gathers several weights at once and waits for the last one only (its PR 8539).
    gloo's threads finish them in any order, so that some are loaded, and saved, as random numbers.
    Here one is gathered at a time. NCCL keeps the order.
    """
    if torch.cuda.is_available() or Version(version("deepspeed")) >= WAITS_FOR_EVERY_GATHER:
        return

    def one_by_one(gather: Callable) -> Callable:
        def gather_each(self: Any, weights: list[nn.Parameter], *rest: Any, **options: Any) -> None:
            for weight in weights:
                gather(self, [weight], *rest, **options)

        return gather_each

    internals.replace_in_all(
        [internals.import_deepspeed_name(internals.SHARDING_INIT)], internals.GATHERS_WHEN_LOADING, one_by_one
    )


def adapt_zero3(model: nn.Module, options: EngineOptions) -> None:
    """Before ``deepspeed.initialize``; most of it takes effect in the first forward pass, which
    raises ``RuntimeError`` if DeepSpeed has renamed what is replaced."""
    gathers = options.gathers_whole_layers
    if gathers and not hasattr(distributed.ProcessGroup, GATHERS_AT_ONCE):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.ProcessGroup.{GATHERS_AT_ONCE}, "
            "with which weights are gathered in one launch; install a tested one (README, What you "
            "need)"
        )
    if gathers:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list({type(layer) for layer in checkpointed_layers(model)}))
    if torch.cuda.is_available():
        limit_layers_in_flight(model, MAX_LAYERS_IN_FLIGHT)

    def once(*_: Any) -> None:
        hook.remove()
        weights = list(model.parameters())  # by now all are sharded, adapters too
        if gathers:
            internals.require(weights, internals.SHARDED_WEIGHT_ATTRIBUTES)
            internals.replace_in_all(weights, "all_gather_coalesced", gather_in_place)
        optimizers = internals.zero3_optimizers(model)
        internals.replace_in_all(optimizers, internals.GRADIENT_NORM, norm_in_place)
        if options.offload:
            for optimizer in optimizers:
                _keep_gradients_on(weights[0].device, optimizer)

    hook = model.register_forward_pre_hook(once)


def limit_layers_in_flight(model: nn.Module, layers: int) -> None:
    """Have the CPU wait, forward and backward, until the GPU is at most so many layers behind."""
    reached: deque[torch.cuda.Event] = deque()

    def wait(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.Event()
        event.record()
        reached.append(event)
        if len(reached) > layers:
            reached.popleft().synchronize()

    def wait_in_backward_too(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        wait()
        if output.requires_grad:
            output.register_hook(wait)  # returns nothing: the gradient stays as it is

    for layer in checkpointed_layers(model):
        layer.register_forward_hook(wait_in_backward_too)


class _Gather:
    """Weights on their way, as DeepSpeed's coordinator expects them to be represented."""

    def __init__(self, works: list[Any], parameters: list[Any]):
        self.works, self.parameters = works, parameters

    def wait(self, **_: Any) -> None:
        # Once: it is waited for by each parameter, and some may have been released again by then.
        for work in self.works:
            work.wait()
        available = internals.import_deepspeed_name(internals.ZERO_PARAM_STATUS).AVAILABLE
        for parameter in self.parameters:
            parameter.ds_status = available
        self.works, self.parameters = [], []  # which hold memory


def gather_in_place(gather: Callable) -> Callable:
    """``gather``, a parameter's ``all_gather_coalesced``, without copies where that is possible."""
    status = internals.import_deepspeed_name(internals.ZERO_PARAM_STATUS)

    def gather_without_copies(
        parameters: Iterable[Any], quantize: bool = False, **options: Any
    ) -> Any:
        # Every process in the same order; the coordinator passes a set.
        parameters = sorted(parameters, key=lambda parameter: parameter.ds_id)
        if quantize or options or not _are_plain(parameters):
            return gather(parameters, quantize=quantize, **options)
        group = parameters[0].ds_process_group
        processes = distributed.get_world_size(group)
        pairs: list[tuple[Tensor, Tensor]] = []  # bytes of a whole, and this process's of them
        for parameter in parameters:
            shard = parameter.ds_tensor
            whole = shard.new_empty(processes * shard.numel())
            parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
            pairs.append((whole.view(torch.uint8), shard.view(torch.uint8)))
            parameter.ds_status = status.INFLIGHT
        return _Gather(_gather_bytes(pairs, group), parameters)

    return gather_without_copies


def _gather_bytes(pairs: list[tuple[Tensor, Tensor]], group: Any) -> list[Any]:
    # gloo's coalesced gathers of torch 2.13 spoil the heap where several are under way: a process
    # dies after some thousands of them.
    if not pairs[0][0].is_cuda:
        each = distributed.all_gather_into_tensor
        return [each(whole, own, group=group, async_op=True) for whole, own in pairs]
    wholes, owns = zip(*pairs, strict=True)
    return [getattr(group, GATHERS_AT_ONCE)([*wholes], [*owns])]


def _are_plain(parameters: list[Any]) -> bool:
    """Whether all are sharded over one group of processes, on their device, in one type or in fp8.

    Others are DeepSpeed's: offloaded or quantized weights, second shards (hpZ), shards within a
    part of the processes (MiCS, ``comm``), gathers in another type (autocast, ``comm_dtype``).
    """
    if not parameters:
        return False
    group = parameters[0].ds_process_group
    absent = internals.import_deepspeed_name(internals.ZERO_PARAM_STATUS).NOT_AVAILABLE
    types = {parameter.dtype for parameter in parameters} - {torch.uint8}  # of weights in fp8
    if len(types) > 1 or distributed.get_world_size(group) == 1:
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


def norm_in_place(norm: Callable) -> Callable:
    """``norm``, ZeRO-3's ``get_grad_norm_direct``, given one number in the place of gradients.

    A norm is its own norm, so all else that DeepSpeed computes (the sum over processes, what an
    infinite norm means) stays as it is. A GPU sums in fp32, in blocks; the norm is infinite from
    1.8e19 on. A CPU, which adds one number after the other, sums in fp64.
    """

    def norm_without_copies(
        gradients: list[Tensor], parameters: list[nn.Parameter], norm_type: float = 2
    ) -> Tensor:
        if norm_type == 2:
            dtype = torch.float32 if gradients[0].is_cuda else torch.float64
            norms = torch._foreach_norm(gradients, 2, dtype=dtype)
            gradients, parameters = [torch.linalg.vector_norm(torch.stack(norms))], parameters[:1]
        total = norm(gradients, parameters, norm_type)
        # DeepSpeed writes -1 for one that is not finite, and before 0.19 squares it when it sums
        # up groups: the norm of such gradients would be small, and nothing would be clipped.
        return torch.where(total < 0, torch.inf, total)

    return norm_without_copies


def _keep_gradients_on(device: torch.device, optimizer: Any) -> None:
    """No gradient is kept yet: the buffer is new zeros on the device, and the old one is freed."""
    views: dict[int, Tensor] = internals.attribute(optimizer, internals.GRADIENT_VIEWS)
    moved = torch.zeros_like(
        internals.attribute(optimizer, internals.GRADIENT_BUFFER), device=device
    )
    parts = {
        name: moved.narrow(0, view.storage_offset(), view.numel()) for name, view in views.items()
    }
    setattr(optimizer, internals.GRADIENT_BUFFER, moved)
    setattr(optimizer, internals.GRADIENT_VIEWS, parts)
