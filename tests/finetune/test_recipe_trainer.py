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

from glm4v_patched.finetune.recipe.other_names import trainer_field_refusal
from glm4v_patched.finetune.recipe.sections import RecipeError, declared_fields
from glm4v_patched.finetune.recipe.trainer import TrainerFields, installed_fields, is_longer
from tests.helpers.recipes import recipe


def trainer(**changes):
    return recipe({f"trainer.{name}": value for name, value in changes.items()}).trainer


def test_each_field_of_the_installed_training_arguments_is_taken_or_refused_by_name():
    public = {f.name: f for f in dataclasses.fields(TrainingArguments) if f.name[0] != "_"}
    accepted = installed_fields()
    own = {*TrainerFields.model_fields}
    assert {*accepted} == {name for name in public if trainer_field_refusal(name) is None} - own
    assert {"neftune_noise_alpha", "eval_delay"} <= {*accepted} and len(accepted) > 20
    for name, kind in accepted.items():
        default = public[name].default
        if default is not dataclasses.MISSING:
            TypeAdapter(kind | None).validate_python(getattr(default, "value", default))


def test_a_whole_number_is_handed_on_as_the_float_that_torch_wants_and_null_is_not():
    assert repr(trainer(adam_beta1=0).other_training_arguments["adam_beta1"]) == "0.0"
    assert "neftune_noise_alpha" not in trainer(neftune_noise_alpha=None).other_training_arguments


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
        assert steps == math.ceil(of_process / accumulation)
        assert fields.total_steps(steps) == max(math.ceil(2.5 * steps), 1)


def test_warm_up_is_in_steps_or_a_share_of_them():
    for steps, expected in ((1, 0), (2, 1), (39, 1), (40, 2), (1999, 99)):
        assert trainer().warmup(steps) == expected  # the first step of a warm-up has the rate 0
    for warmup, expected in ((7, 7), (0, 0), (0.5, 50), (0.29, 29)):
        assert trainer(warmup_steps=warmup).warmup(100) == expected


def test_runs_are_longer_by_the_same_measure_alone():
    four, epochs = {"max_steps": 4}, {"num_train_epochs": 2.0}
    assert is_longer(four, {"max_steps": 5}) and not is_longer(four, four)
    for before, now in ((four, epochs), (epochs, four), (None, four), ([], four)):
        assert not is_longer(before, now)


def test_evaluation_has_batches_of_its_own_or_those_of_training():
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 7}
    assert trainer(**sizes).eval_batch_size == 7
    assert trainer(per_device_train_batch_size=4).eval_batch_size == 4


def test_what_is_done_at_the_end_of_an_epoch_is_done_by_steps():
    """An epoch has 99 steps."""
    epochs = trainer(save_strategy="epoch", logging_strategy="epoch")
    assert (epochs.save_every(99), epochs.eval_every(99), epochs.log_every(5000, 99)) == (99,) * 3
    fields_by_step = {"save_steps": 4, "eval_steps": 5}
    by_steps = {f"trainer.{name}": value for name, value in fields_by_step.items()}
    steps = recipe(by_steps | {"data.eval": 0.1}).trainer
    assert (steps.save_every(99), steps.eval_every(99)) == (4, 5)
    assert (steps.log_every(300, 99), trainer(logging_steps=7).log_every(300, 99)) == (6, 7)
    assert trainer(save_strategy="no").save_every(99) == 0


@pytest.mark.parametrize(
    ("fields", "delay"),
    [({}, 198), ({"eval_strategy": "epoch"}, 198), ({"eval_steps": 5}, 2)],
    ids=["default", "epoch", "steps"],
)
def test_eval_delay_counts_epochs_unless_evaluations_come_by_steps(fields, delay):
    values = {f"trainer.{name}": value for name, value in (fields | {"eval_delay": 2}).items()}
    assert recipe(values | {"data.eval": 0.1}).trainer.eval_delay(99) == delay


def test_every_number_has_its_range():
    kinds = {name: field.annotation for name, field in declared_fields()}
    kinds |= {f"trainer.{name}": kind for name, kind in installed_fields().items()}
    numbers = [name for name, kind in kinds.items() if is_number(kind)]
    assert len(numbers) > 30
    for name in numbers:
        for value in (-1, 1e300, math.nan):
            with pytest.raises(RecipeError, match=name):
                recipe({name: value})


def is_number(annotation) -> bool:
    return annotation in (int, float) or any(map(is_number, typing.get_args(annotation)))
