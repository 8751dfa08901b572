"""What a recipe asks for, and the model that it makes of a folder or an id of the Hub."""

import json
import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from deepspeed.utils import z3_leaf_module

from glm4v_patched.cli import main
from glm4v_patched.engine.activation_checkpointing import checkpointed_layers
from glm4v_patched.engine.deepspeed.config import deepspeed_config
from glm4v_patched.engine.options import PACKAGES
from glm4v_patched.finetune.checkpoints import write_manifest
from glm4v_patched.finetune.launch import launch
from glm4v_patched.finetune.origin import Origin, Rows, base_of
from glm4v_patched.finetune.plan import options_of, settings_of, starting_point
from glm4v_patched.finetune.recipe import Recipe, RecipeError, may_change
from glm4v_patched.finetune.worker import RecipeTrainer
from glm4v_patched.models.base import identify
from glm4v_patched.models.placement import Placement
from tests.helpers.local_hub import LocalHub
from tests.helpers.recipes import built, decided, recipe
from tests.helpers.tiny import golden_weights, tiny_model

NAME = "our-org/glm-4v-tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trained": "lora"},
            'trained is "lora"; expected full, lm, .*, qlora, or a list of tower, adap',
        ),
        ({"lora.rank": 0}, "lora.rank is 0; expected a whole number from 1 to 4096"),
        ({"trained": ["tower", "towr"]}, r"trained is \[.tower., .towr.\]; expected full, .*"),
        ({"trained": ["tower", "tower"]}, "trained is .*; expected full, .* or a list of tower"),
        ({"trained": []}, r"trained is \[\]; expected full, .*, or a list of tower, adapter"),
        ({"trained": ["adapter"], "data.reuse_features": True}, "adapter, which trains the vision"),
        (
            {"lora.alpha": 0},
            "lora.alpha is 0; expected a whole number from 1 to .* or null",
        ),
        ({"lora.dropout": 1}, "lora.dropout is 1; expected a number from 0 to below 1 or null"),
        ({"lora.r": 8}, r"lora.r is not a field .*; did you mean lora.rank\?"),
        ({"lora.target_modules": []}, r"lora.target_modules is not .*did you mean lora.targets\?"),
        ({"lora.bias": "all"}, "lora.bias is not a field of a recipe; expected rank, alpha, drop"),
        (
            {"lora.targets": "dense"},
            'targets is "dense"; expected a list of query_key_value, dense',
        ),
        (
            {"lora.targets": ["up"]},
            r'targets is .*"up".*; expected a list of query_key_value, dense',
        ),
        (
            {"lora.targets": ["fc1"], "trained": "lora_lm"},
            "has fc1, of the vision tower.* lora_all",
        ),
        ({"lora.targets": [], "trained": "lora_lm"}, "lora.targets is an empty list"),
        (
            {"lora.use_dora": True, "trained": "lora_lm"},
            "use_dora with engine.zero_stage 3: .* 0, 1",
        ),
        (
            {"trainer.learning_rate": {"tower": 1e-6, "adapter": 1e-5}},
            "learning_rate is for tower, adapter, and trained is full; expected one number, or one",
        ),
        (
            {"trainer.learning_rate": {"adapter": 1e-5}, "trained": "lora_all"},
            "trained is lora_all; expected .* one for each of tower, language_model",
        ),
        ({"trainer.learning_rate": {"towr": 1e-6}}, "a number above 0, or one for each part"),
        ({"engine.tower": "most"}, 'engine.tower is "most"; expected auto, none, linear'),
        ({"engine.tower": "every 0"}, 'engine.tower is "every 0"; expected .* every N, N > 0'),
        ({"engine.language": None}, "engine.language is null; expected auto, none"),
        ({"engine.optimizer": "sgd"}, 'engine.optimizer is "sgd"; expected adamw or adamw_8bit'),
        ({"engine.offload": "most"}, 'engine.offload is "most"; expected true, false or auto$'),
        ({"engine.precision": "fp16"}, 'engine.precision is "fp16"; expected bf16 or fp32'),
        ({"engine.compile": 1}, "engine.compile is 1; expected true, false or auto"),
        ({"engine.compile": "true"}, r'engine.compile is "true"; .* \(without quotes\)'),
        ({"engine.zero_stage": 4}, "engine.zero_stage is 4; expected 0, 1, 2 or 3"),
        ({"engine.zero_stage": True}, "engine.zero_stage is true; expected 0, 1, 2 or 3"),
        ({"engine.zero_stage": 1.0}, "engine.zero_stage is 1.0; expected 0, 1, 2 or 3"),
        (
            {"trainer.max_steps": 0},
            "trainer.max_steps is 0; expected a whole number from 1 to ",
        ),
        ({"trainer.max_steps": -1}, "trainer.max_steps is -1; expected a whole number"),
        ({"trainer.max_steps": True}, "trainer.max_steps is true; expected a whole number"),
        ({"trainer.max_steps": 10.0}, "trainer.max_steps is 10.0; expected a whole number"),
        ({"trainer.max_steps": "100"}, r'trainer.max_steps is "100"; .* \(without quotes\)$'),
        ({"trainer.max_steps": "-1"}, 'trainer.max_steps is "-1"; .* to 2147483647 or null$'),
        ({"trainer.per_device_train_batch_size": 0}, "per_device_train_batch_size is 0; expected"),
        ({"trainer.learning_rate": -1}, "learning_rate is -1; expected a number above 0"),
        ({"trainer.learning_rate": 0}, "learning_rate is 0; expected a number above 0"),
        ({"trainer.learning_rate": True}, "learning_rate is true; expected a number above 0"),
        ({"trainer.learning_rate": "1e-4"}, r'learning_rate is "1e-4"; .* \(without quotes\)'),
        ({"trainer.learning_rate": math.nan}, "learning_rate is NaN; expected a number above 0"),
        ({"trainer.learning_rate": math.inf}, "learning_rate is Infinity; expected a number"),
        ({"trainer.seed": -1}, "trainer.seed is -1; expected a whole number from 0 to 4294967295"),
        ({"trainer.seed": 2**32}, "trainer.seed is 4294967296; expected a whole number from 0"),
        ({"trainer.save_steps": 0}, "trainer.save_steps is 0; expected .* or null"),
        ({"trainer.save_steps": "5"}, 'trainer.save_steps is "5"; expected .*without quotes'),
        ({"trainer.save_total_limit": 0}, "trainer.save_total_limit is 0; expected .* or null"),
        (
            {"data.pack_to": 0},
            "data.pack_to is 0; expected a whole number from 1 to .* or null",
        ),
        ({"data": "d"}, 'data is "d"; expected a section with train, '),
        ({"lora": None}, "lora is null; expected a section with rank"),
        ({"model": ""}, 'model is ""; expected a folder or an id of the Hub'),
        ({"model": "a\nb"}, r'model is "a\\nb"; expected a folder'),
        ({"model": "a\ud800"}, r'model is "a\\ud800"; expected a folder'),
        ({"out": 2024}, r"out is 2024; expected a folder \(in quotes\)"),
        ({"revision": 1234567}, r"revision is 1234567; expected a branch.* \(in quotes\)"),
        ({"revision": ""}, 'revision is ""; expected a branch, tag or commit or null$'),
        ({"revision": "v\0"}, "revision is .*; expected a branch, tag or commit or null$"),
        ({"engine.x": 1}, "engine.x is not a field of a recipe; expected zero_stage, precision"),
        ({"engine.towr": "none"}, r"engine.towr is not a field .*; did you mean engine.tower\?"),
        ({"learning_rat": 1}, r"learning_rat is not .*; did you mean trainer.learning_rate\?"),
        ({"steps": 1}, r"steps is not a field of a recipe; did you mean trainer.max_steps\?"),
        ({"lr": 1}, r"lr is not a field of a recipe; did you mean trainer.learning_rate\?"),
        ({"no.thing": 1}, "no is not a field of a recipe; expected model, out, data"),
        (
            {"engine.offload": True, "engine.zero_stage": 0},
            "engine.offload with engine.zero_stage 0: .*zero_stage 1, 2 or 3",
        ),
        (
            {"engine.offload": True, "engine.optimizer": "adamw_8bit"},
            "offload with adamw_8bit, .* be adamw",
        ),
        ({"trained": "qlora"}, "qlora with engine.zero_stage 3: .*; expected engine.zero_stage 0"),
        ({"data.reuse_features": True}, "full, which trains the vision tower.*trained to be lm"),
        ({"trained": "lora_all", "data.reuse_features": "f"}, "lora_all, which trains the vision"),
        ({"model": ".", "revision": "v1"}, 'revision is "v1" of ., a folder; expected null'),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        recipe(changes)


