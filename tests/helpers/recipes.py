"""Recipes for tests. Used by the tests of all folders."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glm4v_patched.data.rows import write_conversations
from glm4v_patched.demo.images import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.engine.memory_plan import BatchShape, decide_options
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.recipe.file import write_values
from glm4v_patched.finetune.recipe.model import resolve_base
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.training_arguments import training_arguments
from glm4v_patched.models.base import pin_revision
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.processes import WORKERS, Ended, run_ranks

BATCH = BatchShape(num_sequences=1, sequence_length=2114, processes=2)
LEAST = {
    "model": "m",
    "out": "o",
    "data": {"train": "d"},
    "trainer": {"max_steps": 10, "per_device_train_batch_size": 1, "learning_rate": 1.0},
    "engine": {"tower": "full", "language": "full"},
}


def recipe(changes: Mapping = {}) -> Recipe:  # noqa: B006 (only read)
    """Return a recipe whose files need not exist; changes have dotted names."""
    return Recipe.from_values(LEAST).override(changes)


def write_recipe(recipe: Recipe, path: Path) -> None:
    write_values(path, recipe.model_dump())


def drawn_recipe(folder: Path, changes: Mapping = {}) -> Recipe:  # noqa: B006 (only read)
    """Write 20 conversations and random weights to ``folder``: five steps an epoch of two
    processes, ten of one."""
    conversations = draw_data_set(folder / "images", 20, seed=0, side=IMAGE_SIDE)
    write_conversations(folder / "train.jsonl", conversations)
    build_from_scratch(folder / "model", conversations, seed=0)
    values = {
        "model": str(folder / "model"),
        "out": str(folder / "out"),
        "data.train": str(folder / "train.jsonl"),
        "engine": {"precision": "fp32"},
        "trainer.per_device_train_batch_size": 2,
        "trainer.learning_rate": 1e-3,
    }
    return recipe(values | dict(changes))


def planned(recipe: Recipe, checkpoint: Path | None = None, processes: int = 1) -> Path:
    """Check the data, plan, and write both to ``out``; return the plan's file."""
    from glm4v_patched.finetune.plan import CHECKED_DATA, check_data, make_plan

    out = Path(recipe.out)
    out.mkdir(exist_ok=True)
    job = resolve_recipe(recipe)
    job = job.with_base(pin_revision(job.base))
    checked = check_data(job)
    checked.write(out / CHECKED_DATA)
    placement = Placement(processes, on_cpu=not torch.cuda.is_available())
    plan = make_plan(job, placement, checked, checkpoint)
    plan.write()
    return plan.path


def train_here(recipe: Recipe, checkpoint: Path | None = None) -> dict:
    """Check the data, train in this process, and return the contents of ``training.json``."""
    from glm4v_patched.finetune.plan import Plan
    from glm4v_patched.finetune.worker import train

    train(Plan.read(planned(recipe, checkpoint)))
    return json.loads(Path(recipe.out, "training.json").read_text())


def train_in_processes(
    *plans: Path,
    with_dropout: Sequence[Path] = (),
    diverging: Sequence[Path] = (),
    die_writing: str = "",
) -> Ended:
    """Train one after the other on two processes, for which the plans were made. See
    plan_worker.py. What hangs has failed, two minutes a plan after the two of the start."""
    worker = [str(WORKERS / "plan_worker.py"), *map(str, plans), "--with-dropout"]
    worker += [*map(str, with_dropout), "--diverging", *map(str, diverging)]
    worker += ["--die-writing", die_writing] if die_writing else []
    return run_ranks(*worker, seconds=120 * (1 + len([*plans, *with_dropout, *diverging])))


def arguments_of(run_recipe: Recipe, steps: int = 10) -> dict[str, Any]:
    """Return the ``TrainingArguments`` of a recipe on a CPU, with so many steps an epoch."""
    return training_arguments(
        resolve_recipe(run_recipe),
        decide_options(ChatGLMConfig(), run_recipe.engine_options(), BATCH, 0),
        steps,
        steps,
        on_cpu=True,
        evaluates=run_recipe.data.eval is not None,
        resumes=False,
        loading={},
    )


def built(run_recipe: Recipe) -> nn.Module:
    """Return the recipe's model, prepared for training on a CPU."""
    from glm4v_patched.finetune.worker import build_model

    return build_model(
        decide_options(ChatGLMConfig(), run_recipe.engine_options(), BATCH, 0),
        resolve_base(run_recipe),
    )
