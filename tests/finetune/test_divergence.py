"""NaN and infinity in loss, gradients and weights are noticed, shown and no result."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from glm4v_patched.finetune.checkpoints import find_checkpoint_problems
from glm4v_patched.finetune.divergence import (
    CHECK_INTERVAL,
    Diverged,
    DivergenceMonitor,
    require_finite_weights,
)
from tests.helpers.recipes import train_here
from tests.helpers.sharded import as_sharded

NAN, INF = math.nan, math.inf
OPTIMIZER = SimpleNamespace(param_groups=[{"lr": 0.5}])


class Run:
    """Steps of a watch without a Trainer."""

    def __init__(self, limit: int, max_steps: int = 100, logs: bool = True, done: int = 0):
        self.watch = DivergenceMonitor(limit)
        self.state = TrainerState(global_step=done, max_steps=max_steps)
        self.logs = logs
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.watch.on_train_begin(self.args, self.state, None, nn.Linear(1, 1))

    def step(self, *losses: float, norm=None, saves=False, evaluates=False) -> TrainerControl:
        control = TrainerControl(should_log=self.logs, should_save=saves, should_evaluate=evaluates)
        self.watch.on_step_begin(self.args, self.state, control, OPTIMIZER)
        self.recorded = [self.watch.record(torch.tensor(loss), norm) for loss in losses]
        self.state.global_step += 1
        self.watch.on_step_end(self.args, self.state, control)
        return control


def test_so_many_bad_losses_in_a_row_end_the_run_and_fewer_do_not():
    run = Run(limit=3)
    for loss in (1.0, NAN, INF, 1.0, -INF, NAN):
        assert not run.step(loss).should_training_stop and run.watch.verdict is None
    control = run.step(NAN, saves=True)
    assert control.should_training_stop and control.should_log and not control.should_save
    assert "3 steps in a row, 5 to 7 (learning rate 0.5 at step 5)" in run.watch.verdict


def test_a_gradient_norm_that_is_not_finite_counts_as_does_one_bad_batch_of_several():
    for norm in (torch.tensor(NAN), -1.0):
        run = Run(limit=2)
        run.step(1.0, norm=norm)
        assert not run.watch.verdict
        run.step(1.0, NAN, 1.0)
        assert "in 2 steps in a row, 1 to 2" in run.watch.verdict
        assert "check the model and the data" in run.watch.verdict


def test_between_logs_bad_steps_are_read_every_so_many_steps_without_a_look_at_the_device(
    monkeypatch,
):
    run = Run(limit=1, logs=False)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, None)
        for _ in range(CHECK_INTERVAL - 1):
            run.step(NAN, norm=torch.tensor(1.0))
    assert run.watch.verdict is None
    run.step(1.0)
    assert "in step 1 (learning rate" in run.watch.verdict


def test_bad_steps_end_the_run_although_good_ones_follow_and_the_first_streak_is_named():
    run = Run(limit=2, logs=False)
    for loss in (1.0, NAN, NAN, 1.0, NAN, NAN):
        run.step(loss)
    run.step(1.0, saves=True)
    assert "in 2 steps in a row, 2 to 3" in run.watch.verdict


def test_the_limit_is_no_more_than_the_steps_of_the_run_wherever_it_is_continued():
    for done, max_steps, ends in ((0, 2, True), (30, 32, False)):
        run = Run(limit=5, max_steps=max_steps, logs=False, done=done)
        run.step(NAN)
        assert run.step(NAN).should_training_stop is ends
        assert not ends or "in 2 steps in a row, 1 to 2" in run.watch.verdict


def test_no_checkpoint_is_saved_of_a_run_that_ends_diverged_nor_is_such_a_step_the_best():
    run = Run(limit=2, logs=False)
    for loss in (NAN, NAN):
        run.step(loss)
    control = run.step(1.0, saves=True)  # bad steps are read here, and the last one was not
    assert control.should_training_stop and not control.should_save and not run.watch.is_nonfinite
    run = Run(limit=2, logs=False)
    for loss, is_nonfinite in ((NAN, True), (1.0, False)):
        run.step(loss, evaluates=True)
        assert run.watch.is_nonfinite is is_nonfinite


def test_a_bad_loss_is_left_out_of_the_sum_given_back_to_the_log_and_not_saved(caplog):
    run = Run(limit=10)
    assert run.step(2.0, saves=True).should_save
    assert not run.step(2.0, NAN, saves=True).should_save
    assert "no checkpoint is saved after step 2" in caplog.text
    assert run.recorded == [2.0, 0.0]
    assert math.isnan(run.watch.pop_nonfinite_loss()) and run.watch.pop_nonfinite_loss() == 0.0
    run.step(-INF)
    assert run.watch.pop_nonfinite_loss() == -INF


@pytest.mark.parametrize(("dtype", "bad"), [(torch.float32, NAN), (torch.bfloat16, -INF)])
def test_one_bad_number_anywhere_is_found_and_large_sums_are_none(dtype, bad):
    weights = {name: torch.ones(1000, 3, dtype=dtype) for name in "abc"}
    weights["b"] *= torch.finfo(dtype).max
    weights["count"] = torch.ones(3, dtype=torch.int32)
    named = [(name, nn.Parameter(w, requires_grad=False)) for name, w in weights.items()]
    require_finite_weights(named, "bad")
    weights["c"][777, 1] = bad
    with pytest.raises(Diverged, match="^bad, in 1 tensor: c$"):
        require_finite_weights(named, "bad")


def test_shards_of_zero_3_are_read_without_their_padding(monkeypatch):
    for rank, has_bad in ((0, True), (2, False), (3, False)):
        shard = torch.tensor([1.0, 2.0, NAN, NAN] if rank < 3 else [NAN] * 4)
        parameter = as_sharded(nn.Parameter(torch.empty(0)), ds_tensor=shard, ds_numel=10)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        with pytest.raises(Diverged) if has_bad else nullcontext():
            require_finite_weights([("w", parameter)], "bad")


def train_to_nothing(recipe, message: str) -> dict:
    """The report of a run that ends so and leaves no model."""
    with pytest.raises(Diverged, match=message):
        train_here(recipe)
    report = json.loads(Path(recipe.out, "training.json").read_text(), parse_constant=pytest.fail)
    assert not report["finished"] and "training diverged" in report["error"]
    assert not [*Path(recipe.out).glob("*.safetensors")]
    return report


def test_a_learning_rate_that_breaks_the_model_ends_the_run_and_leaves_none(mine):
    changes = {"trainer.learning_rate": 1e20, "trainer.max_steps": 6}
    message = r"3 steps in a row, 3 to 5 \(learning rate .* at step 3"
    report = train_to_nothing(mine.override(changes), message)
    assert [entry["loss"] for entry in report["history"][2:]] == ["nan"] * 3


def test_finite_weights_whose_loss_is_not_are_no_model_and_no_checkpoint(mine):
    """Ruined by the last update, which no step has seen."""
    changes = {"trainer.learning_rate": 1e30, "trainer.save_steps": 2, "trainer.max_steps": 4}
    train_to_nothing(mine.override(changes), "is NaN or infinite with the weights of step 2, which")
    assert find_checkpoint_problems(Path(mine.out, "checkpoint-2"))


@pytest.mark.parametrize(("value", "precision"), [(INF, "fp32"), (3.4e38, "bf16")])
def test_weights_that_break_in_the_last_step_are_not_left_as_a_model(
    mine, monkeypatch, value, precision
):
    """Without ZeRO they are trained in fp32, and the largest of these are infinite in bf16."""
    end = DivergenceMonitor.on_step_end

    def change(self, args, state, control, model, **kwargs):
        next(p for p in model.parameters() if p.requires_grad).data[0, 0] = value
        return end(self, args, state, control, model=model, **kwargs)

    monkeypatch.setattr(DivergenceMonitor, "on_step_end", change)
    changes = {"trainer.max_steps": 1, "engine.precision": precision}
    message = r"become NaN or infinite, in 1 tensor: transformer.*lora_A"
    train_to_nothing(mine.override(changes), message)
