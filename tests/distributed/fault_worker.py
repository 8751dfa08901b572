"""Trains a recipe with dropout, and dies while writing a checkpoint if it is told to.

Started by test_faults.py: ``python -m torch.distributed.run --nproc_per_node 2 fault_worker.py
PLAN [--die-writing NAME]``, where ``NAME`` is how the path of the
fatal file ends. glm-4v has no dropout of its own; without it, no random number would be drawn while
training, and states of the generators that were lost would not show.
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

options = argparse.ArgumentParser()
options.add_argument("plan", type=Path)
options.add_argument("--die-writing")


def build_with_dropout(*arguments) -> torch.nn.Module:
    model = build_model(*arguments)
    (embedding,) = [module for module in model.modules() if isinstance(module, Embedding)]
    embedding.register_forward_hook(
        lambda module, inputs, output: torch.nn.functional.dropout(output, 0.1, module.training)
    )
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
    arguments = options.parse_args()
    build_model = worker.build_model
    worker.build_model = build_with_dropout
    if arguments.die_writing:
        die_half_way(arguments.die_writing)
    worker.train(Plan.read(arguments.plan))
    process.leave()
