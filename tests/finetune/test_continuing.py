"""A run goes on with the model, the rows and the adapters that it had, or says what differs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerState, TrainingArguments

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.rows import read_conversations
from glm4v_patched.finetune.checkpoints import ROWS, Rows, changes_of_data
from glm4v_patched.finetune.launch import launch
from glm4v_patched.finetune.plan import check_data, starting_point
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.finetune.worker import Schedule
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.recipes import built, drawn_recipe, train_here


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
    out = tmp_path / "run" / "out"
    for path in out.iterdir():
        if path.is_file():
            path.unlink()
    places = {"model": "model", "out": "out", "data.train": "train.jsonl"}
    return trained.override({name: str(tmp_path / "run" / p) for name, p in places.items()})


def test_a_dry_run_says_from_where_it_would_continue(stopped, capsys):
    launch(stopped, Placement(1, on_cpu=True), resume=True, dry_run=True)
    told = capsys.readouterr().out
    assert f"training continues from {Path(stopped.out, 'checkpoint-2')}, after step 2" in told


def test_a_continued_run_saves_and_logs_as_it_is_asked_now(stopped):
    changed = stopped.override({"trainer.save_steps": 1, "trainer.logging_steps": 2})
    report = train_here(changed, starting_point(changed, 1, True, base_of(changed)))
    found = {path.name for path in Path(stopped.out).glob("checkpoint-*")}
    assert found == {"checkpoint-2", "checkpoint-3"}
    assert [entry["step"] for entry in report["history"]] == [1, 2, 4]


def test_a_run_that_was_moved_knows_its_best_checkpoint(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    state = TrainerState(best_global_step=2, best_model_checkpoint="/moved/checkpoint-2")
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    Schedule().on_train_begin(arguments, state, None)
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def loss_of_all_rows(recipe: Recipe) -> float:
    """Of the recipe's model or adapters as they are, on all rows at once."""
    model = built(recipe.override({"engine.tower": "none", "engine.language": "none"})).eval()
    processor = ChatGLMProcessor.from_pretrained(recipe.model)
    batch = ConversationCollator(processor)(read_conversations(recipe.data.train))
    with torch.no_grad():
        return model(**batch).loss.item()


def test_adapters_know_their_model_from_any_folder(trained, monkeypatch):
    monkeypatch.chdir(Path(trained.model).parent)
    model = built(trained.override({"model": Path(trained.model).name}))
    assert model.peft_config["default"].base_model_name_or_path == trained.model


def test_adapters_as_a_model_go_on_where_they_were(trained, tmp_path):
    changes = {
        "model": trained.out,
        "out": str(tmp_path / "out"),
        "trainer.max_steps": 1,
        "trainer.save_steps": None,
        "trainer.per_device_train_batch_size": 20,
        "trainer.warmup_steps": 1,  # so that this one step has the rate 0
    }
    recipe = trained.override(changes)
    want, fresh = loss_of_all_rows(recipe), loss_of_all_rows(trained)
    assert want < fresh - 0.05
    report = train_here(recipe)
    assert report["history"][0]["loss"] == pytest.approx(want, abs=1e-4)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == trained.model and config["r"] == 4
    before = load_file(Path(trained.out, "adapter_model.safetensors"))
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    # The schedule begins at 0: the one step changes nothing.
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name


def test_adapters_whose_base_has_changed_since_are_refused(stopped, tmp_path, monkeypatch):
    from glm4v_patched.finetune import launch as launching

    monkeypatch.setattr(launching, "_run", lambda command, _: "")
    first = stopped.override({"out": str(tmp_path / "first")})
    train_here(first)
    changes = {"model": first.out, "out": str(tmp_path / "more")}
    launch(stopped.override(changes), Placement(1, on_cpu=True))
    weights = Path(stopped.model, "model.safetensors")
    changed = load_file(weights)
    changed["transformer.embedding.word_embeddings.weight"] *= 1.5
    save_file(changed, weights, metadata={"format": "pt"})
    changes["out"] = str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"(?s)trained on another model than .*safetensors: \w+"):
        launch(stopped.override(changes), Placement(1, on_cpu=True))


