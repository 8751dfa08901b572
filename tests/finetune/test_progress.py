"""What is seen of a training while it goes on, and what is said of it at its end."""

import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from transformers import TrainerControl, TrainerState, TrainingArguments

from glm4v_patched.finetune import progress
from glm4v_patched.finetune.ending import describe_end
from glm4v_patched.finetune.plots import plot_loss
from glm4v_patched.finetune.progress import LossPlot, Progress
from glm4v_patched.finetune.recipe import Recipe
from tests.helpers.recipes import train_here

LINE = (
    r"step \d+/\d+ epoch \d\.\d\d loss [\d.]+ lr (0|\d\.\de-\d) [\d.]+ samples/s "
    + r"[\d.]+ GiB " * torch.cuda.is_available()
    + r"left \d+:\d\d:\d\d"
)


@pytest.fixture
def epochs(mine) -> Recipe:
    """Two epochs, a fifth of the rows held out."""
    changes = {"max_steps": None, "num_train_epochs": 2.0, "gradient_accumulation_steps": 2}
    changes = {f"trainer.{name}": value for name, value in changes.items()}
    return mine.override(changes | {"data.eval": 0.2})


class Steps:
    """Steps of ``Progress`` without a Trainer, by a clock of their own."""

    def __init__(self, monkeypatch, folder: Path, is_first: bool = True):
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)
        self.asked = TrainingArguments(str(folder), use_cpu=True, report_to="none")
        self.state = TrainerState(is_world_process_zero=is_first, max_steps=10, epoch=0.5)
        self.progress = Progress(batch=8)
        self.call("on_train_begin")

    def call(self, event: str, **more) -> None:
        getattr(self.progress, event)(self.asked, self.state, TrainerControl(), **more)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.state.global_step += 1
        self.call("on_step_end")

    def log(self) -> None:
        self.call("on_log", logs={"loss": 1.23456, "learning_rate": 1e-4})


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    return drawn


def test_a_training_prints_a_line_a_log_step_and_an_evaluation_and_nothing_else(epochs, capfd):
    report = train_here(epochs)
    told = capfd.readouterr()
    lines = told.out.splitlines()
    steps = [line for line in lines if re.fullmatch(LINE, line)]
    last = report["steps"]["done"]
    assert [line.split()[1] for line in steps] == [f"{n}/{last}" for n in range(1, last + 1)]
    evaluation = r"step \d+/\d+ epoch [12].00 eval_loss [\d.]+ eval_exact_match [\d.]+, in .* s"
    assert len([line for line in lines if re.fullmatch(evaluation, line)]) == 2
    assert len(lines) == last + 2, lines
    loaded, _, trained = told.err.partition("the first step ...")
    for word in ("has new PAD/BOS/EOS tokens", "shards", "{'"):
        assert word not in loaded + trained
    assert "%|" not in trained


def test_a_line_says_how_fast_the_steps_since_the_last_one_were(monkeypatch, tmp_path, capsys):
    steps = Steps(monkeypatch, tmp_path)
    for seconds in (60, 2, 6, 9):  # first layers are compiled, workers start
        steps.step(seconds)
        if seconds != 2:
            steps.log()
        steps.now += 500
        steps.call("on_save")
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/10 epoch 0.50 loss 1.235 lr 1.0e-4 0.133 samples/s ")
    assert " 2 samples/s " in second and second.endswith(" left 0:00:28")
    assert steps.progress.found()["samples_per_s"] is None
    for event in ("on_evaluate", "on_save"):
        steps.step(3)
        steps.now += 100
        steps.call(event)
    assert steps.progress.found()["samples_per_s"] == 8 / 3
    Steps(monkeypatch, tmp_path, is_first=False).log()  # another process says nothing
    assert capsys.readouterr() == ("", "")


def test_the_loss_is_drawn_as_it_trains_and_at_most_so_often(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(progress, "plot_loss", lambda *given: drawn.append(given))
    plot, steps = LossPlot(), Steps(monkeypatch, tmp_path)
    for now in (40, 50, 60, 75):
        steps.now = now
        plot.on_log(steps.asked, steps.state, TrainerControl())
    assert len(drawn) == 2


def test_what_draws_the_loss_keeps_nothing_of_the_training(tmp_path, monkeypatch):
    """As matplotlib keeps the errors of its parser of fonts, which have the frames of all callers;
    data workers that ended later than their loader's queues cost five seconds."""
    kept = []

    def draw(history, path, *marks):
        try:
            raise ValueError
        except ValueError as error:
            kept.append(error)

    class Model:
        pass

    def train() -> weakref.ref:
        model = Model()
        asked = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        LossPlot().on_log(asked, TrainerState(is_world_process_zero=True), TrainerControl())
        return weakref.ref(model)

    monkeypatch.setattr(progress, "plot_loss", draw)
    left = train()
    assert kept and left() is None


def test_a_plot_has_both_losses_the_checkpoints_and_the_best_step(tmp_path, figures):
    history = [{"step": step, "loss": 3.0 / step} for step in range(1, 2001)]
    history += [{"step": step, "eval_loss": 0.1} for step in (1000, 2000)]
    plot_loss(history, tmp_path / "loss.png", saved=[500, 1000], best=1000)
    (axes,) = figures[0].axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert lines["evaluation"] == [1000, 2000] and len(lines["training"]) == 2000
    assert lines["checkpoint"] == [500, 1000] and lines["best evaluation: step 1000"] == [1000] * 2
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {*lines}


@pytest.mark.parametrize("losses", [[2.0, "nan", 1.0, "inf"], ["nan"], []])
def test_a_curve_has_marks_where_the_loss_is_not_finite(tmp_path, figures, losses):
    plot_loss([{"step": s, "loss": v} for s, v in enumerate(losses, 1)], tmp_path / "loss.png")
    (axes,) = figures[0].axes
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_gid() == "not finite"]
    bad = [step for step, loss in enumerate(losses, 1) if isinstance(loss, str)]
    assert sorted(marks) == bad and ("NaN or infinite" in axes.get_title()) == bool(bad)


def test_the_end_of_a_run_without_evaluation_has_its_last_loss(tmp_path, mine):
    report = {"steps": {"done": 1, "asked": 1}, "measured": {"samples_per_s": None}}
    report["history"] = [{"step": 1, "loss": 2.5}]
    (tmp_path / "training.json").write_text(json.dumps(report))
    rows = tmp_path / "held out.jsonl"
    rows.touch()
    told = describe_end(mine.override({"out": str(tmp_path), "data.eval": str(rows)}), False)
    end = r"ended +after all 1 steps\nsaved +.* of step 1: loss 2.5 at"
    assert re.search(end, told)
    assert told.endswith(f"evaluate {tmp_path} --data '{rows}' --out evaluation")
