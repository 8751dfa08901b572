"""Recipes for tests. Used by the tests of all folders."""

import json
from collections.abc import Mapping
from pathlib import Path

from glm4v_patched.data.formats import write_conversations
from glm4v_patched.demo.pictures import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.finetune.config import Recipe

LEAST = {
    "model": "m",
    "out": "o",
    "data": {"train": "d"},
    "trainer": {"max_steps": 10, "per_device_train_batch_size": 1, "learning_rate": 1.0},
    "engine": {"tower": "full", "language": "full"},
}


def recipe(changes: Mapping = {}) -> Recipe:  # noqa: B006 (only read)
    """A recipe whose files need not be there; changes are by dotted names."""
    return Recipe.of(LEAST).override(changes)


def drawn_recipe(folder: Path, changes: Mapping = {}) -> Recipe:  # noqa: B006 (only read)
    """Write 20 conversations and random weights to ``folder``: five steps an epoch of two
    processes, ten of one."""
    conversations = draw_data_set(folder / "pictures", 20, seed=0, side=IMAGE_SIDE)
    write_conversations(folder / "train.jsonl", conversations)
    build_from_scratch(folder / "model", conversations, seed=0)
    drawn = {
        "model": str(folder / "model"),
        "out": str(folder / "out"),
        "data.train": str(folder / "train.jsonl"),
        "engine": {"precision": "fp32"},
        "trainer.per_device_train_batch_size": 2,
        "trainer.learning_rate": 1e-3,
    }
    return recipe(drawn | dict(changes))


def train_here(recipe: Recipe, *arguments, **options) -> dict:
    """Train in this process, once the data has been checked; what ``training.json`` says."""
    from glm4v_patched.finetune.trainer import CHECKED_DATA, check_data, train

    out = Path(recipe.out)
    out.mkdir(exist_ok=True)
    check_data(recipe).write(out / CHECKED_DATA)
    train(recipe, *arguments, **options)
    return json.loads((out / "training.json").read_text())
