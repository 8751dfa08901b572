"""DeepSpeed configurations, and what DeepSpeed needs of the machine."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path


def zero_config(stage: int, bf16: bool = True) -> dict:
    """ZeRO at ``stage`` in bf16 or fp32; batch sizes and clipping are the trainer's."""
    return {
        "bf16": {"enabled": bf16},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        # The optimizer is torch's own AdamW: DeepSpeed's would be compiled first on a CPU.
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


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
