"""Trains a recipe with a frozen tower, and prints how often rank 0 ran it.

Started by test_reused_features.py: ``python -m torch.distributed.run --nproc_per_node 2
frozen_recipe_worker.py SETTINGS``.
"""

import sys
from pathlib import Path

import torch

from glm4v_patched.training import recipe

checkpoint_activations = recipe.checkpoint_activations
runs = []


def freeze_tower(model) -> None:
    checkpoint_activations(model)
    model.transformer.vision.requires_grad_(False)
    model.transformer.vision.register_forward_hook(lambda *call: runs.append(1))


if __name__ == "__main__":
    recipe.checkpoint_activations = freeze_tower
    recipe.train(recipe.Recipe.read(Path(sys.argv[1])))
    if torch.distributed.get_rank() == 0:
        print(f"the tower ran {len(runs)} times")
    torch.distributed.destroy_process_group()
