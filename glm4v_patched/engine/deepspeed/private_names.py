"""Every private name of DeepSpeed that this package uses, and where DeepSpeed has it.

:mod:`internals` checks each one where it is used; :func:`missing_names` looks for all of them in
DeepSpeed's source, without importing it. Needs no torch.
"""

import ast
import importlib.util
from importlib.metadata import version
from pathlib import Path

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
IN_CHECKPOINTS = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)
# Compiles DeepSpeed's own collectives for a CPU, when processes join.
COMPILES_COLLECTIVES = "deepspeed.comm.torch:build_shm_op"
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
# Its share of each weight's gradient, in the buffer. A name that Python writes with the class's.
GRADIENT_VIEWS = "__param_id_to_grad_partition"
ZERO3_OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
OF_ZERO12 = ("single_partition_of_fp32_groups",)
OF_WEIGHTS_OF_ZERO3 = "_z3_optimizer"

# The modules in which DeepSpeed defines, or assigns to, what has these names.
_ZERO = "deepspeed.runtime.zero"
DEFINED_IN: dict[str, tuple[str, ...]] = {
    f"{_ZERO}.partition_parameters": (*OF_SHARDED_WEIGHTS, GATHERS_WHEN_LOADING),
    f"{_ZERO}.parameter_offload": OF_MODULES,
    f"{_ZERO}.stage3": (*OF_ZERO3, OF_WEIGHTS_OF_ZERO3, GRADIENT_VIEWS, ZERO3_OPTIMIZER),
    f"{_ZERO}.stage_1_and_2": OF_ZERO12,
}
_RESOLVED = (ZERO_PARAM_STATUS, SHARDING_INIT, CHECKPOINT_ENGINE, COMPILES_COLLECTIVES)
for _name in (*_RESOLVED, *IN_CHECKPOINTS):
    _module, _, _class = _name.partition(":")
    DEFINED_IN[_module] = (*DEFINED_IN.get(_module, ()), _class)


def missing_names() -> list[tuple[str, str]]:
    """What the installed DeepSpeed's source does not have: names, each with its module.

    Nothing of DeepSpeed is run. A name that is there may still mean something else.
    """
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        return []  # require_deepspeed() says that
    folder = Path(package.origin).parents[1]
    found = []
    for module, names in DEFINED_IN.items():
        written = _written_in(folder / (module.replace(".", "/") + ".py"))
        found += [(name, module) for name in names if name not in written]
    return found


def _written_in(file: Path) -> set[str]:
    """Names that a file of Python defines or assigns to, as attributes too."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return set()
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name):
                names.add(name)
            case ast.Attribute(attr=name):
                names.add(name)
    return names


def moved(name: str, owner: str) -> RuntimeError:
    return RuntimeError(
        f"DeepSpeed {version('deepspeed')} has no {name} (of {owner}), which training with ZeRO "
        f"uses here; install a tested one: {pip_install(SUPPORTED_DEEPSPEED)}"
    )