def test_several_processes_without_zero_are_refused_before_anything_is_written(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text("")
    out = tmp_path / "out"
    recipe(
        {"data.train": str(tmp_path / "train.jsonl"), "out": str(out), "engine.zero_stage": 0}
    ).write(tmp_path / "r")
    assert main(["train", str(tmp_path / "r"), "--processes", "2"]) == 1
    assert "engine.zero_stage 0 on 2 processes" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.skipif(
    find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed: run without it"
)
def test_a_missing_package_is_named_before_anything_starts(tmp_path):
    with pytest.raises(RuntimeError, match="qlora needs bitsandbytes: .*pip install bitsandbytes"):
        launch(
            recipe({"trained": "qlora", "engine.zero_stage": 0, "out": str(tmp_path / "out")}),
            Placement(1, on_cpu=True),
        )
    assert not (tmp_path / "out").exists()


def test_packages_are_known_for_every_choice_with_adapters():
    assert {name for name, needed in PACKAGES.items() if "peft" in needed} == {
        "lora_lm",
        "lora_all",
        "qlora",
    }


def test_a_run_with_other_settings_is_not_continued(tmp_path):
    (tmp_path / "data").write_text("a line\n")
    same = {"data.train": str(tmp_path / "data"), "out": str(tmp_path / "out")}
    checkpoint = tmp_path / "out" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    base = identify(base_of(recipe(same)))
    write_manifest(checkpoint, Origin(settings_of(recipe(same), 2), base, Rows((), ())))
    assert starting_point(recipe(same), 2, resume=True) == checkpoint
    for change, told in [
        ({"trained": "lm"}, "trained: full there, lm now"),
        ({"engine.compile": True}, "engine.compile: auto there, True now"),
        ({"lora.rank": 4}, "lora.rank: 8 there, 4 now"),
        ({"trainer.seed": 1}, "trainer.seed: 0 there, 1 now"),
    ]:
        with pytest.raises(ValueError, match=told):
            starting_point(recipe({**same, **change}), 2, resume=True)


def test_what_is_kept_of_activations_and_where_the_model_lies_may_change(tmp_path):
    (tmp_path / "data").write_text("a line\n")
    same = {"data.train": str(tmp_path / "data")}
    changed = recipe(
        {
            **same,
            "engine.tower": "none",
            "engine.language": "every 2",
            "model": "o/m",
            "revision": "v1",
        }
    )
    assert settings_of(changed, 2) == settings_of(recipe(same), 2)
    assert {"model", "revision", "engine.tower", "engine.language"} <= may_change()


def test_a_recipe_reads_back(tmp_path):
    new = recipe(
        {
            "trained": "lora_all",
            "lora.rank": 4,
            "engine.tower": "none",
            "engine.compile": True,
            "revision": "v1",
        }
    )
    new.write(tmp_path / "new.json")
    assert Recipe.read(tmp_path / "new.json") == new


@pytest.mark.parametrize(
    ("free_gib", "trained", "chosen"),
    [
        # Two GPUs of 141 GB, 80 GB and 24 GB; what is kept is under test in test_memory.py.
        (139, "full", {"offload": False}),
        (79, "full", {"offload": True}),
        (79, "lm", {"offload": True}),
        (79, "lora_all", {"offload": False, "language": "none"}),
        (23.5, "lora_lm", {"offload": False, "tower": "full"}),
        (
            8,
            "lora_lm",
            {"offload": False, "language": "full"},
        ),  # too little; nothing to offload
        (
            0,
            "full",
            {"offload": False, "tower": "full", "language": "full"},
        ),  # a CPU
    ],
)
def test_what_is_auto_is_chosen_by_memory(free_gib, trained, chosen):
    asked = recipe(
        {
            "trained": trained,
            "engine.tower": "auto",
            "engine.language": "auto",
            "engine.compile": True,
        }
    )
    found = decided(asked, free_gib * 2**30)
    assert {name: getattr(found, name) for name in chosen} == chosen
    zero = deepspeed_config(found)["zero_optimization"]
    assert ("offload_optimizer" in zero) == chosen["offload"]
    assert zero["stage3_max_live_parameters"] == found.stage3_max_live_parameters
    assert "auto" not in (found.tower, found.language)


def test_what_is_asked_for_is_not_chosen():
    changes = {"tower": "every 2", "language": "selective", "offload": False, "compile": False}
    asked = recipe({f"engine.{name}": value for name, value in changes.items()})
    for free in (0, 80 * 2**30, 1000 * 2**30):
        found = decided(asked, free)
        assert replace(found, stage3_max_live_parameters=None) == options_of(asked)
    assert not decided(recipe({"engine.optimizer": "adamw_8bit"}), 2**30).offload


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("compiled", "policy", "whole"),
    [
        (False, "full", False),
        (False, "every 2", False),
        (False, "selective", True),
        (False, "attention", True),
        (True, "full", True),
    ],
)
def test_layers_without_hooks_inside_are_gathered_whole_under_zero_3(
    compiled, policy, whole, stage, folder
):
    asked = recipe(
        {
            "model": str(folder),
            "engine.compile": compiled,
            "engine.tower": policy,
            "engine.zero_stage": stage,
        }
    )
    layers = [*checkpointed_layers(built(asked))]
    assert len(layers) == 4
    for layer in layers:
        assert hasattr(layer.forward, "_torchdynamo_orig_callable") == compiled
        assert z3_leaf_module(layer) == (whole and stage == 3)
    zero = deepspeed_config(decided(asked))["zero_optimization"]
    assert ("memory_efficient_linear" in zero) == (whole and stage == 3)


