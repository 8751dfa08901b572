"""``trainer:`` of a recipe: the fields of transformers' ``TrainingArguments``, typed and checked.

Those that most recipes need are declared here, with our defaults. All others that the installed
transformers has are taken with the types that it gives them (:mod:`training_arguments`).
"""

import functools
import importlib.util
import math
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, model_serializer

from ..engine.options import PARTS, parts_with_rates
from ..terminal_text import pip_install
from .recipe_types import (
    MAY_CHANGE,
    AtLeastOne,
    Expected,
    NotNegative,
    Positive,
    Section,
    Seed,
    Text,
    rule,
)
from .training_arguments import installed_fields

Strategy = Literal["no", "steps", "epoch"]
Metric = Literal["eval_loss", "loss", "eval_exact_match", "exact_match"]
Schedule = Literal[
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
Epochs = Annotated[float, Field(gt=0, le=1e6), Expected("a number above 0, of 1000000 at most")]


class TrainerFields(Section):
    """Fields of transformers' ``TrainingArguments``."""

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
        Positive | dict[Literal["tower", "adapter", "language_model"], Positive],
        Expected("a number above 0, or one for each part"),
    ]
    """The highest of the schedule. Parts of the model may have their own, as {tower: 1e-6,
    language_model: 1e-5}."""
    warmup_steps: NotNegative = 0.05
    """Steps until the learning rate is at its highest; below 1, a share of all steps."""
    lr_scheduler_type: Schedule = "cosine"
    """What it does then; older releases of transformers do not have greedy."""
    weight_decay: NotNegative = 0.0
    """Of AdamW; not of biases and norms."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this norm; 0 for not at all."""
    seed: Seed = 0
    """Of the order of rows, and of adapters."""
    logging_steps: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Log the loss every so many steps; null: about 50 times a run."""
    save_strategy: Annotated[Literal["no", "steps", "epoch", "best"] | None, MAY_CHANGE] = None
    """When to save a checkpoint to continue from; null: "steps" if save_steps is given, else "no".
    None is saved at the last step, where the model itself is."""
    save_steps: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Save a checkpoint every so many steps."""
    save_total_limit: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Keep so many of the newest checkpoints, and the best one if that is to be loaded; null:
    all."""
    eval_strategy: Strategy | None = None
    """When to compute the loss of data.eval; null: "epoch" if there is such data, else "no"."""
    eval_steps: AtLeastOne | None = None
    """Evaluate every so many steps."""
    per_device_eval_batch_size: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """null: as per_device_train_batch_size."""
    load_best_model_at_end: bool = False
    """Save, at the end, the weights of the checkpoint with the best metric_for_best_model."""
    metric_for_best_model: Metric = "eval_loss"
    """Of the evaluation; exact_match is of the rows that are answered (data.eval_answers)."""
    early_stopping_patience: AtLeastOne | None = None
    """End after so many evaluations without a better metric_for_best_model (of transformers'
    EarlyStoppingCallback, as is the next); null: never."""
    early_stopping_threshold: NotNegative = 0.0
    """By how much the metric has to be better to count as such."""
    report_to: Annotated[Text | list[Text], MAY_CHANGE] = "none"
    """Loggers, as tensorboard or wandb."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler) -> dict[str, Any]:
        # Null is what TrainingArguments has by default, whatever that is in another release.
        values = handler(self)
        kept = TrainerFields.model_fields
        return {k: v for k, v in values.items() if k in kept or v is not None}

    def handed_on(self) -> dict[str, Any]:
        """The given fields that are declared nowhere here, for ``TrainingArguments``."""
        return {k: v for k, v in self.model_dump().items() if k not in TrainerFields.model_fields}


# What the continuation of a run may change, of the fields that are handed on: how it is logged, and
# how rows are loaded.
MAY_CHANGE_TOO = {"logging_strategy", "logging_first_step", "logging_dir"}
MAY_CHANGE_TOO |= {"run_name", "project", "log_level", "log_level_replica"}
MAY_CHANGE_TOO |= {"log_on_each_node", "disable_tqdm", "skip_memory_metrics", "ddp_timeout"}
MAY_CHANGE_TOO |= {"trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"}
MAY_CHANGE_TOO |= {"include_num_input_tokens_seen", "include_tokens_per_second"}
MAY_CHANGE_TOO |= {"dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"}
MAY_CHANGE_TOO |= {"dataloader_persistent_workers", "dataloader_multiprocessing_context"}
MAY_CHANGE_TOO |= {"torch_empty_cache_steps"}

