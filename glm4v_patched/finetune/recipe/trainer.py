"""Section ``trainer`` of a recipe: fields of transformers' ``TrainingArguments``, type-checked.

The fields that most recipes need are declared here, with our defaults. Fields that have
another place in a recipe are refused (:mod:`other_names`). All other fields of the installed
``TrainingArguments`` are accepted with the types of its dataclass. Transformers and torch, whose
imports take seconds, are imported only for a recipe with such a field.
"""

import dataclasses
import functools
import math
import operator
from enum import EnumType
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field

from .other_names import trainer_field_refusal
from .types import (
    MAY_CHANGE,
    AtLeastOne,
    AtLeastZero,
    BelowOne,
    Expected,
    Folder,
    NotNegative,
    Positive,
    Section,
    Seed,
)

StrategyName = Literal["no", "steps", "epoch"]
MetricName = Literal["eval_loss", "loss", "eval_exact_match", "exact_match"]
ScheduleName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
]
SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that depend on the evaluation metric instead of the step."""
Epochs = Annotated[float, Field(gt=0, le=1e6)]
LoggerName = Literal[
    "none",
    "all",
    "tensorboard",
    "wandb",
    "mlflow",
    "comet_ml",
    "trackio",
    "swanlab",
    "clearml",
    "neptune",
    "dvclive",
    "azure_ml",
    "codecarbon",
    "flyte",
    "dagshub",
]


class TrainerFields(Section):
    """The section ``trainer``."""

    model_config = ConfigDict(extra="allow")  # further fields of the installed TrainingArguments

    per_device_train_batch_size: AtLeastOne
    """Rows in a batch of one process."""
    num_train_epochs: Epochs = 1.0
    """Passes over the rows, if max_steps is null."""
    max_steps: AtLeastOne | None = None
    """Optimizer steps; overrides num_train_epochs."""
    gradient_accumulation_steps: AtLeastOne = 1
    """Batches of each process in one optimizer step: the effective batch is this times
    per_device_train_batch_size times the number of processes."""
    learning_rate: Annotated[
        Positive | dict[Literal["tower", "projector", "language_model"], Positive],
        Expected("a number above 0, or one for each part"),
    ]
    """The highest learning rate of the schedule. Parts of the model may have their own, such as
    {tower: 1e-6, language_model: 1e-5}."""
    warmup_steps: NotNegative = 0.05
    """Steps until the learning rate is at its highest; below 1, a share of all steps."""
    lr_scheduler_type: ScheduleName = "cosine"
    """The schedule after the warm-up; older releases of transformers do not have greedy."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay; biases and norms have none."""
    max_grad_norm: NotNegative = 1.0
    """Clip gradients to this norm; 0: do not clip."""
    seed: Seed = 0
    """Seed of the order of rows, and of newly initialized adapters."""
    logging_steps: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Number of steps between log entries; null: about 50 entries a run. The loss is also logged
    with each evaluation and checkpoint, and at the end."""
    save_strategy: Annotated[Literal["no", "steps", "epoch", "best"] | None, MAY_CHANGE] = None
    """When to save a checkpoint to resume from; null: "steps" if save_steps is set, else "no".
    The last step has none, since the model itself is saved there."""
    save_steps: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Number of steps between checkpoints."""
    save_total_limit: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Number of the newest checkpoints to keep; with load_best_model_at_end, the best one is kept,
    too. null: keep all."""
    eval_strategy: StrategyName | None = None
    """When to evaluate on data.eval; null: "epoch" if there is such data, else "no"."""
    eval_steps: AtLeastOne | None = None
    """Number of steps between evaluations."""
    per_device_eval_batch_size: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Rows in an evaluation batch of one process; null: as per_device_train_batch_size."""
    load_best_model_at_end: bool = False
    """At the end, save the weights of the step with the best metric_for_best_model."""
    metric_for_best_model: MetricName = "eval_loss"
    """Metric that decides which checkpoint is best; exact_match is computed from the rows that the
    model answers (data.eval_answers)."""
    early_stopping_patience: AtLeastOne | None = None
    """Stop after this many evaluations in a row without a better metric_for_best_model
    (transformers' EarlyStoppingCallback); null: never."""
    early_stopping_threshold: NotNegative = 0.0
    """For early stopping, the metric is better only if it has improved by more than this."""
    report_to: Annotated[
        LoggerName | list[LoggerName],
        Expected(f"loggers: {', '.join(get_args(LoggerName))}"),
        MAY_CHANGE,
    ] = "none"
    """Loggers, such as tensorboard or wandb."""

    @property
    def other_training_arguments(self) -> dict[str, Any]:
        """Return the recipe's fields that only ``TrainingArguments`` declares."""
        return dict(self.model_extra or {})

    @property
    def effective_save_strategy(self) -> str:
        """Return ``save_strategy``, or its default given ``save_steps``."""
        return self.save_strategy or ("no" if self.save_steps is None else "steps")

    @property
    def effective_eval_strategy(self) -> str:
        """Return ``eval_strategy``, or its default for a run with ``data.eval``."""
        return self.eval_strategy or ("epoch" if self.eval_steps is None else "steps")

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    @property
    def highest_rate(self) -> float:
        """Return the learning rate, or the highest rate if parts of the model have their own."""
        rates = self.learning_rate
        return max(rates.values()) if isinstance(rates, dict) else rates

    @property
    def run_length(self) -> dict[str, float]:
        """Return the run's length: ``{"max_steps": N}``, or ``{"num_train_epochs": N}``."""
        if self.max_steps is not None:
            return {"max_steps": self.max_steps}
        return {"num_train_epochs": self.num_train_epochs}

    @property
    def ignored_epochs(self) -> float | None:
        """Return ``num_train_epochs`` if it is set and ``max_steps`` overrides it, else None."""
        is_default = self.num_train_epochs == type(self).model_fields["num_train_epochs"].default
        return None if self.max_steps is None or is_default else self.num_train_epochs

    def steps_in_epoch(self, rows: int, processes: int) -> int:
        """Return the optimizer steps of one pass over the rows, counted as the Trainer does.

        The result is 0 if ``dataloader_drop_last`` drops all batches.
        """
        batch_size = self.per_device_train_batch_size
        if self.other_training_arguments.get("dataloader_drop_last"):
            batches = rows // batch_size // processes
        else:
            batches = math.ceil(math.ceil(rows / batch_size) / processes)
        return math.ceil(batches / self.gradient_accumulation_steps)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the run."""
        return self.max_steps or max(math.ceil(self.num_train_epochs * steps_per_epoch), 1)

    def warmup(self, steps: int) -> int:
        """Return the warm-up steps of a run of ``steps`` steps."""
        if self.warmup_steps == 0 or self.warmup_steps >= 1:
            return int(self.warmup_steps)
        # Rounding may leave the product just below an integer. A run of one step has no warm-up,
        # because the learning rate of the first warm-up step is 0.
        return min(max(int(steps * self.warmup_steps + 1e-9), 1), steps - 1)

    def log_every(self, steps: int, steps_per_epoch: int) -> int:
        """Return the steps between log entries; the default gives about 50 entries a run."""
        if self.other_training_arguments.get("logging_strategy") == "epoch":
            return steps_per_epoch
        return self.logging_steps or max(steps // 50, 1)

    def save_every(self, steps_per_epoch: int) -> int:
        """Return the steps between checkpoints; 0 for the strategies "no" and "best"."""
        return steps_per_epoch if self.effective_save_strategy == "epoch" else self.save_steps or 0

    def eval_every(self, steps_per_epoch: int) -> int:
        """Return the steps between evaluations, if there is data for them; 0 for never."""
        if self.effective_eval_strategy == "no":
            return 0
        return steps_per_epoch if self.effective_eval_strategy == "epoch" else self.eval_steps or 0

    def eval_delay(self, steps_per_epoch: int) -> float:
        """Return the steps before the first evaluation.

        ``eval_delay`` of the recipe counts epochs if the evaluation strategy is "epoch".
        """
        delay = self.other_training_arguments.get("eval_delay") or 0
        return delay * steps_per_epoch if self.effective_eval_strategy == "epoch" else delay


def is_longer(before: Any, now: dict[str, float]) -> bool:
    """Return whether the length ``now`` of a run is greater than the length ``before``.

    Args:
        before, now: Values of :attr:`TrainerFields.run_length`. If one is in epochs and the other
            in steps, the result is False. ``before`` is read from a file, and may be anything.
    """
    same_unit = isinstance(before, dict) and before.keys() == now.keys()
    return same_unit and all(now[name] > before[name] for name in now)


# Undeclared fields that may differ when a run is resumed, such as those of logging and loading.
UNDECLARED_MAY_CHANGE = {
    "logging_strategy",
    "logging_first_step",
    "logging_dir",
    "run_name",
    "project",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "disable_tqdm",
    "ddp_timeout",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    "skip_memory_metrics",
    "include_num_input_tokens_seen",
    "include_tokens_per_second",
    "torch_empty_cache_steps",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "dataloader_multiprocessing_context",
}

# Types of undeclared fields with limits. torch checks the limits, too, but only after the model is
# loaded.
STRICTER_TYPES: dict[str, Any] = {
    "adam_beta1": BelowOne,
    "adam_beta2": BelowOne,
    "adam_epsilon": Positive,
    "data_seed": Seed,
    "dataloader_multiprocessing_context": Literal["fork", "spawn", "forkserver"],
    "dataloader_num_workers": Annotated[int, Field(ge=0, le=1024)],
    "dataloader_prefetch_factor": AtLeastOne,
    "logging_dir": Folder | None,
    "ddp_timeout": AtLeastOne,
    "lr_scheduler_kwargs": dict[str, Any],
    "torch_empty_cache_steps": AtLeastOne,
}


@functools.cache
def installed_fields() -> dict[str, Any]:
    """Return the types of the undeclared fields of the installed ``TrainingArguments`` by name.

    Fields that recipes may not have are left out.

    Raises:
        RuntimeError: transformers cannot be imported.
    """
    try:
        from transformers import TrainingArguments
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            "trainer has fields of transformers' TrainingArguments, which cannot be imported: "
            f"{error}; glm4v-patched doctor, without a recipe, says what does not fit"
        ) from None
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    names = [
        name
        for name in names
        if trainer_field_refusal(name) is None and name not in TrainerFields.model_fields
    ]
    types = get_type_hints(TrainingArguments)
    return {name: STRICTER_TYPES.get(name) or _stricter(types[name]) for name in names}


def _stricter(annotation: Any) -> Any:
    """Return the type by which pydantic should check a field of ``TrainingArguments``.

    Enums become their values. Numbers may not be negative, because no field uses negative numbers.
    transformers checks the contents of lists and dicts.
    """
    if get_origin(annotation) in (Union, UnionType):
        members = get_args(annotation)
        # "SomeEnum | str" means the values of the enum, not any text.
        if any(isinstance(member, EnumType) for member in members):
            members = tuple(member for member in members if member is not str)
        return functools.reduce(operator.or_, map(_stricter, members))
    if isinstance(annotation, EnumType):
        return Literal[tuple(choice.value for choice in cast(Any, annotation))]
    replacements = {int: AtLeastZero, float: NotNegative, list: list[Any], dict: dict[str, Any]}
    return replacements.get(get_origin(annotation) or annotation, annotation)
