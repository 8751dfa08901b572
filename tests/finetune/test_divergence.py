"""NaN and infinity in loss, gradients and weights are noticed, shown and no result."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerControl, TrainerState

from glm4v_patched.engine.deepspeed.gradient_norm import _in_place
from glm4v_patched.finetune.checkpoints import find_faults
from glm4v_patched.finetune.divergence import (
    READ_EVERY,
    Diverged,
    DivergenceWatch,
    WeightsCheck,
)
from glm4v_patched.finetune.plots import plot_loss
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.worker import RecipeTrainer
from tests.helpers.recipes import drawn_recipe, train_here
from tests.helpers.sharded import as_sharded

NAN, INF = math.nan, math.inf
OPTIMIZER = SimpleNamespace(param_groups=[{"lr": 0.5}])


class Run:
    """Steps of a watch without a Trainer."""

    def __init__(self, limit: int, max_steps: int = 100, logs: bool = True):
        self.watch = DivergenceWatch(limit)
        self.state = TrainerState(global_step=0, max_steps=max_steps)
        self.logs = logs
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.watch.on_train_begin(self.args, self.state, None, nn.Linear(1, 1))

    def step(self, *losses: float, norm=None, saves: bool = False) -> TrainerControl:
        control = TrainerControl(should_log=self.logs, should_save=saves)
        self.watch.on_step_begin(self.args, self.state, control, OPTIMIZER)
        self.kept = [self.watch.see(torch.tensor(loss), norm).item() for loss in losses]
        self.state.global_step += 1
        self.watch.on_step_end(self.args, self.state, control)
        return control


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_so_many_bad_losses_in_a_row_end_the_run_and_fewer_do_not(bad):
    run = Run(limit=3)
    for loss in (1.0, bad, bad, 1.0, bad, bad):
        assert not run.step(loss).should_training_stop
        assert run.watch.verdict is None
    control = run.step(bad, saves=True)
    assert control.should_training_stop and control.should_log and not control.should_save
    assert "3 steps in a row, 5 to 7 (learning rate 0.5 at step 5)" in run.watch.verdict


@pytest.mark.parametrize("norm", [torch.tensor(NAN), torch.tensor(INF), -1.0, INF])
def test_a_gradient_norm_that_is_not_finite_counts_as_does_one_bad_batch_of_several(norm):
    run = Run(limit=2)
    run.step(1.0, norm=norm)
    assert not run.watch.verdict
    run.step(1.0, NAN, 1.0)
    assert "in 2 steps in a row, 1 to 2" in run.watch.verdict
    assert "whether model and data are right" in run.watch.verdict


def test_between_logs_bad_steps_are_read_every_so_many_steps():
    run = Run(limit=1, logs=False)
    for _ in range(READ_EVERY - 1):
        run.step(NAN)
    assert run.watch.verdict is None
    run.step(1.0)
    assert "in step 1 (learning rate" in run.watch.verdict


def test_a_run_shorter_than_the_limit_whose_every_step_is_bad_ends():
    run = Run(limit=5, max_steps=2, logs=False)
    run.step(NAN)
    run.step(NAN)
    assert "in 2 steps in a row, 1 to 2" in run.watch.verdict


def test_a_bad_loss_is_left_out_of_the_sum_and_given_back_to_the_log():
    run = Run(limit=10)
    run.step(2.0, NAN)
    assert run.kept == [2.0, 0.0]
    assert math.isnan(run.watch.left_out_of_log())
    assert run.watch.left_out_of_log() == 0.0
    run.step(-INF)
    assert run.watch.left_out_of_log() == -INF


def test_no_checkpoint_is_saved_after_a_bad_step(caplog):
    run = Run(limit=3)
    assert run.step(1.0, saves=True).should_save
    assert not run.step(NAN, saves=True).should_save
    assert "no checkpoint is saved after step 2" in caplog.text
    assert run.step(1.0, saves=True).should_save


def test_a_step_costs_no_look_at_the_device(monkeypatch):
    run = Run(limit=3, logs=False)
    for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, None)
    run.watch.on_step_begin(run.args, run.state, None, OPTIMIZER)
    run.watch.see(torch.tensor(NAN), torch.tensor(1.0))
    run.state.global_step = 1
    run.watch.on_step_end(run.args, run.state, TrainerControl())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_bad_number_anywhere_is_found_and_large_sums_are_none(dtype, bad):
    weights = {name: torch.ones(1000, 3, dtype=dtype) for name in "abc"}
    weights["b"] *= torch.finfo(dtype).max
    weights["count"] = torch.ones(3, dtype=torch.int32)

    def names() -> list[str]:
        named = [(n, nn.Parameter(t, requires_grad=False)) for n, t in weights.items()]
        return WeightsCheck(named).names()

    assert names() == []
    weights["c"][777, 1] = bad
    assert names() == ["c"]


def test_shards_of_zero_3_are_read_without_their_padding(monkeypatch):
    shard = torch.tensor([1.0, 2.0, NAN, NAN])
    parameter = as_sharded(nn.Parameter(torch.empty(0)), ds_tensor=shard, ds_numel=10)
    for rank, found in ((0, ["w"]), (1, ["w"]), (2, []), (3, [])):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        assert WeightsCheck([("w", parameter)]).names() == found, rank


def test_zero_3_s_norm_of_gradients_that_are_not_finite_is_infinite():
    """DeepSpeed's -1, squared, would be 1."""
    norm = _in_place(lambda gradients, parameters, norm_type: torch.tensor(-1.0))
    assert norm([torch.ones(2)], [None], 2) == INF
    norm = _in_place(lambda gradients, parameters, norm_type: gradients[0])
    assert norm([torch.tensor([3.0, 4.0])], [None], 2) == 5