# As torch demands them, but only once the model is loaded.
_Beta = Annotated[float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")]
OUR_TYPES: dict[str, Any] = {"adam_beta1": _Beta, "adam_beta2": _Beta, "adam_epsilon": Positive}
OUR_TYPES["dataloader_multiprocessing_context"] = Literal["fork", "spawn", "forkserver"]
OUR_TYPES["dataloader_num_workers"] = Annotated[
    int, Field(ge=0, le=1024), Expected("a whole number from 0 to 1024")
]
OUR_TYPES |= {"data_seed": Seed, "torch_empty_cache_steps": AtLeastOne, "ddp_timeout": AtLeastOne}
OUR_TYPES["dataloader_prefetch_factor"] = AtLeastOne


@functools.cache
def whole_section() -> type[TrainerFields]:
    """With the fields that only transformers knows, whose import takes seconds."""
    others: dict[str, Any] = {
        name: (OUR_TYPES.get(name, kind) | None, None)
        for name, kind in installed_fields().items()
        if name not in TrainerFields.model_fields
    }
    doc = TrainerFields.__doc__
    return create_model("TrainerFields", __base__=TrainerFields, __doc__=doc, **others)


def steps_in_epoch(trainer: TrainerFields, rows: int, processes: int) -> int:
    """Updates of the weights in which all rows are learned once, as the Trainer counts them."""
    batches, per_process = trainer.per_device_train_batch_size, processes
    if trainer.model_dump().get("dataloader_drop_last"):
        of_process = rows // batches // per_process
    else:
        of_process = math.ceil(math.ceil(rows / batches) / per_process)
    return max(math.ceil(of_process / trainer.gradient_accumulation_steps), 1)


def total_steps(trainer: TrainerFields, rows: int, processes: int) -> int:
    """Updates of the weights in a run."""
    if trainer.max_steps is not None:
        return trainer.max_steps
    return max(math.ceil(trainer.num_train_epochs * steps_in_epoch(trainer, rows, processes)), 1)


def warmup(trainer: TrainerFields, steps: int) -> int:
    """Of so many steps, those of warm-up."""
    asked = trainer.warmup_steps
    # A share may be a hair below a whole number. A single step with warm-up would learn nothing.
    share = min(max(int(steps * asked + 1e-9), 1), steps - 1)
    return int(asked) if asked >= 1 or asked == 0 else share


def save_strategy(values: dict[str, Any]) -> str:
    """What is in force, of the section's values by name."""
    return values["save_strategy"] or ("no" if values["save_steps"] is None else "steps")


def eval_strategy(trainer: TrainerFields, evaluates: bool) -> str:
    """What is in force, with or without data to evaluate on."""
    if not evaluates:
        return "no"
    return trainer.eval_strategy or ("epoch" if trainer.eval_steps is None else "steps")


def eval_batch_size(trainer: TrainerFields) -> int:
    return trainer.per_device_eval_batch_size or trainer.per_device_train_batch_size


# What a logger imports: any of these.
LOGGERS = {
    "tensorboard": ["tensorboard", "tensorboardX"],
    "wandb": ["wandb"],
    "mlflow": ["mlflow"],
    "comet_ml": ["comet_ml"],
    "trackio": ["trackio"],
    "swanlab": ["swanlab"],
    "clearml": ["clearml"],
    "neptune": ["neptune"],
    "dvclive": ["dvclive"],
    "azure_ml": ["azureml"],
    "codecarbon": ["codecarbon"],
    "flyte": ["flytekit"],
    "dagshub": ["dagshub"],
}


@rule("trainer.report_to")
def _loggers_are_installed(report_to) -> str | None:
    asked = [report_to] if isinstance(report_to, str) else report_to
    for name in asked:
        if name in ("none", "all"):
            continue
        if name not in LOGGERS:
            return (
                f"trainer.report_to is {name!r}, which is no logger of transformers; expected none "
                f"or {', '.join(LOGGERS)}"
            )
        if all(importlib.util.find_spec(module) is None for module in LOGGERS[name]):
            return f"trainer.report_to {name} needs {name}: {pip_install(LOGGERS[name][0])}"
    return None


@rule("trainer.dataloader_prefetch_factor", "trainer.dataloader_num_workers")
def _workers_draw_ahead(factor, workers) -> str | None:
    if factor is not None and workers == 0:
        return (
            f"trainer.dataloader_prefetch_factor is {factor} and trainer.dataloader_num_workers is "
            "0: no worker draws ahead; expected at least 1 worker, or no factor"
        )
    return None


@rule("trainer.save_strategy", "trainer.save_steps")
def _steps_to_save_at(strategy, steps) -> str | None:
    if strategy == "steps" and steps is None:
        return "trainer.save_strategy is steps; expected trainer.save_steps, too"
    if steps is not None and strategy not in (None, "steps"):
        return (
            f"trainer.save_strategy is {strategy} and trainer.save_steps is {steps}; expected one "
            "of them alone"
        )
    return None


@rule("trainer.eval_strategy", "trainer.eval_steps")
def _steps_to_evaluate_at(strategy, steps) -> str | None:
    if strategy == "steps" and steps is None:
        return "trainer.eval_strategy is steps; expected trainer.eval_steps, too"
    if steps is not None and strategy not in (None, "steps"):
        return (
            f"trainer.eval_strategy is {strategy} and trainer.eval_steps is {steps}; expected one "
            "of them alone"
        )
    return None


@rule(
    "trainer.load_best_model_at_end",
    "trainer.save_strategy",
    "trainer.save_steps",
    "trainer.eval_strategy",
    "trainer.eval_steps",
)
def _best_model_was_saved(best, saved, save_steps, evaluated, eval_steps) -> str | None:
    """As TrainingArguments demands it, but that is known only once torch is loaded."""
    if not best or saved == "best":
        return None
    when = saved or ("no" if save_steps is None else "steps")
    measured = evaluated or ("epoch" if eval_steps is None else "steps")
    told = f"trainer.load_best_model_at_end: checkpoints are saved at {when!r}"
    if when != measured:
        return (
            f"{told} and evaluated at {measured!r}; expected trainer.save_strategy to be "
            f"{'best or ' if measured != 'no' else ''}the same as trainer.eval_strategy"
        )
    if when == "steps" and save_steps != eval_steps:
        return (
            f"{told}, every {save_steps} steps, and evaluated every {eval_steps}, and the best may "
            "not be saved; expected the same number, or trainer.save_strategy to be best"
        )
    return None


@rule("trainer.metric_for_best_model", "data.eval_answers")
def _answers_are_compared(metric, answers) -> str | None:
    if metric.endswith("exact_match") and not answers:
        return (
            f"trainer.metric_for_best_model is {metric} and data.eval_answers is 0; expected some "
            "rows to be answered, or eval_loss"
        )
    return None


@rule(
    "data.eval",
    "trainer.eval_strategy",
    "trainer.eval_steps",
    "trainer.load_best_model_at_end",
    "trainer.early_stopping_patience",
    "trainer.save_strategy",
)
def _evaluation_has_data(data, strategy, steps, best, patience, saved) -> str | None:
    asked = {
        f"trainer.eval_strategy {strategy}": strategy not in (None, "no"),
        "trainer.eval_steps": steps is not None,
        "trainer.load_best_model_at_end": best,
        "trainer.early_stopping_patience": patience is not None,
        "trainer.save_strategy best": saved == "best",
    }
    names = [name for name, given in asked.items() if given]
    if data is None and names:
        return f"{names[0]} needs rows to evaluate on; expected data.eval, a file or a share"
    if strategy == "no" and names:
        return f"{names[0]} with trainer.eval_strategy no; expected steps or epoch"
    return None


@rule("trainer.learning_rate", "trained")
def _each_part_has_a_rate(rates, trained) -> str | None:
    expected = parts_with_rates(trained)
    if isinstance(rates, dict) and rates.keys() != expected:
        return (
            f"trainer.learning_rate is for {', '.join(rates) or 'nothing'}, and trained is "
            f"{trained}; expected one number, or one for each of "
            f"{', '.join(part for part in PARTS if part in expected)}"
        )
    return None


def rate_of(trainer: TrainerFields, part: str) -> float:
    """The learning rate of a part of the model."""
    rates = trainer.learning_rate
    return rates[part] if isinstance(rates, dict) else rates  # type: ignore[index]


def highest_rate(trainer: TrainerFields) -> float:
    rates = trainer.learning_rate
    return max(rates.values()) if isinstance(rates, dict) else rates
