"""Every private name of DeepSpeed that this package uses.

Each name is checked where it is used. A missing one is an error with the version and the cure,
because skipping it silently would make training slower, or wrong. ``remote/`` uses some of these
names itself, because it must not import this package; they are checked from here, too.
"""

import pkgutil
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from ...printed import pip_install
from .config import SUPPORTED_DEEPSPEED

ZERO_PARAM_STATUS = "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus"
CHECKPOINT_ENGINE = (
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine"
)
# The three classes of numbers that DeepSpeed's part of a checkpoint holds.
IN_CHECKPOINTS = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)
# Of a weight that ZeRO-3 has sharded. remote/ uses the status, to know one, and the modules that
# use it, to keep it gathered.
OF_SHARDED_WEIGHTS = (
    "all_gather_coalesced",
    "ds_active_sub_modules",
    "ds_id",
    "ds_numel",
    "ds_process_group",
    "ds_secondary_tensor",
    "ds_shape",
    "ds_status",
    "ds_tensor",
)
# Of a module under ZeRO-3, once DeepSpeed has taken the model over; remote/ uses it.
OF_MODULES = ("ds_id",)
# Of some modules since 0.19.3.
OF_SOME_MODULES = ("ds_recompute_parameters",)
# Of ZeRO-3's optimizer, which every weight knows by the name _z3_optimizer.
OF_ZERO3 = ("get_grad_norm_direct", "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer")
OF_ZERO12 = ("single_partition_of_fp32_groups",)


def resolve(name: str) -> Any:
    """What DeepSpeed has by a name ``module:attribute``.

    Raises:
        RuntimeError: it is not there.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        raise moved(name.replace(":", "."), "DeepSpeed") from None


def attribute(owner: object, name: str) -> Any:
    """The attribute of an object of DeepSpeed, or of what it has taken over.

    Raises:
        RuntimeError: it is not there.
    """
    require([owner], (name,))
    return getattr(owner, name)


def require(owners: Iterable[object], names: Iterable[str]) -> None:
    """Raise ``RuntimeError`` if one of the objects lacks one of the attributes."""
    for owner in owners:
        for name in names:
            if not hasattr(owner, name):
                raise moved(name, type(owner).__name__)


def moved(name: str, owner: str) -> RuntimeError:
    return RuntimeError(
        f"DeepSpeed {version('deepspeed')} has no {name} (of {owner}), which training with ZeRO "
        f"uses here; install a tested one: {pip_install(SUPPORTED_DEEPSPEED)}"
    )


class Replacements:
    """Attributes of objects that are replaced together: all or none, and put back together."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, bool, Any]] = []

    def apply(self, owners: Iterable[Any], name: str, replace: Callable[[Any], Any]) -> None:
        """Replace the attribute ``name`` of all objects by ``replace(attribute)``.

        Raises:
            RuntimeError: one of them lacks it; none is replaced.
        """
        owners = list(owners)
        require(owners, (name,))
        made = [(owner, name in vars(owner), getattr(owner, name)) for owner in owners]
        replacements = [replace(original) for _, _, original in made]
        for (owner, is_own, original), replacement in zip(made, replacements, strict=True):
            setattr(owner, name, replacement)
            self._replaced.append((owner, name, is_own, original))

    def revert(self) -> None:
        """Put the originals back; nothing happens if nothing is replaced."""
        while self._replaced:
            owner, name, is_own, original = self._replaced.pop()
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)  # it was the class's


def sharded_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of a model under ZeRO-3, every one sharded.

    Raises:
        RuntimeError: one lacks a name of :data:`OF_SHARDED_WEIGHTS`.
    """
    weights = list(model.parameters())
    require(weights, OF_SHARDED_WEIGHTS)
    return weights


def zero3_optimizers(model: nn.Module) -> list[Any]:
    """ZeRO-3's optimizer of a model, as its weights know it.

    Raises:
        RuntimeError: no weight knows it.
    """
    found = {id(o): o for w in model.parameters() if (o := getattr(w, "_z3_optimizer", None))}
    if not found:
        raise moved("_z3_optimizer", "Parameter")
    return list(found.values())


def is_sharded(weight: Tensor) -> bool:
    """Whether ZeRO-3 has sharded a weight.

    Raises:
        RuntimeError: DeepSpeed has, and by other names.
    """
    known = [name for name in OF_SHARDED_WEIGHTS if hasattr(weight, name)]
    if known:
        require([weight], OF_SHARDED_WEIGHTS)
    return bool(known)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Of a weight, sharded or not: ZeRO-3 leaves an empty tensor and keeps the shape beside it."""
    return tuple(attribute(tensor, "ds_shape") if is_sharded(tensor) else tensor.shape)


def shard_of(weight: Tensor) -> Tensor:
    """What this process holds of a weight between steps, with padding; all if it is not sharded."""
    return attribute(weight, "ds_tensor") if is_sharded(weight) else weight


def own_shard(weight: nn.Parameter) -> Tensor:
    """What this process holds of a sharded weight, without the padding of the last shard."""
    require([weight], OF_SHARDED_WEIGHTS)
    held: Any = weight
    shard = held.ds_tensor.data
    begin = torch.distributed.get_rank(held.ds_process_group) * shard.numel()
    return shard[: max(held.ds_numel - begin, 0)]


def masters(optimizer: Any, zero_stage: int) -> list[Tensor]:
    """ZeRO's fp32 copies of the trained weights, this process's share."""
    name = "fp32_partitioned_groups_flat" if zero_stage == 3 else OF_ZERO12[0]
    return list(attribute(optimizer, name))


def gradient_buffers(optimizer: Any, zero_stage: int) -> list[Tensor]:
    """What holds gradients from one step to the next: stage 3 has one, for its share of all."""
    return [attribute(optimizer, "grad_partitions_flat_buffer")] if zero_stage == 3 else []
