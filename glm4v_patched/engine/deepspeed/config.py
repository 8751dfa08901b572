"""DeepSpeed's configuration, and what DeepSpeed requires of the machine."""

import importlib.util
from importlib.metadata import version
from typing import Any

from packaging.requirements import Requirement

from ...terminal_text import pip_install
from ..options import EngineOptions

SUPPORTED_DEEPSPEED = "deepspeed>=0.16.9,<0.20"


def deepspeed_config(options: EngineOptions) -> dict[str, Any] | None:
    """Return DeepSpeed's configuration for decided options; None without DeepSpeed.

    transformers' Trainer replaces each "auto" in it.
    """
    if options.zero_stage == 0:
        return None
    assert options.is_decided, "memory_plan.decide_options() comes first"
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        # Number of weights whose gradients the optimizer converts to fp32 at a time. Checkpoints
        # are loaded in groups of this size, so the size must not depend on options that may be
        # changed when a run is resumed.
        "sub_group_size": 5e8,
    }
    if options.gathers_whole_layers:
        zero |= {
            "contiguous_gradients": False,  # no buffer, and no copy of each gradient into it
            # Shard small weights, too: each weight that is kept gathered costs a gather after every
            # step.
            "stage3_param_persistence_threshold": 0,
            # Use torch's own F.linear. DeepSpeed's version reads the id of every weight, so each
            # layer would be compiled separately.
            "memory_efficient_linear": False,
            "stage3_max_live_parameters": options.stage3_max_live_parameters,
            "stage3_max_reuse_distance": options.stage3_max_live_parameters,
            "stage3_prefetch_bucket_size": 2e8,  # one layer of the language model
            "reduce_bucket_size": 2e8,
        }
    if options.zero_hpz_partition_size > 1:
        zero["zero_hpz_partition_size"] = options.zero_hpz_partition_size
    config = {
        "bf16": {"enabled": options.precision == "bf16"},
        "zero_optimization": zero,
        # The optimizer is torch's AdamW. DeepSpeed's own would have to be compiled first.
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if options.offload:
        # Not pinned: torch rounds pinned blocks up to powers of two, which may take a third more
        # memory.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def require_divisible_processes(options: EngineOptions, processes: int) -> None:
    """Raise ``ValueError`` if the number of processes is not a multiple of hpZ's partition size."""
    size = options.zero_hpz_partition_size
    if processes % size:
        raise ValueError(
            f"engine.zero_hpz_partition_size is {size}, and there are {processes} processes; "
            "expected a number that divides them: the number of GPUs of one machine"
        )


def require_deepspeed() -> None:
    """Raise ``RuntimeError`` if DeepSpeed is missing, or if a version was not tested."""
    missing = None
    if importlib.util.find_spec("deepspeed") is None:
        missing = f"DeepSpeed and other packages: {pip_install('glm4v-patched[train]')}"
    elif not Requirement(SUPPORTED_DEEPSPEED).specifier.contains(
        installed := version("deepspeed"), prereleases=True
    ):
        missing = f"a tested DeepSpeed instead of {installed}: {pip_install(SUPPORTED_DEEPSPEED)}"
    if missing:
        raise RuntimeError(f"cannot train here; missing: {missing}")
    if version("transformers") == "5.1.0":
        raise RuntimeError(
            "transformers 5.1.0 does not pass a model to DeepSpeed; expected another release: "
            + pip_install("-U", "transformers")
        )
