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
        rows: Number of rows in an epoch; of packed sequences if ``data.pack_to`` is set.
    """
    if job.data.is_streamed or job.trainer.steps_in_epoch(rows, processes):
        return  # a stream starts again at its end
    batch_size = job.trainer.per_device_train_batch_size
    rows_in_words = pluralize(rows, "row")
    if job.data.pack_to is not None:
        rows_in_words = f"{pluralize(rows, 'packed sequence')} (data.pack_to)"
    raise ValueError(
        f"trainer.dataloader_drop_last is true and there are {rows_in_words}: a batch of "
        f"{batch_size:,} (trainer.per_device_train_batch_size) for each of "
        f"{pluralize(processes, 'process')} takes {batch_size * processes:,}, so that nothing "
        "would be trained; expected more rows, smaller batches, fewer processes, or "
        "trainer.dataloader_drop_last: false"
    )


def require_evaluations(
    trainer_config: TrainerFields, checked: CheckedData, steps: int, steps_per_epoch: int
) -> None:
    """Raise ``ValueError`` if no row is left to evaluate on, or if the run would end too early.

    Too early means before ``eval_delay`` is over, or before the first evaluation if a field needs
    evaluations.
    """
    if checked.eval is None:
        return
    if not len(checked.eval.rows):
        raise ValueError(
            f"data.eval, {checked.eval.path}, has no row that can be used; expected at least 1, or "
            "data.eval: null"
        )
    if not (interval := trainer_config.eval_every(steps_per_epoch)):
        return
    delay, interval_in_words = trainer_config.eval_delay(steps_per_epoch), f"{interval:,} steps"
    if trainer_config.effective_eval_strategy == "epoch":
        interval_in_words = f"epoch, which has {interval:,} steps"
    if delay > steps:
        value = trainer_config.other_training_arguments["eval_delay"]
        raise ValueError(
            f"trainer.eval_delay is {value:g}, which is {delay:g} steps, and the run has "
            f"{steps:,}: it would end before the first evaluation; expected less"
        )
    first = interval * max(math.ceil(delay / interval), 1)
    if first > steps and (names := [*_fields_that_need_evaluations(trainer_config)]):
        raise ValueError(
            f"{names[0]} needs an evaluation before the run ends: there is one every "
            f"{interval_in_words}, the first at step {first:,}, and the run has {steps:,} steps; "
            f"expected more steps, a lower trainer.eval_steps, or no {names[0]}"
        )


def _fields_that_need_evaluations(trainer_config: TrainerFields) -> Iterator[str]:
    """Yield the fields of a recipe that need an evaluation before the run ends."""
    if trainer_config.load_best_model_at_end:
        yield "trainer.load_best_model_at_end"
    if trainer_config.early_stopping_patience is not None:
        yield "trainer.early_stopping_patience"
    if trainer_config.save_strategy == "best":
        yield "trainer.save_strategy best"
    if trainer_config.lr_scheduler_type in SCHEDULES_BY_METRIC:
        yield f"trainer.lr_scheduler_type {trainer_config.lr_scheduler_type}"
