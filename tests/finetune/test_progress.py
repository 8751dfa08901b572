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
from glm4v_patched.finetune import progress, trainer, worker
from glm4v_patched.finetune.ending import describe_end
from glm4v_patched.finetune.plots import plot_loss
from glm4v_patched.finetune.progress import LossPlot, Progress
from glm4v_patched.finetune.recipe import Recipe
from tests.helpers.recipes import drawn_recipe, launching_warm, train_here

LINE = (
    r"step \d+/\d+ epoch \d\.\d\d loss [\d.]+ lr (0|\d\.\de-\d) [\d.]+ samples/s "
    + r"[\d.]+ GiB " * torch.cuda.is_available()
    + r"left \d+:\d\d:\d\d"
)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    changes = {
        "trainer.max_steps": None,
        "trainer.num_train_epochs": 2.0,
        "trainer.gradient_accumulation_steps": 2,
        "trainer.save_steps": 3,
        "trained": "lora_lm",
        "engine.zero_stage": 0,
        "data.eval": 0.2,
    }
    return drawn_recipe(tmp_path_factory.mktemp("progress"), changes)


@pytest.fixture
def clock(monkeypatch) -> dict[str, float]:
    now = {"now": 0.0}
    monkeypatch.setattr("glm4v_patched.finetune.progress.time.monotonic", lambda: now["now"])
    return now


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    return drawn


def test_a_training_prints_a_line_a_log_step_and_an_evaluation_and_nothing_else(
    drawn, tmp_path, capfd
):
    report = train_here(drawn.override({"out": str(tmp_path / "out")}))
    told = capfd.readouterr()
    lines = told.out.splitlines()
    steps = [line for line in lines if re.fullmatch(LINE, line)]
    last = report["steps"]["done"]
    assert [line.split()[1] for line in steps] == [f"{n}/{last}" for n in range(1, last + 1)]
    evaluation = r"step \d+/\d+ epoch [12].00 eval_loss [\d.]+ eval_exact_match [\d.]+, in .* s"
    assert len([line for line in lines if re.fullmatch(evaluation, line)]) == 2
    assert len(lines) == last + 2, lines
    loaded, _, trained = told.err.partition("the first step ...")
    quiet = ("%|", "has new PAD/BOS/EOS tokens", "shards", "{'")
    assert not any(word in loaded + trained for word in quiet[1:]), told.err
    assert "%|" not in trained


def test_a_process_that_is_not_the_first_prints_nothing(clock, tmp_path, capfd):
    asked, state = arguments(tmp_path), TrainerState(is_world_process_zero=False, max_steps=9)
    one = Progress(batch=8)
    one.on_train_begin(asked, state, TrainerControl())
    one.on_step_end(asked, state, TrainerControl())
    one.on_log(asked, state, TrainerControl(), logs={"loss": 1.5})
    assert capfd.readouterr() == ("", "")


def test_a_line_says_how_fast_the_steps_since_the_last_one_were(clock, tmp_path, capsys):
    asked, control = arguments(tmp_path), TrainerControl()
    state = TrainerState(is_world_process_zero=True, max_steps=10, epoch=0.5)
    one = Progress(batch=8)
    one.on_train_begin(asked, state, control)
    for step, seconds in ((1, 60), (2, 2), (3, 6)):
        state.global_step = step
        clock["now"] += seconds
        one.on_step_end(asked, state, control)
        if step != 2:
            one.on_log(asked, state, control, logs={"loss": 1.23456, "learning_rate": 1e-4})
        clock["now"] += 500
        one.on_save(asked, state, control)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/10 epoch 0.50 loss 1.235 lr 1.0e-4 0.133 samples/s ")
    assert " 2 samples/s " in second and second.endswith(" left 0:00:28")


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to="none")


def test_the_loss_is_drawn_as_it_trains(drawn, tmp_path, monkeypatch):
    drawn_after = []

    def draw(history, path, *marks):
        drawn_after.append(len(history))
        path.write_text("a plot")

    monkeypatch.setattr(progress, "plot_loss", draw)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_PLOTS", 0)
    train_here(drawn.override({"out": str(tmp_path / "out")}))
    assert len(drawn_after) > 3 and drawn_after == sorted(drawn_after)
    assert (tmp_path / "out" / "loss.png").is_file()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_PLOTS", 30)
    plot, args = LossPlot(), arguments(tmp_path)
    drawn_after.clear()
    for _ in range(3):
        plot.on_log(args, TrainerState(is_world_process_zero=True), TrainerControl())
    assert len(drawn_after) == 1


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
        asked = arguments(tmp_path)
        LossPlot().on_log(asked, TrainerState(is_world_process_zero=True), TrainerControl())
        return weakref.ref(model)

    monkeypatch.setattr(progress, "plot_loss", draw)
    left = train()
    assert kept and left() is None


