"""What is told before the first step."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm4v_patched.cli import main
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.memory_plan import Batch
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.finetune import disk, plan
from glm4v_patched.finetune.plan import Plan, check_data
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.summary import show_sample
from glm4v_patched.models.base import Base
from glm4v_patched.models.loading import config_of
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.recipes import drawn_recipe, recipe


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
    return drawn_recipe(tmp_path_factory.mktemp("summary"), changes)


def test_a_dry_run_says_all_and_writes_nothing(drawn, tmp_path, capsys):
    drawn.write(tmp_path / "recipe.json")
    before = sorted(Path(drawn.model).parent.rglob("*"))
    assert main(["train", str(tmp_path / "recipe.json"), "--device", "cpu", "--dry-run"]) == 0
    told = capsys.readouterr().out
    counts = check_data(drawn).counts
    assert counts.rows == counts.pictures == 14  # of 20, which batches of 4 take in 4 steps
    for line in [
        f"data        14 rows, 14 pictures; {counts.positions} positions, of which "
        f"{counts.learned} are learned",
        "evaluation  after every epoch, on 6 rows",
        "steps       8, 4 an epoch: 2.00 epochs; effective batch 4 (per_device_train_batch_size 2",
        "trained     lora_lm: 6,144 of 766,688 weights; learning rate 0.001",
        "device      1 x CPU, fp32, no ZeRO",
        "kept        tower full, language full, offload False, compile False",
        ", 2 checkpoints at once of ",
        "(4 positions of a picture)<|end_of_image|>Which",
        "<|assistant|>[[",
        "<|endoftext|>]]",
        "nothing was trained, and nothing written (--dry-run)",
    ]:
        assert line in told, told
    assert sorted(Path(drawn.model).parent.rglob("*")) == before


def test_a_dry_run_tells_of_doubtful_values(drawn, tmp_path, capsys):
    drawn.write(tmp_path / "recipe.json")
    command = ["train", str(tmp_path / "recipe.json"), "--device", "cpu", "--dry-run"]
    assert main(command) == 0
    assert "doubtful" not in capsys.readouterr().out
    assert main([*command, "trainer.learning_rate=10"]) == 0
    assert "\ndoubtful    trainer.learning_rate is 10: " in capsys.readouterr().out


def test_each_learned_turn_of_the_sample_is_marked_and_no_other(drawn):
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    later = [{"role": "user", "content": "C"}, {"role": "assistant", "content": "D"}]
    shown = show_sample(ChatGLMProcessor.from_pretrained(drawn.model), [*messages, *later])
    inside = [part.split("]]")[0] for part in shown.split("[[")[1:]]
    assert len(inside) == 2 and "B" in inside[0] and "D" in inside[1]
    assert not any(letter in "".join(inside) for letter in "AC")


def test_words_that_come_many_times_are_no_picture(drawn):
    messages = [
        {"role": "user", "content": "? ? ? ????????"},
        {"role": "assistant", "content": "B"},
    ]
    shown = show_sample(ChatGLMProcessor.from_pretrained(drawn.model), messages)
    assert "? ? ? ????????" in shown and "positions of a picture" not in shown


def test_a_disk_that_is_too_small_for_the_epochs_is_told_before_anything_is_written(
    drawn, tmp_path, capsys, monkeypatch
):
    """How many steps an epoch has is known only once the rows are read."""
    mine = drawn.override({"out": str(tmp_path / "out")})
    mine.write(tmp_path / "recipe.json")
    needed = disk.needed_space(mine, config_of(Base(mine.model)), 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed.total - 1))
    assert main(["train", str(tmp_path / "recipe.json"), "--device", "cpu"]) == 1
    assert "and up to 2 checkpoints at once" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("local", "needed"), [(None, 222), (2, 111)])
def test_a_machine_with_too_little_memory_for_an_offloaded_optimizer_is_told(
    local, needed, monkeypatch
):
    """16 bytes for each of 13.9 billion weights; the processes of two machines share them."""
    options = EngineOptions(trained="full", zero_stage=3, offload=True)
    batch = Batch(rows=1, row_length=9, processes=4)
    planned = Plan(
        recipe=recipe(),
        base=Base("m"),
        files={},
        data="",
        placement=Placement(4, local_processes=local),
        options=options,
        batch=batch,
        rows=1,
        steps=1,
        free=80e9,
        needed=0,
        space=disk.Space(0, 0, 0, total=1, free=1),
    )
    monkeypatch.setattr(plan, "config_of", lambda base: ChatGLMConfig())
    monkeypatch.setattr(memory_check, "free_ram", lambda: (needed - 1) * 1e9)
    least = rf"takes {needed}\.\d GB of the machine's memory, of which {needed - 1}\.0 GB are free"
    with pytest.raises(ValueError, match=least):
        planned.require_room()
    monkeypatch.setattr(memory_check, "free_ram", lambda: (needed + 1) * 1e9)
    planned.require_room()


def test_no_optimizer_is_started_that_does_not_fit(drawn, tmp_path, capsys, monkeypatch):
    mine = drawn.override(
        {"out": str(tmp_path / "out"), "engine.zero_stage": 2, "engine.offload": True}
        | {"trained": "full"}
    )
    mine.write(tmp_path / "recipe.json")
    monkeypatch.setattr(memory_check, "free_ram", lambda: 1e6)
    assert main(["train", str(tmp_path / "recipe.json"), "--device", "cpu"]) == 1
    told = capsys.readouterr()
    assert re.search(r"optimizer   [\d.]+ MB of the machine's memory", told.out)
    assert "engine.offload is true, and the optimizer takes" in told.err
    assert not (tmp_path / "out").exists()
