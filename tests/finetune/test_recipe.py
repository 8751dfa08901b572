"""What a recipe asks for, and the model that it makes of a folder or an id of the Hub."""

import json

import pytest
import torch
from transformers import TrainingArguments

from glm4v_patched.finetune.worker import RecipeTrainer
from tests.helpers.local_hub import LocalHub
from tests.helpers.recipes import built, recipe

NAME = "our-org/glm-4v-tiny"


@pytest.fixture
def made(model_folder):
    """The tiny model as a recipe makes it."""
    return lambda **changes: built(recipe({"model": str(model_folder)} | changes))


@pytest.mark.parametrize("stage, held", [(0, torch.float32), (3, torch.bfloat16)])
def test_only_zero_keeps_masters_so_without_it_trained_weights_are_fp32(stage, held, made):
    for trained in ("lm", "lora_lm"):
        model = made(**{"trained": trained, "engine.zero_stage": stage})
        dtypes = {(p.requires_grad, p.dtype) for p in model.parameters()}
        assert dtypes == {(True, held), (False, torch.bfloat16)}


def test_the_config_of_the_model_behind_adapters_is_switched_and_no_group_is_empty(made, tmp_path):
    model = made(**{"trained": "lora_lm", "engine.zero_stage": 0})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = RecipeTrainer(model, recipe(), args=arguments, data_collator=list)
    inner = model.get_base_model()
    assert inner.config.skip_logits and inner.transformer.config.skip_logits
    groups = trainer.create_optimizer().param_groups
    assert [len(group["params"]) for group in groups] == [4]  # A and B of two layers
    trainer.save_model()
    assert inner.config.skip_logits
    assert (tmp_path / "adapter_config.json").exists() and not (tmp_path / "config.json").exists()


def test_a_model_comes_from_the_hub_at_its_revision(model_folder, tmp_path, monkeypatch):
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
        repository = hub.add_repository(NAME, files)
        repository.refs["v1"] = repository.head
        newer = json.loads(files["config.json"]) | {"rope_ratio": 7}
        repository.add_commit({"config.json": json.dumps(newer).encode()})
        asked = recipe({"model": NAME, "engine.precision": "fp32"})
        assert built(asked).config.rope_ratio == 7
        model = built(asked.override({"revision": "v1", "trained": "lora_lm"}))
    assert model.config.rope_ratio == 1
    adapter = model.peft_config["default"]
    assert (adapter.base_model_name_or_path, adapter.revision) == (NAME, "v1")
