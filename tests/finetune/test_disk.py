"""A disk that is too small is told before anything starts, with both numbers."""

import shutil
from types import SimpleNamespace

import pytest

from glm4v_patched.engine.memory_plan import count_trained
from glm4v_patched.engine.options import is_lora
from glm4v_patched.engine.trainable import select_weights
from glm4v_patched.finetune import disk
from glm4v_patched.finetune.disk import max_checkpoints_on_disk, needed_space, saved_bytes
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.recipes import recipe
from tests.helpers.tiny import tiny_model

GB = 10**9


def space_of(run_recipe: Recipe) -> disk.DiskSpace:
    checkpoints = max_checkpoints_on_disk(run_recipe.trainer, run_recipe.data.saves_at_bad_row)
    return needed_space(run_recipe.out, ChatGLMConfig(), run_recipe.engine_options(), checkpoints)


def require_disk_space(run_recipe: Recipe, free: int, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    disk.require_disk_space(run_recipe.out, space_of(run_recipe))


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(tmp_path, monkeypatch, words):
    run_recipe = recipe({"out": str(tmp_path / "out")})
    with words.refused(ValueError, "20.0 GB", "27.8 GB"):
        require_disk_space(run_recipe, 20 * GB, monkeypatch)
    require_disk_space(run_recipe.override({"trained": "lora_all"}), 20 * GB, monkeypatch)
    monkeypatch.setattr(disk, "saved_bytes", lambda *_: (28 * GB, 195 * GB))
    require_disk_space(run_recipe, 28 * GB, monkeypatch)
    with pytest.raises(ValueError, match="28.0 GB are free there"):
        require_disk_space(run_recipe, 28 * GB - 1, monkeypatch)
    saving = run_recipe.override({"trainer.max_steps": 1000, "trainer.save_steps": 100})
    with words.refused(ValueError, "9 checkpoints", "195.0 GB", "1783.0 GB"):
        require_disk_space(saving, 1000 * GB, monkeypatch)
    require_disk_space(saving.override({"trainer.save_total_limit": 2}), 1000 * GB, monkeypatch)


BEST = {"load_best_model_at_end": True, "eval_steps": 10}


@pytest.mark.parametrize(
    ("trainer_fields", "counted", "max_checkpoints"),
    [
        ({"max_steps": 10}, None, 0),
        ({"max_steps": 10, "save_steps": 3}, None, 3),
        ({"max_steps": 10, "save_steps": 5, "save_total_limit": 1}, None, 1),
        ({"max_steps": 1000, "save_steps": 10, "save_total_limit": 2}, None, 3),
        ({"max_steps": 1000, "save_steps": 10, "save_total_limit": 2} | BEST, None, 4),
        ({"max_steps": 1000, "save_steps": 10}, None, 99),
        ({"max_steps": 30, "save_steps": 10, "eval_on_start": True} | BEST, None, 3),
        ({"max_steps": 30, "save_steps": 10, "eval_on_start": True}, None, 2),
        ({"num_train_epochs": 4.5, "save_strategy": "epoch"}, None, 4),
        ({"num_train_epochs": 4.5, "save_strategy": "epoch", "save_total_limit": 1}, None, 2),
        ({"num_train_epochs": 4.5, "save_steps": 10}, None, 1),
        ({"num_train_epochs": 4.5, "save_steps": 10}, 41, 4),
    ],
)
def test_an_old_checkpoint_goes_when_a_new_one_is_complete(
    trainer_fields, counted, max_checkpoints
):
    """``counted``: the steps, once all rows have been seen."""
    values = {"max_steps": None} | trainer_fields
    changes = {f"trainer.{name}": value for name, value in values.items()} | {"data.eval": 0.1}
    assert max_checkpoints_on_disk(recipe(changes).trainer, False, counted) == max_checkpoints


def test_a_stream_that_ends_at_a_bad_row_has_room_for_its_checkpoint(tmp_path):
    run_recipe = recipe({"data.stream": True, "out": str(tmp_path)})
    assert space_of(run_recipe).max_checkpoints == 1
    assert space_of(run_recipe.override({"data.on_bad": "skip"})).max_checkpoints == 0


CHECKPOINT_OF_LM = {
    # Weights and what the optimizer has of what is trained (t) and frozen (f), in bf16: without
    # ZeRO fp32 weights; DeepSpeed's own copy, of all or where they are sharded of frozen ones.
    0: lambda t, f: 2 * f + 12 * t,
    2: lambda t, f: 2 * (t + f) * 2 + 12 * t,
    3: lambda t, f: 2 * (t + f) + 2 * f + 12 * t,
}


@pytest.mark.parametrize("present", [0, 1, 2, 3])
def test_checkpoints_that_are_there_need_no_space_and_surplus_ones_give_none(tmp_path, present):
    for step in range(present):
        (tmp_path / f"checkpoint-{step}").mkdir()
    options = recipe({"trained": "lm"}).engine_options()
    space = needed_space(str(tmp_path), tiny_model().config, options, 2)
    assert space.total == space.model + max(2 - present, 0) * space.checkpoint


@pytest.mark.parametrize("stage", CHECKPOINT_OF_LM)
def test_a_checkpoint_has_the_size_of_what_each_stage_writes(stage):
    options = recipe({"trained": "lm", "engine.zero_stage": stage}).engine_options()
    weights = list(select_weights(tiny_model(), "lm").parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = sum(weight.numel() for weight in weights) - trained
    _, checkpoint_bytes = saved_bytes(tiny_model().config, options)
    assert checkpoint_bytes == CHECKPOINT_OF_LM[stage](trained, frozen)


@pytest.mark.parametrize(
    ("trained", "precision", "more"),
    [
        ("full", "bf16", {}),
        ("lm", "fp32", {}),
        ("tower+projector", "bf16", {}),
        ("qlora", "bf16", {"engine.zero_stage": 0}),
        ("lora_all", "fp32", {"lora.targets": "all-linear"}),
        ("lora_lm", "bf16", {"lora.targets": ["dense"]}),
        ("lora_all", "bf16", {"lora.use_dora": True, "engine.zero_stage": 0}),
    ],
    ids=["full", "lm", "vision", "qlora", "all-linear", "targets", "DoRA"],
)
def test_the_saved_model_has_the_size_of_its_weights(trained, precision, more):
    changes = {"trained": trained, "lora.rank": 4, "engine.precision": precision}
    options = recipe(changes | more).engine_options()
    model = select_weights(tiny_model(), "lora_lm" if trained == "qlora" else trained, options.lora)
    weights, adapters = model.named_parameters(), is_lora(trained)
    saved = sum(weight.numel() for name, weight in weights if not adapters or "lora_" in name)
    model_bytes, checkpoint = saved_bytes(model.config, options)
    assert model_bytes == saved * (2 if precision == "bf16" else 4)
    learned = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert count_trained(model.config, options) == learned
    if adapters and options.zero_stage:
        assert checkpoint == model_bytes + 12 * learned
