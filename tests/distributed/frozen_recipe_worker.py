"""Trains a recipe, and prints how often rank 0 ran the tower.

Started by test_reused_features.py: ``python -m torch.distributed.run --nproc_per_node 2
frozen_recipe_worker.py PLAN``.
"""

import sys
from pathlib import Path

import torch

from glm4v_patched.finetune import process, worker
from glm4v_patched.finetune.plan import Plan
from glm4v_patched.remote.visual import EVA2CLIPModel

build_model = worker.build_model
runs = []


def build_and_count(*arguments) -> torch.nn.Module:
    model = build_model(*arguments)
    (tower,) = [module for module in model.modules() if isinstance(module, EVA2CLIPModel)]
    tower.register_forward_hook(lambda *call: runs.append(1))
    return model


if __name__ == "__main__":
    worker.build_model = build_and_count
    worker.train(Plan.read(Path(sys.argv[1])))
    if torch.distributed.get_rank() == 0:
        print(f"the tower ran {len(runs)} times")
    process.leave()
