"""What fields of a recipe cannot say together. Needs no torch."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ..data.columns import fault_of_columns
from ..data.source import make_sources
from ..engine.options import LANGUAGE_TARGETS, PARTS, is_lora, parts_with_rates, trains_vision
from ..terminal_text import pip_install
from .recipe_file import Fault

# What loggers import, where it is called otherwise.
MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}


def conflicts(known: Mapping[str, Any]) -> list[Fault]:
    """What cannot go together, of the values that are known, by dotted names: a group of rules ends
    at a value that is not."""
    faults = []
    for rules in RULES:
        with suppress(KeyError):
            for fault in rules(known):
                faults.append(fault)
    return faults


def _of_engine(of: Mapping[str, Any]) -> Iterator[Fault]:
    stage, offload = of["engine.zero_stage"], of["engine.offload"]
    if offload is True and stage == 0:
        yield Fault(
            "engine.offload",
            "engine.offload with engine.zero_stage 0: ZeRO offloads the optimizer; expected "
            "engine.zero_stage 1, 2 or 3, or engine.offload to be false",
        )
    if offload is True and of["engine.optimizer"] == "adamw_8bit":
        yield Fault(
            "engine.offload",
            "engine.offload with adamw_8bit, which runs on a GPU: expected engine.optimizer to be "
            "adamw, or engine.offload to be false",
        )
    for name in ("hpz_partition_size", "quantized_weights", "quantized_gradients"):
        if of[f"engine.zero_{name}"] > 1 - name.startswith("quantized") and stage != 3:
            yield Fault(
                f"engine.zero_{name}",
                f"engine.zero_{name} with engine.zero_stage {stage}: only stage 3 shards weights; "
                "expected engine.zero_stage 3, or no such field",
            )


def _of_4_and_8_bits(of: Mapping[str, Any]) -> Iterator[Fault]:
    trained, stage, fp8 = of["trained"], of["engine.zero_stage"], of["engine.fp8"]
    if trained == "qlora" and stage != 0:
        yield Fault(
            "trained",
            f"qlora with engine.zero_stage {stage}: weights of 4 bits cannot be sharded; expected "
            "engine.zero_stage 0, and one process",
        )
    if not fp8:
        return
    told = "expected another, or engine.fp8 to be false"
    if trained == "qlora":
        yield Fault("engine.fp8", f"engine.fp8 with trained qlora, of weights of 4 bits; {told}")
    if of["engine.zero_quantized_weights"]:
        text = "engine.fp8 with engine.zero_quantized_weights, which quantises in another way what "
        yield Fault("engine.fp8", f"{text}is gathered; expected one of them to be false")
    if of["engine.precision"] == "fp32":
        text = "engine.fp8 with engine.precision fp32: products in fp8 give bf16"
        yield Fault("engine.fp8", f"{text}; {told}")
    if of["lora.use_dora"] and is_lora(trained):
        text = "engine.fp8 with lora.use_dora: DoRA takes norms of weights, which are then in fp8"
        yield Fault("engine.fp8", f"{text}; expected one of them to be false")


def _of_reused_features(of: Mapping[str, Any]) -> Iterator[Fault]:
    trained = of["trained"]
    if of["data.reuse_features"] and trains_vision(trained):
        yield Fault(
            "data.reuse_features",
            f"data.reuse_features with trained {trained}, which trains the vision tower or its "
            "adapter: its features change with every step; expected trained to be lm, lora_lm or "
            "qlora, or data.reuse_features to be false",
        )


def _of_lora(of: Mapping[str, Any]) -> Iterator[Fault]:
    trained = of["trained"]
    targets = of["lora.targets"] if is_lora(trained) else None
    if trained != "lora_all" and isinstance(targets, list) and {*targets} - {*LANGUAGE_TARGETS}:
        yield Fault(
            "lora.targets",
            f"lora.targets is {targets}, with layers of the vision tower, and trained is "
            f"{trained}; expected lora_all",
        )
    if of["lora.use_dora"] and is_lora(trained) and of["engine.zero_stage"] == 3:
        yield Fault(
            "lora.use_dora",
            "lora.use_dora with engine.zero_stage 3: DoRA takes norms of whole weights, and ZeRO-3 "
            "shards them; expected engine.zero_stage 0, 1 or 2, or lora.use_dora to be null",
        )


def _of_model(of: Mapping[str, Any]) -> Iterator[Fault]:
    revision, model = of["revision"], of["model"]
    # Beside adapters, it is of the model under them.
    is_model = os.path.isdir(model) and not os.path.isfile(
        os.path.join(model, "adapter_config.json")
    )
    if revision is not None and is_model:
        yield Fault("revision", f'revision is "{revision}" of {model}, a folder; expected null')


def _of_rates(of: Mapping[str, Any]) -> Iterator[Fault]:
    rates, trained = of["trainer.learning_rate"], of["trained"]
    expected = parts_with_rates(trained)
    if isinstance(rates, dict) and rates.keys() != expected:
        yield Fault(
            "trainer.learning_rate",
            f"trainer.learning_rate is for {', '.join(rates) or 'nothing'}, and trained is "
            f"{trained}; expected one number, or one for each of "
            f"{', '.join(part for part in PARTS if part in expected)}",
        )


def _of_loggers(of: Mapping[str, Any]) -> Iterator[Fault]:
    asked = of["trainer.report_to"]
    for name in [asked] if isinstance(asked, str) else asked:
        module = MODULES.get(name, name)
        if name not in ("none", "all") and importlib.util.find_spec(module) is None:
            text = f"trainer.report_to {name} needs {name}: {pip_install(module)}"
            yield Fault("trainer.report_to", text)


def _of_columns(of: Mapping[str, Any]) -> Iterator[Fault]:
    columns, form = of["data.columns"], of["data.format"]
    if columns is not None:
        fault = fault_of_columns(columns)
        if fault is None and form != "auto":
            fault = f"is given, and data.format {form}, which names them: give one of them"
        if fault:
            yield Fault("data.columns", f"data.columns {fault}")


def _of_sets(of: Mapping[str, Any]) -> Iterator[Fault]:
    for name in ("data.train", "data.eval"):
        sets = of.get(name)
        try:
            if sets is not None and not isinstance(sets, float):
                make_sources(sets, {})
        except ValueError as error:
            yield Fault(name, f"{name}: {error}")
            continue
        if name == "data.eval" and isinstance(sets, list):
            weighed = [
                n for n, one in enumerate(sets, 1) if isinstance(one, dict) and "weight" in one
            ]
            for number in weighed:
                yield Fault(
                    name,
                    f"data.eval: set {number} of {len(sets)} has a weight, and each of its rows is "
                    "evaluated once; expected none",
                )


def _of_loading(of: Mapping[str, Any]) -> Iterator[Fault]:
    factor = of.get("trainer.dataloader_prefetch_factor")
    if factor is not None and of.get("trainer.dataloader_num_workers") == 0:
        yield Fault(
            "trainer.dataloader_prefetch_factor",
            f"trainer.dataloader_prefetch_factor is {factor} and trainer.dataloader_num_workers is "
            "0: no worker draws ahead; expected at least 1 worker, or no factor",
        )


def _of_stream(of: Mapping[str, Any]) -> Iterator[Fault]:
    stream, check = of["data.stream"], of["data.check"]
    is_part = check not in (None, "all")
    if (stream is False and is_part) or (stream and check == "all"):
        yield Fault(
            "data.stream",
            f"data.stream is {str(stream).lower()}, and data.check {check}: rows are streamed "
            "where not all of them are checked; leave out one of them",
        )
    if not (stream or is_part):
        return
    evaluated, often = of["data.eval"], of["trainer.eval_strategy"]
    lacks = {
        "how many rows it has; expected trainer.max_steps": of["trainer.max_steps"] is None,
        "how long its rows are; expected no data.pack_to": of["data.pack_to"] is not None,
        "which rows a share holds out; expected a file as data.eval": isinstance(evaluated, float),
        "when an epoch ends; expected save_steps": of["trainer.save_strategy"] == "epoch",
        "when an epoch ends; expected eval_steps": often == "epoch"
        or (evaluated is not None and often is None and of["trainer.eval_steps"] is None),
    }
    for text, is_asked in lacks.items():
        if is_asked:
            told = f"of a stream (data.stream, data.check) it is not known {text}"
            yield Fault("data.stream", told)


def _of_steps(of: Mapping[str, Any]) -> Iterator[Fault]:
    for kind in ("save", "eval"):
        name = f"trainer.{kind}_strategy"
        strategy, steps = of[name], of[f"trainer.{kind}_steps"]
        if strategy == "steps" and steps is None:
            yield Fault(name, f"{name} is steps; expected trainer.{kind}_steps, too")
        if strategy not in (None, "steps") and steps is not None:
            told = f"{name} is {strategy} and trainer.{kind}_steps is {steps}"
            yield Fault(name, f"{told}; expected one of them alone")


def _of_evaluation(of: Mapping[str, Any]) -> Iterator[Fault]:
    strategy, steps = of["trainer.eval_strategy"], of["trainer.eval_steps"]
    best, saved = of["trainer.load_best_model_at_end"], of["trainer.save_strategy"]
    asked = {
        f"trainer.eval_strategy {strategy}": strategy not in (None, "no"),
        "trainer.eval_steps": steps is not None,
        "trainer.load_best_model_at_end": best,
        "trainer.early_stopping_patience": of["trainer.early_stopping_patience"] is not None,
        "trainer.save_strategy best": saved == "best",
    }
    names = [name for name, given in asked.items() if given]
    if names and of["data.eval"] is None:
        text = f"{names[0]} needs rows to evaluate on; expected data.eval, a file or a share"
        yield Fault("data.eval", text)
    elif names and strategy == "no":
        text = f"{names[0]} with trainer.eval_strategy no; expected steps or epoch"
        yield Fault("trainer.eval_strategy", text)
    if of["trainer.metric_for_best_model"].endswith("exact_match") and not of["data.eval_answers"]:
        yield Fault(
            "trainer.metric_for_best_model",
            "trainer.metric_for_best_model is exact_match and data.eval_answers is 0; expected "
            "some rows to be answered, or eval_loss",
        )
    # As TrainingArguments demands it, but that is known only once torch is loaded.
    save_steps = of["trainer.save_steps"]
    when = saved or ("no" if save_steps is None else "steps")
    measured = strategy or ("epoch" if steps is None else "steps")
    if best and when != "best" and (when, save_steps) != (measured, steps):
        every = {"steps": f" {save_steps}"}.get(when, "")
        yield Fault(
            "trainer.load_best_model_at_end",
            f"trainer.load_best_model_at_end: checkpoints are saved at {when}{every}, and "
            f"evaluated at {measured}{'' if steps is None else f' {steps}'}; expected the same, or "
            "trainer.save_strategy to be best",
        )


RULES: tuple[Callable[[Mapping[str, Any]], Iterator[Fault]], ...] = (
    _of_engine,
    _of_4_and_8_bits,
    _of_reused_features,
    _of_lora,
    _of_model,
    _of_rates,
    _of_loggers,
    _of_columns,
    _of_sets,
    _of_loading,
    _of_stream,
    _of_steps,
    _of_evaluation,
)
