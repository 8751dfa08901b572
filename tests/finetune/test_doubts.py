"""Values of a recipe that are allowed and most likely mistakes."""

import re

import pytest

from glm4v_patched.finetune.summary import find_doubts
from tests.helpers.recipes import recipe

SANE = {
    "trained": "lora_lm",
    "trainer.learning_rate": 1e-3,
    "trainer.per_device_train_batch_size": 4,
    "trainer.gradient_accumulation_steps": 2,
}
LONG = {"trainer.max_steps": None, "trainer.num_train_epochs": 101.0}


def told(changes, rows=64, steps=100, processes=2) -> list[str]:
    return list(find_doubts(recipe(SANE | changes), rows, steps, processes))


@pytest.mark.parametrize(
    ("changes", "told_of"),
    [
        ({"trainer.learning_rate": 10.0}, "trainer.learning_rate is 10: AdamW moves .* 1e-4 for L"),
        (
            {
                "trained": "full",
                "trainer.learning_rate": {"tower": 1e-5, "adapter": 2, "language_model": 1},
            },
            "learning_rate is 2: ",
        ),
        ({"trainer.weight_decay": 100.0}, "trainer.weight_decay is 100: .* usual are 0 to 0.1"),
        ({"trainer.warmup_steps": 500}, "warmup_steps is 500 and the run has 100 .* at 20% of"),
        (
            {"trainer.gradient_accumulation_steps": 9},
            "the effective batch, 72, is larger than the number of rows, 64: an epoch is one step",
        ),
        ({"data.eval": 0.95}, "data.eval is 0.95: most rows are held out"),
        ({"lora.alpha": 10**5}, r"alpha is 100,000 and lora.rank 8: .* multiplied by 12,500; usu"),
        ({"lora.alpha": 200, "lora.rank": 4, "lora.use_rslora": True}, "multiplied by 100; usual"),
    ],
)
def test_what_is_most_likely_a_mistake_is_told_with_its_numbers(changes, told_of):
    (doubt,) = told(changes)
    assert re.search(told_of, doubt), doubt


def test_many_epochs_are_told():
    assert told(LONG, steps=404) == ["each row is learned 101 times"]
    assert told(LONG, steps=400) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer.learning_rate": 1e-2},
        {"trainer.warmup_steps": 99},
        {"trainer.warmup_steps": 500, "trainer.lr_scheduler_type": "constant"},
        {"trainer.warmup_steps": 500, "trainer.lr_scheduler_type": "reduce_lr_on_plateau"},
        {"trained": "full", "lora.alpha": 10**5},
        {"lora.alpha": 512},
        {"data.eval": 0.5},
        {"data.eval": "held_out.jsonl"},
    ],
)
def test_nothing_is_said_of_what_people_do(changes):
    assert told(changes) == []


def test_a_single_step_and_a_full_batch_are_no_mistakes():
    assert told({"trainer.max_steps": 1}, rows=16, steps=1) == []
