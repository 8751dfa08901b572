"""Learning rate schedules, and saving initial weights as the best ones, under DeepSpeed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.recipes import drawn_recipe, planned, train_in_processes

RUNS = {
    # This schedule reads optimizer.defaults, as cosine_with_min_lr does.
    "polynomial": {"trainer.lr_scheduler_type": "polynomial", "engine.zero_stage": 2},
    "plateau": {
        "trainer.lr_scheduler_type": "reduce_lr_on_plateau",
        "trainer.lr_scheduler_kwargs": {"patience": 0},
    },
    "start": {
        "trained": "lm",
        "trainer.learning_rate": 5.0,  # so high that every step makes the model worse
        "trainer.eval_on_start": True,
        "trainer.load_best_model_at_end": True,
    },
}


@pytest.mark.slow
def test_schedules_train_and_initial_weights_are_saved_if_they_stay_the_best_under_zero(tmp_path):
    values = {"trained": "lora_lm", "data.eval": 0.25, "data.eval_answers": 0}
    steps = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "dataloader_num_workers": 0}
    values |= {f"trainer.{name}": value for name, value in steps.items()}
    common = drawn_recipe(tmp_path, values)
    runs = [common.override(more | {"out": str(tmp_path / name)}) for name, more in RUNS.items()]
    ended = train_in_processes(*[planned(run, processes=2) for run in runs])
    assert not ended.status, ended.output[-8000:]
    reports = {name: json.loads((tmp_path / name / "training.json").read_text()) for name in RUNS}
    assert all(report["steps"] == {"asked": 4, "done": 4} for report in reports.values())
    assert reports["start"]["best_step"] == 0
    start = load_file(Path(common.model, "model.safetensors"))
    saved = load_file(tmp_path / "start" / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in start.items())
