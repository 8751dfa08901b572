"""A run goes on with the model, the rows and the adapters that it had, or says what differs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.engine import fp8
from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.launch import launch
from glm4v_patched.finetune.plan import Plan, find_start_checkpoint
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.run_folder import close_record, start_record
from glm4v_patched.models.placement import Placement
from tests.helpers.recipes import built, drawn_recipe, planned, recipe, train_here
from tests.helpers.tiny import update_json


def start(run_recipe: Recipe, **options) -> None:
    launch(resolve_recipe(run_recipe), Placement(1, on_cpu=True), **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Recipe:
    """Adapters of four steps, two epochs of two, and the checkpoint of the first."""
    changes = {
        "trainer.max_steps": None,
        "trainer.num_train_epochs": 2.0,
        "trainer.gradient_accumulation_steps": 5,
        "trainer.save_strategy": "epoch",
        "trainer.learning_rate": 1e-2,
        "trainer.weight_decay": 0.1,
        "trained": "lora_lm",
        "lora.rank": 4,
        "engine.zero_stage": 0,
    }
    recipe = drawn_recipe(tmp_path_factory.mktemp("continuing"), changes)
    Path(recipe.out).mkdir()
    start_record(Path(recipe.out), [])
    train_here(recipe)
    close_record(Path(recipe.out), adapters=True)
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
    """Replace the training processes by nothing."""
    monkeypatch.setattr(launching, "_run_processes", lambda command, _: "")


def history(folder: str | Path) -> list[dict]:
    return json.loads(Path(folder, "training.json").read_text())["history"]


def test_epochs_are_trained_with_what_was_asked_for(trained):
    assert [entry["step"] for entry in history(trained.out)] == [1, 2, 3, 4]
    arguments = torch.load(Path(trained.out, "training_args.bin"), weights_only=False)
    assert (arguments.weight_decay, arguments.max_steps) == (0.1, 4)
    assert arguments.lr_scheduler_type == "cosine"
    assert [path.name for path in Path(trained.out).glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_finished_run_is_made_longer_from_its_last_checkpoint(trained, mine, not_run):
    out = Path(mine.out)
    same = trained.override({"out": mine.out})
    longer = same.override({"trainer.num_train_epochs": 3.0})
    shutil.copytree(trained.out, out)
    with pytest.raises(ValueError, match="is finished .*raise trainer.num_train_epochs"):
        start(same, resume=True)
    start(longer, resume=True)
    assert Plan.read(out / "plan.json").checkpoint == out / "checkpoint-2"
    report = train_here(longer, out / "checkpoint-2")
    assert [entry["step"] for entry in report["history"]] == [*range(1, 7)]
    assert report["history"][:2] == history(trained.out)[:2]
    with pytest.raises(ValueError, match=r"num_train_epochs: 3\.0 then, 2\.0 now"):
        find_start_checkpoint(resolve_recipe(same), 1, True)
    shutil.rmtree(out)
    shutil.copytree(trained.out, out, ignore=shutil.ignore_patterns("checkpoint-*"))
    with pytest.raises(
        ValueError, match="left no checkpoint.*start a new run with that folder as model"
    ):
        start(longer, resume=True)


def test_a_continued_run_saves_and_logs_as_it_is_asked_now(stopped, capsys):
    changes = {"save_strategy": None, "save_steps": 1, "logging_steps": 2}
    changed = stopped.override({f"trainer.{name}": value for name, value in changes.items()})
    start(changed, resume=True, dry_run=True)
    message = f"training resumes from {Path(stopped.out, 'checkpoint-2')}, after step 2"
    assert message in capsys.readouterr().out
    report = train_here(changed, find_start_checkpoint(resolve_recipe(changed), 1, True))
    names = {path.name for path in Path(stopped.out).glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-3"}
    # Each checkpoint is logged, for what is logged after it begins there.
    assert [entry["step"] for entry in report["history"]] == [1, 2, 3, 4]


def test_folders_may_move_between_start_and_continuation_and_what_is_learned_may_not():
    settings = resolve_recipe(recipe({"trainer.save_steps": 4})).settings(2)
    free = {"data.train": "e", "model": "n", "out": "p", "trainer.save_steps": 5}
    free |= {"max_nonfinite_steps": 9, "trainer.dataloader_num_workers": 2, "engine.tower": "none"}
    # Epochs decide nothing where there is a number of steps.
    assert resolve_recipe(recipe(free | {"trainer.num_train_epochs": 7.0})).settings(2) == settings
    fixed = {"trainer.learning_rate": 2.0, "trainer.seed": 1, "data.pack_to": 100, "lora.rank": 4}
    fixed |= {"trainer.per_device_train_batch_size": 2, "trained": "lm"}
    fixed |= {"engine.zero_stage": 2, "engine.precision": "fp32"}
    for name, value in fixed.items():
        assert (
            len(resolve_recipe(recipe({name: value})).settings(2).items() ^ settings.items()) == 2
        ), name
    assert len(resolve_recipe(recipe()).settings(1).items() ^ settings.items()) == 2


def test_adapters_as_a_model_go_on_where_they_were(trained, tmp_path, monkeypatch):
    changes = {
        "model": trained.out,
        "out": str(tmp_path / "out"),
        "trainer.max_steps": 1,
        "trainer.save_strategy": None,
        "trainer.learning_rate": 1e-30,  # a step of this size changes no weight
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


def test_another_base_under_adapters_or_their_checkpoint_is_refused(
    trained, stopped, tmp_path, not_run
):
    adapters = shutil.copytree(trained.out, tmp_path / "adapters")
    update_json(adapters / "adapter_config.json", base_model_name_or_path=stopped.model)
    more = stopped.override({"model": str(adapters), "out": str(tmp_path / "more")})
    start(more)
    assert find_start_checkpoint(resolve_recipe(stopped), 1, True).name == "checkpoint-2"
    path = Path(stopped.model, "model.safetensors")
    weights = load_file(path)
    weights["transformer.embedding.word_embeddings.weight"] *= 1.5
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)has changed since the adapters .*safetensors: \w+"):
        start(more.override({"out": str(tmp_path / "other")}))
    with pytest.raises(ValueError, match=r"(?s)of the model, model\.safetensors: \w+ then, \w+"):
        find_start_checkpoint(resolve_recipe(stopped), 1, True)


def test_changed_rows_and_images_are_said_and_can_be_accepted(stopped, capfd, not_run):
    data = Path(stopped.data.train)
    one, other, *_ = sorted(data.parent.glob("images/*"))
    other.write_bytes(one.read_bytes())
    with pytest.raises(ValueError, match=r"(?s)20 then, 20 now; .*--accept-changed-data"):
        start(stopped, resume=True)
    start(stopped, resume=True, accept_changed_data=True)
    output = capfd.readouterr().out
    assert "rows: 20 then, 20 now; their contents" in output
    data.write_text(data.read_text() + data.read_text().splitlines()[0])
    start(stopped, resume=True, accept_changed_data=True)
    output = capfd.readouterr().out
    assert "20 then, 21 now; their contents" in output
    assert "may come twice and others not at all" in output


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["lora_all", "lm"])
def test_a_stopped_run_in_fp8_goes_on_to_the_bit_and_saves_bf16(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(fp8, "_allow_cpu", True)
    changes = {
        "engine": {"fp8": True, "precision": "bf16", "zero_stage": 0},
        "trained": trained,
        "lora.rank": 4,
    }
    changes |= {"trainer.max_steps": 4, "trainer.learning_rate": 1e-2, "trainer.save_steps": 2}
    whole = drawn_recipe(tmp_path, changes)
    plain = whole.override({"engine.fp8": False, "out": str(tmp_path / "plain")})
    stopped = whole.override({"out": str(tmp_path / "stopped")})
    history = train_here(whole)["history"]
    assert history[-1]["loss"] < history[0]["loss"] and train_here(plain)["history"] != history
    shutil.copytree(whole.out, stopped.out)
    assert train_here(stopped, Path(stopped.out, "checkpoint-2"))["history"][-2:] == history[-2:]
    saved, of_bf16, again = (
        load_file(next(Path(run.out).glob("*.safetensors"))) for run in (whole, plain, stopped)
    )
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert {name: t.shape for name, t in saved.items()} == {n: t.shape for n, t in of_bf16.items()}
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    if trained == "lm":  # the frozen tower is what it was
        tower = [name for name in saved if ".vision." in name]
        assert tower and all(torch.equal(saved[name], of_bf16[name]) for name in tower)


def test_a_resumed_run_keeps_the_precision_of_its_checkpoint_on_another_cpu(
    mine, tmp_path, monkeypatch
):
    changes = {"out": str(tmp_path / "run"), "trainer.max_steps": 2, "trainer.save_steps": 1}
    by_cpu = mine.override(changes | {"engine.precision": "auto"})
    monkeypatch.setattr("glm4v_patched.engine.options.has_bf16", lambda: False)
    train_here(by_cpu)
    monkeypatch.setattr("glm4v_patched.engine.options.has_bf16", lambda: True)
    checkpoint = find_start_checkpoint(resolve_recipe(by_cpu), 1, True)
    plan = Plan.read(planned(by_cpu, checkpoint))
    assert plan.options.precision == plan.settings["engine.precision"] == "fp32"
    assert plan.precision_reason == "as in checkpoint-1"
    assert Plan.read(planned(by_cpu)).options.precision == "bf16"
    with pytest.raises(ValueError, match="engine.precision: fp32 then, bf16 now"):
        in_bf16 = by_cpu.override({"engine.precision": "bf16"})
        find_start_checkpoint(resolve_recipe(in_bf16), 1, True)
