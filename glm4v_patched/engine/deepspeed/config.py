"""DeepSpeed's configuration, and what DeepSpeed needs of the machine."""

import importlib.util
import os
import shutil
from importlib.metadata import version
from typing import Any

from packaging.requirements import Requirement

from ...terminal_text import pip_install
from ..options import EngineOptions

SUPPORTED_DEEPSPEED = "deepspeed>=0.16.9,<0.20"


def deepspeed_config(options: EngineOptions) -> dict[str, Any] | None:
    """What DeepSpeed is given for options that are decided; None where it takes no part. "auto" is
    filled in by transformers' Trainer."""
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
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if options.offload:
        # Not pinned: torch rounds pinned blocks up to powers of two, which may take a third more.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def zero_plus_plus(options: EngineOptions) -> dict[str, Any]:
    """What is asked for of ZeRO++, by DeepSpeed's names; nothing by default."""
    names = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
    asked = {name: getattr(options, name) for name in names}
    return {n: value for n, value in asked.items() if value != getattr(EngineOptions, n)}


def require_zero_plus_plus(options: EngineOptions, processes: int, on_cpu: bool) -> None:
    """Raise ``ValueError`` if ZeRO++ cannot do what is asked for on these processes."""
    size = options.zero_hpz_partition_size
    if processes % size:
        raise ValueError(
            f"engine.zero_hpz_partition_size is {size}, and there are {processes} processes; "
            "expected a number that divides them: the GPUs of one machine"
        )
    if not (options.zero_quantized_weights or options.zero_quantized_gradients):
        return
    if on_cpu:
        raise ValueError(
            "engine.zero_quantized_weights and engine.zero_quantized_gradients run on GPUs; "
            "expected false on a CPU"
        )
    # Where torch looks for CUDA's compiler.
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if not (shutil.which("nvcc") or os.path.isfile(os.path.join(home, "bin", "nvcc"))):
        raise ValueError(
            "DeepSpeed compiles what engine.zero_quantized_weights and _gradients ask for, and "
            "there is no nvcc; install CUDA's toolkit and set CUDA_HOME, or expected false"
        )


def require_deepspeed() -> None:
    """Raise ``RuntimeError`` naming what is missing or not supported, and how to install it."""
    told = None
    if importlib.util.find_spec("deepspeed") is None:
        told = f"DeepSpeed and what training needs: {pip_install('glm4v-patched[train]')}"
    elif not Requirement(SUPPORTED_DEEPSPEED).specifier.contains(
        found := version("deepspeed"), prereleases=True
    ):
        told = f"a tested DeepSpeed, {found} is not: {pip_install(SUPPORTED_DEEPSPEED)}"
    if told:
        raise RuntimeError(f"cannot train here; missing: {told}")
    if version("transformers") == "5.1.0":
        raise RuntimeError(
            "transformers 5.1.0 does not hand a model to DeepSpeed; expected another: "
            + pip_install("-U", "transformers")
        )
