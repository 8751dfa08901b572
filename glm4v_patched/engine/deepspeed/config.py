"""DeepSpeed's configuration, and what DeepSpeed needs of the machine."""

import importlib.util
import os
import shutil
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from ...terminal_text import pip_install
from ..options import EngineOptions

OLDEST_DEEPSPEED, FIRST_UNTESTED_DEEPSPEED = "0.16.9", "0.20"
SUPPORTED_DEEPSPEED = f"deepspeed>={OLDEST_DEEPSPEED},<{FIRST_UNTESTED_DEEPSPEED}"


def deepspeed_config(
    options: EngineOptions,
    micro_batch: int | str = "auto",
    accumulation: int | str = "auto",
    clipping: float | str = "auto",
) -> dict[str, Any] | None:
    """What DeepSpeed is given for options that are decided; None where it takes no part.

    Args:
        micro_batch, accumulation, clipping: "auto" is filled in by transformers' Trainer.
    """
    if options.zero_stage == 0:
        return None
    assert options.is_decided, "memory_plan.decide() comes first"
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        # Weights whose gradients are held in fp32 during an update. A checkpoint is loaded by these
        # groups, so that it may not depend on policies, which are free when a run is resumed.
        "sub_group_size": 5e8,
    }
    if options.gathers_whole_layers:
        zero |= {
            "contiguous_gradients": False,  # a copy of each gradient less, and the buffer for it
            # No weight stays gathered by itself: each would cost a gather after every step.
            "stage3_param_persistence_threshold": 0,
            # torch's own F.linear: DeepSpeed's asks every weight for its number, and each layer
            # would be compiled anew.
            "memory_efficient_linear": False,
            "stage3_max_live_parameters": options.stage3_max_live_parameters,
            "stage3_max_reuse_distance": options.stage3_max_live_parameters,
            "stage3_prefetch_bucket_size": 2e8,  # one layer of the language model
            "reduce_bucket_size": 2e8,
        }
    zero |= zero_plus_plus(options)
    config = {
        "bf16": {"enabled": options.precision == "bf16"},
        "zero_optimization": zero,
        # The optimizer is torch's own AdamW: DeepSpeed's would be compiled first.
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
    }
    if options.offload:
        # Not pinned: torch rounds pinned blocks up to powers of two, which may take a third more.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def zero_plus_plus(options: EngineOptions) -> dict[str, Any]:
    """What is asked for of ZeRO++, by DeepSpeed's names; nothing by default."""
    asked: dict[str, Any] = {}
    if options.zero_hpz_partition_size > 1:
        asked["zero_hpz_partition_size"] = options.zero_hpz_partition_size
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if getattr(options, name):
            asked[name] = True
    return asked


def require_zero_plus_plus(options: EngineOptions, processes: int, on_cpu: bool) -> None:
    """Raise ``ValueError`` if ZeRO++ cannot do what is asked for on these processes."""
    size = options.zero_hpz_partition_size
    quantized = options.zero_quantized_weights or options.zero_quantized_gradients
    if processes % size:
        raise ValueError(
            f"engine.zero_hpz_partition_size is {size}, and there are {processes} processes; "
            "expected a number that divides them: the GPUs of one machine"
        )
    if quantized and on_cpu:
        raise ValueError(
            "engine.zero_quantized_weights and engine.zero_quantized_gradients run on GPUs; "
            "expected false on a CPU"
        )
    if quantized and not has_nvcc():
        raise ValueError(
            "DeepSpeed compiles what engine.zero_quantized_weights and _gradients ask for, and "
            "there is no nvcc; install CUDA's toolkit and set CUDA_HOME, or expected false"
        )


def has_nvcc() -> bool:
    """Whether CUDA's compiler is where torch looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or os.path.isfile(os.path.join(home, "bin", "nvcc"))


def require_deepspeed() -> None:
    """Raise ``RuntimeError`` naming what is missing or not supported, and how to install it."""
    missing = None
    if importlib.util.find_spec("deepspeed") is None:
        install = pip_install("glm4v-patched[train]")
        missing = f"DeepSpeed and what training needs: {install}"
    elif not _is_supported(found := version("deepspeed")):
        missing = f"a tested DeepSpeed, {found} is not: {pip_install(SUPPORTED_DEEPSPEED)}"
    if missing:
        raise RuntimeError(f"cannot train here; missing: {missing}")
    if version("transformers") == "5.1.0":
        raise RuntimeError(
            "transformers 5.1.0 does not hand a model to DeepSpeed; expected another: "
            + pip_install("-U", "transformers")
        )


def _is_supported(found: str) -> bool:
    return Version(OLDEST_DEEPSPEED) <= Version(found) < Version(FIRST_UNTESTED_DEEPSPEED)
