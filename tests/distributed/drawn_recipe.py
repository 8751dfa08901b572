"""A tiny model, pictures and questions, and a recipe to train the one on the others."""

from pathlib import Path

from glm4v_patched.data.formats import write_conversations
from glm4v_patched.finetune.trainer import Recipe
from glm4v_patched.training.pictures import draw_data_set
from glm4v_patched.training.scratch import IMAGE_SIDE, build_from_scratch


def drawn_recipe(folder: Path, **settings) -> Recipe:
    """Write 20 conversations and random weights to ``folder``: five steps an epoch of two
    processes, ten of one."""
    conversations = draw_data_set(folder / "pictures", 20, seed=0, side=IMAGE_SIDE)
    write_conversations(folder / "train.jsonl", conversations)
    build_from_scratch(folder / "model", conversations, seed=0)
    defaults = {"out": "", "micro_batch": 2, "learning_rate": 1e-3, "precision": "fp32"}
    paths = {"model": str(folder / "model"), "data": str(folder / "train.jsonl")}
    return Recipe(**(paths | defaults | settings))
