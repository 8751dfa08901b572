"""A recipe on this machine: its fields, model, data, folder and memory."""

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
from ..finetune.run_folder import require_lockable, require_usable
from ..models.base import ModelSource
from ..models.placement import Device
from .findings import FAILS, OK, WARNING, Finding, finding_from_error

# What a tokenizer that cannot be loaded raises, too.
CHECK_ERRORS = (ValueError, OSError, KeyError, TypeError, ImportError)
# Faults that say nothing of model and data.
MACHINE_OPTIONS = {"--device", "--processes", "engine"}
MEMORY_CURE = "fewer rows (trainer.per_device_train_batch_size), shorter ones, more GPUs with "
MEMORY_CURE += "engine.zero_stage: 3, engine.optimizer: adamw_8bit, or another trained: lora_lm, qlora"


def check_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    processes: int | None = None,
    device: Device = "cuda",
) -> list[Finding]:
    """What the launcher would refuse, all of it, and what only shows when training has begun. Rows
    are read and images decoded, as before a training."""
    found: list[Finding] = []

    @contextmanager
    def looking_at(what: str) -> Iterator[None]:
        try:
            yield
        except CHECK_ERRORS as error:
            found.append(finding_from_error(what, FAILS, str(error)))

    try:
        recipe, placement = validate_recipe(path, overrides, processes, device)
        found.append(Finding("recipe", OK, f"{path}: {placement.processes} processes"))
    except RecipeError as error:
        found += [finding_from_error("recipe", FAILS, line) for line in str(error).splitlines()]
        recipe, placement = error.recipe_and_placement
        if recipe is None or error.names - MACHINE_OPTIONS:
            text = "not looked at: the recipe has to be right first"
            return [*found, Finding("model, data, memory", WARNING, text)]
    except RuntimeError as error:  # transformers, of which it has a field, cannot be imported
        return [finding_from_error("recipe", FAILS, str(error))]
    job = resolve_recipe(recipe)
    with looking_at("folder (out)"):
        require_lockable(job.out)
        require_usable(job.out, job.inputs, job.trainer.length, job.has_adapters)
        found.append(Finding("folder (out)", OK, f"{job.out} can be written, and has no run"))
    with looking_at("model"):
        job = require_model(job)
        found.append(Finding("model", OK, "its weights have the names and shapes of a glm-4v"))
    if found[-1].verdict == FAILS:
        return found
    # Late, for they import torch.
    from ..finetune.plan import check_data, make_plan
    from ..finetune.summary import describe_data, describe_memory, describe_policies

    # It prints which rows are left out, and --json is for programs.
    with looking_at("data"), redirect_stdout(sys.stderr):
        checked = check_data(job)
        told = describe_data(checked, job.data.is_streamed)
        found.append(Finding("data", WARNING if checked.skipped else OK, told))
        found += [Finding("data, warning", WARNING, doubt) for doubt in checked.find_warnings()]
        if placement is not None:
            with looking_at("memory and disk"):
                plan = make_plan(job, placement, checked)
                plan.require_memory_and_disk()
                told = f"{describe_memory(plan) or 'a step fits'} ({describe_policies(plan)})"
                fits = Finding("memory and disk", OK, told)
                found.append(replace(fits, verdict=WARNING, cure=MEMORY_CURE) if plan.is_tight else fits)
                found += _implementations(job.base, plan.options)
    return found


def _implementations(base: ModelSource, options: EngineOptions) -> Iterator[Finding]:
    """Which implementations modules get in training and in answers, of a model without weights."""
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

    for use in (ModelUsage.training(options), ModelUsage.inference()):
        with torch.device("meta"):
            model: Any = build_random_model(load_model_config(base), dtype=torch.bfloat16)
            if use.purpose == TRAINING:
                model = select_weights(model, options.trained, options.lora)
        use_implementations(model, use)
        told = "\n".join(summarize_explanations(explain_implementations(model, use)))
        yield Finding(f"implementations: {use.purpose}", OK, told)
