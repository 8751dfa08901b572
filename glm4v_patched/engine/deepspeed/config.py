"""DeepSpeed configurations, and what DeepSpeed needs of the machine."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path


def zero_config(
    stage: int,
    bf16: bool = True,
    whole_layers: bool = False,
    kept_gathered: float = 1e9,
    offload_optimizer: bool = False,
) -> dict:
    """ZeRO at ``stage`` in bf16 or fp32; batch sizes and clipping are the trainer's.

    Args:
        whole_layers: For :func:`gather.gather_whole_layers`, under stage 3: no weight stays
            gathered by itself, as that costs a gather each after every step, and compiled layers
            get torch's own ``F.linear``.
        kept_gathered: Weights that may stay gathered between a layer's forward and its backward,
            2 bytes each; 1e12 saves the second gather where all fit.
        offload_optimizer: Keep the optimizer's states and the fp32 weights on the CPU.
    """
    zero = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if whole_layers:
        zero |= {
            "contiguous_gradients": False,  # a copy of each gradient less, and the buffer for it
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
            "stage3_max_live_parameters": kept_gathered,
            "stage3_max_reuse_distance": kept_gathered,
            "stage3_prefetch_bucket_size": 2e8,  # one layer of the language model
            "reduce_bucket_size": 2e8,
            "sub_group_size": 5e8,  # weights whose gradients are held in fp32 during an update
        }
    config = {
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        # The optimizer is torch's own AdamW: DeepSpeed's would be compiled first.
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if offload_optimizer:
        # Not pinned: torch rounds pinned blocks up to powers of two, which may take a third more.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def path_of_processes() -> str:
    """``PATH`` for training processes, with the programs of this Python environment first.

    torch starts ``ninja`` by name; pip puts it beside the interpreter, which is on ``PATH`` only
    where the environment is activated.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def require_deepspeed(on_cpu: bool) -> None:
    """Raise ``RuntimeError`` naming what is missing and how to install it."""
    missing = []
    if importlib.util.find_spec("deepspeed") is None:
        missing.append("DeepSpeed and what training needs: pip install 'glm4v-patched[train]'")
    if on_cpu and shutil.which("g++") is None and shutil.which("c++") is None:
        missing.append("a C++ compiler, for DeepSpeed's CPU collectives: apt-get install g++")
    if on_cpu and shutil.which("ninja", path=path_of_processes()) is None:
        missing.append("ninja, for DeepSpeed's CPU collectives: pip install ninja")
    if missing:
        raise RuntimeError("cannot train here; missing:\n  - " + "\n  - ".join(missing))