def test_a_curve_has_marks_where_the_loss_is_not_finite(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self))
    losses = [2.0, "nan", 1.0, "inf"]
    plot_loss([{"step": s, "loss": v} for s, v in enumerate(losses, 1)], tmp_path / "loss.png")
    (axes,) = figures[0].axes
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_gid() == "not finite"]
    assert sorted(marks) == [2, 4]
    assert "NaN or infinite" in axes.get_title()


@pytest.mark.parametrize("losses", [["nan"], ["inf", "nan"], [0.0], []])
def test_a_curve_without_a_loss_is_drawn_too(tmp_path, losses):
    plot_loss([{"step": s, "loss": v} for s, v in enumerate(losses, 1)], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").is_file()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    changes = {
        "trainer.max_steps": 6,
        "trainer.save_steps": 2,
        "trained": "lora_lm",
        "engine.zero_stage": 0,
    }
    return drawn_recipe(tmp_path_factory.mktemp("diverging"), changes)


def test_a_learning_rate_that_breaks_the_model_ends_the_run_and_leaves_none(drawn, tmp_path):
    out = tmp_path / "out"
    changes = {"out": str(out), "trainer.learning_rate": 1e20, "trainer.save_steps": None}
    recipe = drawn.override(changes)
    with pytest.raises(Diverged, match=r"3 steps in a row, 3 to 5 \(learning rate .* at step 3"):
        train_here(recipe)
    report = json.loads((out / "training.json").read_text(), parse_constant=pytest.fail)
    assert not report["finished"] and "training diverged" in report["error"]
    assert "no checkpoint is complete" in report["error"]
    assert [entry["loss"] for entry in report["history"][2:]] == ["nan"] * 3
    assert not [*out.glob("*.safetensors")]


@pytest.mark.parametrize("save_steps", [None, 2])
def test_finite_weights_whose_loss_is_not_are_no_model_and_no_checkpoint(
    save_steps, drawn, tmp_path
):
    """Ruined by the last update, which no step has seen."""
    out = tmp_path / "out"
    changes = {"out": str(out), "trainer.learning_rate": 1e30, "trainer.save_steps": save_steps}
    recipe = drawn.override(changes | {"trainer.max_steps": 4 if save_steps else 2})
    with pytest.raises(Diverged, match="is NaN or infinite with the weights of step 2; .*no model"):
        train_here(recipe)
    report = json.loads((out / "training.json").read_text())
    assert not report["finished"] and "no checkpoint is complete" in report["error"]
    assert not [*out.glob("*.safetensors")]
    assert save_steps is None or find_faults(out / "checkpoint-2")


