"""What fields of a recipe cannot say together. Needs no torch.

Rules are given the values that are right by themselves, by dotted names; none speaks of another.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ...data.columns import find_columns_problem
from ...data.source import make_sources
from ...engine.options import LANGUAGE_TARGETS, MODEL_PARTS, is_lora, parts_with_rates, trains_vision
from ...terminal_text import pip_install
from .file import RecipeProblem, collect_problems
from .trainer import METRIC_SCHEDULES

# What loggers import, where it is called otherwise.
MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}


def conflicts(known: Mapping[str, Any]) -> list[RecipeProblem]:
    """What cannot go together."""
    rules = (_of_engine, _of_model, _of_data, _of_stream, _of_trainer)
    return [fault for rule in rules for fault in rule(known)]


def _is_null(known: Mapping[str, Any], *names: str) -> bool:
    return all(name in known and known[name] is None for name in names)


def _of_engine(known: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    of, trained = known.get, known.get("trained", "full")
    stage, fp8, is_qlora = of("engine.zero_stage"), of("engine.fp8"), trained == "qlora"
    offload, has_dora = of("engine.offload") is True, is_lora(trained) and of("lora.use_dora")
    if offload and stage == 0:
        yield RecipeProblem(
            "engine.offload",
            "engine.offload with engine.zero_stage 0: ZeRO offloads the optimizer; expected "
            "engine.zero_stage 1, 2 or 3, or engine.offload to be false",
        )
    if offload and of("engine.optimizer") == "adamw_8bit":
        yield RecipeProblem(
            "engine.offload",
            "engine.offload with adamw_8bit, which runs on a GPU: expected engine.optimizer to be "
            "adamw, or engine.offload to be false",
        )
    usual = {"hpz_partition_size": 1, "quantized_weights": False, "quantized_gradients": False}
    for name, value in usual.items():
        if of(f"engine.zero_{name}", value) != value and stage in (0, 1, 2):
            yield RecipeProblem(
                f"engine.zero_{name}",
                f"engine.zero_{name} with engine.zero_stage {stage}: only stage 3 shards weights; "
                "expected engine.zero_stage 3, or no such field",
            )
    if is_qlora and stage in (1, 2, 3):
        yield RecipeProblem(
            "trained",
            f"qlora with engine.zero_stage {stage}: weights of 4 bits cannot be sharded; expected "
            "engine.zero_stage 0, and one process",
        )
    if has_dora and stage == 3:
        yield RecipeProblem(
            "lora.use_dora",
            "lora.use_dora with engine.zero_stage 3: DoRA takes norms of whole weights, and ZeRO-3 "
            "shards them; expected engine.zero_stage 0, 1 or 2, or lora.use_dora to be null",
        )
    another, one_of_them = "another, or engine.fp8 to be false", "one of them to be false"
    of_fp8 = [
        (is_qlora, f"trained qlora, of weights of 4 bits; expected {another}"),
        (
            of("engine.zero_quantized_weights"),
            "engine.zero_quantized_weights, which quantizes in another way what is gathered; "
            f"expected {one_of_them}",
        ),
        (
            of("engine.precision") == "fp32",
            f"engine.precision fp32: products in fp8 give bf16; expected {another}",
        ),
        (
            has_dora,
            "lora.use_dora: DoRA takes norms of weights, which are then in fp8; expected "
            f"{one_of_them}",
        ),
    ]
    for is_asked, text in of_fp8:
        if fp8 and is_asked:
            yield RecipeProblem("engine.fp8", f"engine.fp8 with {text}")


def _of_model(known: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    trained, targets = known.get("trained"), known.get("lora.targets")
    revision, model = known.get("revision"), known.get("model")
    # Beside adapters, a revision is of the model under them.
    if (
        revision is not None
        and model is not None
        and os.path.isdir(model)
        and not os.path.isfile(os.path.join(model, "adapter_config.json"))
    ):
        yield RecipeProblem("revision", f'revision is "{revision}" of {model}, a folder; expected null')
    if trained is None:
        return
    if known.get("data.reuse_features") and trains_vision(trained):
        yield RecipeProblem(
            "data.reuse_features",
            f"data.reuse_features with trained {trained}, which trains the vision tower or its "
            "projector: its features change with every step; expected trained to be lm, lora_lm or "
            "qlora, or data.reuse_features to be false",
        )
    on_language = is_lora(trained) and trained != "lora_all"
    if isinstance(targets, list | tuple) and not targets:
        yield RecipeProblem("lora.targets", "lora.targets is []; expected at least one layer, or null")
    if on_language and isinstance(targets, list | tuple) and {*targets} - {*LANGUAGE_TARGETS}:
        yield RecipeProblem(
            "lora.targets",
            f"lora.targets is {[*targets]}, with layers of the vision tower, and trained is "
            f"{trained}; expected lora_all",
        )
    rates, expected = known.get("trainer.learning_rate"), parts_with_rates(trained)
    if isinstance(rates, dict) and rates.keys() != expected:
        yield RecipeProblem(
            "trainer.learning_rate",
            f"trainer.learning_rate is for {', '.join(rates) or 'nothing'}, and trained is "
            f"{trained}; expected one number, or one for each of "
            f"{', '.join(part for part in MODEL_PARTS if part in expected)}",
        )


def _of_data(known: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    columns, form = known.get("data.columns"), known.get("data.format")
    if columns is not None:
        fault = find_columns_problem(columns)
        if fault is None and form not in (None, "auto"):
            fault = f"is given, and data.format {form}, which names them: give one of them"
        if fault:
            yield RecipeProblem("data.columns", f"data.columns {fault}")
    for name in ("data.train", "data.eval"):
        sets = known.get(name)
        faults: list[RecipeProblem] = []
        with collect_problems(faults, name, f"{name}: "):
            if sets is not None and not isinstance(sets, float):
                make_sources(sets, {})
        yield from faults
        several = sets if isinstance(sets, list) and name == "data.eval" and not faults else []
        for number, one in enumerate(several, 1):
            if isinstance(one, dict) and "weight" in one:
                yield RecipeProblem(
                    name,
                    f"data.eval: set {number} of {len(several)} has a weight, and each of its rows "
                    "is evaluated once; expected none",
                )


def _of_stream(known: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    stream, check = known.get("data.stream"), known.get("data.check")
    is_part = check not in (None, "all")
    if (stream is False and is_part) or (stream and check == "all"):
        yield RecipeProblem(
            "data.stream",
            f"data.stream is {str(stream).lower()}, and data.check {check}: rows are streamed "
            "where not all of them are checked; leave out one of them",
        )
    if not (stream or is_part):
        return
    evaluated, often = known.get("data.eval"), known.get("trainer.eval_strategy")
    by_default = evaluated is not None and _is_null(
        known, "trainer.eval_strategy", "trainer.eval_steps"
    )
    no_end = "when an epoch ends; expected"
    lacks = [
        (
            _is_null(known, "trainer.max_steps"),
            "how many rows it has; expected trainer.max_steps",
        ),
        (
            known.get("data.pack_to") is not None,
            "how long its rows are; expected no data.pack_to",
        ),
        (
            isinstance(evaluated, float),
            "which rows a share holds out; expected a file as data.eval",
        ),
        (known.get("trainer.save_strategy") == "epoch", f"{no_end} save_steps"),
        (often == "epoch" or by_default, f"{no_end} eval_steps"),
        (known.get("trainer.logging_strategy") == "epoch", f"{no_end} logging_steps"),
    ]
    for is_asked, text in lacks:
        if is_asked:
            told = f"of a stream (data.stream, data.check) it is not known {text}"
            yield RecipeProblem("data.stream", told)


def _of_trainer(known: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    of = known.get
    loggers = of("trainer.report_to", [])
    for name in [loggers] if isinstance(loggers, str) else loggers:
        module = MODULES.get(name, name)
        if name not in ("none", "all") and importlib.util.find_spec(module) is None:
            text = f"trainer.report_to {name} needs {name}: {pip_install(module)}"
            yield RecipeProblem("trainer.report_to", text)
    factor = of("trainer.dataloader_prefetch_factor")
    if factor is not None and of("trainer.dataloader_num_workers") == 0:
        yield RecipeProblem(
            "trainer.dataloader_prefetch_factor",
            f"trainer.dataloader_prefetch_factor is {factor} and trainer.dataloader_num_workers is "
            "0: no worker draws ahead; expected at least 1 worker, or no factor",
        )
    for kind in ("save", "eval"):
        name = f"trainer.{kind}_strategy"
        strategy, steps = of(name), of(f"trainer.{kind}_steps")
        if strategy == "steps" and _is_null(known, f"trainer.{kind}_steps"):
            yield RecipeProblem(name, f"{name} is steps; expected trainer.{kind}_steps, too")
        if strategy not in (None, "steps") and steps is not None:
            told = f"{name} is {strategy} and trainer.{kind}_steps is {steps}"
            yield RecipeProblem(name, f"{told}; expected one of them alone")
    strategy, steps = of("trainer.eval_strategy"), of("trainer.eval_steps")
    best, saved = of("trainer.load_best_model_at_end"), of("trainer.save_strategy")
    schedule = of("trainer.lr_scheduler_type")
    asked = {
        f"trainer.eval_strategy {strategy}": strategy not in (None, "no"),
        "trainer.eval_steps": steps is not None,
        "trainer.load_best_model_at_end": best,
        "trainer.early_stopping_patience": of("trainer.early_stopping_patience") is not None,
        "trainer.save_strategy best": saved == "best",
        f"trainer.lr_scheduler_type {schedule}": schedule in METRIC_SCHEDULES,
        "trainer.eval_on_start": of("trainer.eval_on_start"),
    }
    names = [name for name, given in asked.items() if given]
    if names and _is_null(known, "data.eval"):
        text = f"{names[0]} needs rows to evaluate on; expected data.eval, a file or a share"
        yield RecipeProblem("data.eval", text)
    elif names and strategy == "no" and names != ["trainer.eval_on_start"]:
        text = f"{names[0]} with trainer.eval_strategy no; expected steps or epoch"
        yield RecipeProblem("trainer.eval_strategy", text)
    metric = of("trainer.metric_for_best_model") or ""
    if metric.endswith("exact_match") and of("data.eval_answers") == 0:
        yield RecipeProblem(
            "trainer.metric_for_best_model",
            "trainer.metric_for_best_model is exact_match and data.eval_answers is 0; expected "
            "some rows to be answered, or eval_loss",
        )
    # As TrainingArguments demands it, but that is known only once torch is loaded.
    save_steps = of("trainer.save_steps")
    when = saved or ("no" if save_steps is None else "steps")
    measured = strategy or ("epoch" if steps is None else "steps")
    compared = ("save_strategy", "save_steps", "eval_strategy", "eval_steps")
    are_known = all(f"trainer.{name}" in known for name in compared)
    if are_known and best and when != "best" and (when, save_steps) != (measured, steps):
        every = {"steps": f" {save_steps}"}.get(when, "")
        yield RecipeProblem(
            "trainer.load_best_model_at_end",
            f"trainer.load_best_model_at_end: checkpoints are saved at {when}{every}, and "
            f"evaluated at {measured}{'' if steps is None else f' {steps}'}; expected the same, or "
            "trainer.save_strategy to be best",
        )