def test_without_zero_deepspeed_takes_no_part():
    assert deepspeed_config(decided(recipe({"engine.zero_stage": 0}))) is None
    assert (
        deepspeed_config(decided(recipe({"engine.zero_stage": 1})))["zero_optimization"]["stage"]
        == 1
    )


def test_policies_are_set_behind_adapters(folder):
    model = built(recipe({"model": str(folder), "trained": "lora_all", "engine.tower": "none"}))
    names = {type(layer).__name__: layer for layer in checkpointed_layers(model)}
    assert not names["TransformerLayer"].gradient_checkpointing
    assert names["GLMBlock"].gradient_checkpointing


@pytest.mark.parametrize("stage, held", [(0, torch.float32), (3, torch.bfloat16)])
@pytest.mark.parametrize("trained", ["lm", "lora_lm"])
def test_only_zero_keeps_masters_so_without_it_trained_weights_are_fp32(
    trained, stage, held, folder
):
    model = built(recipe({"model": str(folder), "trained": trained, "engine.zero_stage": stage}))
    dtypes = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert dtypes == {(True, held), (False, torch.bfloat16)}


def test_no_group_of_the_optimizer_is_empty(folder, tmp_path):
    from transformers import TrainingArguments

    model = built(recipe({"model": str(folder), "trained": "lora_lm", "engine.zero_stage": 0}))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = RecipeTrainer(model, args=arguments, data_collator=list)
    groups = trainer.create_optimizer().param_groups
    assert [len(group["params"]) for group in groups] == [4]  # A and B of two layers


