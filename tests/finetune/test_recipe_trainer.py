"""``trainer:`` takes what TrainingArguments takes, but for what is the recipe's own."""

import dataclasses
import itertools
import math
import typing

import pytest
from accelerate.data_loader import BatchSamplerShard
from pydantic import TypeAdapter
from torch.utils.data import BatchSampler
from transformers import TrainingArguments

from glm4v_patched.finetune.other_names import refusal
from glm4v_patched.finetune.recipe import RecipeError, fields
from glm4v_patched.finetune.recipe_trainer import TrainerFields, installed_fields, is_longer
from tests.helpers.recipes import recipe


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


def test_runs_are_longer_by_the_same_measure_alone():
    four, epochs = {"max_steps": 4}, {"num_train_epochs": 2.0}
    assert is_longer(four, {"max_steps": 5}) and not is_longer(four, four)
    for there, now in ((four, epochs), (epochs, four), (None, four), ([], four)):
        assert not is_longer(there, now)


def test_evaluation_has_batches_of_its_own_or_those_of_training():
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 7}
    assert trainer(**sizes).eval_batch_size == 7
    assert trainer(per_device_train_batch_size=4).eval_batch_size == 4


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
