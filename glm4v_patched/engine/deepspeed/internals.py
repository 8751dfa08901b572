"""Every private name of DeepSpeed that this package uses.

Each name is checked where it is used. If DeepSpeed does not have it, an error names DeepSpeed's
version and the cure, because training without it would be slower, or wrong.

``remote/`` must not import this package. It uses some private names without it: ``ds_status``,
``ds_active_sub_modules`` and ``ds_id`` of weights, ``ds_id`` of modules and, since DeepSpeed
0.19.3, ``ds_recompute_parameters`` of modules.
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

# The enum of a sharded weight's states: gathered, not gathered, being gathered.
ZERO_PARAM_STATUS = "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus"
CHECKPOINT_ENGINE = (
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine"
)
# The context that shards new weights, and its method that gathers weights for loading and saving.
SHARDING_INIT = "deepspeed.runtime.zero.partition_parameters:Init"
LOADING_GATHER = "_allgather_params_coalesced"
# The classes of DeepSpeed's own objects in a checkpoint's files.
CHECKPOINT_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)
# The module and function that compile DeepSpeed's own collectives for a CPU at initialization.
COLLECTIVES, COLLECTIVES_COMPILER = "deepspeed.comm.torch", "build_shm_op"
# Attributes of a weight that ZeRO-3 has sharded.
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
# A weight's reference to ZeRO-3's optimizer, and attributes of that optimizer. The last attribute
# (Python mangles its name) maps each weight's id to this process's shard of the weight's gradient.
WEIGHT_OPTIMIZER = "_z3_optimizer"
GRADIENT_NORM = "get_grad_norm_direct"
GRADIENT_BUFFER = "grad_partitions_flat_buffer"
GRADIENT_VIEWS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def import_deepspeed_name(name: str) -> Any:
    """Return the object that DeepSpeed has under a name ``module:attribute``."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        raise _missing_name_error(name.replace(":", "."), "DeepSpeed") from None


def get_deepspeed_attribute(owner: object, name: str) -> Any:
    """Return an attribute of an object that is DeepSpeed's or that DeepSpeed has modified."""
    require_attributes([owner], (name,))
    return getattr(owner, name)


def require_attributes(owners: Iterable[object], names: Iterable[str]) -> None:
    """Raise ``RuntimeError`` if an attribute is missing from one of the objects."""
    for owner in owners:
        for name in names:
            if not hasattr(owner, name):
                raise _missing_name_error(name, type(owner).__name__)


def _missing_name_error(name: str, owner: str) -> RuntimeError:
    return RuntimeError(
        f"DeepSpeed {version('deepspeed')} has no {name} (of {owner}), which training with ZeRO "
        f"uses here; install a tested one: {pip_install(SUPPORTED_DEEPSPEED)}"
    )


def replace_in_all(owners: Iterable[Any], name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the attribute ``name`` of all objects by ``wrap(attribute)``.

    If an object has no such attribute, an error is raised and none is replaced.
    """
    owners = list(owners)
    require_attributes(owners, (name,))
    for owner in owners:
        setattr(owner, name, wrap(getattr(owner, name)))


@contextmanager
def skip_collectives_compilation() -> Iterator[None]:
    """Return a context in which DeepSpeed skips compiling its CPU collectives (about a minute).

    Only ``inference_all_reduce`` uses these collectives; training uses gloo in any case. Once
    compiled, they leave 67 MB of shared memory behind for each process, and for a killed process
    also a lock.
    """
    if torch.cuda.is_available():
        yield
        return
    backend = importlib.import_module(COLLECTIVES)
    require_attributes([backend], (COLLECTIVES_COMPILER,))
    with patch.object(backend, COLLECTIVES_COMPILER, lambda: None):
        yield


def zero3_optimizers(model: nn.Module) -> list[Any]:
    """Return the ZeRO-3 optimizers that the model's weights refer to."""
    optimizers = {}
    for weight in model.parameters():
        if optimizer := getattr(weight, WEIGHT_OPTIMIZER, None):
            optimizers[id(optimizer)] = optimizer
    if not optimizers:
        raise _missing_name_error(WEIGHT_OPTIMIZER, "Parameter")
    return list(optimizers.values())


def is_sharded(weight: Tensor) -> bool:
    """Return whether ZeRO-3 has sharded a weight.

    Raises:
        RuntimeError: The weight has only some of a sharded weight's attributes.
    """
    existing = [name for name in SHARDED_WEIGHT_ATTRIBUTES if hasattr(weight, name)]
    if existing:
        require_attributes([weight], SHARDED_WEIGHT_ATTRIBUTES)
    return bool(existing)


def gathered_weight(weight: Tensor) -> AbstractContextManager:
    """Return a context in which a weight is complete, also if ZeRO-3 has sharded it.

    The weight may be read and not changed. All processes must enter the context.
    """
    if not is_sharded(weight):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight])


def local_shard(weight: Tensor) -> Tensor:
    """Return this process's shard of a weight, with its padding, or an unsharded weight itself."""
    return get_deepspeed_attribute(weight, "ds_tensor") if is_sharded(weight) else weight


def unpadded_shard(weight: nn.Parameter) -> Tensor:
    """Return this process's shard of a sharded weight, without the padding of the last shard."""
    require_attributes([weight], SHARDED_WEIGHT_ATTRIBUTES)
    sharded: Any = weight
    shard = sharded.ds_tensor.data
    begin = torch.distributed.get_rank(sharded.ds_process_group) * shard.numel()
    return shard[: max(sharded.ds_numel - begin, 0)]
