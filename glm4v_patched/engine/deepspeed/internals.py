"""Every private name of DeepSpeed that this package uses.

Each is checked where it is used: a missing one is an error with the version and the cure, because
skipping it silently would make training slower, or wrong. ``remote/``, which must not import this
package, uses ``ds_status``, ``ds_active_sub_modules`` and ``ds_id`` of weights, and of modules
``ds_id`` and, since 0.19.3, ``ds_recompute_parameters``.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...terminal_text import pip_install
from .config import SUPPORTED_DEEPSPEED

ZERO_PARAM_STATUS = "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus"
CHECKPOINT_ENGINE = (
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine"
)
# Makes shards of new weights, and gathers them to load and to save them.
SHARDING_INIT = "deepspeed.runtime.zero.partition_parameters:Init"
GATHERS_WHEN_LOADING = "_allgather_params_coalesced"
# The three classes of numbers that DeepSpeed's part of a checkpoint holds.
CHECKPOINT_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)
# Compiles DeepSpeed's own collectives for a CPU, when processes join.
COLLECTIVES, COMPILES_COLLECTIVES = "deepspeed.comm.torch", "build_shm_op"
# Of a weight that ZeRO-3 has sharded.
SHARDED_WEIGHT_ATTRIBUTES = (
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
# By it a weight knows ZeRO-3's optimizer, which has the others: the last one is its share of each
# weight's gradient by the weight's number, as Python writes a name with two underscores.
OPTIMIZER_OF_WEIGHT = "_z3_optimizer"
GRADIENT_NORM = "get_grad_norm_direct"
GRADIENT_BUFFER = "grad_partitions_flat_buffer"
GRADIENT_VIEWS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def resolve(name: str) -> Any:
    """What DeepSpeed has by a name ``module:attribute``."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        raise _moved(name.replace(":", "."), "DeepSpeed") from None


def attribute(owner: object, name: str) -> Any:
    """The attribute of an object of DeepSpeed, or of what it has taken over."""
    require([owner], (name,))
    return getattr(owner, name)


def require(owners: Iterable[object], names: Iterable[str]) -> None:
    """Raise ``RuntimeError`` if one of the objects lacks one of the attributes."""
    for owner in owners:
        for name in names:
            if not hasattr(owner, name):
                raise _moved(name, type(owner).__name__)


def _moved(name: str, owner: str) -> RuntimeError:
    return RuntimeError(
        f"DeepSpeed {version('deepspeed')} has no {name} (of {owner}), which training with ZeRO "
        f"uses here; install a tested one: {pip_install(SUPPORTED_DEEPSPEED)}"
    )


def replace_in_all(owners: Iterable[Any], name: str, make: Callable[[Any], Any]) -> None:
    """Replace the attribute ``name`` of all objects by ``make(attribute)``, or of none."""
    owners = list(owners)
    require(owners, (name,))
    for owner in owners:
        setattr(owner, name, make(getattr(owner, name)))


@contextmanager
def skip_collectives_compilation() -> Iterator[None]:
    """Where processes join DeepSpeed's group: on a CPU without its own collectives, which it would
    compile first, for a minute.

    They serve its ``inference_all_reduce`` alone, and training is by gloo in any case. Each process
    would also leave 67 MB of shared memory behind, and one that is killed meanwhile a lock.
    """
    if torch.cuda.is_available():
        yield
        return
    backend = importlib.import_module(COLLECTIVES)
    require([backend], (COMPILES_COLLECTIVES,))
    with patch.object(backend, COMPILES_COLLECTIVES, lambda: None):
        yield


def zero3_optimizers(model: nn.Module) -> list[Any]:
    """ZeRO-3's optimizer of a model, as its weights know it."""
    found = {id(o): o for w in model.parameters() if (o := getattr(w, OPTIMIZER_OF_WEIGHT, None))}
    if not found:
        raise _moved(OPTIMIZER_OF_WEIGHT, "Parameter")
    return list(found.values())


def is_sharded(weight: Tensor) -> bool:
    """Whether ZeRO-3 has sharded a weight. Some of the names without the others are an error."""
    known = [name for name in SHARDED_WEIGHT_ATTRIBUTES if hasattr(weight, name)]
    if known:
        require([weight], SHARDED_WEIGHT_ATTRIBUTES)
    return bool(known)


def gathered(weight: Tensor, modifier_rank: int | None = None) -> AbstractContextManager:
    """Inside, a weight that ZeRO-3 sharded is whole. All processes have to enter, and after it all
    have what the process ``modifier_rank`` wrote, or what it was."""
    if not is_sharded(weight):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=modifier_rank)


def local_shard(weight: Tensor) -> Tensor:
    """What this process holds of a weight between steps, with padding; all if it is not sharded."""
    return attribute(weight, "ds_tensor") if is_sharded(weight) else weight


def unpadded_shard(weight: nn.Parameter) -> Tensor:
    """What this process holds of a sharded weight, without the padding of the last shard."""
    require([weight], SHARDED_WEIGHT_ATTRIBUTES)
    held: Any = weight
    shard = held.ds_tensor.data
    begin = torch.distributed.get_rank(held.ds_process_group) * shard.numel()
    return shard[: max(held.ds_numel - begin, 0)]
