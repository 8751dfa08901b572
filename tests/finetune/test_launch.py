"""Checks before the training processes start, and the state after they have ended."""

import errno
import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.launch import launch, prepared
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.run_folder import RECORD
from glm4v_patched.models.base import ModelSource
from glm4v_patched.models.placement import Placement

ONE_FAILED = "process 0 ended with status 1"


def start(run_recipe: Recipe, **options) -> None:
    launch(resolve_recipe(run_recipe), Placement(1, on_cpu=True), **options)


@pytest.fixture
def runs(monkeypatch):
    """Sets what stands in the place of training processes: given their command, how they ended."""

    def set_run(run) -> None:
        monkeypatch.setattr(launching, "_run_processes", lambda command, _: run(command))

    return set_run


@pytest.fixture
def processes(mine, runs) -> list[list[str]]:
    """Commands of processes that leave adapters in place of training."""
    commands = []

    def run(command) -> str:
        commands.append(command)
        Path(mine.out, "adapter_model.safetensors").write_text(f"weights of run {len(commands)}")
        Path(mine.out, "training.json").write_text('{"finished": true}')
        return ""

    runs(run)
    return commands


def contents(folder: str | Path) -> dict[str, bytes]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}])
def test_a_run_never_removes_what_its_model_s_links_lead_to(mine, processes, tmp_path, options):
    model, out = Path(shutil.copytree(mine.model, tmp_path / "model")), Path(mine.out)
    start(mine)
    (out / "training.json").unlink()
    linked = model / "model.safetensors"
    shutil.move(linked, out / "adapter_model.safetensors")
    linked.symlink_to(out / "adapter_model.safetensors")
    content = linked.read_bytes()
    with pytest.raises(ValueError, match=f"reads {linked}, and would replace .*adapter_model"):
        start(mine.override({"model": str(model)}), **options)
    assert linked.read_bytes() == content and len(processes) == 1


def test_a_finished_run_is_replaced_only_on_request_and_after_its_data_was_checked(mine, processes):
    start(mine)
    Path(mine.out, "notes.txt").write_text("mine")
    before = contents(mine.out)
    with pytest.raises(ValueError, match=r"contains a finished training; .*\(--overwrite\)$"):
        start(mine)
    with pytest.raises(ValueError, match="plan.json"):
        start(mine.override({"data.train": f"{mine.out}/plan.json"}), overwrite=True)
    assert contents(mine.out) == before and len(processes) == 1
    start(mine, overwrite=True)
    after = contents(mine.out)
    assert after["adapter_model.safetensors"] == b"weights of run 2"
    assert after["notes.txt"] == b"mine"


def test_a_diverged_training_is_told_by_what_its_processes_said(mine, runs):
    def run(command) -> str:
        report = {"finished": False, "error": "training diverged: in step 7"}
        Path(mine.out, "training.json").write_text(json.dumps(report))
        return ONE_FAILED

    runs(run)
    message = r"^training diverged: in step 7 \(settings: .*json\)"
    with pytest.raises(RuntimeError, match=f"{message}$"):
        start(mine)
    # A stream may also end at a row, with a checkpoint.
    with pytest.raises(RuntimeError, match=rf"(?s){message}\nto resume from .* --resume$"):
        start(mine.override({"data.stream": True, "trainer.save_steps": 1}), overwrite=True)
    # A report of before is no report of a run that dies without one.
    runs(lambda command: ONE_FAILED)
    with pytest.raises(RuntimeError, match=f"failed: {ONE_FAILED}"):
        start(mine, overwrite=True)


def test_a_full_disk_hides_neither_the_cause_nor_how_to_continue(mine, runs, monkeypatch):
    runs(lambda command: ONE_FAILED)
    full = OSError(errno.ENOSPC, "No space left on device", "run.json")
    monkeypatch.setattr(launching, "close_record", Mock(side_effect=full))
    with pytest.raises(RuntimeError, match=rf"(?s){ONE_FAILED}.*to resume .*--resume$"):
        start(mine.override({"trainer.save_steps": 1}))


