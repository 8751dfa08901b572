"""What is seen of a training while it goes on, and what is said of it at its end."""

import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from transformers import TrainerControl, TrainerState, TrainingArguments

from glm4v_patched.cli import main
from glm4v_patched.finetune import progress, worker
from glm4v_patched.finetune.ending import describe_end
from glm4v_patched.finetune.plots import plot_loss
from glm4v_patched.finetune.progress import LossPlot, Progress
from glm4v_patched.finetune.recipe import Recipe
from tests.helpers.processes import on_the_cpu
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


def test_a_process_that_is_not_the_first_prints_nothing(monkeypatch, tmp_path, capfd):
    steps = Steps(monkeypatch, tmp_path, is_first=False)
    steps.step(1)
    steps.log()
    assert capfd.readouterr() == ("", "")


def test_a_line_says_how_fast_the_steps_since_the_last_one_were(monkeypatch, tmp_path, capsys):
    steps = Steps(monkeypatch, tmp_path)
    for seconds in (60, 2, 6):
        steps.step(seconds)
        if seconds != 2:
            steps.log()
        steps.now += 500
        steps.call("on_save")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/10 epoch 0.50 loss 1.235 lr 1.0e-4 0.133 samples/s ")
    assert " 2 samples/s " in second and second.endswith(" left 0:00:28")


def test_speed_is_that_of_steps_without_what_comes_between(monkeypatch, tmp_path):
    steps = Steps(monkeypatch, tmp_path)
    for seconds in (60, 9, 9, 9):  # layers are compiled, workers start
        steps.step(seconds)
    assert steps.progress.found()["samples_per_s"] is None
    steps.step(2)
    for event in ("on_evaluate", "on_save"):
        steps.now += 100
        steps.call(event)
        steps.step(3)
    assert steps.progress.found()["samples_per_s"] == 3 * 8 / (2 + 3 + 3)


@pytest.mark.parametrize(("pack_to", "samples_per_row"), [(None, 1), (400, 14)])
def test_a_packed_row_counts_as_the_samples_in_it(epochs, monkeypatch, pack_to, samples_per_row):
    def measure(batch: float, *others):
        raise InterruptedError(batch)

    monkeypatch.setattr(worker, "Progress", measure)
    with pytest.raises(InterruptedError) as measured:
        train_here(epochs.override({"data.pack_to": pack_to}))
    # Two rows a batch, two batches a step.
    assert measured.value.args == (pytest.approx(2 * 2 * samples_per_row),)


# The curve


def test_the_loss_is_drawn_as_it_trains_and_at_most_so_often(mine, tmp_path, monkeypatch):
    drawn_after = []

    def draw(history, path, *marks):
        drawn_after.append(len(history))
        path.write_text("a plot")

    monkeypatch.setattr(progress, "plot_loss", draw)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_PLOTS", 0)
    train_here(mine.override({"trainer.max_steps": 4}))
    assert len(drawn_after) > 3 and drawn_after == sorted(drawn_after)
    assert Path(mine.out, "loss.png").is_file()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_PLOTS", 30)
    plot, steps = LossPlot(), Steps(monkeypatch, tmp_path)
    drawn_after.clear()
    for now in (40, 50, 60, 75):
        steps.now = now
        plot.on_log(steps.asked, steps.state, TrainerControl())
    assert len(drawn_after) == 2


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
    figures[0].canvas.draw()
    for axis in (axes.xaxis, axes.yaxis):
        assert axis.get_offset_text().get_text() == ""
        ticks = [label.get_text() for label in axis.get_ticklabels()]
        assert len(ticks) > 3 and all(re.fullmatch(r"[−\d.]+", tick) for tick in ticks), ticks


@pytest.mark.parametrize("losses", [[2.0, "nan", 1.0, "inf"], ["nan"], [0.0], []])
def test_a_curve_has_marks_where_the_loss_is_not_finite(tmp_path, figures, losses):
    plot_loss([{"step": s, "loss": v} for s, v in enumerate(losses, 1)], tmp_path / "loss.png")
    (axes,) = figures[0].axes
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_gid() == "not finite"]
    bad = [step for step, loss in enumerate(losses, 1) if isinstance(loss, str)]
    assert sorted(marks) == bad and ("NaN or infinite" in axes.get_title()) == bool(bad)


# The end; test_evaluation.py has that of a run with evaluations


def test_the_end_of_a_run_without_evaluation_has_its_last_loss(mine, tmp_path, capsys):
    mine.write(tmp_path / "recipe.json")
    with on_the_cpu():
        assert main(["train", str(tmp_path / "recipe.json"), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    end = r"\nended +after all 10 steps\nsaved +the adapters of step 10: loss [\d.]+ at"
    assert re.search(end, told)


def test_rows_for_evaluation_are_what_the_next_command_evaluates(mine, tmp_path):
    rows = tmp_path / "held out.jsonl"
    rows.touch()
    report = {"steps": {"done": 1, "asked": 1}, "history": [], "measured": {"samples_per_s": None}}
    (tmp_path / "training.json").write_text(json.dumps(report))
    told = describe_end(mine.override({"out": str(tmp_path), "data.eval": str(rows)}), False)
    assert told.endswith(f"evaluate {tmp_path} --data '{rows}' --out evaluation")
