"""Runs recipes under ZeRO-3 that break in different ways, one after the other; writes what each
process made of them.

Started by test_diverging_processes.py: ``python -m torch.distributed.run --nproc_per_node 2
divergence_worker.py FOLDER``.
"""

import json
import math
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from glm4v_patched.finetune.divergence import Diverged, DivergenceWatch
from glm4v_patched.finetune.plan import Plan
from glm4v_patched.finetune.process import leave
from glm4v_patched.finetune.worker import RecipeTrainer, train

BROKEN = "transformer.encoder.layers.1.mlp.dense_h_to_4h.weight"


@contextmanager
def loss_of_rank_1_is_nan(from_step: int):
    """What is told; the gradients are sound."""
    compute, see, steps = RecipeTrainer.compute_loss, DivergenceWatch.see, []

    def compute_loss(self, *args, **kwargs):
        steps.append(None)
        return compute(self, *args, **kwargs)

    def told(self, loss, norm):
        is_nan = dist.get_rank() == 1 and len(steps) >= from_step
        return see(self, loss * math.nan if is_nan else loss, norm)

    with (
        mock.patch.object(RecipeTrainer, "compute_loss", compute_loss),
        mock.patch.object(DivergenceWatch, "see", told),
    ):
        yield


def a_weight_is_broken_at_the_end():
    """One number of rank 1's share of it."""
    save = RecipeTrainer.save_model

    def break_and_save(self, *args, **kwargs):
        if dist.get_rank() == 1:
            self.model.get_parameter(BROKEN).ds_tensor.data[0] = math.nan
        save(self, *args, **kwargs)

    return mock.patch.object(RecipeTrainer, "save_model", break_and_save)


def main(folder: Path) -> None:
    cases = {
        "told": loss_of_rank_1_is_nan(2),
        "base": nullcontext(),
        "saved": a_weight_is_broken_at_the_end(),
    }
    outcomes = {}
    for name, broken in cases.items():
        plan = Plan.read(folder / name / "plan.json")
        with broken:
            try:
                train(plan)
                outcomes[name] = "trained"
            except Diverged as error:
                outcomes[name] = str(error)
    (folder / f"outcomes-{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
