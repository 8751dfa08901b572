"""Disk space that a run needs: the saved model, and its checkpoints."""

import math
import shutil
from pathlib import Path
from typing import NamedTuple

from ..engine.folders import nearest_existing
from ..engine.memory_plan import count_lora, count_parameters, count_trained
from ..engine.options import EngineOptions, is_lora
from ..remote.configuration_chatglm import ChatGLMConfig
from ..terminal_text import format_bytes, pluralize
from .recipe.trainer import TrainerFields

# Bytes for each trained weight: its fp32 master, and AdamW's two moments in fp32 or in 8 bits.
FP32_BYTES, MOMENT_BYTES, MOMENT_8BIT_BYTES = 4, 8, 2


class DiskSpace(NamedTuple):
    """Bytes on the disk that a run needs.

    Args:
        model: Bytes of the model or adapters that are saved at the end.
        checkpoint: Bytes of one checkpoint.
        max_checkpoints: How many checkpoints are on the disk at once, at most.
        total: Bytes that the run still adds, at most.
        free: Free bytes on the disk.
    """

    model: int
    checkpoint: int
    max_checkpoints: int
    total: int
    free: int


def needed_space(
    out: str, config: ChatGLMConfig, options: EngineOptions, checkpoints: int
) -> DiskSpace:
    """Return the disk space that a run needs.

    Args:
        config: Config of the base model.
        checkpoints: From :func:`max_checkpoints_on_disk`.
    """
    model, checkpoint = saved_bytes(config, options)
    existing = len([*Path(out).glob("checkpoint-*")])  # if the run is resumed
    total = model + max(checkpoints - existing, 0) * checkpoint
    return DiskSpace(
        model, checkpoint, checkpoints, total, shutil.disk_usage(nearest_existing(out)).free
    )


def require_disk_space(out: str, space: DiskSpace) -> None:
    """Raise ``ValueError`` if the disk of a run's folder has too little space."""
    if space.total <= space.free:
        return
    saved = f"the model ({format_bytes(space.model)})"
    if space.max_checkpoints:
        checkpoints = pluralize(space.max_checkpoints, "checkpoint")
        saved += f" and up to {checkpoints} at once ({format_bytes(space.checkpoint)} each)"
    cure = "expected a folder on a larger disk"
    if space.max_checkpoints > 1:
        cure += ", or fewer checkpoints (trainer.save_total_limit, trainer.save_steps)"
    raise ValueError(
        f"out is {out}: {format_bytes(space.free)} are free there, and {saved} take "
        f"{format_bytes(space.total)}; {cure}"
    )


def max_checkpoints_on_disk(
    trainer: TrainerFields, may_end_with_one: bool, steps: int | None = None
) -> int:
    """Return how many checkpoints are on the disk at once, at most.

    An old checkpoint is deleted after a new one is complete.

    Args:
        may_end_with_one: Whether the run may end with a checkpoint at a row that cannot be used
            (:attr:`Data.ends_at_bad_row`).
        steps: Steps of the run, if ``max_steps`` does not set them. While they are unknown, the
            result is what ``save_total_limit`` allows, or one checkpoint if it is null.
    """
    limit, strategy = trainer.save_total_limit, trainer.effective_save_strategy
    # The best checkpoint stays beside the newest ones.
    upper_bound = math.inf if limit is None else limit + 1 + trainer.load_best_model_at_end
    if strategy == "no":
        return int(may_end_with_one)
    steps = trainer.max_steps or steps
    at_start = bool(trainer.passthrough_fields.get("eval_on_start")) and (
        trainer.load_best_model_at_end or strategy == "best"
    )
    if strategy == "steps" and steps is not None:
        assert trainer.save_steps is not None
        num_written = (steps - 1) // trainer.save_steps  # none at the last step
    elif strategy == "epoch" and trainer.max_steps is None:
        num_written = max(math.ceil(trainer.num_train_epochs) - 1, 0)
    else:
        num_written = 1 if upper_bound == math.inf else int(upper_bound)
    return max(int(min(num_written + at_start, upper_bound)), int(may_end_with_one))


def saved_bytes(config: ChatGLMConfig, options: EngineOptions) -> tuple[int, int]:
    """Return the bytes of the model or adapters that are saved, and of one checkpoint."""
    total, trained = sum(count_parameters(config)), count_trained(config, options)
    adapters = count_lora(config, options)
    frozen = 0 if is_lora(options.trained) else total - trained  # LoRA saves the adapters alone
    # "auto", in the check before the rows are read, counts as bf16: no run needs less.
    element_size = FP32_BYTES if options.precision == "fp32" else 2
    moments = MOMENT_8BIT_BYTES if options.optimizer == "adamw_8bit" else MOMENT_BYTES
    model = (adapters or total) * element_size
    if options.zero_stage == 0:  # weights are trained in fp32, and rounded only at the end
        return model, frozen * element_size + trained * (FP32_BYTES + moments)
    # Beside the model that the Trainer saves, DeepSpeed saves fp32 masters, and its own copy of all
    # weights, or under ZeRO-3 of the frozen weights.
    copied = frozen if options.zero_stage == 3 else trained + frozen
    return model, model + copied * element_size + trained * (FP32_BYTES + moments)
