"""A recipe on this machine: its fields, model, data, folder and memory."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ..atomic import require_apart
from ..engine.deepspeed.config import require_zero_plus_plus, zero_plus_plus
from ..engine.options import is_lora
from ..finetune.preflight import examine
from ..finetune.recipe import Recipe
from ..finetune.recipe_file import RecipeError
from ..finetune.recipe_model import base_of
from ..finetune.run_folder import fault_of_lock, require_usable
from ..models.base import Base, pin
from ..models.check_weights import require_readable, require_whole
from ..models.placement import Device, Placement
from ..terminal_text import in_bytes
from .findings import FAILS, OK, WARNING, Finding, finding

if TYPE_CHECKING:
    from ..finetune.plan import Plan
    from ..remote.configuration_chatglm import ChatGLMConfig

CONFIGS_OF_TOKENIZER = ("tokenizer_config.json", "tokenizer.model")
# Faults that say nothing of model and data.
OF_THE_MACHINE = {"--device", "--processes"}


def check_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    processes: int | None = None,
    device: Device = "cuda",
) -> Iterator[Finding]:
    """What :func:`preflight.check` and the launcher would refuse, all of it, and what only shows
    when training has begun. Rows are read and pictures decoded, as before a training."""
    try:
        recipe, placement, fault = examine(path, overrides, processes, device)
    except (RecipeError, RuntimeError) as error:  # of a transformers that cannot be imported, too
        yield from _of_lines("recipe", error)
        return
    if fault is not None:
        yield from _of_lines("recipe", fault)
    if recipe is None or (fault is not None and fault.names - OF_THE_MACHINE):
        text = "not looked at: the recipe has to be right first"
        yield Finding("model, data, memory", WARNING, text)
        return
    if placement is not None:
        where = "on the CPU" if placement.on_cpu else "each on a GPU"
        yield Finding("recipe", OK, f"{path}: {placement.processes} processes, {where}")
        yield from _check_zero_plus_plus(recipe, placement)
    yield from _check_out(recipe)
    try:
        base = pin(base_of(recipe))
    except ValueError as error:
        yield finding("model", FAILS, str(error))
        return
    yield from _check_inside(recipe, base, placement)


def _check_zero_plus_plus(recipe: Recipe, placement: Placement) -> Iterator[Finding]:
    options = recipe.engine_options()
    try:
        require_zero_plus_plus(options, placement.processes, placement.on_cpu)
    except ValueError as error:
        yield finding("ZeRO++", FAILS, str(error))
        return
    if zero_plus_plus(options):
        yield Finding("ZeRO++", OK, f"on {placement.processes} processes")


def _of_lines(check: str, error: Exception) -> Iterator[Finding]:
    for line in str(error).splitlines():
        yield finding(check, FAILS, line)


def _check_out(recipe: Recipe) -> Iterator[Finding]:
    folder, check = Path(recipe.out), "folder (out)"
    models = [Path(name) for name in {recipe.model, base_of(recipe).model} if os.path.isdir(name)]
    try:
        for model in models:
            require_apart(folder, model)
    except ValueError as error:
        yield finding(check, FAILS, str(error))
        return
    if text := fault_of_lock(folder):
        yield finding(check, FAILS, text)
        return
    try:
        if folder.is_dir():
            require_usable(folder, recipe.data.files(), is_lora(recipe.trained), False, False)
    except ValueError as error:
        yield finding(check, FAILS, str(error))
        return
    yield Finding(check, OK, f"{folder} can be written, and holds no other run")


def _check_inside(recipe: Recipe, base: Base, placement: Placement | None) -> Iterator[Finding]:
    # Late, for they import torch.
    from ..models.loading import config_of

    try:
        require_readable(base.model, base.revision)
        config = config_of(base)
    except (ValueError, OSError) as error:
        yield finding("model", FAILS, str(error))
        return
    from ..finetune.disk import needed_space, require_space

    try:
        require_space(recipe.out, needed_space(recipe, config))
    except ValueError as error:
        yield finding("disk (out)", FAILS, str(error))
    yield from _check_model(recipe, base)
    of_processor = _check_processor(recipe, base, config)
    yield of_processor
    if of_processor.verdict == FAILS:
        yield Finding("data, memory", WARNING, "not looked at: the processor has to be right first")
        return
    from ..finetune.plan import check_data, make_plan
    from ..finetune.summary import describe_data

    try:
        # It prints which rows are left out, and --json is for programs.
        with redirect_stdout(sys.stderr):
            checked = check_data(recipe, base)
    except (ValueError, OSError) as error:
        yield finding("data", FAILS, str(error))
        return
    yield Finding(
        "data", WARNING if checked.skipped else OK, describe_data(checked, recipe.data.is_streamed)
    )
    if placement is not None:
        yield from _check_memory(make_plan(recipe, placement, checked, base), config)


def _check_model(recipe: Recipe, base: Base) -> Iterator[Finding]:
    """Names and shapes of the weights, and whose code lies beside them."""
    try:
        number = require_whole(base.model, base.revision, recipe.from_scratch, recipe.trained)
    except ValueError as error:
        yield finding("weights", FAILS, str(error))
        return
    yield Finding("weights", OK, f"{number}, with the names and shapes of a glm-4v")
    folder = Path(base.model)
    # The second is in all folders with our code, also of earlier versions.
    if (folder / "modeling_chatglm.py").is_file() and not (folder / "checkpointing.py").is_file():
        text = "the published code is beside the weights; a recipe does not use it, and scripts of "
        text += "others that load it fail on this transformers (docs/patching.md)"
        yield Finding("code", OK, text)


def _check_processor(recipe: Recipe, base: Base, config: "ChatGLMConfig") -> Finding:
    from ..models.loading import load_processor

    try:
        processor = load_processor(base)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        text = f"tokenizer and image processor cannot be loaded: {error}"
        cure = f"put the published {' and '.join(CONFIGS_OF_TOKENIZER)} beside the weights"
        return Finding("processor", FAILS, text, cure)
    places, wanted = processor.num_image_tokens, config.vision.num_image_tokens
    if places == wanted:
        side = config.vision.image_size
        return Finding("processor", OK, f"pictures of {side} pixels take {places + 2:,} positions")
    size = json.dumps({"image_size": config.vision.image_size})
    text = f"its pictures take {places:,} positions, and the model's {wanted:,}: image_size was "
    text += "lost when the tokenizer was saved"
    return Finding("processor", FAILS, text, f"write {size} into tokenizer_config.json")


def _check_memory(plan: "Plan", config: "ChatGLMConfig") -> Iterator[Finding]:
    from ..engine.memory_plan import OUTSIDE_TORCH, offloaded
    from ..engine.ram import free_ram
    from ..finetune.summary import describe_policies

    needed, room, where = plan.needed, plan.free - OUTSIDE_TORCH, "of each GPU"
    if plan.placement.on_cpu:
        needed, room = needed * plan.placement.processes, free_ram()
        where = "of the machine's memory"
    yield _compare_memory("memory of a step", needed, room, f"{where} ({describe_policies(plan)})")
    if plan.options.offload is True:
        needed = offloaded(config, plan.options)
        yield _compare_memory("memory of the optimizer", needed, free_ram(), "of the machine's")


def _compare_memory(check: str, needed: float, room: float, where: str) -> Finding:
    text = f"about {in_bytes(needed)} {where}, of which {in_bytes(room)} can be had"
    if needed <= room:
        return Finding(check, OK, text)
    cure = "fewer rows (trainer.per_device_train_batch_size), shorter ones, more GPUs with "
    cure += "engine.zero_stage: 3, engine.optimizer: adamw_8bit, or another trained: lora_lm, qlora"
    from ..engine.memory_check import ERROR_OF_ESTIMATES

    surely = needed > room * (1 + ERROR_OF_ESTIMATES)
    return Finding(check, FAILS if surely else WARNING, text, cure)
