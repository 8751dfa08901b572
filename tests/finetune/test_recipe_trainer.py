"""``trainer:`` takes what TrainingArguments takes, but for what is the recipe's own."""

import dataclasses
import itertools
import json
import math
import shutil
import typing
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from pydantic import TypeAdapter
from torch.utils.data import BatchSampler
from transformers import TrainingArguments

from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune.launch import launch
from glm4v_patched.finetune.other_names import refusal
from glm4v_patched.finetune.plan import Plan, starting_point
from glm4v_patched.finetune.recipe import Recipe, RecipeError, fields
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.finetune.recipe_trainer import TrainerFields, installed_fields
from glm4v_patched.finetune.run_folder import begin, close_record
from glm4v_patched.models.placement import Placement
from tests.helpers.recipes import drawn_recipe, recipe, train_here


def trainer(**changes):
    return recipe({f"trainer.{name}": value for name, value in changes.items()}).trainer


def test_each_field_of_the_installed_training_arguments_is_taken_or_refused_by_name():
    public = {f.name: f for f in dataclasses.fields(TrainingArguments) if f.name[0] != "_"}
    taken = installed_fields()
    own = {*TrainerFields.model_fields}
    assert {*taken} == {name for name in public if refusal(name) is None} - own
    assert {"neftune_noise_alpha", "eval_delay"} <= {*taken} and len(taken) > 20
    for name, kind in taken.items():
        default = public[name].default
        if default is not dataclasses.MISSING:
            TypeAdapter(kind | None).validate_python(getattr(default, "value", default))


def test_a_whole_number_is_handed_on_as_the_float_that_torch_wants_and_null_is_not():
    assert repr(trainer(adam_beta1=0).others["adam_beta1"]) == "0.0"
    assert "neftune_noise_alpha" not in trainer(neftune_noise_alpha=None).others


@pytest.mark.parametrize(
    ("batch", "accumulation", "drop"), [(2, 1, False), (3, 2, False), (2, 1, True)]
)
def test_steps_are_counted_as_the_trainer_counts_them(batch, accumulation, drop):
    fields = trainer(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        dataloader_drop_last=drop,
        max_steps=None,
        num_train_epochs=2.5,
    )
    for rows, processes in itertools.product((1, 7, 20, 21), (1, 2, 3)):
        batches = BatchSampler(range(rows), batch, drop_last=drop)
        of_process = len(BatchSamplerShard(batches, processes, 0))
        steps = fields.steps_in_epoch(rows, processes)
        assert steps == max(math.ceil(of_process / accumulation), 1)
        assert fields.total_steps(steps) == math.ceil(2.5 * steps)


def test_warm_up_is_in_steps_or_a_share_of_them():
    for steps, found in ((1, 0), (2, 1), (39, 1), (40, 2), (1999, 99)):
        assert trainer().warmup(steps) == found  # the first step of a warm-up has the rate 0
    for asked, found in ((7, 7), (0, 0), (0.5, 50), (0.29, 29)):
        assert trainer(warmup_steps=asked).warmup(100) == found


def test_no_entry_of_the_loss_history_spans_a_checkpoint():
    best = {"trainer.save_strategy": "best", "trainer.eval_strategy": "epoch", "data.eval": 0.1}
    for asked, steps, every in (
        ({"trainer.save_steps": 4}, 10, 4),
        ({"trainer.save_steps": 99}, 5000, 99),
        ({"trainer.save_strategy": "epoch"}, 5000, 99),
        (best, 5000, 99),
    ):
        chosen = recipe(asked).trainer.log_every(steps, 99)
        assert 1 <= chosen <= max(steps // 50, 1) and every % chosen == 0
    assert trainer(logging_steps=7).log_every(300) == 7


def test_every_number_has_its_range():
    kinds = {name: field.annotation for name, field in fields()}
    kinds |= {f"trainer.{name}": kind for name, kind in installed_fields().items()}
    numbers = [name for name, kind in kinds.items() if is_number(kind)]
    assert len(numbers) > 30
    for name in numbers:
        for value in (-1, 1e300, math.nan):
            with pytest.raises(RecipeError, match=name):
                recipe({name: value})


def is_number(annotation) -> bool:
    return annotation in (int, float) or any(map(is_number, typing.get_args(annotation)))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    """Two epochs of five steps, with a checkpoint after the first."""
    changes = {"max_steps": None, "num_train_epochs": 2.0, "gradient_accumulation_steps": 2}
    changes |= {"save_strategy": "epoch", "logging_steps": 1, "weight_decay": 0.1}
    changes = {f"trainer.{name}": value for name, value in changes.items()}
    changes |= {"trained": "lora_lm", "engine.zero_stage": 0}
    recipe = drawn_recipe(tmp_path_factory.mktemp("fields"), changes)
    Path(recipe.out).mkdir()
    begin(Path(recipe.out), [])
    train_here(recipe)
    close_record(Path(recipe.out), adapters=True)
    return recipe


def history(out: str | Path) -> list[dict]:
    return json.loads(Path(out, "training.json").read_text())["history"]


def test_epochs_are_trained_with_what_was_asked_for(drawn):
    assert len(history(drawn.out)) == 10
    arguments = torch.load(Path(drawn.out, "training_args.bin"), weights_only=False)
    assert (arguments.weight_decay, arguments.max_steps) == (0.1, 10)
    assert arguments.lr_scheduler_type == "cosine"
    assert [path.name for path in Path(drawn.out).glob("checkpoint-*")] == ["checkpoint-5"]


def test_a_finished_run_is_made_longer_from_its_last_checkpoint(drawn, mine, monkeypatch):
    out = Path(shutil.copytree(drawn.out, mine.out))
    monkeypatch.setattr(launching, "_run", lambda command, _: "")
    resume = partial(launch, placement=Placement(1, on_cpu=True), resume=True)
    with pytest.raises(ValueError, match="is finished .*raise trainer.num_train_epochs"):
        resume(mine)
    longer = mine.override({"trainer.num_train_epochs": 3.0})
    resume(longer)
    assert Plan.read(out / "plan.json").checkpoint == out / "checkpoint-5"
    report = train_here(longer, out / "checkpoint-5")
    assert [entry["step"] for entry in report["history"]] == [*range(1, 16)]
    assert report["history"][:5] == history(drawn.out)[:5]
    with pytest.raises(ValueError, match=r"num_train_epochs: 3\.0 there, 2\.0 now"):
        starting_point(mine, 1, True, base_of(mine))
    shutil.rmtree(out)
    shutil.copytree(drawn.out, out, ignore=shutil.ignore_patterns("checkpoint-*"))
    with pytest.raises(ValueError, match="left no checkpoint.*give a new run that folder as model"):
        resume(longer)
