"""Conflicts between the fields of a recipe. Imports no torch.

Each rule gets the valid values by dotted names, and does not depend on other rules.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ...data.columns import find_columns_problem
from ...data.source import make_sources
from ...engine.options import (
    LANGUAGE_TARGETS,
    MODEL_PARTS,
    is_lora,
    parts_with_learning_rates,
    trains_tower_or_projector,
)
from ...terminal_text import pip_install
from .file import RecipeProblem, collect_problems
from .trainer import SCHEDULES_BY_METRIC

# Python modules of the loggers that are not named like their module.
LOGGER_MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}


def conflicts(values: Mapping[str, Any]) -> list[RecipeProblem]:
    """Return the problems of valid values that contradict each other.

    Args:
        values: Values by dotted names. Fields with invalid values are missing.
    """
    rules = (
        _engine_conflicts,
        _model_conflicts,
        _data_conflicts,
        _stream_conflicts,
        _strategy_conflicts,
        _evaluation_conflicts,
    )
    return [problem for rule in rules for problem in rule(values)]


def _is_null(values: Mapping[str, Any], *names: str) -> bool:
    """Return whether all these fields are null; a field with an invalid value is not."""
    return all(name in values and values[name] is None for name in names)


def _engine_conflicts(values: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    get, trained = values.get, values.get("trained", "full")
    stage, fp8, is_qlora = get("engine.zero_stage"), get("engine.fp8"), trained == "qlora"
    offload, has_dora = get("engine.offload") is True, is_lora(trained) and get("lora.use_dora")
    if offload and stage == 0:
        yield RecipeProblem(
            "engine.offload",
            "engine.offload with engine.zero_stage 0: ZeRO offloads the optimizer; expected "
            "engine.zero_stage 1, 2 or 3, or engine.offload to be false",
        )
    if offload and get("engine.optimizer") == "adamw_8bit":
        yield RecipeProblem(
            "engine.offload",
            "engine.offload with adamw_8bit, which runs on a GPU: expected engine.optimizer to be "
            "adamw, or engine.offload to be false",
        )
    if get("engine.zero_hpz_partition_size", 1) != 1 and stage in (0, 1, 2):
        yield RecipeProblem(
            "engine.zero_hpz_partition_size",
            f"engine.zero_hpz_partition_size with engine.zero_stage {stage}: only stage 3 shards "
            "weights; expected engine.zero_stage 3, or engine.zero_hpz_partition_size 1",
        )
    if is_qlora and stage in (1, 2, 3):
        yield RecipeProblem(
            "trained",
            f"qlora with engine.zero_stage {stage}: weights in 4 bits cannot be sharded; expected "
            "engine.zero_stage 0, and one process",
        )
    if has_dora and stage == 3:
        yield RecipeProblem(
            "lora.use_dora",
            "lora.use_dora with engine.zero_stage 3: DoRA computes norms of full weights, and "
            "ZeRO-3 shards them; expected engine.zero_stage 0, 1 or 2, or lora.use_dora to be null",
        )
    fp8_conflicts = [
        (is_qlora, "trained qlora, with weights in 4 bits; expected another value of trained"),
        (
            get("engine.precision") == "fp32",
            "engine.precision fp32: matrix products in fp8 return bf16; expected bf16",
        ),
        (
            has_dora,
            "lora.use_dora: DoRA computes norms of the weights, which engine.fp8 stores in fp8; "
            "expected lora.use_dora to be null",
        ),
    ]
    for is_conflict, text in fp8_conflicts:
        if fp8 and is_conflict:
            message = f"engine.fp8 with {text}, or engine.fp8 to be false"
            yield RecipeProblem("engine.fp8", message)


def _model_conflicts(values: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    trained, targets = values.get("trained"), values.get("lora.targets")
    revision, model = values.get("revision"), values.get("model")
    # If model is a folder of adapters, the revision is that of their base model.
    if (
        revision is not None
        and model is not None
        and os.path.isdir(model)
        and not os.path.isfile(os.path.join(model, "adapter_config.json"))
    ):
        text = f'revision is "{revision}", and {model} is a folder, which has none; expected null'
        yield RecipeProblem("revision", text)
    if trained is None:
        return
    if values.get("data.reuse_features") and trains_tower_or_projector(trained):
        yield RecipeProblem(
            "data.reuse_features",
            f"data.reuse_features with trained {trained}, which trains the vision tower or its "
            "projector: its features change with every step; expected trained to be lm, lora_lm or "
            "qlora, or data.reuse_features to be false",
        )
    is_language_lora = is_lora(trained) and trained != "lora_all"
    if isinstance(targets, list | tuple) and not targets:
        yield RecipeProblem(
            "lora.targets", "lora.targets is []; expected at least one layer, or null"
        )
    if is_language_lora and isinstance(targets, list | tuple) and {*targets} - {*LANGUAGE_TARGETS}:
        yield RecipeProblem(
            "lora.targets",
            f"lora.targets is {[*targets]}, with layers of the vision tower, and trained is "
            f"{trained}; expected lora_all",
        )
    rates, expected = values.get("trainer.learning_rate"), parts_with_learning_rates(trained)
    if isinstance(rates, dict) and rates.keys() != expected:
        yield RecipeProblem(
            "trainer.learning_rate",
            f"trainer.learning_rate is for {', '.join(rates) or 'nothing'}, and trained is "
            f"{trained}; expected one number, or one for each of "
            f"{', '.join(part for part in MODEL_PARTS if part in expected)}",
        )


def _data_conflicts(values: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    columns, format_name = values.get("data.columns"), values.get("data.format")
    if columns is not None:
        problem = find_columns_problem(columns)
        if problem is None and format_name not in (None, "auto"):
            problem = f"is set, and data.format {format_name} names the columns, too; set one only"
        if problem:
            yield RecipeProblem("data.columns", f"data.columns {problem}")
    problems: list[RecipeProblem] = []
    for name in ("data.train", "data.eval"):
        sets = values.get(name)
        if sets is None or isinstance(sets, float):  # a share of the training rows
            continue
        with collect_problems(problems, name, f"{name}: "):
            make_sources(sets, {})
            if name == "data.eval" and isinstance(sets, list):
                problems += _eval_weight_problems(sets)
    yield from problems


def _eval_weight_problems(sets: list[Any]) -> Iterator[RecipeProblem]:
    """Yield a problem for each set of ``data.eval`` that has a weight."""
    for number, data_set in enumerate(sets, 1):
        if isinstance(data_set, dict) and "weight" in data_set:
            yield RecipeProblem(
                "data.eval",
                f"data.eval: set {number} of {len(sets)} has a weight, and each of its rows is "
                "evaluated once; expected none",
            )


def _stream_conflicts(values: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    stream, extent = values.get("data.stream"), values.get("data.check")
    checks_only_some = extent not in (None, "all")
    if (stream is False and checks_only_some) or (stream and extent == "all"):
        yield RecipeProblem(
            "data.stream",
            f"data.stream is {str(stream).lower()}, and data.check is {extent}: rows are streamed "
            "if, and only if, data.check is not all; leave out one of the two",
        )
    if not (stream or checks_only_some):
        return
    eval_sets, eval_strategy = values.get("data.eval"), values.get("trainer.eval_strategy")
    evaluates_each_epoch = eval_strategy == "epoch" or (
        eval_sets is not None and _is_null(values, "trainer.eval_strategy", "trainer.eval_steps")
    )
    epoch_end = "end of an epoch; expected trainer."
    # Whether the recipe needs something that a stream does not know, and what that is.
    unknowns = [
        (_is_null(values, "trainer.max_steps"), "number of rows; expected trainer.max_steps"),
        (values.get("data.pack_to") is not None, "lengths of rows; expected no data.pack_to"),
        (
            isinstance(eval_sets, float),
            "set of rows that a share could hold out; expected a file as data.eval",
        ),
        (values.get("trainer.save_strategy") == "epoch", f"{epoch_end}save_steps"),
        (evaluates_each_epoch, f"{epoch_end}eval_steps"),
        (values.get("trainer.logging_strategy") == "epoch", f"{epoch_end}logging_steps"),
    ]
    for is_needed, text in unknowns:
        if is_needed:
            message = f"a stream (data.stream, data.check) has no known {text}"
            yield RecipeProblem("data.stream", message)


def _strategy_conflicts(values: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    """Yield problems of loggers, data loading, and the strategies to save and evaluate."""
    loggers = values.get("trainer.report_to", [])
    for name in [loggers] if isinstance(loggers, str) else loggers:
        module = LOGGER_MODULES.get(name, name)
        if name not in ("none", "all") and importlib.util.find_spec(module) is None:
            text = f"trainer.report_to {name} needs {name}: {pip_install(module)}"
            yield RecipeProblem("trainer.report_to", text)
    factor = values.get("trainer.dataloader_prefetch_factor")
    if factor is not None and values.get("trainer.dataloader_num_workers") == 0:
        yield RecipeProblem(
            "trainer.dataloader_prefetch_factor",
            f"trainer.dataloader_prefetch_factor is {factor} and trainer.dataloader_num_workers is "
            "0: no worker prefetches; expected at least 1 worker, or no factor",
        )
    for action in ("save", "eval"):
        name = f"trainer.{action}_strategy"
        strategy, steps = values.get(name), values.get(f"trainer.{action}_steps")
        if strategy == "steps" and _is_null(values, f"trainer.{action}_steps"):
            yield RecipeProblem(name, f"{name} is steps; expected trainer.{action}_steps, too")
        if strategy not in (None, "steps") and steps is not None:
            message = f"{name} is {strategy} and trainer.{action}_steps is {steps}"
            yield RecipeProblem(name, f"{message}; expected only one of the two")


def _evaluation_conflicts(values: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    """Yield problems of fields that need evaluations, or checkpoints at the evaluated steps."""
    get = values.get
    strategy, steps = get("trainer.eval_strategy"), get("trainer.eval_steps")
    loads_best, save_strategy = get("trainer.load_best_model_at_end"), get("trainer.save_strategy")
    schedule = get("trainer.lr_scheduler_type")
    needs_evaluation = {
        f"trainer.eval_strategy {strategy}": strategy not in (None, "no"),
        "trainer.eval_steps": steps is not None,
        "trainer.load_best_model_at_end": loads_best,
        "trainer.early_stopping_patience": get("trainer.early_stopping_patience") is not None,
        "trainer.save_strategy best": save_strategy == "best",
        f"trainer.lr_scheduler_type {schedule}": schedule in SCHEDULES_BY_METRIC,
        "trainer.eval_on_start": get("trainer.eval_on_start"),
    }
    names = [name for name, is_set in needs_evaluation.items() if is_set]
    if names and _is_null(values, "data.eval"):
        text = f"{names[0]} needs rows to evaluate on; expected data.eval, a file or a share"
        yield RecipeProblem("data.eval", text)
    elif names and strategy == "no" and names != ["trainer.eval_on_start"]:
        text = f"{names[0]} with trainer.eval_strategy no; expected steps or epoch"
        yield RecipeProblem("trainer.eval_strategy", text)
    metric = get("trainer.metric_for_best_model") or ""
    if metric.endswith("exact_match") and get("data.eval_answers") == 0:
        yield RecipeProblem(
            "trainer.metric_for_best_model",
            "trainer.metric_for_best_model is exact_match and data.eval_answers is 0; expected "
            "some rows to be answered, or eval_loss",
        )
    # TrainingArguments checks this, too, but only after torch is loaded.
    save_steps = get("trainer.save_steps")
    save_strategy = save_strategy or ("no" if save_steps is None else "steps")
    strategy = strategy or ("epoch" if steps is None else "steps")
    compared = ("save_strategy", "save_steps", "eval_strategy", "eval_steps")
    are_valid = all(f"trainer.{name}" in values for name in compared)
    differ = save_strategy != "best" and (save_strategy, save_steps) != (strategy, steps)
    if are_valid and loads_best and differ:
        save_interval = "" if save_strategy != "steps" else f" (every {save_steps})"
        eval_interval = "" if steps is None else f" (every {steps})"
        yield RecipeProblem(
            "trainer.load_best_model_at_end",
            f"trainer.load_best_model_at_end: save_strategy is {save_strategy}{save_interval}, and "
            f"eval_strategy is {strategy}{eval_interval}; expected the same, or "
            "trainer.save_strategy to be best",
        )