def test_the_config_of_the_model_behind_adapters_is_switched(folder, tmp_path):
    from transformers import TrainingArguments

    model = built(recipe({"model": str(folder), "trained": "lora_lm", "engine.zero_stage": 0}))
    inner = model.get_base_model()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = RecipeTrainer(model, args=arguments, data_collator=list)
    assert inner.config.skip_logits and inner.transformer.config.skip_logits
    trainer.save_model()
    assert inner.config.skip_logits
    assert (tmp_path / "adapter_config.json").exists() and not (tmp_path / "config.json").exists()


def test_a_model_comes_from_the_hub_at_its_revision(folder, tmp_path, monkeypatch):
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        repository = hub.add_repository(NAME, files)
        repository.refs["v1"] = repository.head
        newer = json.loads(files["config.json"]) | {"rope_ratio": 7}
        changes = {"config.json": json.dumps(newer).encode()}
        repository.add_commit(changes)
        asked = recipe(
            {"model": NAME, "revision": "v1", "trained": "lora_lm", "engine.precision": "fp32"}
        )
        model = built(asked)
        inner = model.get_base_model().state_dict()
        assert model.config.rope_ratio == 1
        assert built(recipe({"model": NAME, "engine.precision": "fp32"})).config.rope_ratio == 7
    for name, weight in golden_weights().items():
        if "query_key_value" not in name and "inv_freq" not in name:
            assert torch.equal(inner[name], weight), name
    adapter = model.peft_config["default"]
    assert (adapter.base_model_name_or_path, adapter.revision) == (NAME, "v1")


@pytest.mark.parametrize(("zero_stage", "in_place"), [(3, True), (2, False)])
def test_norms_are_taken_in_place_under_zero_3(folder, zero_stage, in_place):
    class Zero:
        def get_grad_norm_direct(self, gradients, parameters, norm_type=2):
            return torch.tensor(len(gradients))

    model = built(recipe({"model": str(folder), "engine.zero_stage": zero_stage}))
    zero = model.get_input_embeddings().weight._z3_optimizer = Zero()
    model(torch.tensor([[1, 2, 3]]))
    gradients = [torch.ones(3), torch.ones(1)]
    given = zero.get_grad_norm_direct(gradients, [None, None])
    assert given == (1 if in_place else 2)
