"""Trains plans one after the other: ``plan_worker.py [PLAN ...] [--with-dropout PLAN ...]``.

glm-4v has no dropout of its own; without it no random number would be drawn while training, and
states of the generators that were lost would not show. ``--die-writing NAME``: half-way through a
file whose path ends so the process dies. Beside each plan, ``tower.txt`` says how often rank 0 ran
the tower.
"""

import argparse
import io
import os
import signal
from pathlib import Path

import torch

from glm4v_patched.finetune import process, worker
from glm4v_patched.finetune.plan import Plan
from glm4v_patched.remote.modeling_chatglm import Embedding
from glm4v_patched.remote.visual import EVA2CLIPModel

options = argparse.ArgumentParser()
options.add_argument("plans", type=Path, nargs="*")
options.add_argument("--with-dropout", type=Path, nargs="*", default=[])
options.add_argument("--die-writing")
build_model = worker.build_model
tower_runs: list[None] = []


def drop_out(module: torch.nn.Module, _, output: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(output, dropout, module.training)


def build(*arguments) -> torch.nn.Module:
    model = build_model(*arguments)
    for module in model.modules():
        if isinstance(module, Embedding) and dropout:
            module.register_forward_hook(drop_out)
        elif isinstance(module, EVA2CLIPModel):
            module.register_forward_hook(lambda *call: tower_runs.append(None))
    return model


def die_half_way(name: str) -> None:
    save = torch.save

    def save_or_die(values, file, **settings):
        if not str(file).endswith(name):
            return save(values, file, **settings)
        whole = io.BytesIO()
        save(values, whole, **settings)
        Path(file).write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_or_die


if __name__ == "__main__":
    asked = options.parse_args()
    worker.build_model = build
    if asked.die_writing:
        die_half_way(asked.die_writing)
    for plan in asked.plans + asked.with_dropout:
        dropout = 0.1 if plan in asked.with_dropout else 0.0
        worker.train(Plan.read(plan))
        # transformers 4 leaves it there, for the next training.
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        if process.is_first():
            plan.with_name("tower.txt").write_text(str(len(tower_runs)))
        tower_runs.clear()
    process.leave()
