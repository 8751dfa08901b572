"""What is told before the first step, and of values that are allowed and most likely mistakes."""

from pathlib import Path

import pytest

from glm4v_patched.cli import main
from glm4v_patched.engine.memory_plan import Batch
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.finetune import disk
from glm4v_patched.finetune.plan import Plan, check_data
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.summary import find_doubts, show_sample
from glm4v_patched.models.base import Base
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.recipes import recipe


@pytest.fixture
def saving(mine) -> Recipe:
    """Four steps an epoch of 14 rows; six are held out."""
    epochs = {"trainer.max_steps": None, "trainer.num_train_epochs": 2.0, "data.eval": 0.2}
    return mine.override(
        epochs | {"trainer.gradient_accumulation_steps": 2, "trainer.save_steps": 3}
    )


def train(asked: Recipe, *options: str) -> int:
    file = Path(asked.out).parent / "recipe.json"
    asked.write(file)
    return main(["train", str(file), "--device", "cpu", *options])


def planned(asked: Recipe, rows=64, steps=100) -> Plan:
    """A run of two processes that is decided, of a model that need not be there."""
    return Plan(
        recipe=asked,
        base=Base("m"),
        files={},
        data="",
        placement=Placement(2),
        options=EngineOptions(),
        batch=Batch(rows=1, row_length=9, processes=2),
        rows=rows,
        steps=steps,
        steps_an_epoch=asked.trainer.steps_in_epoch(rows, 2),
        free=80e9,
        needed=0,
        space=disk.Space(0, 0, 0, total=1, free=1),
    )


def test_a_dry_run_says_all_and_writes_nothing(saving, capsys):
    before = sorted(Path(saving.model).parent.rglob("*"))
    assert train(saving, "--dry-run", "trainer.learning_rate=10") == 0
    told = capsys.readouterr().out
    counts = check_data(saving).counts
    assert counts.rows == counts.pictures == 14
    for line in [
        f"data        14 rows, 14 pictures; {counts.positions} positions, of which "
        f"{counts.learned} are learned",
        "evaluation  after every epoch, on 6 rows",
        "steps       8, 4 an epoch: 2.00 epochs; effective batch 4 (per_device_train_batch_size 2",
        "trained     lora_lm: 6,144 of 766,688 weights; learning rate 10",
        "device      1 x CPU, fp32, no ZeRO",
        "kept        tower full, language full, offload False, compile False",
        ", 2 checkpoints at once of ",
        "(4 positions of a picture)<|end_of_image|>Which",
        "\ndoubtful    trainer.learning_rate is 10: ",
        "nothing was trained, and nothing written (--dry-run)",
    ]:
        assert line in told, told
    assert sorted(Path(saving.model).parent.rglob("*")) == before
    assert not Path(saving.out).exists()


def test_learned_turns_of_the_sample_are_marked_and_repeated_words_are_no_picture(drawn):
    turns = [("user", "A ? ? ????"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    messages = [{"role": role, "content": text} for role, text in turns]
    shown = show_sample(ChatGLMProcessor.from_pretrained(drawn.model), messages)
    inside = [part.split("]]")[0] for part in shown.split("[[")[1:]]
    assert len(inside) == 2 and "B" in inside[0] and "D" in inside[1]
    assert not any(letter in "".join(inside) for letter in "AC")
    assert "A ? ? ????" in shown and "positions of a picture" not in shown


SANE = {
    "trained": "lora_lm",
    "trainer.learning_rate": 1e-3,
    "trainer.per_device_train_batch_size": 4,
    "trainer.gradient_accumulation_steps": 2,
}


def doubts(changes, **sizes) -> list[str]:
    return list(find_doubts(planned(recipe(SANE | changes), **sizes)))


def test_what_is_most_likely_a_mistake_is_told_with_its_numbers(words):
    rates = {"tower": 1e-5, "adapter": 2, "language_model": 1}
    told = []
    for changes in [
        {"trained": "full", "trainer.learning_rate": rates},
        {"trainer.warmup_steps": 500},
        {"trainer.gradient_accumulation_steps": 9},
    ]:
        (doubt,) = doubts(changes)
        told.append(doubt)
    words("\n".join(told))


def test_nothing_is_said_of_what_people_do():
    for changes in (
        {"trainer.learning_rate": 1e-2, "trainer.warmup_steps": 99},
        {"trainer.warmup_steps": 500, "trainer.lr_scheduler_type": "constant"},
    ):
        assert doubts(changes) == []
    assert doubts({"trainer.max_steps": 1}, rows=16, steps=1) == []
