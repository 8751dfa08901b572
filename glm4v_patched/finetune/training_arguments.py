"""What transformers' Trainer is given, decided: fields of ``TrainingArguments``, and what it has no
field for. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..data.workers import worker_start
from ..engine.deepspeed.config import deepspeed_config
from ..engine.options import EngineOptions
from .job import Job

# The Trainer's names.
TRAINER_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}
# Fields of ``trainer`` that it is not given: they are of :class:`LoopOptions`, or in the steps.
NOT_TRAINING_ARGUMENTS = {"early_stopping_patience", "early_stopping_threshold", "save_total_limit"}
NOT_TRAINING_ARGUMENTS |= {"num_train_epochs"}


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """What the training loop does that ``TrainingArguments`` has no field for.

    Args:
        rates: Learning rates of parts of the model, where they have their own.
        max_nonfinite_steps: The run ends after so many in a row.
        fail_on_bad_rows: Whether a row of a stream that cannot be used ends the run.
        keep_checkpoints: Complete ones, beside the best; None for all.
        patience, threshold: Of transformers' EarlyStoppingCallback; without the first, none.
        worker_start: How processes that read images start (:func:`data.workers.worker_start`).
    """

    rates: dict[str, float] | None = None
    max_nonfinite_steps: int = 3
    fail_on_bad_rows: bool = True
    keep_checkpoints: int | None = None
    patience: int | None = None
    threshold: float = 0.0
    worker_start: str | None = None


def loop_options(job: Job, options: EngineOptions) -> LoopOptions:
    asked, rates = job.trainer, job.trainer.learning_rate
    return LoopOptions(
        rates={str(k): v for k, v in rates.items()} if isinstance(rates, dict) else None,
        max_nonfinite_steps=job.max_nonfinite_steps,
        fail_on_bad_rows=job.data.on_bad == "fail",
        keep_checkpoints=asked.save_total_limit,
        patience=asked.early_stopping_patience,
        threshold=asked.early_stopping_threshold,
        worker_start=worker_start(options.offload, asked.undeclared_fields),
    )


def training_arguments(
    job: Job,
    options: EngineOptions,
    steps: int,
    steps_an_epoch: int,
    *,
    on_cpu: bool,
    evaluates: bool,
    continues: bool,
    loading: Mapping[str, Any],
) -> dict[str, Any]:
    """The recipe's fields of ``TrainingArguments``, as JSON values, with all that it leaves open.

    Args:
        options: Decided.
        evaluates: Whether there is data to evaluate on.
        continues: Whether the run begins at a checkpoint.
        loading: Of :func:`loader_options`.
    """
    asked = job.trainer
    eval_every = asked.eval_every(steps_an_epoch)
    given = asked.model_dump(exclude_none=True, exclude=NOT_TRAINING_ARGUMENTS)
    decided: dict[str, Any] = {
        "output_dir": str(job.out),
        # Of epochs, too: schedule, log and estimates agree on them before the first step.
        "max_steps": steps,
        "per_device_eval_batch_size": asked.eval_batch_size,
        "learning_rate": asked.highest_rate,
        "warmup_steps": asked.warmup(steps),
        # By steps, also where it is asked for at the end of an epoch: there the Trainer evaluates
        # after it has saved, and a run that continues from that checkpoint would not.
        "save_strategy": "steps" if asked.effective_save_strategy == "epoch" else asked.effective_save_strategy,
        "save_steps": asked.save_every(steps_an_epoch),
        "eval_strategy": "steps" if evaluates and eval_every else "no",
        "eval_steps": eval_every,
        "eval_delay": asked.eval_delay(steps_an_epoch),
        # A checkpoint has the evaluation of the start.
        "eval_on_start": bool(asked.undeclared_fields.get("eval_on_start")) and not continues,
        "metric_for_best_model": asked.metric_for_best_model if evaluates else None,
        "restore_callback_states_from_checkpoint": asked.early_stopping_patience is not None,
        "logging_strategy": "no" if asked.undeclared_fields.get("logging_strategy") == "no" else "steps",
        "logging_steps": asked.log_every(steps, steps_an_epoch),
        "ignore_data_skip": job.data.is_streamed,  # which begins where it is to go on
    }
    return {**given, **engine_arguments(options, on_cpu), **decided, **loading}


def engine_arguments(options: EngineOptions, on_cpu: bool) -> dict[str, Any]:
    """Fields for options that are decided, whatever is learned; the bench has no others of ours."""
    return {
        "optim": TRAINER_OPTIMIZERS[options.optimizer],
        "bf16": options.precision == "bf16",
        "use_cpu": on_cpu,
        "deepspeed": deepspeed_config(options),
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        # It logs the mean of earlier losses for NaN, and waits for the GPU in every step to know.
        "logging_nan_inf_filter": False,
    }
