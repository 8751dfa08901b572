"""A run is decided once: what is printed is what every process reads and does."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from glm4v_patched.cli import main
from glm4v_patched.engine.memory_plan import GIB, OUTSIDE_TORCH, Batch
from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune import plan as planning
from glm4v_patched.finetune import worker
from glm4v_patched.finetune.plan import Plan, check_data, make_plan
from glm4v_patched.finetune.recipe import may_change
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.finetune.summary import describe_memory, describe_policies
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.recipes import planned


def test_a_plan_reads_back_as_it_was_written(mine, tmp_path):
    recipe = mine.override({"out": str(tmp_path), "lora.targets": ["dense"]})
    for placement in (Placement(1, on_cpu=True), Placement(4, local_processes=2, on_cpu=True)):
        plan = make_plan(recipe, placement, check_data(recipe), base_of(recipe))
        plan = replace(plan, checkpoint=tmp_path / "checkpoint-4", changes=("rows: others",))
        plan.write()
        assert Plan.read(plan.path) == plan
    assert json.loads(plan.path.read_text())["options"]["lora"]["targets"] == ["dense"]


def test_it_is_decided_by_what_is_free_and_not_by_what_a_gpu_has(mine, monkeypatch):
    """Of the real size, on GPUs of which others use some."""
    recipe = mine.override({"engine.language": "auto"})
    checked = check_data(recipe)
    real = ChatGLMConfig()
    monkeypatch.setattr(planning, "config_of", lambda base: real)
    batch = Batch(rows=4, row_length=2114, processes=1)
    monkeypatch.setattr(planning, "batch_of", lambda *_: batch)
    found = []
    for free in (140 * GIB, 75 * GIB):
        monkeypatch.setattr(planning, "free_on_gpus", lambda number, free=free: [free] * number)
        plan = make_plan(recipe, Placement(1), checked, base_of(recipe))
        assert plan.free == free >= plan.needed
        found.append(plan.options.language)
    assert found[0] != found[1]
    # What is outside of torch is not free.
    assert "may not suffice" not in describe_memory(replace(plan, needed=free - OUTSIDE_TORCH))
    assert "may not suffice" in describe_memory(replace(plan, needed=free - OUTSIDE_TORCH + GIB))


def test_what_is_printed_is_what_runs(mine, tmp_path, monkeypatch, capsys):
    """The summary, --dry-run and doctor, and the engine of the process that trains."""
    mine.write(tmp_path / "recipe.json")
    command = [str(tmp_path / "recipe.json"), "--device", "cpu"]
    monkeypatch.setattr(launching, "_run", lambda command, _: "")
    monkeypatch.setattr("glm4v_patched.finetune.ending.describe_end", lambda *_: "")
    told = []
    for run in (["train", *command, "--dry-run"], ["doctor", *command], ["train", *command]):
        main(run)
        told.append(" ".join(capsys.readouterr().out.split()))
    plan = Plan.read(Path(mine.out, "plan.json"))
    assert all(describe_policies(plan) in text for text in told)
    prepare = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(worker, "prepare_model", prepare)
    with pytest.raises(ZeroDivisionError):
        worker.train(plan)
    assert prepare.call_args.args[0] == plan.options


def test_a_process_that_finds_a_plan_untrue_stops_with_both_numbers(mine, monkeypatch, words):
    plan = Plan.read(planned(mine))
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        with words.refused(ValueError, "1 processes", "3 take part"):
            plan.require_true()
    other = replace(plan, files=plan.files | {"model.safetensors": "another"})
    with pytest.raises(ValueError, match=r"model\.safetensors: another planned, [0-9a-f]+ here"):
        other.require_true()
    monkeypatch.setattr(planning, "free_memory", lambda limit: 40 * GIB)
    replace(plan, free=41 * GIB).require_true()
    with words.refused(RuntimeError, "78.0 GiB", "40.0 GiB"):
        replace(plan, free=78 * GIB).require_true()


def test_each_field_that_may_change_on_continuation_says_so_itself():
    """What decides the course of a training may not."""
    fixed = {"trained", "lora.rank", "engine.zero_stage", "engine.precision", "trainer.seed"}
    fixed |= {"trainer.learning_rate", "trainer.per_device_train_batch_size", "data.pack_to"}
    assert not fixed & may_change()
    assert {"out", "model", "data.train", "trainer.save_steps", "engine.tower"} <= may_change()
