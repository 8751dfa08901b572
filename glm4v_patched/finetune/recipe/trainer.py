"""``trainer:`` of a recipe: the fields of transformers' ``TrainingArguments``, typed and checked.

Those that most recipes need are declared here, with our defaults. Those that a recipe has other
words for are refused by name. All others that the installed transformers has are taken with the
types that its dataclass gives them; its import, and torch's, takes seconds, and is only done for a
recipe with such a field.
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
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the evaluations, not the steps."""
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
    """Fields of transformers' ``TrainingArguments``."""

    model_config = ConfigDict(extra="allow")  # those of the installed release: recipe._others

    per_device_train_batch_size: AtLeastOne
    """Rows in a step of one process."""
    num_train_epochs: Epochs = 1.0
    """How often each row is learned, if max_steps is null."""
    max_steps: AtLeastOne | None = None
    """Updates of the weights, whatever num_train_epochs says."""
    gradient_accumulation_steps: AtLeastOne = 1
    """Batches of each process in one update: the effective batch is this times
    per_device_train_batch_size times the processes."""
    learning_rate: Annotated[
        Positive | dict[Literal["tower", "projector", "language_model"], Positive],
        Expected("a number above 0, or one for each part"),
    ]
    """The highest of the schedule. Parts of the model may have their own, as {tower: 1e-6,
    language_model: 1e-5}."""
    warmup_steps: NotNegative = 0.05
    """Steps until the learning rate is at its highest; below 1, a share of all steps."""
    lr_scheduler_type: ScheduleName = "cosine"
    """What it does then; older releases of transformers do not have greedy."""
    weight_decay: NotNegative = 0.0
    """Of AdamW; not of biases and norms."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this norm; 0 for not at all."""
    seed: Seed = 0
    """Of the order of rows, and of adapters."""
    logging_steps: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Log the loss every so many steps, and with each evaluation, checkpoint and at the end; null:
    about 50 times a run."""
    save_strategy: Annotated[Literal["no", "steps", "epoch", "best"] | None, MAY_CHANGE] = None
    """When to save a checkpoint to continue from; null: "steps" if save_steps is given, else "no".
    None is saved at the last step, where the model itself is."""
    save_steps: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Save a checkpoint every so many steps."""
    save_total_limit: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Keep so many of the newest checkpoints, and the best one if that is to be loaded; null:
    all."""
    eval_strategy: StrategyName | None = None
    """When to compute the loss of data.eval; null: "epoch" if there is such data, else "no"."""
    eval_steps: AtLeastOne | None = None
    """Evaluate every so many steps."""
    per_device_eval_batch_size: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """null: as per_device_train_batch_size."""
    load_best_model_at_end: bool = False
    """Save, at the end, the weights of the checkpoint with the best metric_for_best_model."""
    metric_for_best_model: MetricName = "eval_loss"
    """Of the evaluation; exact_match is of the rows that are answered (data.eval_answers)."""
    early_stopping_patience: AtLeastOne | None = None
    """End after so many evaluations without a better metric_for_best_model (of transformers'
    EarlyStoppingCallback, as is the next); null: never."""
    early_stopping_threshold: NotNegative = 0.0
    """By how much the metric has to be better to count as such."""
    report_to: Annotated[
        LoggerName | list[LoggerName], Expected(f"loggers: {', '.join(get_args(LoggerName))}"), MAY_CHANGE
    ] = "none"
    """Loggers, as tensorboard or wandb."""

    @property
    def undeclared_fields(self) -> dict[str, Any]:
        """The given fields that are declared nowhere here, for ``TrainingArguments``."""
        return dict(self.model_extra or {})

    @property
    def effective_save_strategy(self) -> str:
        """The strategy that is in force."""
        return self.save_strategy or ("no" if self.save_steps is None else "steps")

    @property
    def effective_eval_strategy(self) -> str:
        """The strategy that is in force, where there is data to evaluate on."""
        return self.eval_strategy or ("epoch" if self.eval_steps is None else "steps")

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    @property
    def highest_rate(self) -> float:
        rates = self.learning_rate
        return max(rates.values()) if isinstance(rates, dict) else rates

    @property
    def length(self) -> dict[str, float]:
        """How long a run is: its steps, or where they are left open its epochs."""
        if self.max_steps is not None:
            return {"max_steps": self.max_steps}
        return {"num_train_epochs": self.num_train_epochs}

    def steps_in_epoch(self, rows: int, processes: int) -> int:
        """Updates of the weights in which all rows are learned once, as the Trainer counts them;
        0 where no batch is whole, and those that are not are dropped."""
        batches, per_process = self.per_device_train_batch_size, processes
        if self.undeclared_fields.get("dataloader_drop_last"):
            of_process = rows // batches // per_process
        else:
            of_process = math.ceil(math.ceil(rows / batches) / per_process)
        return math.ceil(of_process / self.gradient_accumulation_steps)

    def total_steps(self, steps_an_epoch: int) -> int:
        """Updates of the weights in a run."""
        return self.max_steps or max(math.ceil(self.num_train_epochs * steps_an_epoch), 1)

    def warmup(self, steps: int) -> int:
        """Of so many steps, those of warm-up."""
        asked = self.warmup_steps
        # A share may be a hair below a whole number. One step with warm-up would learn nothing.
        share = min(max(int(steps * asked + 1e-9), 1), steps - 1)
        return int(asked) if asked >= 1 or asked == 0 else share

    def log_every(self, steps: int, steps_an_epoch: int) -> int:
        """Where the recipe leaves it open: for about 50 entries in so many steps."""
        if self.undeclared_fields.get("logging_strategy") == "epoch":
            return steps_an_epoch
        return self.logging_steps or max(steps // 50, 1)

    def save_every(self, steps_an_epoch: int) -> int:
        """Steps; 0 for never, and for "best"."""
        return steps_an_epoch if self.effective_save_strategy == "epoch" else self.save_steps or 0

    def eval_every(self, steps_an_epoch: int) -> int:
        """Steps, where there is data to evaluate on; 0 for never."""
        if self.effective_eval_strategy == "no":
            return 0
        return steps_an_epoch if self.effective_eval_strategy == "epoch" else self.eval_steps or 0

    def eval_delay(self, steps_an_epoch: int) -> float:
        """Steps before the first evaluation; the recipe has epochs where those are evaluated."""
        delay = self.undeclared_fields.get("eval_delay") or 0
        return delay * steps_an_epoch if self.effective_eval_strategy == "epoch" else delay


def is_longer(there: Any, now: dict[str, float]) -> bool:
    """Whether a run that lasts ``now`` is longer than one whose length was ``there``
    (:attr:`TrainerFields.length`); epochs and steps are not compared with each other."""
    same_kind = isinstance(there, dict) and there.keys() == now.keys()
    return same_kind and all(now[name] > there[name] for name in now)


# What the continuation of a run may change, of the fields that are handed on: how it is logged, and
# how rows are loaded.
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

# As torch demands them, but only once the model is loaded.
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
    """The types of the installed transformers' other fields by name, as pydantic is to check them,
    without those that are refused.

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
    names = [n for n in names if trainer_field_refusal(n) is None and n not in TrainerFields.model_fields]
    kinds = get_type_hints(TrainingArguments)
    return {name: STRICTER_TYPES.get(name) or _checked(kinds[name]) for name in names}


def _checked(kind: Any) -> Any:
    """Of enumerations beside text, the values alone; numbers with the range that all fields have,
    for none is below 0. Of what is in a list or a section, transformers makes its own types."""
    if get_origin(kind) in (Union, UnionType):
        kinds = get_args(kind)
        if any(isinstance(part, EnumType) for part in kinds):
            kinds = tuple(part for part in kinds if part is not str)
        return functools.reduce(operator.or_, map(_checked, kinds))
    if isinstance(kind, EnumType):
        return Literal[tuple(choice.value for choice in cast(Any, kind))]
    plain = {int: AtLeastZero, float: NotNegative, list: list[Any], dict: dict[str, Any]}
    return plain.get(get_origin(kind) or kind, kind)
