"""Changes to ZeRO-3; ``docs/benchmarks`` has the gain of each.

- Each layer is gathered in one launch, and NCCL writes every weight directly to its destination.
  Unchanged, DeepSpeed gathers into one buffer and copies each weight out of it. Buffer and copies
  take twice the layer's memory, and memory bandwidth that concurrent computation needs.
- The gradient norm reads each gradient once, in place. Unchanged, DeepSpeed copies all gradients to
  fp64.
- Gradients stay on the GPU until the update, also if the optimizer is on the CPU. Unchanged,
  DeepSpeed keeps bf16 gradients on the CPU beside the fp32 ones: 28 GB of RAM for all weights of
  the real model. With gradient accumulation, each micro-batch copies them to the GPU and back.
- The CPU does not run far ahead of the GPU. DeepSpeed releases a gathered layer when the CPU has
  queued the layer's work, but the memory is free only when the GPU has done that work: if the CPU
  is twenty layers ahead of the GPU, twenty gathered layers are in memory.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, distributed, nn

from ..activation_checkpointing import transformer_layers
from ..options import EngineOptions
from . import internals

# The first release that gathers correctly under gloo: see serialize_gloo_gathers().
FIRST_FIXED_DEEPSPEED = Version("0.19.8")
# The method of torch's process groups that gathers several tensors in one launch.
COALESCED_GATHER = "allgather_into_tensor_coalesced"
MAX_LAYERS_IN_FLIGHT = 3
"""The number of layers by which the CPU may be ahead of the GPU. Without this limit, training would
be 2 % faster and take 6 % more memory (docs/benchmarks)."""


@cache
def serialize_gloo_gathers() -> None:
    """Make DeepSpeed before 0.19.8 gather sharded weights one at a time under gloo.

    Unpatched, DeepSpeed starts the gathers of several weights and waits only for the last gather
    (its PR 8539 fixes this). gloo's threads finish gathers in any order, so some weights would be
    loaded, and saved, as random numbers. NCCL keeps the order.
    """
    if torch.cuda.is_available() or Version(version("deepspeed")) >= FIRST_FIXED_DEEPSPEED:
        return

    def one_by_one(gather: Callable) -> Callable:
        def gather_each(self: Any, weights: list[nn.Parameter], *rest: Any, **options: Any) -> None:
            for weight in weights:
                gather(self, [weight], *rest, **options)

        return gather_each

    internals.replace_in_all(
        [internals.import_deepspeed_name(internals.SHARDING_INIT)],
        internals.LOADING_GATHER,
        one_by_one,
    )


def adapt_zero3(model: nn.Module, options: EngineOptions) -> None:
    """Apply this module's changes; call it before ``deepspeed.initialize``.

    Most changes take effect in the first forward pass.

    Raises:
        RuntimeError: torch has no coalesced gather. The first forward pass raises it, too, if
            DeepSpeed lacks an attribute that is to be replaced.
    """
    gathers_layers = options.gathers_whole_layers
    if gathers_layers and not hasattr(distributed.ProcessGroup, COALESCED_GATHER):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.ProcessGroup.{COALESCED_GATHER}, "
            "with which weights are gathered in one launch; install a tested one (README, What you "
            "need)"
        )
    if gathers_layers:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list({type(layer) for layer in transformer_layers(model)}))
    if torch.cuda.is_available():
        limit_layers_in_flight(model, MAX_LAYERS_IN_FLIGHT)

    def adapt_once(*_: Any) -> None:
        hook.remove()
        weights = list(model.parameters())  # all are sharded by now, adapters too
        if gathers_layers:
            internals.require_attributes(weights, internals.SHARDED_WEIGHT_ATTRIBUTES)
            internals.replace_in_all(weights, "all_gather_coalesced", gather_in_place)
        optimizers = internals.zero3_optimizers(model)
        internals.replace_in_all(optimizers, internals.GRADIENT_NORM, norm_in_place)
        if options.offload:
            for optimizer in optimizers:
                _move_gradients_to(weights[0].device, optimizer)

    hook = model.register_forward_pre_hook(adapt_once)


def limit_layers_in_flight(model: nn.Module, layers: int) -> None:
    """Make the CPU wait while the GPU is more than ``layers`` layers behind, in both passes."""
    events: deque[torch.cuda.Event] = deque()

    def wait(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.Event()
        event.record()
        events.append(event)
        if len(events) > layers:
            events.popleft().synchronize()

    def wait_in_both_passes(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        wait()
        if output.requires_grad:
            output.register_hook(wait)  # returns None: the gradient is not changed

    for layer in transformer_layers(model):
        layer.register_forward_hook(wait_in_both_passes)


class _Gather:
    """Handle of a gather in flight, with the interface that DeepSpeed's coordinator expects."""

    def __init__(self, works: list[Any], parameters: list[Any]):
        self.works, self.parameters = works, parameters

    def wait(self, **_: Any) -> None:
        # Only the first call acts. DeepSpeed also calls it later, when it may have released some
        # of the parameters again.
        for work in self.works:
            work.wait()
        status = internals.import_deepspeed_name(internals.ZERO_PARAM_STATUS)
        for parameter in self.parameters:
            parameter.ds_status = status.AVAILABLE
        self.works, self.parameters = [], []  # release their memory