def test_adapters_that_lack_tensors_are_refused(trained, tmp_path):
    shutil.copytree(trained.out, tmp_path / "lora", ignore=shutil.ignore_patterns("checkpoint-*"))
    weights = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    weights.pop(sorted(weights)[0])
    save_file(weights, tmp_path / "lora" / "adapter_model.safetensors")
    recipe = trained.override({"model": str(tmp_path / "lora")})
    with pytest.raises(ValueError, match="holds 3 tensors, of which 1 do not fit"):
        built(recipe)


def test_another_base_under_a_checkpoint_of_adapters_is_refused(stopped):
    assert starting_point(stopped, 1, True, base_of(stopped)).name == "checkpoint-2"
    weights = Path(stopped.model, "model.safetensors")
    changed = load_file(weights)
    changed["transformer.embedding.word_embeddings.weight"] *= 1.5
    save_file(changed, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)of the model, model\.safetensors: \w+ there, \w+"):
        starting_point(stopped, 1, True, base_of(stopped))


def rows_now(recipe: Recipe) -> Rows:
    checked = check_data(recipe)
    return Rows(checked.row_digests, checked.row_lines)


def test_a_picture_replaced_under_its_name_is_noticed_and_can_be_accepted(stopped):
    checkpoint = Path(stopped.out, "checkpoint-2")
    assert changes_of_data(checkpoint, rows_now(stopped), accept=False) == []
    one, other, *_ = sorted(Path(stopped.data.train).parent.glob("pictures/*"))
    other.write_bytes(one.read_bytes())
    with pytest.raises(ValueError, match=r"(?s)20 there and now, 1 differ .*--accept-changed-data"):
        changes_of_data(checkpoint, rows_now(stopped), accept=False)
    with pytest.raises(ValueError, match="run on other data"):
        train_here(stopped, checkpoint)
    report = train_here(stopped, checkpoint, accept=True)
    assert [entry["step"] for entry in report["history"]] == [1, 2, 3, 4]


def test_a_mended_row_is_said_and_the_next_checkpoints_are_of_it(stopped, capfd, monkeypatch):
    from glm4v_patched.finetune import launch as launching

    monkeypatch.setattr(launching, "_run", lambda command, _: "")
    data = Path(stopped.data.train)
    lines = data.read_text().splitlines()
    lines[6] = lines[6].replace('"}]}', ' indeed."}]}')
    data.write_text("\n".join([*lines, ""]))
    with pytest.raises(ValueError, match=r"1 differ \(line 7\)"):
        launch(stopped, Placement(1, on_cpu=True), resume=True)
    launch(stopped, Placement(1, on_cpu=True), resume=True, accept_changed_data=True)
    said = capfd.readouterr().out
    assert "rows: 20 there and now, 1 differ (line 7)" in said
    assert "the order of places in the file stays as it was" in said
    data.write_text("\n".join([*lines, lines[0], ""]))
    launch(stopped, Placement(1, on_cpu=True), resume=True, accept_changed_data=True)
    said = capfd.readouterr().out
    assert "20 there, 21 now; 1 are gone (line 7); 2 are new (lines 7, 21)" in said
    assert "some may come a second time and others not at all" in said


def test_an_order_of_rows_depends_on_their_number_alone(trained):
    """What is said of the order, on the Trainer's own sampler: the indices of two epochs."""
    from transformers import Trainer, TrainingArguments

    def order(number: int) -> list[int]:
        arguments = TrainingArguments("out", use_cpu=True, seed=3, report_to="none")
        trainer = Trainer(
            torch.nn.Linear(1, 1), arguments, train_dataset=[{"x": i} for i in range(number)]
        )
        trainer.args.remove_unused_columns = False
        trainer.data_collator = lambda rows: {"x": torch.tensor([row["x"] for row in rows])}
        return [x for batch in trainer.get_train_dataloader() for x in batch["x"].tolist()]

    assert order(20) == order(20) != sorted(order(20))
    assert [x for x in order(21) if x < 20] != order(20)


def test_rows_lie_in_the_checkpoint(stopped):
    content = json.loads(Path(stopped.out, "checkpoint-2", ROWS).read_text())
    assert content["lines"] == [*range(1, 21)] and len({*content["digests"]}) == 20
