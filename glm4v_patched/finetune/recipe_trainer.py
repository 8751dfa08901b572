"""``trainer:`` of a recipe: the fields of transformers' ``TrainingArguments``, typed and checked.

Those that most recipes need are declared here, with our defaults. Those that a recipe has other
words for are refused by name. All others that the installed transformers has are taken with the
types that its dataclass gives them; its import, and torch's, takes seconds, and is only done for a
recipe with such a field.
"""

import dataclasses
import functools
import importlib.util
import math
import operator
from enum import EnumType
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import Field, create_model, model_serializer

from ..engine.options import PARTS, parts_with_rates
from ..terminal_text import pip_install
from .recipe_types import (
    MAY_CHANGE,
    AtLeastOne,
    AtLeastZero,
    Expected,
    NotNegative,
    Positive,
    Section,
    Seed,
    Text,
    refuse,
    rule,
)

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
MAY_CHANGE_TOO = {
    *("logging_strategy", "logging_first_step", "logging_dir", "run_name", "project"),
    *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "ddp_timeout"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics"),
    *("include_num_input_tokens_seen", "include_tokens_per_second", "torch_empty_cache_steps"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
    *("dataloader_persistent_workers", "dataloader_multiprocessing_context"),
}

# As torch demands them, but only once the model is loaded.
_Beta = Annotated[float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")]
_Workers = Annotated[int, Field(ge=0, le=1024), Expected("a whole number from 0 to 1024")]
OUR_TYPES: dict[str, Any] = {
    "adam_beta1": _Beta,
    "adam_beta2": _Beta,
    "adam_epsilon": Positive,
    "data_seed": Seed,
    "dataloader_multiprocessing_context": Literal["fork", "spawn", "forkserver"],
    "dataloader_num_workers": _Workers,
    "dataloader_prefetch_factor": AtLeastOne,
    "ddp_timeout": AtLeastOne,
    "torch_empty_cache_steps": AtLeastOne,
}

_PACKING = "data.pack_to, which wastes less than grouping by length"
_ROWS = "trainer.per_device_train_batch_size"
# What to write in the place of fields that are the recipe's own.
_INSTEAD = {
    "out": "output_dir",
    "--overwrite": "overwrite_output_dir",
    "--resume or --resume-from": "resume_from_checkpoint",
    "--device cpu": "use_cpu no_cuda use_mps_device",
    "data.train": "do_train",
    "data.eval and trainer.eval_strategy": "do_eval do_predict",
    "engine.zero_stage and engine.offload": "deepspeed",
    "engine.precision": "bf16 fp16 bf16_full_eval fp16_full_eval fp16_opt_level fp16_backend "
    "half_precision_backend",
    "engine.optimizer": "optim optim_args optim_target_modules adafactor",
    "engine.tower and engine.language": "gradient_checkpointing gradient_checkpointing_kwargs "
    "activation_checkpointing activation_checkpointing_kwargs",
    "engine.compile": "torch_compile torch_compile_backend torch_compile_mode torchdynamo",
    "trainer.warmup_steps, which is a share of all steps if it is below 1": "warmup_ratio",
    _ROWS: "per_gpu_train_batch_size",
    f"{_ROWS}; what is kept of activations already follows the free memory": "auto_find_batch_size",
    "trainer.per_device_eval_batch_size": "per_gpu_eval_batch_size",
    _PACKING: "group_by_length train_sampling_strategy length_column_name",
}
INSTEAD = {name: instead for instead, names in _INSTEAD.items() for name in names.split()}
# Why fields are refused that nothing stands for; also those that begin with such a name.
_REASONS = {
    "the weights are sharded by DeepSpeed: engine.zero_stage": "fsdp",
    "processes and their group are the launcher's: --processes": "ddp local_rank "
    "parallelism_config accelerator_config mp_parameters",
    "there is no TPU here": "tpu",
    "there is no hyperparameter search here": "ray",
    "a model is published by python -m hub_upload, after training": "push_to_hub hub",
    "the data's columns are the recipe's: data": "remove_unused_columns label_names",
    "it needs the logits of all positions, which are never built here": "label_smoothing_factor",
    "its kernels are not for this model's layers: engine.compile fuses them": "use_liger_kernel "
    "liger_kernel",
    "no answers are generated in a training step": "use_cache",
    "it is for models that hand states on from step to step": "past_index",
    "it is of other models": "jit_mode_eval",
    "what is not finite is always shown: max_nonfinite_steps": "logging_nan_inf_filter",
    "weights are always saved as safetensors": "save_safetensors",
    "a checkpoint that holds only the model cannot be continued from; to have none, leave out "
    "trainer.save_steps": "save_only_model",
    "all processes see one file system": "save_on_each_node",
    "SIGTERM ends the training, and --resume continues it": "enable_jit_checkpoint",
    "a continued run goes on with the rows that it has not seen": "ignore_data_skip",
    "a continued run always restores them": "restore_callback_states_from_checkpoint",
    "the loss is computed without logits, so there are no predictions to collect": ""
    "prediction_loss_only include_inputs_for_metrics include_for_metrics batch_eval_metrics "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "use_legacy_prediction_loop",
}


def refusal(name: str) -> str | None:
    """Why a field of ``TrainingArguments`` may not be in a recipe; None for others.

    ``name`` need not be one of the installed release.
    """
    if name == "ddp_timeout":  # handed on, unlike all others of its group
        return None
    if name in INSTEAD:
        return f"trainer.{name} is set by the recipe; expected {INSTEAD[name]}"
    reason = reason_against(name)
    return reason and f"trainer.{name} cannot be set: {reason}"


def reason_against(name: str) -> str | None:
    """Why a field is refused that nothing stands for; None of others."""
    for reason, names in _REASONS.items():
        if any(name == start or name.startswith(start + "_") for start in names.split()):
            return reason
    return None


def installed_fields() -> dict[str, Any]:
    """The types of the installed transformers' fields by name, as pydantic is to check them,
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
    kinds = get_type_hints(TrainingArguments)
    return {name: _checked(kinds[name]) for name in names if refusal(name) is None}


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


@functools.cache
def whole_section() -> type[TrainerFields]:
    """With the fields that only transformers knows."""
    others: dict[str, Any] = {
        name: (OUR_TYPES.get(name, kind) | None, None)
        for name, kind in installed_fields().items()
        if name not in TrainerFields.model_fields
    }
    doc = TrainerFields.__doc__
    return create_model("TrainerFields", __base__=TrainerFields, __doc__=doc, **others)


# What the fields say


def steps_in_epoch(trainer: TrainerFields, rows: int, processes: int) -> int:
    """Updates of the weights in which all rows are learned once, as the Trainer counts them."""
    batches, per_process = trainer.per_device_train_batch_size, processes
    if trainer.model_dump().get("dataloader_drop_last"):
        of_process = rows // batches // per_process
    else:
        of_process = math.ceil(math.ceil(rows / batches) / per_process)
    return max(math.ceil(of_process / trainer.gradient_accumulation_steps), 1)


def total_steps(trainer: TrainerFields, steps_an_epoch: int) -> int:
    """Updates of the weights in a run."""
    if trainer.max_steps is not None:
        return trainer.max_steps
    return max(math.ceil(trainer.num_train_epochs * steps_an_epoch), 1)


def length_of(trainer: TrainerFields) -> dict[str, float]:
    """How long a run is: its steps, or where they are left open its epochs."""
    if trainer.max_steps is not None:
        return {"max_steps": trainer.max_steps}
    return {"num_train_epochs": trainer.num_train_epochs}


def is_longer(there: Any, now: dict[str, float]) -> bool:
    """Whether a run that lasts ``now`` is longer than one whose :func:`length_of` was ``there``;
    epochs and steps are not compared with each other."""
    if not isinstance(there, dict) or there.keys() != now.keys():
        return False
    return all(now[name] > there[name] for name in now)


def warmup(trainer: TrainerFields, steps: int) -> int:
    """Of so many steps, those of warm-up."""
    asked = trainer.warmup_steps
    # A share may be a hair below a whole number. A single step with warm-up would learn nothing.
    share = min(max(int(steps * asked + 1e-9), 1), steps - 1)
    return int(asked) if asked >= 1 or asked == 0 else share


def logging_steps(trainer: TrainerFields, steps: int, steps_an_epoch: int = 0) -> int:
    """If the recipe leaves it open: for about 50 entries in so many steps, none across a
    checkpoint, where a resumption would cut it."""
    if trainer.logging_steps is not None:
        return trainer.logging_steps
    wanted = max(steps // 50, 1)
    saved_every = trainer.save_steps
    if saved_every is None and trainer.save_strategy in ("epoch", "best"):
        saved_every = steps_an_epoch
    return max(n for n in range(1, wanted + 1) if not saved_every or saved_every % n == 0)


def save_strategy(trainer: TrainerFields) -> str:
    """What is in force."""
    return trainer.save_strategy or ("no" if trainer.save_steps is None else "steps")


def eval_strategy(trainer: TrainerFields, evaluates: bool = True) -> str:
    """What is in force, with or without data to evaluate on."""
    if not evaluates:
        return "no"
    return trainer.eval_strategy or ("epoch" if trainer.eval_steps is None else "steps")


def eval_batch_size(trainer: TrainerFields) -> int:
    return trainer.per_device_eval_batch_size or trainer.per_device_train_batch_size


def rate_of(trainer: TrainerFields, part: str) -> float:
    """The learning rate of a part of the model."""
    rates = trainer.learning_rate
    return rates[part] if isinstance(rates, dict) else rates  # type: ignore[index]


def highest_rate(trainer: TrainerFields) -> float:
    rates = trainer.learning_rate
    return max(rates.values()) if isinstance(rates, dict) else rates


# What cannot go together

LOGGERS = [
    *("tensorboard", "wandb", "mlflow", "comet_ml", "trackio", "swanlab", "clearml"),
    *("neptune", "dvclive", "azure_ml", "codecarbon", "flyte", "dagshub"),
]
# What they import, where it is called otherwise: any of these.
IMPORTED = {"tensorboard": ["tensorboard", "tensorboardX"]}
IMPORTED |= {"azure_ml": ["azureml"], "flyte": ["flytekit"]}


@rule("trainer.report_to")
def _loggers_are_installed(report_to) -> str | None:
    for name in [report_to] if isinstance(report_to, str) else report_to:
        if name not in ("none", "all", *LOGGERS):
            return (
                f"trainer.report_to is {name!r}, which is no logger of transformers; expected none "
                f"or {', '.join(LOGGERS)}"
            )
        modules = [] if name in ("none", "all") else IMPORTED.get(name, [name])
        if modules and all(importlib.util.find_spec(module) is None for module in modules):
            return f"trainer.report_to {name} needs {name}: {pip_install(modules[0])}"
    return None


refuse(
    "trainer.dataloader_prefetch_factor, trainer.dataloader_num_workers",
    lambda factor, workers: factor is not None and workers == 0,
    "trainer.dataloader_prefetch_factor is {0} and trainer.dataloader_num_workers is 0: no worker "
    "draws ahead; expected at least 1 worker, or no factor",
)
for _kind in ("save", "eval"):
    refuse(
        f"trainer.{_kind}_strategy, trainer.{_kind}_steps",
        lambda strategy, steps: strategy == "steps" and steps is None,
        f"trainer.{_kind}_strategy is steps; expected trainer.{_kind}_steps, too",
    )
    refuse(
        f"trainer.{_kind}_strategy, trainer.{_kind}_steps",
        lambda strategy, steps: strategy not in (None, "steps") and steps is not None,
        f"trainer.{_kind}_strategy is {{0}} and trainer.{_kind}_steps is {{1}}; expected one of "
        "them alone",
    )
refuse(
    "trainer.metric_for_best_model, data.eval_answers",
    lambda metric, answers: metric.endswith("exact_match") and not answers,
    "trainer.metric_for_best_model is {0} and data.eval_answers is 0; expected some rows to be "
    "answered, or eval_loss",
)


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
