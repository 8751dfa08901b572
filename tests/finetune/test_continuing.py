"""A run goes on with the model, the rows and the adapters that it had, or says what differs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune.launch import launch
from glm4v_patched.finetune.plan import settings_of, starting_point
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.models.placement import Placement
from tests.helpers.recipes import built, drawn_recipe, recipe, train_here

HERE = Placement(1, on_cpu=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Recipe:
    """Adapters of four steps, and the checkpoint of the second."""
    changes = {
        "trainer.max_steps": 4,
        "trainer.save_steps": 2,
        "trainer.learning_rate": 1e-2,
        "trained": "lora_lm",
        "lora.rank": 4,
        "engine.zero_stage": 0,
    }
    recipe = drawn_recipe(tmp_path_factory.mktemp("continuing"), changes)
    train_here(recipe)
    return recipe


@pytest.fixture
def stopped(trained, tmp_path) -> Recipe:
    """The same run with its model and data in folders of its own, when it had the checkpoint."""
    shutil.copytree(Path(trained.model).parent, tmp_path / "run")
    for path in (tmp_path / "run" / "out").iterdir():
        if path.is_file():
            path.unlink()
    places = {"model": "model", "out": "out", "data.train": "train.jsonl"}
    return trained.override({name: str(tmp_path / "run" / p) for name, p in places.items()})


@pytest.fixture
def not_run(monkeypatch):
    """What is launched trains nothing."""
    monkeypatch.setattr(launching, "_run", lambda command, _: "")


def test_a_continued_run_saves_and_logs_as_it_is_asked_now(stopped, capsys):
    changed = stopped.override({"trainer.save_steps": 1, "trainer.logging_steps": 2})
    launch(changed, HERE, resume=True, dry_run=True)
    told = f"training continues from {Path(stopped.out, 'checkpoint-2')}, after step 2"
    assert told in capsys.readouterr().out
    report = train_here(changed, starting_point(changed, 1, True, base_of(changed)))
    found = {path.name for path in Path(stopped.out).glob("checkpoint-*")}
    assert found == {"checkpoint-2", "checkpoint-3"}
    assert [entry["step"] for entry in report["history"]] == [1, 2, 4]


def test_folders_may_move_between_start_and_continuation_and_what_is_learned_may_not():
    settings = settings_of(recipe({"trainer.save_steps": 4}), 2)
    free = {"data.train": "e", "model": "n", "out": "p", "trainer.save_steps": 5}
    free |= {"max_nonfinite_steps": 9, "trainer.dataloader_num_workers": 2}
    # Epochs decide nothing where there is a number of steps.
    assert settings_of(recipe(free | {"trainer.num_train_epochs": 7.0}), 2) == settings
    for changes in ({"trainer.learning_rate": 2.0}, {"data.pack_to": 100}):
        assert len(settings_of(recipe(changes), 2).items() ^ settings.items()) == 2
    assert len(settings_of(recipe(), 1).items() ^ settings.items()) == 2
    # One that is newer than a checkpoint has the default of its field.
    defaults = Recipe.defaults()
    assert defaults["lora.rank"] == 8 and defaults["engine.compile"] == "auto"
    assert "trainer.per_device_train_batch_size" not in defaults and "lora" not in defaults


def test_adapters_as_a_model_go_on_where_they_were(trained, tmp_path, monkeypatch):
    changes = {
        "model": trained.out,
        "out": str(tmp_path / "out"),
        "trainer.max_steps": 1,
        "trainer.save_steps": None,
        "trainer.warmup_steps": 1,  # so that this one step has the rate 0
    }
    train_here(trained.override(changes))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == trained.model and config["r"] == 4
    before = load_file(Path(trained.out, "adapter_model.safetensors"))
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    # They know their model from any folder.
    monkeypatch.chdir(Path(trained.model).parent)
    model = built(trained.override({"model": Path(trained.model).name}))
    assert model.peft_config["default"].base_model_name_or_path == trained.model


def test_another_base_under_adapters_or_their_checkpoint_is_refused(stopped, tmp_path, not_run):
    first = stopped.override({"out": str(tmp_path / "first")})
    train_here(first)
    more = stopped.override({"model": first.out, "out": str(tmp_path / "more")})
    launch(more, HERE)
    assert starting_point(stopped, 1, True, base_of(stopped)).name == "checkpoint-2"
    path = Path(stopped.model, "model.safetensors")
    weights = load_file(path)
    weights["transformer.embedding.word_embeddings.weight"] *= 1.5
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)trained on another model than .*safetensors: \w+"):
        launch(more.override({"out": str(tmp_path / "other")}), HERE)
    with pytest.raises(ValueError, match=r"(?s)of the model, model\.safetensors: \w+ there, \w+"):
        starting_point(stopped, 1, True, base_of(stopped))


def test_changed_rows_and_pictures_are_said_and_can_be_accepted(stopped, capfd, not_run):
    data = Path(stopped.data.train)
    one, other, *_ = sorted(data.parent.glob("pictures/*"))
    other.write_bytes(one.read_bytes())
    with pytest.raises(ValueError, match=r"(?s)20 there, 20 now; 1 \(.*--accept-changed-data"):
        launch(stopped, HERE, resume=True)
    launch(stopped, HERE, resume=True, accept_changed_data=True)
    said = capfd.readouterr().out
    assert "rows: 20 there, 20 now; 1 (line" in said
    data.write_text(data.read_text() + data.read_text().splitlines()[0])
    launch(stopped, HERE, resume=True, accept_changed_data=True)
    said = capfd.readouterr().out
    assert "20 there, 21 now; 1 (line" in said
    assert "may come a second time and others not at all" in said
