"""Train plans one after the other: ``plan_worker.py [PLAN ...] [--with-dropout PLAN ...]``.

Plans of ``--diverging`` come first, those of ``--with-dropout`` last.

glm-4v has no dropout of its own. Without dropout, training would use no random numbers, and a lost
RNG state would go unnoticed. ``--die-writing NAME``: the process dies half-way through writing a
file whose path ends with NAME. ``--diverging PLAN ...``: train with the patch that BREAKS has for
the name of the plan's folder, if any; the error of process N is in ``outcome-N.txt`` beside the
plan.
"""

import argparse
import io
import math
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import deepspeed  # noqa: F401  (before the ranks are forked)
import torch
import torch.distributed as dist

from glm4v_patched.finetune import process, worker
from glm4v_patched.finetune.bad_rows import BadRow
from glm4v_patched.finetune.divergence import Diverged, DivergenceMonitor
from glm4v_patched.finetune.plan import Plan
from glm4v_patched.remote.modeling_chatglm import Embedding

options = argparse.ArgumentParser()
options.add_argument("plans", type=Path, nargs="*")
options.add_argument("--with-dropout", type=Path, nargs="*", default=[])
options.add_argument("--diverging", type=Path, nargs="*", default=[])
options.add_argument("--die-writing")
BROKEN = "transformer.encoder.layers.1.mlp.dense_h_to_4h.weight"
build_model, see = worker.build_model, DivergenceMonitor.record
save_model, save = worker.RecipeTrainer.save_model, torch.save
require_finite_loss = worker.RecipeTrainer._require_finite_loss
evaluate = worker.RecipeTrainer.evaluate


def drop_out(module: torch.nn.Module, _, output: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(output, 0.1, module.training)


def build_with_dropout(*arguments) -> torch.nn.Module:
    model = build_model(*arguments)
    for module in model.modules():
        if isinstance(module, Embedding):
            module.register_forward_hook(drop_out)
    return model


def save_half(values, file, **settings):
    if not str(file).endswith(arguments.die_writing):
        return save(values, file, **settings)
    complete = io.BytesIO()
    save(values, complete, **settings)
    Path(file).write_bytes(complete.getvalue()[: len(complete.getvalue()) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def see_nan(self, loss, norm):
    """Report rank 1's loss as NaN from the second step on; its gradients are finite."""
    self.steps_seen = getattr(self, "steps_seen", 0) + 1
    is_nan = dist.get_rank() == 1 and self.steps_seen > 1
    return see(self, loss * math.nan if is_nan else loss, norm)


def break_and_save(self, *args, **kwargs):
    """Set one number of rank 1's shard of a weight to NaN before the model is saved."""
    if dist.get_rank() == 1:
        self.model.get_parameter(BROKEN).ds_tensor.data[0] = math.nan
    save_model(self, *args, **kwargs)


def break_last_loss(self):
    """Make the loss NaN that rank 1 computes once more, with the weights of the last update."""
    loss_of = self.compute_loss
    if dist.get_rank() == 1:
        self.compute_loss = lambda *inputs: loss_of(*inputs) * math.nan
    require_finite_loss(self)


def evaluate_and_end(self, *args, **kwargs):
    """Let each process count another number of correct answers, and end with the average."""
    self.eval_generations.answer = lambda *_: dist.get_rank()
    raise Diverged(f"exact match {evaluate(self, *args, **kwargs)['eval_exact_match']}")


BREAKS = {
    "reported": mock.patch.object(DivergenceMonitor, "record", see_nan),
    "saved": mock.patch.object(worker.RecipeTrainer, "save_model", break_and_save),
    "last": mock.patch.object(worker.RecipeTrainer, "_require_finite_loss", break_last_loss),
    "evaluated": mock.patch.object(worker.RecipeTrainer, "evaluate", evaluate_and_end),
}


def train(plan: Path) -> None:
    try:
        worker.train(Plan.read(plan))
    finally:
        # transformers 4 leaves it set, which would affect the next training.
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


if __name__ == "__main__":
    arguments = options.parse_args()
    if arguments.die_writing:
        torch.save = save_half
    for plan in arguments.diverging:
        with BREAKS.get(plan.parent.name, nullcontext()):
            try:
                train(plan)
            except (BadRow, Diverged) as error:
                assert plan.with_name("training.json").exists(), "it leaves before the report"
                plan.with_name(f"outcome-{os.environ['RANK']}.txt").write_text(str(error))
    for plan in arguments.plans + arguments.with_dropout:
        worker.build_model = build_with_dropout if plan in arguments.with_dropout else build_model
        train(plan)
    process.exit_process()
