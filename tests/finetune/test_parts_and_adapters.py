"""Parts of the model with learning rates of their own; LoRA in peft's words."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from glm4v_patched.engine.options import PARTS, LoraOptions, part_of
from glm4v_patched.engine.trainable import select_weights
from glm4v_patched.finetune.plan import BEFORE, settings_of
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.models.check_weights import COMPUTED
from tests.helpers.recipes import recipe, train_here
from tests.helpers.tiny import tiny_model


@pytest.fixture
def short(mine) -> Recipe:
    """One step, at the whole rate."""
    changes = {"trainer.max_steps": 1, "trainer.warmup_steps": 0}
    return mine.override(changes | {"trainer.lr_scheduler_type": "constant"})


def steps_of_parts(asked: Recipe) -> dict[str, float]:
    """How far weights moved in a training, the farthest of each part of the model."""
    train_here(asked)
    before, after = (load_file(Path(f, "model.safetensors")) for f in (asked.model, asked.out))
    moved = dict.fromkeys(PARTS, 0.0)
    # transformers 5.0 writes what is computed, where others write what was read.
    for name in after.keys() - {f"transformer.{COMPUTED}"}:
        step = (after[name] - before[name].to(after[name].dtype)).abs().max().item()
        moved[part_of(name)] = max(moved[part_of(name)], step)
    return moved


def test_every_weight_belongs_to_the_part_that_its_name_says():
    parts = {name: part_of(name) for name, _ in tiny_model().named_parameters()}
    assert {*parts.values()} == {*PARTS}
    for name, part in parts.items():
        inside = name.removeprefix("transformer.").split(".")
        assert (part == "language_model") == (inside[0] != "vision")
        assert (part == "adapter") == (inside[1] in ("linear_proj", "conv", "boi", "eoi"))


def test_each_part_learns_at_its_own_rate_and_those_not_asked_for_do_not(short):
    moved = steps_of_parts(short.override({"trained": "adapter+language_model"}))
    assert {part for part, step in moved.items() if step} == {"adapter", "language_model"}
    rates = {"tower": 1e-5, "adapter": 1e-9, "language_model": 1e-3}
    moved = steps_of_parts(short.override({"trained": "full", "trainer.learning_rate": rates}))
    # AdamW's first step is as long as the rate, whatever the gradient.
    for part in ("tower", "language_model"):
        assert moved[part] == pytest.approx(rates[part], rel=0.05)
    assert moved["adapter"] < 1e-7


def test_adapters_are_what_the_recipe_says_and_go_on_as_they_are(short):
    lora = {"lora.rank": 4, "lora.dropout": 0.25, "lora.targets": "all-linear"}
    lora |= {"lora.use_rslora": True, "lora.use_dora": True, "trained": "lora_all"}
    train_here(short.override(lora))
    config = json.loads(Path(short.out, "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.25)
    assert config["use_rslora"] and config["use_dora"]
    names = load_file(Path(short.out, "adapter_model.safetensors"))
    assert any("lora_magnitude_vector" in name for name in names)
    on = {name.rsplit(".", 3)[1] for name in names if "lora_A" in name}
    assert on == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2"}
    assert not any(part_of(name) == "adapter" for name in names)
    again = short.override({"model": short.out, "trained": "lora_all", "lora.rank": 4})
    assert base_of(again).adapters == base_of(again.override(lora)).adapters == Path(short.out)


def test_alpha_is_twice_the_rank_and_adapters_of_before_keep_their_eight(short):
    model = select_weights(tiny_model(), "lora_lm", LoraOptions(rank=32))
    assert model.peft_config["default"].lora_alpha == 64
    assert settings_of(recipe({"trained": "lora_lm"}), 1)["lora.alpha"] == 16
    assert BEFORE["lora.alpha"] == 8