def test_weights_that_break_in_the_last_step_are_not_left_as_a_model(drawn, tmp_path, monkeypatch):
    out = tmp_path / "out"
    recipe = drawn.override({"out": str(out), "trainer.max_steps": 2, "trainer.save_steps": None})
    stop = DivergenceWatch.on_step_end

    def break_one(self, args, state, control, model, **kwargs):
        if state.global_step == 2:
            name, weight = next((n, p) for n, p in model.named_parameters() if p.requires_grad)
            weight.data[0, 0] = INF
        return stop(self, args, state, control, model=model, **kwargs)

    monkeypatch.setattr(DivergenceWatch, "on_step_end", break_one)
    with pytest.raises(Diverged, match=r"infinite, in 1 tensors: transformer.*lora_A.*no model"):
        train_here(recipe)
    assert not json.loads((out / "training.json").read_text())["finished"]
    assert not [*out.glob("*.safetensors")]


def test_weights_that_bf16_cannot_hold_are_looked_at_as_they_are_saved(
    drawn, tmp_path, monkeypatch
):
    """Without ZeRO they are trained in fp32, and the largest of these are infinite in bf16."""
    out = tmp_path / "out"
    changes = {"trainer.max_steps": 1, "trainer.save_steps": None, "engine.precision": "bf16"}
    end = DivergenceWatch.on_step_end

    def grow(self, args, state, control, model, **kwargs):
        next(p for p in model.parameters() if p.requires_grad).data[0, 0] = 3.4e38
        return end(self, args, state, control, model=model, **kwargs)

    monkeypatch.setattr(DivergenceWatch, "on_step_end", grow)
    with pytest.raises(Diverged, match="infinite, in 1 tensors"):
        train_here(drawn.override({"out": str(out)} | changes))
    assert not [*out.glob("*.safetensors")]


def test_a_base_with_one_nan_is_named_before_the_first_step(drawn, tmp_path):
    import shutil

    model = tmp_path / "model"
    shutil.copytree(drawn.model, model)
    weights = load_file(model / "model.safetensors")
    weights["transformer.encoder.layers.1.mlp.dense_h_to_4h.weight"][3, 4] = NAN
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    recipe = drawn.override({"model": str(model), "out": str(tmp_path / "out")})
    with pytest.raises(Diverged, match=r"before the first step, in 1 tensors: .*layers\.1\.mlp"):
        train_here(recipe)


def test_a_bad_step_within_the_limit_is_in_the_history_and_the_run_goes_on(
    drawn, tmp_path, monkeypatch
):
    recipe = drawn.override({"out": str(tmp_path / "out"), "trainer.save_steps": None})
    see, seen = DivergenceWatch.see, []

    def see_one_bad(self, loss, norm):
        seen.append(loss)
        return see(self, torch.full_like(loss, INF) if len(seen) == 3 else loss, norm)

    monkeypatch.setattr(DivergenceWatch, "see", see_one_bad)
    report = train_here(recipe)
    assert report["finished"]
    losses = [entry["loss"] for entry in report["history"]]
    assert losses[2] == "inf" and all(0 < x < 10 for x in losses[:2] + losses[3:])
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_mode & 0o044 == 0o044


def test_deepspeeds_norm_is_looked_at_once_a_step(monkeypatch):
    """Before the last batch of a step it is the norm of the step before."""
    seen = []
    trainer: Any = object.__new__(RecipeTrainer)
    trainer.watch = SimpleNamespace(see=lambda loss, norm: seen.append(norm))
    trainer.is_deepspeed_enabled = True
    monkeypatch.setattr(Trainer, "training_step", lambda *arguments: torch.tensor(1.0))
    engine = SimpleNamespace(get_global_grad_norm=lambda: 0.5)
    for is_last in (False, False, True):
        trainer.accelerator = SimpleNamespace(sync_gradients=is_last)
        trainer.training_step(engine, {})
    assert seen == [None, None, 0.5]
