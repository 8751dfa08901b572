"""The model that a recipe makes: its parts with their learning rates, adapters and their card."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import TrainingArguments

from glm4v_patched.engine.options import MODEL_PARTS, part_of_parameter
from glm4v_patched.finetune.adapter_card import CARD_FILE, write_card
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.recipe.model import resolve_base
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.training_arguments import LoopOptions
from glm4v_patched.finetune.worker import RecipeTrainer
from glm4v_patched.models.base import ModelSource
from glm4v_patched.models.check_weights import COMPUTED_BUFFER_SUFFIX
from tests.helpers.recipes import built, recipe, train_here
from tests.helpers.tiny import tiny_model


@pytest.fixture
def short(mine) -> Recipe:
    """One step, at the whole rate."""
    changes = {"trainer.max_steps": 1, "trainer.warmup_steps": 0}
    return mine.override(changes | {"trainer.lr_scheduler_type": "constant"})


def steps_of_parts(run_recipe: Recipe) -> dict[str, float]:
    """How far weights moved in a training, the farthest of each part of the model."""
    train_here(run_recipe)
    before, after = (
        load_file(Path(f, "model.safetensors")) for f in (run_recipe.model, run_recipe.out)
    )
    moved = dict.fromkeys(MODEL_PARTS, 0.0)
    # transformers 5.0 writes what is computed, where others write what was read.
    for name in after.keys() - {f"transformer.{COMPUTED_BUFFER_SUFFIX}"}:
        step = (after[name] - before[name].to(after[name].dtype)).abs().max().item()
        moved[part_of_parameter(name)] = max(moved[part_of_parameter(name)], step)
    return moved


def test_every_weight_belongs_to_the_part_that_its_name_says():
    parts = {name: part_of_parameter(name) for name, _ in tiny_model().named_parameters()}
    assert {*parts.values()} == {*MODEL_PARTS}
    for name, part in parts.items():
        inside = name.removeprefix("transformer.").split(".")
        assert (part == "language_model") == (inside[0] != "vision")
        assert (part == "projector") == (inside[1] in ("linear_proj", "conv", "boi", "eoi"))


def test_each_part_learns_at_its_own_rate_and_those_not_asked_for_do_not(short):
    both = short.override({"trained": ["language_model", "projector"]})
    assert both == short.override({"trained": "projector+language_model"})
    moved = steps_of_parts(both)
    assert {part for part, step in moved.items() if step} == {"projector", "language_model"}
    rates = {"tower": 1e-5, "projector": 1e-9, "language_model": 1e-3}
    moved = steps_of_parts(short.override({"trained": "full", "trainer.learning_rate": rates}))
    # AdamW's first step is as long as the rate, whatever the gradient.
    for part in ("tower", "language_model"):
        assert moved[part] == pytest.approx(rates[part], rel=0.05)
    assert moved["projector"] < 1e-7


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
    assert not any(part_of_parameter(name) == "projector" for name in names)
    again = short.override({"model": short.out, "trained": "lora_all", "lora.rank": 4})
    for same in (again, again.override(lora)):
        assert resolve_base(same).adapters == Path(short.out)


def test_a_training_of_adapters_leaves_a_card_that_the_hub_reads(mine, tmp_path):
    changes = {"lora.rank": 2, "lora.alpha": 8, "data.eval": 0.2, "data.eval_answers": 2}
    changes |= {"trainer.max_steps": 2, "trainer.eval_steps": 1, "trainer.run_name": str(tmp_path)}
    trained = mine.override(changes)
    report = train_here(trained)
    card = ModelCard.load(Path(trained.out, CARD_FILE))
    assert card.data.library_name == "peft" and card.data.base_model is None
    first, last = report["evaluations"]
    assert f"loss {last['eval_loss']:.4g}, exact_match {last['eval_exact_match']:.4g}" in card.text
    assert re.search(r"on 1\d rows, for 2 steps", card.content)
    for text in ("lora_lm", "rank: 2", "learning_rate: 0.001", "PeftModel.from_pretrained"):
        assert text in card.content, card.content
    for nothing in ("More Information Needed", str(Path(trained.model).parent), str(tmp_path)):
        assert nothing not in card.content
    # Where the best weights were saved, their scores.
    folder, public_values = Path(trained.out), resolve_recipe(trained).public_values
    write_card(
        folder, ModelSource(trained.model), public_values, report | {"best_step": first["step"]}, 16
    )
    assert f"loss {first['eval_loss']:.4g}, " in ModelCard.load(Path(trained.out, CARD_FILE)).text
    assert first["eval_loss"] != last["eval_loss"]
    # A base of the Hub is named with its commit.
    unevaluated = report | {"evaluations": []}
    write_card(folder, ModelSource("zai-org/glm-4v-9b", "0" * 40), public_values, unevaluated, 16)
    card = ModelCard.load(Path(trained.out, CARD_FILE))
    assert card.data.base_model == "zai-org/glm-4v-9b"
    assert f'from_pretrained("zai-org/glm-4v-9b", revision="{"0" * 40}"' in card.content
    assert "They were not evaluated." in card.content


@pytest.fixture
def build_tiny(model_folder):
    """The tiny model as a recipe makes it."""
    return lambda **changes: built(recipe({"model": str(model_folder)} | changes))


def test_the_config_of_the_model_behind_adapters_is_switched_and_no_group_is_empty(
    build_tiny, tmp_path
):
    model = build_tiny(**{"trained": "lora_lm", "engine.zero_stage": 0})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = RecipeTrainer(model, LoopOptions(), args=arguments, data_collator=list)
    inner = model.get_base_model()
    assert inner.config.skip_logits and inner.transformer.config.skip_logits
    groups = trainer.create_optimizer().param_groups
    assert [len(group["params"]) for group in groups] == [4]  # A and B of two layers
    stops, inner.config.eos_token_id = inner.config.eos_token_id, 5  # as the Trainer does
    trainer.save_model()
    assert inner.config.skip_logits and inner.config.eos_token_id == stops
    assert (tmp_path / "adapter_config.json").exists() and not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("trained", ["lm", "lora_lm"])
def test_saved_weights_have_the_mode_of_other_new_files(trained, build_tiny, tmp_path):
    model = build_tiny(**{"trained": trained, "engine.zero_stage": 0})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    RecipeTrainer(model, LoopOptions(), args=arguments, data_collator=list).save_model()
    (tmp_path / "new").touch()
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir() if path.is_file()}
    assert {*modes.values()} == {modes["new"]}, modes


def test_a_model_comes_from_the_hub_at_its_revision(hub, model_folder):
    name = "our-org/glm-4v-tiny"
    files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    repository = hub.add_repository(name, files)
    repository.refs["v1"] = repository.head
    newer = json.loads(files["config.json"]) | {"rope_ratio": 7}
    repository.add_commit({"config.json": json.dumps(newer).encode()})
    run_recipe = recipe({"model": name, "engine.precision": "fp32"})
    assert built(run_recipe).config.rope_ratio == 7
    model = built(run_recipe.override({"revision": "v1", "trained": "lora_lm"}))
    assert model.config.rope_ratio == 1
    adapter = model.peft_config["default"]
    assert (adapter.base_model_name_or_path, adapter.revision) == (name, "v1")
