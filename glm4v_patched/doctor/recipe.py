"""Checks of a recipe on this machine: fields, model, data, output folder and memory."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engine.options import EngineOptions
from ..finetune.job import resolve_recipe
from ..finetune.launch import require_model
from ..finetune.preflight import validate_recipe
from ..finetune.recipe.file import RecipeError
from ..finetune.run_folder import check_run_folder, require_lockable
from ..models.base import ModelSource
from ..models.placement import Device
from ..terminal_text import pluralize
from .findings import FAILS, OK, WARNING, Finding, finding_from_error

# Exceptions that a user's mistake raises, and those that loading a damaged tokenizer raises.
CHECK_ERRORS = (ValueError, OSError, KeyError, TypeError, ImportError)
# If a recipe's only problems are with these options, its model and data can still be checked.
MACHINE_OPTIONS = {"--device", "--processes", "engine"}
MEMORY_CURE = (
    "use a smaller trainer.per_device_train_batch_size, shorter samples, more GPUs with "
    "engine.zero_stage: 3, engine.optimizer: adamw_8bit, or trained: lora_lm or qlora"
)


def check_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    processes: int | None = None,
    device: Device = "cuda",
) -> list[Finding]:
    """Return findings on what the launcher would refuse, and on what would fail later.

    As before a training, all rows are read and all images are decoded.

    Args:
        path, overrides, processes, device: The arguments of ``train``.
    """
    findings: list[Finding] = []

    @contextmanager
    def errors_as_findings(check_name: str) -> Iterator[None]:
        try:
            yield
        except CHECK_ERRORS as error:
            findings.append(finding_from_error(check_name, FAILS, str(error)))

    try:
        recipe, placement = validate_recipe(path, overrides, processes, device)
        text = f"{path} is valid, for {pluralize(placement.processes, 'process')}"
        findings.append(Finding("recipe", OK, text))
    except RecipeError as error:
        findings += [finding_from_error("recipe", FAILS, line) for line in str(error).splitlines()]
        recipe, placement = error.recipe_and_placement
        if recipe is None or error.names - MACHINE_OPTIONS:
            text = "not checked, because the recipe has errors"
            return [*findings, Finding("model, data, memory", WARNING, text)]
    except RuntimeError as error:  # transformers, which has TrainingArguments, is not importable
        return [finding_from_error("recipe", FAILS, str(error))]
    job = resolve_recipe(recipe)
    with errors_as_findings("folder (out)"):
        require_lockable(job.out)
        check_run_folder(job.out, job.inputs, job.trainer.run_length, job.has_adapters)
        text = f"{job.out} is writable and contains no run"
        findings.append(Finding("folder (out)", OK, text))
    with errors_as_findings("model"):
        job = require_model(job)
        text = "its weights have the names and shapes of a glm-4v"
        findings.append(Finding("model", OK, text))
    if findings[-1].verdict == FAILS:
        return findings
    # Imported here, because they import torch.
    from ..finetune.plan import check_data, make_plan
    from ..finetune.summary import describe_data, describe_engine, describe_memory

    # check_data prints the rows that are left out. They go to stderr, because --json prints JSON to
    # stdout.
    with errors_as_findings("data"), redirect_stdout(sys.stderr):
        checked = check_data(job)
        text = describe_data(checked, job.data.is_streamed)
        findings.append(Finding("data", WARNING if checked.skipped else OK, text))
        findings += [Finding("data warnings", WARNING, line) for line in checked.find_warnings()]
        if placement is not None:
            with errors_as_findings("memory and disk"):
                plan = make_plan(job, placement, checked)
                plan.require_memory_and_disk()
                text = f"{describe_memory(plan) or 'a step fits'} ({describe_engine(plan)})"
                fits = Finding("memory and disk", OK, text)
                tight = replace(fits, verdict=WARNING, cure=MEMORY_CURE)
                findings.append(tight if plan.is_tight else fits)
                findings += _describe_implementations(job.base, plan.options)
    return findings


def _describe_implementations(base: ModelSource, options: EngineOptions) -> Iterator[Finding]:
    """Yield findings on a model's implementations in training and inference, without weights."""
    import torch

    from ..engine.implementations import (
        TRAINING,
        ModelUsage,
        explain_implementations,
        summarize_explanations,
        use_implementations,
    )
    from ..engine.trainable import build_random_model, select_weights
    from ..models.loading import load_model_config

    for usage in (ModelUsage.training(options), ModelUsage.inference()):
        with torch.device("meta"):
            model: Any = build_random_model(load_model_config(base), dtype=torch.bfloat16)
            if usage.purpose == TRAINING:
                model = select_weights(model, options.trained, options.lora)
        use_implementations(model, usage)
        text = "\n".join(summarize_explanations(explain_implementations(model, usage)))
        yield Finding(f"implementations: {usage.purpose}", OK, text)
