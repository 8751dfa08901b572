"""Fields of ``TrainingArguments`` for a job, and further options of the training loop.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..data.workers import start_method
from ..engine.deepspeed.config import deepspeed_config
from ..engine.options import EngineOptions
from .job import Job

# The Trainer's names for the engine's optimizers.
TRAINER_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}
# Fields of the section ``trainer`` that are not passed to TrainingArguments: three of LoopOptions,
# and num_train_epochs, in place of which max_steps is passed.
NOT_TRAINING_ARGUMENTS = {"early_stopping_patience", "early_stopping_threshold", "save_total_limit"}
NOT_TRAINING_ARGUMENTS |= {"num_train_epochs"}


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of the training loop that ``TrainingArguments`` has no field for.

    Args:
        rates: Learning rate of each part of the model; None if they all have the same.
        max_nonfinite_steps: Number of steps in a row with a NaN or infinite loss or gradient norm
            that end the run.
        fail_on_bad_rows: Whether a row of a stream that cannot be used ends the run.
        keep_checkpoints: How many complete checkpoints to keep beside the best; None for all.
        patience, threshold: Arguments of transformers' EarlyStoppingCallback; no early stopping if
            ``patience`` is None.
        worker_start_method: Start method of dataloader workers (:func:`data.workers.start_method`).
    """

    rates: dict[str, float] | None = None
    max_nonfinite_steps: int = 3
    fail_on_bad_rows: bool = True
    keep_checkpoints: int | None = None
    patience: int | None = None
    threshold: float = 0.0
    worker_start_method: str | None = None


def loop_options(job: Job, options: EngineOptions) -> LoopOptions:
    """Return the loop's options for a job and the decided options of the engine."""
    trainer_config, rates = job.trainer, job.trainer.learning_rate
    return LoopOptions(
        rates={str(k): v for k, v in rates.items()} if isinstance(rates, dict) else None,
        max_nonfinite_steps=job.max_nonfinite_steps,
        fail_on_bad_rows=job.data.on_bad == "fail",
        keep_checkpoints=trainer_config.save_total_limit,
        patience=trainer_config.early_stopping_patience,
        threshold=trainer_config.early_stopping_threshold,
        worker_start_method=start_method(options.offload, trainer_config.other_training_arguments),
    )


def training_arguments(
    job: Job,
    options: EngineOptions,
    steps: int,
    steps_per_epoch: int,
    *,
    on_cpu: bool,
    evaluates: bool,
    resumes: bool,
    loading: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of ``TrainingArguments`` for a job, as JSON values.

    Args:
        options: Decided options of the engine.
        steps: Optimizer steps of the run.
        steps_per_epoch: Optimizer steps of one pass over the rows.
        evaluates: Whether there is data to evaluate on.
        resumes: Whether the run resumes from a checkpoint.
        loading: Fields for the dataloader, from :func:`loader_options`.
    """
    trainer_config, passthrough = job.trainer, job.trainer.other_training_arguments
    eval_every = trainer_config.eval_every(steps_per_epoch)
    from_recipe = trainer_config.model_dump(exclude_none=True, exclude=NOT_TRAINING_ARGUMENTS)
    # "epoch" becomes "steps": at the end of an epoch the Trainer saves before it evaluates, and a
    # run that resumes from that checkpoint would lack the evaluation.
    save_strategy = trainer_config.effective_save_strategy
    if save_strategy == "epoch":
        save_strategy = "steps"
    decided: dict[str, Any] = {
        "output_dir": str(job.out),
        # The length of a run in epochs is passed as steps, so that schedule, log and plan agree.
        "max_steps": steps,
        "per_device_eval_batch_size": trainer_config.eval_batch_size,
        "learning_rate": trainer_config.highest_rate,
        "warmup_steps": trainer_config.warmup(steps),
        "save_strategy": save_strategy,
        "save_steps": trainer_config.save_every(steps_per_epoch),
        "eval_strategy": "steps" if evaluates and eval_every else "no",
        "eval_steps": eval_every,
        "eval_delay": trainer_config.eval_delay(steps_per_epoch),
        # The checkpoint of a resumed run already has the results of this evaluation.
        "eval_on_start": bool(passthrough.get("eval_on_start")) and not resumes,
        "metric_for_best_model": trainer_config.metric_for_best_model if evaluates else None,
        "restore_callback_states_from_checkpoint": (
            trainer_config.early_stopping_patience is not None
        ),
        "logging_strategy": "no" if passthrough.get("logging_strategy") == "no" else "steps",
        "logging_steps": trainer_config.log_every(steps, steps_per_epoch),
        "ignore_data_skip": job.data.is_streamed,  # a stream itself skips the rows of earlier steps
    }
    return {**from_recipe, **engine_arguments(options, on_cpu), **decided, **loading}


def engine_arguments(options: EngineOptions, on_cpu: bool) -> dict[str, Any]:
    """Return the fields of ``TrainingArguments`` that depend on the decided options of the engine.

    The benchmark of training passes only these.
    """
    return {
        "optim": TRAINER_OPTIMIZERS[options.optimizer],
        "bf16": options.precision == "bf16",
        "use_cpu": on_cpu,
        "deepspeed": deepspeed_config(options),
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        # The filter would log the mean of earlier losses in place of NaN, and wait for the GPU in
        # every step.
        "logging_nan_inf_filter": False,
    }
