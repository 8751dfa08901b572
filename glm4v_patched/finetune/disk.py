"""How much disk a run needs: what it saves at the end, and its checkpoints."""

import math
import shutil
from pathlib import Path
from typing import NamedTuple

from ..engine.folders import nearest_existing
from ..engine.memory_plan import count_lora, count_parameters, count_trained
from ..engine.options import EngineOptions, is_lora
from ..remote.configuration_chatglm import ChatGLMConfig
from ..terminal_text import format_bytes
from .recipe.trainer import TrainerFields

FP32, MOMENTS, MOMENTS_OF_8_BITS = 4, 8, 2


class DiskSpace(NamedTuple):
    """Bytes: of what is saved at the end, of a checkpoint, of all together, and what is free."""

    model: int
    checkpoint: int
    number: int
    total: int
    free: int


def needed_space(
    out: str, config: ChatGLMConfig, options: EngineOptions, checkpoints: int
) -> DiskSpace:
    """What a run takes of the disk.

    Args:
        config: Of the model that it starts from.
        checkpoints: Of :func:`checkpoints_at_once`.
    """
    model, checkpoint = saved_bytes(config, options)
    there = len([*Path(out).glob("checkpoint-*")])  # of a run to be continued
    total = model + max(checkpoints - there, 0) * checkpoint
    return DiskSpace(model, checkpoint, checkpoints, total, shutil.disk_usage(nearest_existing(out)).free)


def require_disk_space(out: str, space: DiskSpace) -> None:
    """Raise ``ValueError`` if the disk of a run's folder is too small."""
    if space.total <= space.free:
        return
    saved = f"the model ({format_bytes(space.model)})"
    if space.number:
        saved += f" and up to {space.number} checkpoints at once ({format_bytes(space.checkpoint)} "
        saved += "each)"
    cure = "expected a folder on a larger disk"
    if space.number > 1:
        cure += ", or fewer checkpoints (trainer.save_total_limit, trainer.save_steps)"
    raise ValueError(
        f"out is {out}: {format_bytes(space.free)} are free there, and {saved} take "
        f"{format_bytes(space.total)}; {cure}"
    )


def checkpoints_at_once(
    trainer: TrainerFields, may_end_with_one: bool, steps: int | None = None
) -> int:
    """The most that lie on the disk: an old one goes when a new one is complete.

    Args:
        may_end_with_one: Whether the run may end at a row that cannot be used
            (:attr:`Data.ends_at_bad_row`).
        steps: Of the run, where max_steps does not say it. Until it is known, one checkpoint is
            counted where nothing limits them.
    """
    limit, strategy = trainer.save_total_limit, trainer.effective_save_strategy
    # The best one is kept beside the newest.
    most = math.inf if limit is None else limit + 1 + trainer.load_best_model_at_end
    if strategy == "no":
        return int(may_end_with_one)
    steps = trainer.max_steps or steps
    at_start = bool(trainer.undeclared_fields.get("eval_on_start")) and (
        trainer.load_best_model_at_end or strategy == "best"
    )
    if strategy == "steps" and steps is not None:
        assert trainer.save_steps is not None
        saved = (steps - 1) // trainer.save_steps  # none at the last step
    elif strategy == "epoch" and trainer.max_steps is None:
        saved = max(math.ceil(trainer.num_train_epochs) - 1, 0)
    else:
        saved = 1 if most == math.inf else int(most)
    return max(int(min(saved + at_start, most)), int(may_end_with_one))


def saved_bytes(config: ChatGLMConfig, options: EngineOptions) -> tuple[int, int]:
    """Bytes of what is saved at the end, and of a checkpoint."""
    total, trained = sum(count_parameters(config)), count_trained(config, options)
    adapters = count_lora(config, options)
    frozen = 0 if is_lora(options.trained) else total - trained  # adapters are saved without it
    width = 2 if options.precision == "bf16" else FP32
    moments = MOMENTS_OF_8_BITS if options.optimizer == "adamw_8bit" else MOMENTS
    model = (adapters or total) * width
    if options.zero_stage == 0:  # trained in fp32, which is rounded at the end
        return model, frozen * width + trained * (FP32 + moments)
    # DeepSpeed keeps fp32 masters, and beside what the Trainer saves a copy of its own: of all
    # weights, or where they are sharded of those that are frozen.
    copied = frozen if options.zero_stage == 3 else trained + frozen
    return model, model + copied * width + trained * (FP32 + moments)
