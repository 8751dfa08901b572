"""Parts of the model with learning rates of their own; LoRA in peft's words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.engine.activation_checkpointing import checkpoint_layers
from glm4v_patched.engine.memory_plan import Batch, estimate, states
from glm4v_patched.engine.options import PARTS, EngineOptions, LoraOptions, part_of
from glm4v_patched.engine.trainable import select_weights
from glm4v_patched.finetune.plan import BEFORE, settings_of
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.models.check_weights import COMPUTED
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.recipes import built, drawn_recipe, recipe, train_here
from tests.helpers.tiny import grown_image, pictures, text, tiny_model

REAL = ChatGLMConfig()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    """Three steps without ZeRO."""
    changes = {"trainer.max_steps": 3, "engine.zero_stage": 0, "trainer.warmup_steps": 0}
    return drawn_recipe(tmp_path_factory.mktemp("parts"), changes)


def weights_of(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, "model.safetensors"))


def test_parts_that_have_a_name_get_it():
    for given, name in [
        (["language_model"], "lm"),
        (["language_model", "adapter", "tower"], "full"),
        (["language_model", "adapter"], "adapter+language_model"),
        ("adapter+language_model", "adapter+language_model"),
    ]:
        assert recipe({"trained": given}).trained == name


def test_every_weight_belongs_to_the_part_that_its_name_says():
    parts = {name: part_of(name) for name, _ in tiny_model().named_parameters()}
    assert {*parts.values()} == {*PARTS}
    for name, part in parts.items():
        inside = name.removeprefix("transformer.").split(".")
        assert (part == "language_model") == (inside[0] != "vision")
        assert (part == "adapter") == (inside[1] in ("linear_proj", "conv", "boi", "eoi"))


@pytest.mark.parametrize("trained", ["tower", "adapter", "tower+adapter", "adapter+language_model"])
def test_only_the_parts_asked_for_are_trained_and_saved(drawn, tmp_path, trained):
    asked = drawn.override({"trained": trained, "out": str(tmp_path / "out")})
    train_here(asked)
    before, after = weights_of(drawn.model), weights_of(asked.out)
    changed = {name for name, w in after.items() if not torch.equal(w, before[name].to(w.dtype))}
    # transformers 5.0 writes what is computed, where others write what was read.
    assert {part_of(name) for name in changed - {f"transformer.{COMPUTED}"}} == {
        *trained.split("+")
    }


def test_each_part_learns_at_its_own_rate(drawn, tmp_path):
    rates = {"tower": 1e-5, "adapter": 1e-9, "language_model": 1e-3}
    asked = drawn.override(
        {
            "trainer.learning_rate": rates,
            "out": str(tmp_path / "out"),
            "trainer.max_steps": 1,
            "trainer.lr_scheduler_type": "constant",
        }
    )
    train_here(asked)
    before, after = weights_of(drawn.model), weights_of(asked.out)
    moved = dict.fromkeys(PARTS, 0.0)
    for name, weight in after.items():
        moved[part_of(name)] = max(
            moved[part_of(name)], (weight - before[name].to(weight.dtype)).abs().max().item()
        )
    # AdamW's first step is as long as the rate, whatever the gradient.
    for part in ("tower", "language_model"):
        assert moved[part] == pytest.approx(rates[part], rel=0.05)
    assert moved["adapter"] < 1e-7


def test_adapters_are_what_the_recipe_says_and_go_on_as_they_are(drawn, tmp_path):
    lora = {"lora.rank": 4, "lora.dropout": 0.25, "lora.targets": "all-linear"}
    lora |= {"lora.use_rslora": True, "trained": "lora_all"}
    first = drawn.override({**lora, "out": str(tmp_path / "first")})
    train_here(first)
    config = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.25)
    assert config["use_rslora"] and not config["use_dora"]
    names = load_file(tmp_path / "first" / "adapter_model.safetensors")
    on = {name.rsplit(".", 3)[1] for name in names}
    assert on == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2"}
    assert not any(part_of(name) == "adapter" for name in names)
    again = drawn.override({"model": first.out, "out": "o", "trained": "lora_all", "lora.rank": 4})
    assert base_of(again).adapters == Path(first.out)
    assert base_of(again.override(lora)).adapters == Path(first.out)
    for changes, message in [
        ({"lora.alpha": 16}, "have lora_alpha 8, and lora.alpha is 16; expected the same, or null"),
        ({"lora.dropout": 0.1}, "have lora_dropout 0.25, and lora.dropout is 0.1"),
        ({"lora.use_rslora": False}, "have use_rslora True, and lora.use_rslora is False"),
        ({"lora.targets": ["dense"]}, "are on dense, .*query_key_value, and lora.targets is dense"),
    ]:
        with pytest.raises(ValueError, match=message):
            base_of(again.override(changes))


def test_dora_trains_without_sharded_weights(drawn, tmp_path):
    changes = {"lora.use_dora": True, "trained": "lora_lm", "out": str(tmp_path / "out")}
    assert train_here(drawn.override(changes))["finished"]
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any("lora_magnitude_vector" in name for name in names)


def test_alpha_is_twice_the_rank_and_was_eight_before():
    model = select_weights(tiny_model(), "lora_lm", LoraOptions(rank=32))
    assert model.peft_config["default"].lora_alpha == 64
    assert settings_of(recipe({"trained": "lora_lm"}), 1)["lora.alpha"] == 16
    assert BEFORE["lora.alpha"] == 8


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_dropout_is_the_same_when_a_layer_is_computed_again(policy):
    """Else gradients would be of another network than the loss."""
    ids = torch.tensor([text(9) + grown_image() + text(9)])
    found = []
    for asked in ("none", policy):
        torch.manual_seed(0)
        lora = LoraOptions(dropout=0.5, targets=("query_key_value", "dense_h_to_4h"))
        model = select_weights(tiny_model(), "lora_lm", lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        checkpoint_layers(model.train(), asked, asked)
        torch.manual_seed(1)
        model(input_ids=ids, labels=ids, pixel_values=pictures(1)).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


def test_memory_is_that_of_what_is_trained():
    batch = Batch(rows=1, row_length=2114, processes=2)
    options = EngineOptions(
        tower="full", language="full", compile=True, offload=False, stage3_max_live_parameters=1e9
    )
    sizes = {
        trained: states(REAL, replace(options, trained=trained), batch)
        for trained in ("adapter", "tower", "lm", "adapter+language_model", "full")
    }
    assert sorted(sizes, key=sizes.__getitem__) == [*sizes]
    small = replace(options, trained="lora_lm")
    large = replace(small, lora=LoraOptions(rank=64, targets=("query_key_value", "dense_4h_to_h")))
    added = states(REAL, large, batch) - states(REAL, small, batch)
    # Per weight: its value, its gradient, fp32 copy and two moments, shared by two processes. The
    # small ones are not counted.
    weights = 40 * 64 * (2 * 4096 + 512 + 13696 + 4096)
    assert added == pytest.approx(weights * (2 + 2 + 4 + 8) / 2)
    assert estimate(REAL, large, batch) > estimate(REAL, small, batch)


def test_a_base_under_adapters_of_the_old_scale_is_continued_with_it(drawn, tmp_path):
    first = drawn.override(
        {
            "trained": "lora_lm",
            "lora.alpha": 8,
            "out": str(tmp_path / "first"),
            "trainer.max_steps": 1,
        }
    )
    train_here(first)
    again = drawn.override({"model": first.out, "trained": "lora_lm"})
    assert built(again).peft_config["default"].lora_alpha == 8
