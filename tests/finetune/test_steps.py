"""Runs that would do nothing are refused before a model is loaded, and those that did are none."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from glm4v_patched.finetune import process, worker
from glm4v_patched.finetune.divergence import NoResult
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.plan import check_data, make_plan
from glm4v_patched.finetune.progress import Progress
from glm4v_patched.finetune.steps import require_batches, require_evaluations
from glm4v_patched.finetune.trainer import RecipeTrainer
from glm4v_patched.models.placement import Placement
from tests.helpers.recipes import planned, recipe, train_here

DROPS = {"trainer.dataloader_drop_last": True, "trainer.per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("changes", "rows", "processes", "is_refused"),
    [
        ({}, 3, 1, True),
        ({}, 4, 1, False),
        ({}, 7, 2, True),
        ({}, 8, 2, False),
        ({"trainer.gradient_accumulation_steps": 100}, 4, 1, False),
        ({"trainer.gradient_accumulation_steps": 100}, 3, 1, True),
        ({"data.pack_to": 100}, 3, 1, True),
        ({"trainer.dataloader_drop_last": False}, 1, 8, False),
        ({"data.stream": True}, 3, 8, False),
    ],
)
def test_rows_that_make_no_whole_batch_for_each_process_are_refused(
    changes, rows, processes, is_refused
):
    run_recipe = recipe(DROPS | changes)
    if not is_refused:
        require_batches(resolve_recipe(run_recipe), rows, processes)
        return
    kind = r"packed sequences \(data.pack_to\)" if "data.pack_to" in changes else "rows"
    message = f"there are {rows} {kind}: .* for each of {processes} .* takes {4 * processes}, "
    with pytest.raises(ValueError, match=message):
        require_batches(resolve_recipe(run_recipe), rows, processes)


def test_a_plan_is_refused_without_a_batch_an_evaluation_or_a_learning_rate(mine, words):
    checked, placement = check_data(resolve_recipe(mine)), Placement(1, on_cpu=True)
    evaluated = mine.override({"data.eval": 0.2})
    messages = []
    for run_recipe, changes in [
        (mine, {"trainer.dataloader_drop_last": True, "trainer.per_device_train_batch_size": 21}),
        (evaluated, {"trainer.early_stopping_patience": 2, "trainer.eval_steps": 11}),
        (mine, {"trainer.lr_scheduler_type": "cosine_with_min_lr"}),
    ]:
        run_recipe = run_recipe.override(changes)
        rows = check_data(resolve_recipe(run_recipe)) if run_recipe.data.eval else checked
        with pytest.raises(ValueError, match=r"^trainer\.") as refused:
            make_plan(resolve_recipe(run_recipe), placement, rows)
        messages.append(str(refused.value))
    words("\n".join(messages))


def evaluations(steps: int, epoch: int, rows: int = 5, **changes) -> None:
    fields = {f"trainer.{name}": value for name, value in changes.items()}
    checked = SimpleNamespace(eval=SimpleNamespace(rows=range(rows), path="held_out.jsonl"))
    require_evaluations(recipe(fields | {"data.eval": 0.1}).trainer, checked, steps, epoch)


BEST_BY_STEPS = {"load_best_model_at_end": True, "save_steps": 20, "eval_steps": 20}


@pytest.mark.parametrize(
    "needs",
    [
        BEST_BY_STEPS,
        {"early_stopping_patience": 3, "eval_steps": 20},
        {"save_strategy": "best", "eval_steps": 20},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 20},
        {"load_best_model_at_end": True, "save_strategy": "epoch"},  # of 20 steps
    ],
    ids=["best by steps", "patience", "saving the best", "a schedule", "best by epochs"],
)
def test_what_needs_evaluations_is_refused_where_the_first_comes_after_the_end(needs):
    evaluations(20, 20, **needs)
    with pytest.raises(ValueError, match=r"^trainer\..* at step 20, and the run has 19 steps; "):
        evaluations(19, 20, **needs)
    delay = {"eval_delay": 1.5 if "eval_steps" not in needs else 25}
    evaluations(40, 20, **needs, **delay)
    with pytest.raises(ValueError, match=r"^trainer\..* at step 40, and the run has 39 steps; "):
        evaluations(39, 20, **needs, **delay)


def test_rows_that_are_only_evaluated_at_the_end_are_and_never_is_refused():
    evaluations(10, 20)
    evaluations(10, 20, eval_steps=20)
    evaluations(10, 20, eval_strategy="no", eval_on_start=True)
    with pytest.raises(ValueError, match=r"data\.eval, held_out\.jsonl, has no row"):
        evaluations(10, 20, rows=0)


def test_eval_delay_may_be_as_long_as_the_run_and_no_longer():
    evaluations(40, 20, eval_delay=2)
    with pytest.raises(ValueError, match="eval_delay is 2, which is 40 steps, and the run has 39"):
        evaluations(39, 20, eval_delay=2)


def ended(run_recipe) -> dict:
    """The report of a run that has no result, and left none."""
    with pytest.raises(NoResult) as error:
        train_here(run_recipe)
    assert not [*Path(run_recipe.out).glob("*.safetensors")]
    report = json.loads(Path(run_recipe.out, "training.json").read_text())
    assert not report["finished"] and report["error"] == str(error.value)
    return report


def test_a_training_that_ends_without_a_step_or_a_reason_is_no_result(mine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "train", Mock())
        assert "ended after step 0 of 10 for an unknown reason" in ended(mine)["error"]
        monkeypatch.setattr(worker, "train", Mock(side_effect=NoResult("no step")))
        assert process.run(planned(mine)) == 1
    monkeypatch.undo()
    at_end = Progress.on_step_end

    def stop(self, args, state, control, **kwargs):
        control.should_training_stop = True
        return at_end(self, args, state, control, **kwargs)

    monkeypatch.setattr(Progress, "on_step_end", stop)
    assert "ended after step 1 of 10 for an unknown reason" in ended(mine)["error"]