def gather_in_place(gather: Callable) -> Callable:
    """Wrap a parameter's ``all_gather_coalesced`` so that it gathers without copies if possible."""
    status = internals.import_deepspeed_name(internals.ZERO_PARAM_STATUS)

    def gather_without_copies(
        parameters: Iterable[Any], quantize: bool = False, **options: Any
    ) -> Any:
        # All processes must gather in the same order, and DeepSpeed's coordinator passes a set.
        parameters = sorted(parameters, key=lambda parameter: parameter.ds_id)
        if quantize or options or not _are_uniformly_sharded(parameters):
            return gather(parameters, quantize=quantize, **options)
        group = parameters[0].ds_process_group
        processes = distributed.get_world_size(group)
        pairs: list[tuple[Tensor, Tensor]] = []  # bytes of the complete weight and of its shard
        for parameter in parameters:
            shard = parameter.ds_tensor
            complete = shard.new_empty(processes * shard.numel())
            parameter.data = complete[: parameter.ds_numel].view(parameter.ds_shape)
            pairs.append((complete.view(torch.uint8), shard.view(torch.uint8)))
            parameter.ds_status = status.INFLIGHT
        return _Gather(_gather_bytes(pairs, group), parameters)

    return gather_without_copies


def _gather_bytes(pairs: list[tuple[Tensor, Tensor]], group: Any) -> list[Any]:
    """Start gathering ``(output, shard)`` pairs; return the works to wait for."""
    # On a CPU, start one gather for each pair. In torch 2.13, several coalesced gathers of gloo in
    # flight at once corrupt the heap, and a process dies after some thousands of gathers.
    if not pairs[0][0].is_cuda:
        gather = distributed.all_gather_into_tensor
        return [gather(output, shard, group=group, async_op=True) for output, shard in pairs]
    outputs, shards = zip(*pairs, strict=True)
    return [getattr(group, COALESCED_GATHER)([*outputs], [*shards])]


def _are_uniformly_sharded(parameters: list[Any]) -> bool:
    """Return whether :func:`gather_in_place` can gather these parameters together.

    They must be sharded over one process group of several processes, and each shard must have its
    parameter's device and dtype. All must have the same dtype, except weights in fp8. DeepSpeed
    itself gathers all other parameters: offloaded or quantized ones, those with secondary shards
    (hpZ), with shards on some of the processes (MiCS, attribute ``comm``), and those that are
    gathered in another dtype (autocast, attribute ``comm_dtype``).
    """
    if not parameters:
        return False
    group = parameters[0].ds_process_group
    status = internals.import_deepspeed_name(internals.ZERO_PARAM_STATUS)
    dtypes = {parameter.dtype for parameter in parameters} - {torch.uint8}  # uint8: fp8 weights
    if len(dtypes) > 1 or distributed.get_world_size(group) == 1:
        return False
    return all(
        parameter.ds_status is status.NOT_AVAILABLE
        and parameter.ds_secondary_tensor is None
        and parameter.ds_process_group is group
        and parameter.ds_tensor.device == parameter.device
        and parameter.ds_tensor.dtype == parameter.dtype
        and not hasattr(parameter, "comm")
        and not hasattr(parameter, "comm_dtype")
        for parameter in parameters
    )


def norm_in_place(norm: Callable) -> Callable:
    """Wrap ZeRO-3's ``get_grad_norm_direct``: pass it the norm of the gradients in their place.

    The norm of a single number is that number, so DeepSpeed's other steps (the sum over processes,
    the handling of an infinite norm) stay the same. A GPU sums the squares in fp32, in blocks, so
    norms above 1.8e19 become infinite. A CPU adds one square after the other, in fp64.
    """

    def norm_without_copies(
        gradients: list[Tensor], parameters: list[nn.Parameter], norm_type: float = 2
    ) -> Tensor:
        if norm_type == 2:
            dtype = torch.float32 if gradients[0].is_cuda else torch.float64
            norms = torch._foreach_norm(gradients, 2, dtype=dtype)
            gradients, parameters = [torch.linalg.vector_norm(torch.stack(norms))], parameters[:1]
        total = norm(gradients, parameters, norm_type)
        # DeepSpeed returns -1 for a norm that is not finite. Before 0.19, DeepSpeed squares this -1
        # when it sums over groups: the norm would seem small, and nothing would be clipped.
        return torch.where(total < 0, torch.inf, total)

    return norm_without_copies


def _move_gradients_to(device: torch.device, optimizer: Any) -> None:
    """Move the optimizer's gradient buffer to a device. It contains no gradients yet."""
    views: dict[int, Tensor] = internals.get_deepspeed_attribute(
        optimizer, internals.GRADIENT_VIEWS
    )
    buffer = torch.zeros_like(
        internals.get_deepspeed_attribute(optimizer, internals.GRADIENT_BUFFER), device=device
    )
    new_views = {
        weight_id: buffer.narrow(0, view.storage_offset(), view.numel())
        for weight_id, view in views.items()
    }
    setattr(optimizer, internals.GRADIENT_BUFFER, buffer)
    setattr(optimizer, internals.GRADIENT_VIEWS, new_views)
