"""What is looked at before training processes start, and what is left when they have ended."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune.launch import launch
from glm4v_patched.finetune.plan import Plan, check_data
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.finetune.run_folder import LOCK, RECORD
from glm4v_patched.models.base import Base
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.recipes import drawn_recipe

HERE = Placement(1, on_cpu=True)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    changes = {"trainer.max_steps": 2, "engine.zero_stage": 0, "trained": "lora_lm"}
    return drawn_recipe(tmp_path_factory.mktemp("launched"), changes)


@pytest.fixture
def recipe(drawn, tmp_path) -> Recipe:
    return drawn.override({"out": str(tmp_path / "out")})


@pytest.fixture
def processes(recipe, monkeypatch) -> list[list[str]]:
    """In the place of training processes, which leave adapters; their commands."""
    commands = []

    def run(command, environments) -> str:
        commands.append(command)
        out = Path(recipe.out)
        (out / "adapter_model.safetensors").write_text(f"weights of run {len(commands)}")
        (out / "training.json").write_text('{"finished": true}')
        return ""

    monkeypatch.setattr(launching, "_run", run)
    return commands


def contents(folder: str | Path) -> dict[str, bytes]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("place", ["{model}", "{link}", "{model}/out", "{parent}"])
def test_a_run_never_writes_to_its_model_s_folder(recipe, processes, tmp_path, place, overwrite):
    shutil.copytree(recipe.model, tmp_path / "models" / "model")
    model, link = tmp_path / "models" / "model", tmp_path / "link"
    link.symlink_to(model)
    out = place.format(model=model, link=link, parent=model.parent)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="model's .*folder of its own"):
        launch(recipe.override({"model": str(model), "out": out}), HERE, overwrite=overwrite)
    assert contents(tmp_path) == before and not processes


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize("of_adapters", [False, True])
def test_a_run_never_removes_what_its_model_s_links_lead_to(
    recipe, processes, tmp_path, of_adapters, options
):
    """Files of the model, of its base and of the adapters may be links, into out too."""
    model, out = tmp_path / "model", Path(recipe.out)
    shutil.copytree(recipe.model, model)
    launch(recipe, HERE)
    (out / "training.json").unlink()
    weights = model / "model.safetensors"
    if of_adapters:
        model = tmp_path / "adapters"
        model.mkdir()
        config = {"peft_type": "LORA", "r": recipe.lora.rank}
        config |= {"base_model_name_or_path": str(weights.parent)}
        (model / "adapter_config.json").write_text(json.dumps(config))
        name = "transformer.encoder.layers.0.self_attention.query_key_value.lora_A.weight"
        save_file({name: torch.ones(2)}, model / "adapter_model.safetensors")
    mine = recipe.override({"model": str(model)})
    for linked in {weights, *model.glob("adapter_model.*")}:
        content = linked.read_bytes()
        shutil.move(linked, out / "adapter_model.safetensors")
        linked.symlink_to(out / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=f"reads {linked}, and would replace .*adapter_model"):
            launch(mine, HERE, **options)
        assert linked.read_bytes() == content and len(processes) == 1
        linked.unlink()
        linked.write_bytes(content)


def test_a_second_run_into_a_folder_is_refused_while_the_first_goes_on(recipe, monkeypatch):
    seen = []

    def run(command, environments) -> str:
        with pytest.raises(ValueError, match=f"another run writes to .*process {os.getpid()} on"):
            launch(recipe, HERE, overwrite=True)
        with pytest.raises(ValueError, match=f"another run writes to .*process {os.getpid()} on"):
            launch(recipe, HERE, resume=True)
        seen.append(contents(recipe.out))
        return ""

    monkeypatch.setattr(launching, "_run", run)
    launch(recipe, HERE)
    assert seen[0].keys() == {LOCK, RECORD, "recipe.json", "plan.json", "data.json", "data.arrow"}
    assert LOCK not in contents(recipe.out)


def test_a_finished_run_is_replaced_only_on_request_and_after_its_data_was_checked(
    recipe, processes, tmp_path
):
    launch(recipe, HERE)
    Path(recipe.out, "notes.txt").write_text("mine")
    before = contents(recipe.out)
    with pytest.raises(ValueError, match=r"holds a finished training, adapters; .*\(--overwrite\)"):
        launch(recipe, HERE)
    with pytest.raises(ValueError, match="is finished"):
        launch(recipe, HERE, resume=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(ValueError, match="bad.jsonl"):
        launch(recipe.override({"data.train": str(bad)}), HERE, overwrite=True)
    assert contents(recipe.out) == before and len(processes) == 1
    launch(recipe, HERE, overwrite=True)
    after = contents(recipe.out)
    assert after["adapter_model.safetensors"] == b"weights of run 2"
    assert after["notes.txt"] == b"mine"


def test_a_diverged_training_is_told_by_what_its_processes_said(recipe, monkeypatch):
    def run(command, environments) -> str:
        report = {"finished": False, "error": "training diverged: in step 7"}
        Path(recipe.out, "training.json").write_text(json.dumps(report))
        return "process 0 ended with status 1"

    monkeypatch.setattr(launching, "_run", run)
    with pytest.raises(RuntimeError, match=r"^training diverged: in step 7 \(settings: .*json\)$"):
        launch(recipe, HERE)
    # A report of before is no report of a run that dies without one.
    monkeypatch.setattr(launching, "_run", lambda command, _: "process 0 ended with status 1")
    with pytest.raises(RuntimeError, match="failed: process 0 ended with status 1"):
        launch(recipe, HERE, overwrite=True)


def test_a_full_disk_hides_neither_the_cause_nor_how_to_continue(recipe, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "run.json")

    monkeypatch.setattr(launching, "_run", lambda command, _: "process 1 ended with status 1")
    monkeypatch.setattr(launching, "close_record", full)
    saving = recipe.override({"trainer.save_steps": 1})
    with pytest.raises(RuntimeError, match=r"(?s)process 1 ended.*to continue .*--resume$"):
        launch(saving, HERE)


def test_it_is_told_where_a_process_was_killed_for_memory():
    """Whichever ended first: the others fail in consequence."""
    ranks = [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]
    told = launching._describe_statuses([1, -signal.SIGKILL], ranks)
    assert told.startswith(
        "process 1 (PID 8) was killed (SIGKILL), as the system does where memory"
    )
    assert launching._describe_statuses([None, 3], ranks).startswith("process 1 (PID 8) ended with")
    assert launching._describe_statuses([0, 0], ranks) == ""


def stop(command, environments) -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize("run", [stop, lambda command, _: "process 0 ended with status 1"])
def test_what_comes_after_a_run_that_did_not_end_well_is_not_the_run_s(recipe, monkeypatch, run):
    out = Path(recipe.out)

    def write(command, environments) -> str:
        (out / "adapter_config.json").write_text("{}")
        return run(command, environments)

    monkeypatch.setattr(launching, "_run", write)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        launch(recipe, HERE)
    assert "adapter_config.json" in json.loads((out / RECORD).read_text())["written"]
    mine = {"README.md": b"mine", "mine.safetensors": b"mine, too"}
    for name, content in mine.items():
        (out / name).write_bytes(content)
    # No data of a later run is looked at either, and no record of it made.
    bad = recipe.override({"data.train": recipe.data.train + ".none"})
    for asked in (recipe, bad):
        with pytest.raises(ValueError, match="holds README.md, mine.safetensors, of which no run"):
            launch(asked, HERE, overwrite=True)
        with pytest.raises(ValueError, match="holds README.md, mine.safetensors, which no run wr"):
            launch(asked, HERE, resume=True)
    assert mine.items() <= contents(out).items()
    for name in mine:
        (out / name).rename(out / f"{name}.txt")
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        launch(recipe, HERE, overwrite=True)


def test_all_processes_load_the_commit_that_adapters_base_was_pinned_to(
    recipe, processes, tmp_path, monkeypatch
):
    cached, asked = recipe.model, []
    folder = tmp_path / "adapters"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": recipe.lora.rank, "base_model_name_or_path": "our-org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"revision": "main"}))
    name = "transformer.encoder.layers.0.self_attention.query_key_value.lora_A.weight"
    save_file({name: torch.ones(2)}, folder / "adapter_model.safetensors")

    def pin(base: Base) -> Base:
        asked.append(base.revision)
        return replace(base, revision="c0ffee")

    def check(recipe: Recipe, base: Base):
        assert base.revision == "c0ffee"
        return check_data(recipe.override({"model": cached, "revision": None}))

    monkeypatch.setattr(launching, "pin", pin)
    monkeypatch.setattr(launching, "require_whole", lambda *given: asked.append(given[:2]))
    monkeypatch.setattr("glm4v_patched.finetune.plan.check_data", check)
    for module in ("finetune.plan", "models.loading"):
        monkeypatch.setattr(f"glm4v_patched.{module}.config_of", lambda base: ChatGLMConfig())
    monkeypatch.setattr("glm4v_patched.finetune.summary.describe", lambda *_: "of the Hub")
    monkeypatch.setattr(Plan, "require_room", lambda self: None)
    monkeypatch.setattr("glm4v_patched.finetune.disk.require_space", lambda *_: None)
    launch(recipe.override({"model": str(folder)}), HERE)
    # What processes read, and a run that continues.
    plan = Plan.read(Path(recipe.out, "plan.json"))
    assert plan.base == base_of(plan.recipe) == Base("our-org/base", "c0ffee", folder)
    assert asked == ["main", ("our-org/base", "c0ffee")]


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True
)
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("parent_dies", [False, True])
def test_a_stopped_process_does_not_outlive_the_launcher(monkeypatch, parent_dies, tmp_path):
    """Neither SIGTERM nor the end of its input reaches one that is stopped."""
    monkeypatch.setattr(launching, "SECONDS_TO_END", 0.5)
    monkeypatch.setattr(launching, "SECONDS_TO_LOOK", 0.1)
    file = tmp_path / "pid"
    found, stopped = [], []

    def stop_the_child(process: subprocess.Popen) -> list[psutil.Process]:
        descendants = find(process)
        text = file.read_text() if file.exists() else ""
        if not found and text.endswith("\n"):
            found.append(psutil.Process(int(text)))
            found[0].send_signal(signal.SIGSTOP)
            return [*descendants, *find(process)]
        if found and parent_dies:
            process.kill()
        elif found and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        return descendants

    find = launching._descendants
    monkeypatch.setattr(launching, "_descendants", stop_the_child)
    command = f"{sys.executable} -c '{PARENT}' > {file}"
    with nullcontext() if parent_dies else pytest.raises(KeyboardInterrupt):
        launching._run(["/bin/sh", "-c", f"exec {command}"], [dict(os.environ)])
    end = time.monotonic() + 10
    try:
        while found[0].is_running() and found[0].status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        with suppress(psutil.NoSuchProcess):
            found[0].kill()
