"""Checks of a recipe on this machine, before anything expensive starts. Imports no torch.

The command runs these checks once; the training processes do not repeat them.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..data.source import (
    find_path_problem,
    find_source_problem,
    folders_of_source,
    make_sources,
    named_paths,
    pattern_reaches,
)
from ..engine.deepspeed.config import require_deepspeed, require_divisible_processes
from ..engine.folders import find_folder_problem
from ..engine.gpus import find_fp8_problem, find_gpus
from ..engine.options import require_packages
from ..models.base import ModelSource, folders_of
from ..models.find import find_model_problem
from ..models.placement import Device, Placement, PlacementError, place_processes
from ..paths import is_within, refuse_overlap
from .recipe.file import RecipeProblem, collect_problems, read_document, short_json
from .recipe.model import resolve_base
from .recipe.sections import Recipe, check_values
from .recipe.shipped import find_recipe
from .run_folder import find_foreign_images


def validate_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    processes: int | None = None,
    device: Device = "cuda",
    world_size: int | None = None,
) -> tuple[Recipe, Placement]:
    """Read a recipe, and check whether it can run on this machine.

    Args:
        overrides: Assignments such as ``engine.compile=true`` that override the file.
        processes, device: Arguments of :func:`place_processes`, for this machine.
        world_size: Number of processes on all machines, if there are several machines.

    Raises:
        RecipeError: There are problems; the message has a line for each.
    """
    document = read_document(find_recipe(path)).override(overrides)
    checked = check_values(document.values)
    problems = [*checked.problems, *_local_problems(checked.valid, device, processes)]
    placement = None
    try:
        placement = place_processes(processes, device, checked.valid.get("engine.zero_stage", 3))
    except PlacementError as error:
        problems.append(RecipeProblem(error.field, str(error)))
    if checked.recipe is not None:
        problems += _combined_problems(checked.recipe, placement, world_size)
    if problems:
        recipe_error = document.error(problems)
        recipe_error.recipe_and_placement = checked.recipe, placement
        raise recipe_error
    assert checked.recipe is not None and placement is not None
    return checked.recipe, placement


def _local_problems(
    values: Mapping[str, Any], device: Device, processes: int | None
) -> Iterator[RecipeProblem]:
    """Yield problems of valid values on this machine: paths, devices, packages."""
    checks = {
        "model": find_model_problem,
        "data.train": find_path_problem,
        "data.eval": find_path_problem,
        "data.image_folder": lambda folder: (
            None if os.path.isdir(folder) else "there is no such folder"
        ),
        "data.reuse_features": find_folder_problem,
        "out": find_folder_problem,
    }
    for name, find_problem in checks.items():
        value = values.get(name)
        if not isinstance(value, str):
            continue  # not a path, or invalid, which check_values reports
        text = find_problem(value)
        if text is None and name == "out":
            text = find_foreign_images(Path(value))
        if text and name == "data.eval" and re.fullmatch(r"[\d.]+ ?%?", value):
            text += "; a share of the rows is a number without quotes or %: 0.05"
        if text:
            yield RecipeProblem(name, f"{name} is {short_json(value)}: {text}")
    for name in ("data.train", "data.eval"):
        sets = values.get(name)
        with suppress(ValueError):  # check_values reports it
            for source in make_sources(sets, {}) if isinstance(sets, list) else ():
                if text := find_source_problem(source):
                    yield RecipeProblem(name, f"{name} has {short_json(source.path)}: {text}")
    yield from find_device_problems(values, device, processes)
    problems: list[RecipeProblem] = []
    for name in ("trained", "engine.optimizer"):
        with collect_problems(problems, name):
            require_packages(values.get(name, ""))
    if values.get("engine.zero_stage"):
        with collect_problems(problems, "engine.zero_stage"):
            require_deepspeed()
    yield from problems


def find_device_problems(
    values: Mapping[str, Any], device: Device, processes: int | None
) -> Iterator[RecipeProblem]:
    """Yield problems of a recipe's values that do not work on a device.

    Args:
        values: Valid values by dotted names.
        processes: Number of GPUs to check; None for all.
    """
    if device == "cpu":
        # Name of a field, its value that needs a GPU, and the value for a CPU.
        gpu_only = [("engine.optimizer", "adamw_8bit", "adamw"), ("engine.fp8", True, "false")]
        for name, value, expected in gpu_only:
            if values.get(name) == value:
                message = f"{name} is {short_json(value)}, which runs on a GPU, and --device is cpu"
                yield RecipeProblem(name, f"{message}; expected {expected}")
    elif values.get("engine.fp8"):
        for gpu in find_gpus().devices[:processes]:  # place_processes reports missing GPUs
            if problem := find_fp8_problem(gpu.name, gpu.capability):
                yield RecipeProblem("engine.fp8", f"engine.fp8 is true: {problem}")
                return


def _combined_problems(
    recipe: Recipe, placement: Placement | None, world_size: int | None
) -> list[RecipeProblem]:
    """Return problems of fields that do not work together on this machine."""
    base, problems = ModelSource(recipe.model), list[RecipeProblem]()
    with collect_problems(problems, "model"):
        base = resolve_base(recipe)
    if base.adapters is not None and (problem := find_model_problem(base.model)):
        text = f"the base model of the adapters is {short_json(base.model)}: {problem}"
        problems.append(RecipeProblem("model", text))
    problems += _output_problems(recipe, base)
    if placement is not None:
        with collect_problems(problems, "engine"):
            processes = world_size or placement.processes
            require_divisible_processes(recipe.engine_options(), processes)
    return problems


def _output_problems(recipe: Recipe, base: ModelSource) -> list[RecipeProblem]:
    """Return problems of output folders that contain, or lie in, a folder that the run reads."""
    inputs: list[tuple[str, str | Path]] = [("the model's folder", recipe.model)]
    inputs += folders_of(base)
    patterns: list[tuple[str, str]] = []  # name of the field, and a path that may have wildcards
    for name, sets in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        if sets is None or isinstance(sets, float):
            continue
        for source in make_sources(sets, {"image_folder": recipe.data.image_folder}):
            inputs += folders_of_source(source, name)
        patterns += [(name, path) for path in named_paths(sets)]
    problems: list[RecipeProblem] = []
    outputs, features = {"out": recipe.out}, recipe.data.reuse_features
    if isinstance(features, str):
        outputs["data.reuse_features"] = features
        if is_within(recipe.out, features):  # the reverse is allowed
            text = f"out, {recipe.out}, lies in the folder of data.reuse_features, {features}"
            text += "; expected out to be another folder, or one that contains it"
            problems.append(RecipeProblem("out", text))
    for name, out in outputs.items():
        with collect_problems(problems, name):
            refuse_overlap(out, inputs, name)
            for field, pattern in patterns:
                if pattern_reaches(pattern, out):
                    raise ValueError(
                        f"{name}, {out}, may contain files that match {field}, {pattern}; expected "
                        "a folder whose files do not match the pattern"
                    )
    return problems
