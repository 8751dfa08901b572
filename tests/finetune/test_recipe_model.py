"""The base model of a recipe, and the adapters that it can train further."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm4v_patched.finetune.recipe.model import resolve_base
from glm4v_patched.models.base import ModelSource, identify
from tests.helpers.recipes import recipe

LANGUAGE = "base_model.model.transformer.encoder.layers.0.self_attention.query_key_value"
TOWER = "base_model.model.transformer.vision.transformer.layers.0.attention.query_key_value"


def model(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True)
    config = {"model_type": "chatglm", "vision_config": {}} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
    return folder


def adapters(folder: Path, base: Path | str, *modules: str, **changes) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 8} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {f"{module}.lora_A.weight": torch.ones(2) for module in modules or [LANGUAGE]}
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def base_under(folder: Path, **changes) -> ModelSource:
    return resolve_base(recipe({"model": str(folder), "trained": "lora_lm"} | changes))


def test_a_folder_of_adapters_leads_to_their_model(tmp_path):
    base = model(tmp_path / "base")
    folder = adapters(tmp_path / "lora", base)
    resolved = base_under(folder)
    assert resolved == ModelSource(str(base), None, folder)
    names = {"adapters: adapter_config.json", "adapters: adapter_model.safetensors"}
    assert identify(resolved).keys() == identify(ModelSource(str(base))).keys() | names
    assert base_under(base, trained="full") == ModelSource(str(base))
    on_both = adapters(tmp_path / "both", "org/name", LANGUAGE, TOWER, revision="abc", r=4)
    fields = {"trained": "lora_all", "lora.rank": 4, "lora.use_dora": False}
    assert base_under(on_both, **fields) == ModelSource("org/name", "abc", on_both)
    # A revision beside adapters is that of their base on the Hub.
    assert base_under(on_both, **fields, revision="v2") == ModelSource("org/name", "v2", on_both)
    with pytest.raises(
        ValueError, match="on the vision tower and the language model, and trained is 'lora_lm'"
    ):
        base_under(on_both)


@pytest.mark.parametrize(
    ("adapter_fields", "recipe_fields", "named"),
    [
        ({}, {"trained": "full"}, ["'full'", "merge"]),
        ({}, {"trained": "lora_all"}, ["'lora_all'"]),
        ({}, {"lora.rank": 16}, ["r 8", "lora.rank is 16"]),
        ({"lora_alpha": 8}, {"lora.alpha": 16}, ["lora_alpha 8", "lora.alpha is 16"]),
        ({}, {"lora.targets": ["dense"]}, ["query_key_value", "lora.targets is dense"]),
        ({}, {"revision": "v2"}, ["revision is 'v2'", "base"]),
        ({"peft_type": "IA3"}, {}, ["peft_type is 'IA3'"]),
        ({"base_model_name_or_path": None}, {}, ["base_model_name_or_path is None"]),
    ],
)
def test_adapters_that_a_recipe_cannot_continue_are_refused(
    tmp_path, adapter_fields, recipe_fields, named, words
):
    folder = adapters(tmp_path / "lora", model(tmp_path / "base"), **adapter_fields)
    with words.refused(ValueError, *named):
        base_under(folder, **recipe_fields)


def test_adapters_of_what_is_no_glm4v_are_refused(tmp_path, words):
    chained = adapters(tmp_path / "chained", model(tmp_path / "text", vision_config=None))
    mixed = model(tmp_path / "mixed")
    shutil.copy(chained / "adapter_config.json", mixed)
    for folder in (chained, adapters(tmp_path / "second", chained), mixed):
        with words.refused(ValueError, "chained" if folder != mixed else "mixed"):
            base_under(folder)


def test_adapters_that_are_missing_or_damaged_are_named(tmp_path):
    folder = adapters(tmp_path / "lora", model(tmp_path / "base"))
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    weights.write_bytes(weights.read_bytes()[:20])
    with pytest.raises(ValueError, match="adapter_model.safetensors has 20 of its 152 bytes"):
        base_under(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="adapter_model.safetensors is missing"):
        base_under(folder)
    for damage in ("", "[]", "[" * 99_999):
        config.write_text(damage)
        with pytest.raises(ValueError, match="adapter_config.json"):
            base_under(folder)