def test_speed_is_that_of_steps_without_what_comes_between(clock, tmp_path):
    asked, state, control = arguments(tmp_path), TrainerState(), TrainerControl()
    one = Progress(batch=8)
    one.on_train_begin(asked, state, control)

    def step(seconds: float) -> None:
        clock["now"] += seconds
        one.on_step_end(asked, state, control)

    for seconds in (60, 9, 9, 9):  # layers are compiled, workers start
        step(seconds)
    assert one.found()["samples_per_s"] is None
    step(2)
    for happens in (one.on_evaluate, one.on_save):
        clock["now"] += 100
        happens(asked, state, control)
        step(3)
    assert one.found()["samples_per_s"] == 3 * 8 / (2 + 3 + 3)


@pytest.mark.parametrize(("pack_to", "samples_per_row"), [(None, 1), (400, 14)])
def test_a_packed_row_counts_as_the_samples_in_it(
    drawn, tmp_path, monkeypatch, pack_to, samples_per_row
):
    def measure(batch: float, *others):
        raise InterruptedError(batch)

    monkeypatch.setattr(worker, "Progress", measure)
    asked = {"out": str(tmp_path / "out"), "data.pack_to": pack_to}
    with pytest.raises(InterruptedError) as measured:
        train_here(drawn.override(asked))
    # Two rows a batch, two batches a step.
    assert measured.value.args == (pytest.approx(2 * 2 * samples_per_row),)


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


def test_the_end_says_why_which_weights_which_files_and_what_to_type_next(
    drawn, tmp_path, monkeypatch
):
    given = iter([3.0, 2.0, 2.5, 2.25, 1.0])
    monkeypatch.setattr(trainer, "mean_loss", lambda *_: (next(given), 1))
    asked = {
        "out": str(tmp_path / "out"),
        "trainer.num_train_epochs": 5.0,
        "trainer.save_steps": None,
        "trainer.save_strategy": "epoch",
        "trainer.load_best_model_at_end": True,
        "trainer.early_stopping_patience": 2,
    }
    early = drawn.override(asked)
    steps = [entry["step"] for entry in train_here(early)["evaluations"]]
    told = describe_end(early, on_cpu=True)
    ended, saved, measured, files, following = told.splitlines()
    assert ended.endswith(
        f"early, after step {steps[3]} of {5 * steps[0]}: 2 evaluations without a better eval_loss"
    )
    assert f"the adapters of step {steps[1]}, the best by eval_loss: eval_loss 2, eval_e" in saved
    assert "samples/s" in measured
    for name in ("", "loss.png", "answers.png", "training.json"):
        assert str(tmp_path / "out" / name).rstrip("/") in files
    assert following.endswith(f"chat {tmp_path / 'out'} --device cpu")


def test_the_end_of_a_run_without_evaluation_has_its_last_loss(drawn, tmp_path, capsys):
    mine = drawn.override({"out": str(tmp_path / "out"), "data.eval": None})
    mine.write(tmp_path / "recipe.json")
    with launching_warm():
        assert main(["train", str(tmp_path / "recipe.json"), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"\nended +after all 10 steps\nsaved +the adapters of step 10: loss [\d.]+ at", told
    )


def test_rows_for_evaluation_are_what_the_next_command_evaluates(drawn, tmp_path):
    rows = tmp_path / "held out.jsonl"
    rows.touch()
    report = {"steps": {"done": 1, "asked": 1}, "history": [], "measured": {"samples_per_s": None}}
    (tmp_path / "training.json").write_text(json.dumps(report))
    mine = drawn.override({"out": str(tmp_path), "data.eval": str(rows)})
    told = describe_end(mine, on_cpu=False)
    assert told.endswith(f"evaluate {tmp_path} --data '{rows}' --out evaluation")
