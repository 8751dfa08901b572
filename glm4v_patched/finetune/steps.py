"""Refuse runs without a batch, and runs that would end before an evaluation that they need."""

import math
from collections.abc import Iterator

from ..data.checked_data import CheckedData
from ..terminal_text import pluralize
from .job import Job
from .recipe.trainer import SCHEDULES_BY_METRIC, TrainerFields


def require_batches(job: Job, rows: int, processes: int) -> None:
    """Raise ``ValueError`` if ``dataloader_drop_last`` would drop all batches.

    Args:
        rows: Number of rows in an epoch, after packing.
    """
    trainer_config = job.trainer
    needed = trainer_config.per_device_train_batch_size * processes
    if job.data.is_streamed or trainer_config.steps_in_epoch(rows, processes):
        return  # a stream starts again at its end
    row = "row" if job.data.pack_to is None else "packed row (data.pack_to)"
    rows_in_words = pluralize(rows, row, row.replace("row", "rows", 1))
    raise ValueError(
        f"trainer.dataloader_drop_last is true and there are {rows_in_words}: a batch of "
        f"{trainer_config.per_device_train_batch_size:,} (trainer.per_device_train_batch_size) for "
        f"each of {pluralize(processes, 'process')} takes {needed:,}, so that nothing "
        "would be trained; expected more rows, smaller batches, fewer processes, or "
        "trainer.dataloader_drop_last: false"
    )


def require_evaluations(
    trainer_config: TrainerFields, checked: CheckedData, steps: int, steps_an_epoch: int
) -> None:
    """Raise ``ValueError`` if no row is left to evaluate on, or if the run would end too early.

    Too early means before ``eval_delay`` is over, or before an evaluation that a field needs.
    """
    if checked.eval is None:
        return
    if not len(checked.eval.rows):
        raise ValueError(
            f"of data.eval, {checked.eval.path}, 0 rows are left; expected at least 1 that can be "
            "used, or data.eval: null"
        )
    if not (every := trainer_config.eval_every(steps_an_epoch)):
        return
    delay, interval = trainer_config.eval_delay(steps_an_epoch), f"every {every:,} steps"
    if trainer_config.effective_eval_strategy == "epoch":
        interval = f"after every epoch of {every:,} steps"
    if delay > steps:
        raise ValueError(
            f"trainer.eval_delay is {trainer_config.passthrough_fields['eval_delay']:g}, which is "
            f"{delay:g} steps, and the run has {steps:,}: it would end before the first "
            "evaluation; expected less"
        )
    first = every * max(math.ceil(delay / every), 1)
    if first > steps and (names := [*_fields_with_evaluations(trainer_config)]):
        raise ValueError(
            f"{names[0]} needs evaluations before the end: the run has {steps:,} steps, and with "
            f"one {interval} the first comes at step {first:,}; expected more steps, a lower "
            f"trainer.eval_steps, or not {names[0]}"
        )


def _fields_with_evaluations(trainer_config: TrainerFields) -> Iterator[str]:
    """Yield the fields of a recipe that need an evaluation before the run ends."""
    if trainer_config.load_best_model_at_end:
        yield "trainer.load_best_model_at_end"
    if trainer_config.early_stopping_patience is not None:
        yield "trainer.early_stopping_patience"
    if trainer_config.save_strategy == "best":
        yield "trainer.save_strategy best"
    if trainer_config.lr_scheduler_type in SCHEDULES_BY_METRIC:
        yield f"trainer.lr_scheduler_type {trainer_config.lr_scheduler_type}"
