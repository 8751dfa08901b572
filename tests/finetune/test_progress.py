"""The lines and plot of a running training, and the lines at its end."""

import json
import re
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from transformers import TrainerControl, TrainerState, TrainingArguments

from glm4v_patched.finetune import progress
from glm4v_patched.finetune.ending import describe_end
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.plots import plot_loss
from glm4v_patched.finetune.progress import Progress
from glm4v_patched.terminal_text import Activity
from tests.helpers.recipes import train_here

LINE = (
    r"step \d+/\d+ epoch \d\.\d\d loss [\d.]+ lr (0|\d\.\de-\d) [\d.]+ samples/s "
    + r"[\d.]+ GiB " * torch.cuda.is_available()
    + r"left \d+:\d\d:\d\d"
)


@pytest.fixture(autouse=True)
def plots_are_empty():
    """Draw them here."""


class Steps:
    """Steps of ``Progress`` without a Trainer, by a clock of their own."""

    def __init__(self, monkeypatch, folder: Path, is_first: bool = True):
        self.now, self.plots = 0.0, []
        monkeypatch.setattr(progress, "plot_loss", lambda *arguments: self.plots.append(self.now))
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)
        self.asked = TrainingArguments(str(folder), use_cpu=True, report_to="none")
        self.state = TrainerState(is_world_process_zero=is_first, max_steps=10, epoch=0.5)
        self.progress = Progress(8, Activity("training", 10, "step", 0))
        self.call("on_train_begin")

    def call(self, event: str, **more) -> None:
        getattr(self.progress, event)(self.asked, self.state, TrainerControl(), **more)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.state.global_step += 1
        self.call("on_step_end")

    def log(self) -> None:
        self.call("on_log", logs={"loss": 1.23456, "learning_rate": 1e-4})


def test_a_training_prints_a_line_a_log_step_and_an_evaluation_and_nothing_else(mine, capfd):
    report = train_here(mine.override({"trainer.max_steps": 4, "data.eval": 0.2}))
    output = capfd.readouterr()
    lines = output.out.splitlines()
    steps = [line for line in lines if re.fullmatch(LINE, line)]
    last = report["steps"]["done"]
    assert [line.split()[1] for line in steps] == [f"{n}/{last}" for n in range(1, last + 1)]
    evaluation = r"step \d+/\d+ epoch .* eval_loss [\d.]+ eval_exact_match [\d.]+, in .* s"
    assert [line for line in lines if line not in steps and not re.match(evaluation, line)] == []
    loaded, _, trained = output.err.partition("the first step ...")
    for word in ("has new PAD/BOS/EOS tokens", "shards", "{'"):
        assert word not in loaded + trained
    assert Path(mine.out, "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "%|" not in trained


def test_a_line_has_the_speed_since_the_last_one_without_evaluations_and_checkpoints(
    monkeypatch, tmp_path, capsys
):
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
    assert steps.progress.measurements()["samples_per_s"] is None
    for event in ("on_evaluate", "on_save"):
        steps.step(3)
        steps.now += 100
        steps.call(event)
    assert steps.progress.measurements()["samples_per_s"] == 8 / 3
    Steps(monkeypatch, tmp_path, is_first=False).log()  # another process says nothing
    assert capsys.readouterr() == ("", "")


def test_a_plot_has_both_losses_the_checkpoints_the_best_step_and_bad_ones(tmp_path, monkeypatch):
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self))
    history = [{"step": step, "loss": 3.0 / step} for step in range(1, 2000)]
    history += [{"step": 2000, "loss": "nan"}]
    history += [{"step": step, "eval_loss": 0.1} for step in (1000, 2000)]
    plot_loss(history, tmp_path / "loss.png", best=0)  # with eval_on_start
    assert "best evaluation: step 0" in figures.pop().axes[0].get_legend_handles_labels()[1]
    plot_loss(history, tmp_path / "loss.png", saved=[500, 1000], best=1000)
    (axes,) = figures[0].axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert lines["evaluation"] == [1000, 2000] and len(lines["training"]) >= 1999
    assert lines["checkpoint"] == [500, 1000] and lines["best evaluation: step 1000"] == [1000] * 2
    bad = [list(line.get_xdata()) for line in axes.lines if line.get_gid() == "not finite"]
    assert bad == [[2000, 2000]] and "NaN or infinite" in axes.get_title()


def test_the_plot_is_drawn_twice_a_minute_and_at_the_end(monkeypatch, tmp_path):
    steps = Steps(monkeypatch, tmp_path)
    for steps.now in (100, 110, 129, 131, 132):
        steps.log()
    steps.call("on_train_end")
    assert steps.plots == [100, 131, 132]


def test_the_end_of_a_run_without_evaluation_has_its_last_loss(tmp_path, mine):
    report = {"steps": {"done": 1, "asked": 1}, "measured": {"samples_per_s": None}}
    report |= {"history": [{"step": 1, "loss": 2.5}], "left_out": 3}
    (tmp_path / "training.json").write_text(json.dumps(report))
    rows = tmp_path / "held out.jsonl"
    rows.touch()
    description = describe_end(
        resolve_recipe(mine.override({"out": str(tmp_path), "data.eval": str(rows)})), False
    )
    end = r"ended +after 1 step; 3 rows could not be used\nsaved +.* of step 1: loss 2.5 at"
    assert re.search(end, description)
    assert description.endswith(f"evaluate {tmp_path} --data '{rows}' --out evaluation")
