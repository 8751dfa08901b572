"""What this package uses of DeepSpeed by private names (:mod:`private_names` lists them).

Each name is checked where it is used. A missing one is an error with the version and the cure,
because skipping it silently would make training slower, or wrong. ``remote/`` uses some of these
names itself, because it must not import this package; they are checked from here, too.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .private_names import (
    CHECKPOINT_ENGINE,
    COMPILES_COLLECTIVES,
    GATHERS_WHEN_LOADING,
    GRADIENT_VIEWS,
    IN_CHECKPOINTS,
    OF_MODULES,
    OF_SHARDED_WEIGHTS,
    OF_SOME_MODULES,
    OF_WEIGHTS_OF_ZERO3,
    OF_ZERO3,
    OF_ZERO12,
    SHARDING_INIT,
    ZERO3_OPTIMIZER,
    ZERO_PARAM_STATUS,
    moved,
)

__all__ = [
    "CHECKPOINT_ENGINE",
    "GATHERS_WHEN_LOADING",
    "IN_CHECKPOINTS",
    "OF_MODULES",
    "OF_SHARDED_WEIGHTS",
    "OF_SOME_MODULES",
    "OF_ZERO3",
    "OF_ZERO12",
    "SHARDING_INIT",
    "ZERO_PARAM_STATUS",
    "Replacements",
    "attribute",
    "gathered",
    "gradient_buffers",
    "gradient_views",
    "is_sharded",
    "masters",
    "moved",
    "nothing_compiled",
    "own_shard",
    "require",
    "resolve",
    "set_gradient_views",
    "shard_of",
    "sharded_weights",
    "whole_shape",
    "zero3_optimizers",
]

# As Python writes a name with two underscores that is used inside of a class.
_GRADIENT_VIEWS = f"_{ZERO3_OPTIMIZER}{GRADIENT_VIEWS}"


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


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Where processes join DeepSpeed's group: on a CPU without its own collectives, which it would
    compile first, for a minute.

    They serve its ``inference_all_reduce`` alone, and training is by gloo in any case. Each process
    would also leave 67 MB of shared memory behind, and one that is killed meanwhile a lock.
    """
    replacements = Replacements()
    if not torch.cuda.is_available():
        backend, _, compiles = COMPILES_COLLECTIVES.partition(":")
        module = importlib.import_module(backend)
        replacements.apply([module], compiles, lambda original: lambda: None)
    try:
        yield
    finally:
        replacements.revert()


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
    found = {id(o): o for w in model.parameters() if (o := getattr(w, OF_WEIGHTS_OF_ZERO3, None))}
    if not found:
        raise moved(OF_WEIGHTS_OF_ZERO3, "Parameter")
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


def gathered(weight: Tensor, modifier_rank: int | None = None) -> AbstractContextManager:
    """Inside, a weight that ZeRO-3 sharded is whole. All processes have to enter, and after it all
    have what the process ``modifier_rank`` wrote, or what it was."""
    if not is_sharded(weight):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=modifier_rank)


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


def gradient_views(optimizer: Any) -> dict[int, Tensor]:
    """ZeRO-3's share of each weight's gradient by the weight's number, parts of the buffer."""
    return attribute(optimizer, _GRADIENT_VIEWS)


def set_gradient_views(optimizer: Any, views: dict[int, Tensor]) -> None:
    require([optimizer], (_GRADIENT_VIEWS,))
    setattr(optimizer, _GRADIENT_VIEWS, views)
