"""Refuses runs that would do nothing: without a batch, or without an evaluation that they need."""

import math
from collections.abc import Iterator

from ..data.checked_data import CheckedData
from .job import Job
from .recipe.trainer import METRIC_SCHEDULES, TrainerFields


def require_batches(job: Job, rows: int, processes: int) -> None:
    """Raise ``ValueError`` if so many rows, packed ones if they are packed, are no whole batch for
    each process, and those that are not whole are dropped."""
    asked = job.trainer
    needed = asked.per_device_train_batch_size * processes
    if job.data.is_streamed or asked.steps_in_epoch(rows, processes):
        return  # a stream begins anew at its end
    kind = "rows" if job.data.pack_to is None else "packed rows (data.pack_to)"
    raise ValueError(
        f"trainer.dataloader_drop_last is true and there are {rows:,} {kind}: a batch of "
        f"{asked.per_device_train_batch_size:,} (trainer.per_device_train_batch_size) for each of "
        f"{processes:,} processes takes {needed:,}, so that nothing would be learned; expected "
        "more rows, smaller batches, fewer processes, or trainer.dataloader_drop_last: false"
    )


def require_evaluations(
    asked: TrainerFields, checked: CheckedData, steps: int, steps_an_epoch: int
) -> None:
    """Raise ``ValueError`` if there are no rows to evaluate on, or what needs an evaluation in the
    course of the run would wait for one beyond its end."""
    if checked.eval is None:
        return
    if not len(checked.eval.rows):
        raise ValueError(
            f"of data.eval, {checked.eval.path}, 0 rows are left; expected at least 1 that can be "
            "used, or data.eval: null"
        )
    if not (every := asked.eval_every(steps_an_epoch)):
        return
    delay, unit = asked.eval_delay(steps_an_epoch), f"every {every:,} steps"
    if asked.effective_eval_strategy == "epoch":
        unit = f"after every epoch of {every:,} steps"
    if delay > steps:
        raise ValueError(
            f"trainer.eval_delay is {asked.others['eval_delay']:g}, which is {delay:g} steps, and "
            f"the run has {steps:,}: it would end before the first evaluation; expected less"
        )
    first = every * max(math.ceil(delay / every), 1)
    if first > steps and (names := [*_that_need_evaluations(asked)]):
        raise ValueError(
            f"{names[0]} needs evaluations before the end: the run has {steps:,} steps, and with "
            f"one {unit} the first comes at step {first:,}; expected more steps, a lower "
            f"trainer.eval_steps, or not {names[0]}"
        )


def _that_need_evaluations(asked: TrainerFields) -> Iterator[str]:
    if asked.load_best_model_at_end:
        yield "trainer.load_best_model_at_end"
    if asked.early_stopping_patience is not None:
        yield "trainer.early_stopping_patience"
    if asked.save_strategy == "best":
        yield "trainer.save_strategy best"
    if asked.lr_scheduler_type in METRIC_SCHEDULES:
        yield f"trainer.lr_scheduler_type {asked.lr_scheduler_type}"
