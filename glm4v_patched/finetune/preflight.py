"""What can be checked before anything expensive starts; needs no torch.

The command line checks once, not each training process.
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
from ..engine.deepspeed.config import require_deepspeed, require_zero_plus_plus
from ..engine.folders import find_folder_problem
from ..engine.gpus import find_fp8_problem, find_gpus
from ..engine.options import require_packages
from ..models.base import ModelSource, folders_of
from ..models.find import find_model_problem
from ..models.placement import Device, PlacementError, Placement, place_processes
from ..paths import is_within, require_apart
from .recipe.file import RecipeProblem, collect_problems, read_document, shown
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
    """Read a recipe, and see whether it can be run here.

    Args:
        overrides: As ``engine.compile=true``; laid over the file.
        processes, device: As :func:`place_processes` takes them, for this machine.
        world_size: Processes of all machines, where there are several.

    Raises:
        RecipeError: with a line for everything that is wrong, as far as one fault does not hide
            another; ``found`` has recipe and placement, as far as there are any.
    """
    document = read_document(find_recipe(path)).override(overrides)
    checked = check_values(document.values)
    faults = [*checked.faults, *_faults_here(checked.known, device, processes)]
    placement = None
    try:
        placement = place_processes(processes, device, checked.known.get("engine.zero_stage", 3))
    except PlacementError as error:
        faults.append(RecipeProblem(error.field, str(error)))
    if checked.recipe is not None:
        faults += _faults_together(checked.recipe, placement, world_size)
    if faults:
        told = document.error(faults)
        told.found = checked.recipe, placement
        raise told
    assert checked.recipe is not None and placement is not None
    return checked.recipe, placement


def _faults_here(
    known: Mapping[str, Any], device: Device, processes: int | None
) -> Iterator[RecipeProblem]:
    """What is wrong here with values that are right by themselves."""
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
    for name, fault_of in checks.items():
        value = known.get(name)
        if not isinstance(value, str):
            continue  # false or none; or it is invalid, which is reported elsewhere
        text = fault_of(value) or (name == "out" and find_foreign_images(Path(value)))
        if text and name == "data.eval" and re.fullmatch(r"[\d.]+ ?%?", value):
            text += "; a share of the rows is a number without quotes or %: 0.05"
        if text:
            yield RecipeProblem(name, f"{name} is {shown(value)}: {text}")
    for name in ("data.train", "data.eval"):
        sets = known.get(name)
        with suppress(ValueError):  # which is reported elsewhere
            for source in make_sources(sets, {}) if isinstance(sets, list) else ():
                if text := find_source_problem(source):
                    yield RecipeProblem(name, f"{name} has {shown(source.path)}: {text}")
    yield from find_device_problems(known, device, processes)
    missing: list[RecipeProblem] = []
    for name in ("trained", "engine.optimizer"):
        with collect_problems(missing, name):
            require_packages(known.get(name, ""))
    if known.get("engine.zero_stage"):
        with collect_problems(missing, "engine.zero_stage"):
            require_deepspeed()
    yield from missing


def find_device_problems(
    known: Mapping[str, Any], device: Device, processes: int | None
) -> Iterator[RecipeProblem]:
    """What of a recipe's values does not run on this device, or on the GPUs of so many processes
    (None for all)."""
    if device == "cpu":
        of_gpus = {"engine.optimizer": ("adamw_8bit", "adamw"), "engine.fp8": (True, "false")}
        for name, (value, cure) in of_gpus.items():
            if known.get(name) == value:
                told = f"{name} is {shown(value)}, which runs on a GPU, and --device is cpu"
                yield RecipeProblem(name, f"{told}; expected {cure}")
    elif known.get("engine.fp8"):
        gpus = find_gpus().devices[:processes]  # where there is none, that is told elsewhere
        faults = [find_fp8_problem(gpu.name, gpu.capability) for gpu in gpus]
        for fault in [*filter(None, faults)][:1]:
            yield RecipeProblem("engine.fp8", f"engine.fp8 is true: {fault}")


def _faults_together(
    recipe: Recipe, placement: Placement | None, world_size: int | None
) -> list[RecipeProblem]:
    """What is wrong here with fields that are right one by one."""
    base, faults = ModelSource(recipe.model), list[RecipeProblem]()
    with collect_problems(faults, "model"):
        base = resolve_base(recipe)
    if base.adapters is not None and (fault := find_model_problem(base.model)):
        faults.append(
            RecipeProblem("model", f"the model under the adapters is {shown(base.model)}: {fault}")
        )
    faults += _faults_of_outputs(recipe, base)
    if placement is not None:
        with collect_problems(faults, "engine"):
            processes = world_size or placement.processes
            require_zero_plus_plus(recipe.engine_options(), processes, placement.on_cpu)
    return faults


def _faults_of_outputs(recipe: Recipe, base: ModelSource) -> list[RecipeProblem]:
    """Outputs inside or around a folder that the run reads."""
    read: list[tuple[str, str | Path]] = [("the model's folder", recipe.model), *folders_of(base)]
    patterns: list[tuple[str, str]] = []
    for name, sets in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        if sets is None or isinstance(sets, float):
            continue
        for source in make_sources(sets, {"image_folder": recipe.data.image_folder}):
            read += folders_of_source(source, name)
        patterns += [(name, path) for path in named_paths(sets)]
    faults: list[RecipeProblem] = []
    outputs, features = {"out": recipe.out}, recipe.data.reuse_features
    if isinstance(features, str):
        outputs["data.reuse_features"] = features
        if is_within(recipe.out, features):  # a folder in out is apart from a run's own names
            told = f"out, {recipe.out}, lies in the folder of data.reuse_features, {features}"
            told += "; expected out in a folder of its own, beside or around it"
            faults.append(RecipeProblem("out", told))
    for name, out in outputs.items():
        with collect_problems(faults, name):
            require_apart(out, read, name)
            for of, pattern in patterns:
                if pattern_reaches(pattern, out):
                    raise ValueError(
                        f"{name}, {out}, lies where {of} looks for files, {pattern}; expected a "
                        "folder that the pattern does not reach"
                    )
    return faults
