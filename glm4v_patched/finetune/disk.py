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

# Bytes per trained weight of its fp32 master weight, and of AdamW's two moments in fp32 or 8 bits.
FP32_BYTES, MOMENTS_BYTES, MOMENTS_8BIT_BYTES = 4, 8, 2


class DiskSpace(NamedTuple):
    """Disk space that a run needs, in bytes.

    Args:
        model: Size of the model or adapters that are saved at the end.
        checkpoint: Size of one checkpoint.
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
    out: str, config: ChatGLMConfig, options: EngineOptions, max_checkpoints: int
) -> DiskSpace:
    """Return the disk space that a run needs.

    Args:
        out: The run's folder.
        config: Config of the base model.
        max_checkpoints: From :func:`max_checkpoints_on_disk`.
    """
    model, checkpoint = saved_bytes(config, options)
    num_existing = len([*Path(out).glob("checkpoint-*")])  # if the run is resumed
    total = model + max(max_checkpoints - num_existing, 0) * checkpoint
    free = shutil.disk_usage(nearest_existing(out)).free
    return DiskSpace(model, checkpoint, max_checkpoints, total, free)


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
    trainer: TrainerFields, saves_at_bad_row: bool, steps: int | None = None
) -> int:
    """Return how many checkpoints are on the disk at once, at most.

    Args:
        saves_at_bad_row: Whether a row that cannot be used ends the run, which then saves a
            checkpoint (:attr:`Data.saves_at_bad_row`).
        steps: Steps of the run, if ``max_steps`` does not set them. While they are unknown, the
            result is what ``save_total_limit`` allows, or one checkpoint if it is null.
    """
    limit, strategy = trainer.save_total_limit, trainer.effective_save_strategy
    # An old checkpoint is deleted only after a new one is complete, and the best one is kept, too.
    upper_bound = math.inf if limit is None else limit + 1 + trainer.load_best_model_at_end
    if strategy == "no":
        return int(saves_at_bad_row)
    steps = trainer.max_steps or steps
    # The initial weights may be the best ones, and are then saved as checkpoint-0.
    saves_at_start = bool(trainer.other_training_arguments.get("eval_on_start")) and (
        trainer.load_best_model_at_end or strategy == "best"
    )
    if strategy == "steps" and steps is not None:
        assert trainer.save_steps is not None
        num_written = (steps - 1) // trainer.save_steps  # the last step has no checkpoint
    elif strategy == "epoch" and trainer.max_steps is None:
        num_written = max(math.ceil(trainer.num_train_epochs) - 1, 0)
    else:
        num_written = 1 if upper_bound == math.inf else int(upper_bound)
    return max(int(min(num_written + saves_at_start, upper_bound)), int(saves_at_bad_row))


def saved_bytes(config: ChatGLMConfig, options: EngineOptions) -> tuple[int, int]:
    """Return the bytes of the model or adapters that are saved, and of one checkpoint."""
    total, trained = sum(count_parameters(config)), count_trained(config, options)
    adapters = count_lora(config, options)
    frozen = 0 if is_lora(options.trained) else total - trained  # LoRA saves the adapters alone
    # Before the rows are read, the precision may be "auto". It counts as bf16, the smaller one.
    element_size = FP32_BYTES if options.precision == "fp32" else 2
    moments = MOMENTS_8BIT_BYTES if options.optimizer == "adamw_8bit" else MOMENTS_BYTES
    model = (adapters or total) * element_size
    if options.zero_stage == 0:  # weights are trained in fp32, and rounded only at the end
        return model, frozen * element_size + trained * (FP32_BYTES + moments)
    # In addition to the model that the Trainer saves, DeepSpeed saves the fp32 master weights, and
    # its own copy of all weights; under ZeRO-3, the copy has only the frozen weights.
    copied = frozen if options.zero_stage == 3 else trained + frozen
    return model, model + copied * element_size + trained * (FP32_BYTES + moments)
