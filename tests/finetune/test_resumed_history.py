"""What a run records is the same when it was killed after any of its checkpoints and resumed.

What kill -9 leaves is what lies on the disk. So each checkpoint's folder is copied once it is
complete, and a run is resumed from each copy; incomplete ones are never resumed from
(test_checkpoints.py).
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.finetune import progress, worker
from glm4v_patched.finetune.divergence import DivergenceMonitor
from glm4v_patched.finetune.ending import describe_end
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.schedule import learning_rates
from glm4v_patched.finetune.trainer import CheckpointCallback, RecipeTrainer
from tests.helpers.recipes import arguments_of, train_here

# About five of the 20 rows are held out, so an epoch has four steps.
EIGHT_STEPS = {
    "data.eval": 0.25,
    "data.eval_answers": 0,
    "lora.dropout": 0.3,
    "trainer.max_steps": None,
    "trainer.num_train_epochs": 2.0,
    "trainer.per_device_train_batch_size": 4,
}
BEST = {"save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True}


@pytest.fixture
def make_recipe(mine) -> Callable[..., Recipe]:
    return lambda **fields: mine.override(
        EIGHT_STEPS | {f"trainer.{name}": value for name, value in fields.items()}
    )


@pytest.fixture
def losses(monkeypatch) -> Callable[..., None]:
    """Sets the loss of the evaluations by their steps: of a small model it depends on rounding."""

    def set_losses(of_step: dict[int, float]) -> None:
        mean_loss = lambda self, *_: (of_step[self.state.global_step], 1)  # noqa: E731
        monkeypatch.setattr(RecipeTrainer, "_mean_loss", mean_loss)

    return set_losses


@pytest.fixture
def record(monkeypatch) -> Callable[..., dict[str, Any]]:
    """Trains, and returns all that is recorded but times and speeds, and what was saved."""
    trainers: list[RecipeTrainer] = []
    report_of = worker._report

    def keep(plan, trainer, *rest):
        trainers.append(trainer)
        return report_of(plan, trainer, *rest)

    monkeypatch.setattr(worker, "_report", keep)
    plots: list[dict[int, float]] = []

    def plot(history, *rest):
        plots.append(
            {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
        )

    monkeypatch.setattr(progress, "plot_loss", plot)

    def run(run_recipe: Recipe, checkpoint: Path | None = None) -> dict[str, Any]:
        report, trainer = train_here(run_recipe, checkpoint), trainers.pop()
        state, callbacks = trainer.state, trainer.callback_handler.callbacks
        # The last entry is of the process, not of the run: how long it took.
        assert "train_runtime" in state.log_history[-1]
        entries = [
            {name: value for name, value in entry.items() if not name.endswith("runtime")}
            for entry in state.log_history[:-1]
        ]
        names = ("history", "best_step", "steps")
        best = state.best_model_checkpoint and Path(state.best_model_checkpoint).name
        return {
            "entries": entries,
            "evaluations in loss.png": plots[-1],
            "report": {name: report.get(name) for name in names},
            "best": (state.best_metric, state.best_global_step, best),
            "patience": [
                callback.early_stopping_patience_counter
                for callback in callbacks
                if hasattr(callback, "early_stopping_patience_counter")
            ],
            "weights": load_file(Path(run_recipe.out, "adapter_model.safetensors")),
        }

    return run


def killed_and_resumed(
    run_recipe: Recipe, record: Callable[..., dict[str, Any]], monkeypatch
) -> tuple[dict[str, Any], list[int]]:
    """Resume from each checkpoint; returns what the undisturbed run recorded, and their steps."""
    copies: dict[int, Path] = {}
    on_save = CheckpointCallback.on_save

    def copy(self, args, state, control, **kwargs):
        on_save(self, args, state, control, **kwargs)
        copies[state.global_step] = Path(f"{run_recipe.out}-{state.global_step}")
        shutil.copytree(args.output_dir, copies[state.global_step])

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCallback, "on_save", copy)
        whole = record(run_recipe)
    for step, out in copies.items():
        resumed = record(run_recipe.override({"out": str(out)}), out / f"checkpoint-{step}")
        assert resumed.keys() == whole.keys()
        for name, weight in whole["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), (step, name)
        for name in whole.keys() - {"weights"}:
            assert resumed[name] == whole[name], (step, name)
    return whole, [*copies]


def steps_of(recorded: dict[str, Any], kind: str) -> list[int]:
    return [entry["step"] for entry in recorded["entries"] if kind in entry]


def test_evaluations_at_the_end_of_epochs_and_means_across_checkpoints_are_not_lost(
    make_recipe, record, monkeypatch
):
    mine = make_recipe(save_steps=3, logging_steps=4)
    whole, saved = killed_and_resumed(mine, record, monkeypatch)
    assert saved == [3, 6]
    assert steps_of(whole, "eval_loss") == [*whole["evaluations in loss.png"]] == [4, 8]
    assert steps_of(whole, "loss") == [3, 4, 6, 8]
    # The check computes the rates that the Trainer uses.
    rates = dict(learning_rates(arguments_of(mine, 8)))
    logged = {e["step"]: e["learning_rate"] for e in whole["entries"] if "loss" in e}
    assert logged == {step: pytest.approx(rates[step - 1]) for step in logged}


def test_the_best_and_what_is_left_of_patience_are_not_lost(
    make_recipe, record, losses, monkeypatch, caplog
):
    """The start is evaluated once, and the run ends where it would have ended."""
    losses({0: 2.0, 2: 1.0, 4: 3.0, 6: 2.5, 8: 0.5})
    mine = make_recipe(**BEST, eval_on_start=True, early_stopping_patience=2)
    whole, saved = killed_and_resumed(mine, record, monkeypatch)
    assert saved == [0, 2, 4]  # of the step with which it ends there is none
    assert steps_of(whole, "eval_loss") == [0, 2, 4, 6]
    assert whole["best"] == (1.0, 2, "checkpoint-2") and whole["patience"] == [2]
    # Where the best one is gone, the best of those to come is taken.
    again = mine.override({"out": f"{mine.out}-4"})
    shutil.rmtree(Path(again.out, "checkpoint-2"))
    best = record(again, Path(again.out, "checkpoint-4"))["best"]
    assert best == (0.5, 8, "checkpoint-6")  # of the last step there is none
    assert "checkpoint-2, which has the best evaluation so far, is incomplete" in caplog.text


def test_the_start_may_stay_the_best_and_is_what_is_saved_then(make_recipe, record, losses):
    losses({0: 1.0, 4: 3.0, 8: 2.0})
    mine = make_recipe(save_strategy="epoch", load_best_model_at_end=True, eval_on_start=True)
    recorded = record(mine)
    assert recorded["best"] == (1.0, 0, "checkpoint-0") and recorded["report"]["best_step"] == 0
    start = load_file(Path(mine.out, "checkpoint-0", "adapter_model.safetensors"))
    assert all(torch.equal(start[name], weight) for name, weight in recorded["weights"].items())
    message = "step 0, the best by eval_loss, which is the model that training started from"
    assert message in describe_end(resolve_recipe(mine), on_cpu=True)


@pytest.mark.parametrize(
    "saving", [{"save_steps": 2}, pytest.param({"save_strategy": "best"}, marks=pytest.mark.slow)]
)
def test_only_weights_that_are_kept_can_be_the_best(
    make_recipe, record, losses, monkeypatch, saving
):
    """A step that was not finite has no checkpoint."""
    see, steps = DivergenceMonitor.record, iter(range(1, 9))

    def see_nan(self, loss, norm):
        return see(self, loss * (torch.nan if next(steps) == 4 else 1), norm)

    losses({2: 2.0, 4: 1.0, 6: 3.0, 8: 4.0})
    monkeypatch.setattr(DivergenceMonitor, "record", see_nan)
    mine = make_recipe(eval_steps=2, load_best_model_at_end=True, **saving)
    assert record(mine)["best"] == (2.0, 2, "checkpoint-2")
    assert not Path(mine.out, "checkpoint-4").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"save_strategy": "epoch", "load_best_model_at_end": True, "early_stopping_patience": 1},
        {"save_strategy": "best", "eval_steps": 2, "load_best_model_at_end": True},
        {"save_steps": 1, "gradient_accumulation_steps": 3, "logging_strategy": "epoch"},
        {
            "save_steps": 2,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
            "learning_rate": 0.3,
        },
    ],
    ids=lambda fields: ",".join(fields),
)
def test_other_runs_are_the_same_too(make_recipe, record, monkeypatch, fields):
    _, saved = killed_and_resumed(make_recipe(**fields), record, monkeypatch)
    assert saved