def test_it_is_told_which_process_ended_first_and_whether_it_was_killed_for_memory(words):
    """The others fail in consequence."""
    ranks = [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]
    assert launching._describe_statuses([0, 0], ranks) == ""
    for statuses in ([1, -signal.SIGKILL], [1, -signal.SIGSEGV], [None, 3]):
        message = launching._describe_statuses(statuses, ranks)
        assert message.startswith("process 1 (PID 8) ")
        words(message)


@pytest.mark.parametrize("end", [Mock(side_effect=KeyboardInterrupt), lambda: ONE_FAILED])
def test_what_comes_after_a_run_that_did_not_end_well_is_not_the_run_s(mine, runs, end):
    out, foreign = Path(mine.out), Path(mine.out, "mine.safetensors")

    def run(command) -> str:
        (out / "adapter_config.json").write_text("{}")
        return end()

    runs(run)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        start(mine)
    assert "adapter_config.json" in json.loads((out / RECORD).read_text())["written"]
    foreign.write_bytes(b"mine")
    # No data of a later run is looked at either, and no record of it made.
    run_recipe = mine.override({"data.train": mine.data.train + ".none"})
    for options in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(ValueError, match="contains mine.safetensors, .*no run"):
            start(run_recipe, **options)
    assert foreign.read_bytes() == b"mine"
    foreign.unlink()
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        start(mine, overwrite=True)


@pytest.mark.parametrize(
    ("visible", "gpu"), [("", "0"), ("3,1", "3"), ("12", "12"), ("GPU-5f3a,GPU-77aa", "GPU-5f3a")]
)
def test_one_process_without_zero_has_the_first_gpu_that_is_visible(
    mine, monkeypatch, visible, gpu
):
    """The Trainer would take all of them."""
    environments = []
    monkeypatch.setattr(
        launching, "_run_processes", lambda command, variables: environments.extend(variables) or ""
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    path = Path(mine.out, "plan.json")
    options = mine.engine_options()
    launching._run_training(SimpleNamespace(options=options, placement=Placement(1), path=path))
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == [gpu]


@pytest.mark.parametrize("parent_dies", [False, True])
def test_a_stopped_process_does_not_outlive_the_launcher(monkeypatch, parent_dies, tmp_path):
    """Neither SIGTERM nor the end of its input reaches one that is stopped."""
    file = tmp_path / "pid"

    def interrupt(seconds: float) -> None:
        if file.is_file() and file.read_text().endswith("\n") and not parent_dies:
            raise KeyboardInterrupt

    monkeypatch.setattr(launching.time, "sleep", interrupt)
    end = "exit 3" if parent_dies else "wait"
    command = f"sleep 1000 & kill -STOP $!; echo $! > {file}; {end}"
    before = signal.getsignal(signal.SIGTERM)
    with nullcontext() if parent_dies else pytest.raises(KeyboardInterrupt):
        launching._run_processes(["/bin/sh", "-c", command], [dict(os.environ)])
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.undo()
    child = psutil.Process(int(file.read_text()))
    assert not psutil.wait_procs([child], timeout=10)[1] or child.status() == "zombie"


def test_a_model_of_the_hub_is_written_down_with_its_commit(mine, monkeypatch):
    plan = SimpleNamespace(
        base=ModelSource("org/name", "c0ffee"), options=EngineOptions(), write=Mock()
    )
    checked = SimpleNamespace(write=Mock())
    monkeypatch.setattr(launching, "_check_and_plan", lambda *_: (plan, checked, []))
    with prepared(resolve_recipe(mine.override({"model": "org/name"})), Placement(1, on_cpu=True)):
        assert json.loads(Path(mine.out, "recipe.json").read_text())["revision"] == "c0ffee"
