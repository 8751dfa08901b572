"""Killed processes and launchers: all processes end, checkpoints stay, the cure is printed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from glm4v_patched.finetune.checkpoints import checkpoint_step, last_complete_checkpoint
from glm4v_patched.terminal_text import own_command
from tests.helpers.processes import cpu_environment, heed_signals
from tests.helpers.recipes import drawn_recipe, write_recipe

RUN_TIMEOUT = 300
END_TIMEOUT = 45  # torch's launcher kills after 30
OPTIONS = ("--processes", "2", "--device", "cpu")


class CommandLine:
    """An endless ``glm4v-patched train``, whose processes can be found, killed and counted."""

    def __init__(self, folder: Path, *options: str):
        self.folder, self.log = folder, folder / "output.txt"
        command = [sys.executable, "-m", "glm4v_patched.cli", "train", str(folder / "mine.json")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *OPTIONS, *options],
                env=cpu_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=heed_signals,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def alive(self) -> list[psutil.Process]:
        """Return all processes of this run, by the folder in their commands."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(str(self.folder) in argument for argument in process.info["cmdline"] or [])
        ]

    def ranks(self) -> list[psutil.Process] | None:
        """Return both ranks, or None before both run."""
        by_rank = {}
        for process in self.alive():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile
                by_rank[process.environ().get("RANK")] = process
        return [by_rank["0"], by_rank["1"]] if {"0", "1"} <= by_rank.keys() else None

    def wait_for(self, condition: Callable):
        end = time.monotonic() + RUN_TIMEOUT
        while not (value := condition()):
            if time.monotonic() > end or self.process.poll() is not None:
                pytest.fail(f"status {self.process.poll()}\n{self.output[-8000:]}")
            time.sleep(0.05)
        return value

    def has_checkpoint(self, after_step: int = 0) -> bool:
        checkpoint = last_complete_checkpoint(self.folder)
        return checkpoint is not None and checkpoint_step(checkpoint) > after_step

    def require_ended(self, status: int) -> None:
        """Require that the run ends with this status, and with all its processes."""
        assert self.process.wait(END_TIMEOUT) == status, self.output[-8000:]
        end = time.monotonic() + END_TIMEOUT
        while alive := self.alive():
            assert time.monotonic() < end, f"still there: {alive}\n{self.output[-8000:]}"
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., CommandLine]]:
    steps = {"max_steps": 10**6, "save_steps": 2, "save_total_limit": 2}
    recipe = drawn_recipe(tmp_path, {f"trainer.{name}": value for name, value in steps.items()})
    folder, started = Path(recipe.out), []
    folder.mkdir()
    write_recipe(recipe, folder / "mine.json")
    # Under nohup, the ignored signal would be inherited.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def start(*options: str) -> CommandLine:
        started.append(CommandLine(folder, *options))
        return started[-1]

    yield start
    signal.signal(signal.SIGHUP, before)
    for run in started:
        for process in run.alive():
            process.kill()
        run.process.wait()


@pytest.mark.slow
def test_a_killed_rank_and_sigterm_end_the_run_say_how_to_continue_and_leave_no_process(
    start, monkeypatch
):
    run = start()
    run.wait_for(run.has_checkpoint)
    _, worker = run.ranks()
    worker.kill()
    run.require_ended(1)
    assert f"process 1 (PID {worker.pid}) was killed (SIGKILL), as the system does" in run.output
    assert "Traceback" not in run.output.rpartition("training on 2 processes failed")[2]
    checkpoint = last_complete_checkpoint(run.folder)
    monkeypatch.setenv("PATH", cpu_environment()["PATH"])  # where the run was started
    resume = own_command("train", str(run.folder / "recipe.json"), *OPTIONS, "--resume")
    assert run.output.endswith(f"to resume from {checkpoint}:\n  {resume}\n")

    run = start("--resume")
    run.wait_for(lambda: run.has_checkpoint(after_step=checkpoint_step(checkpoint)))
    assert f"training resumes from {checkpoint}, after step" in run.output
    assert len(run.alive()) == 3  # the command line, two ranks
    run.process.terminate()
    run.require_ended(128 + signal.SIGTERM)
    assert f"training was stopped by SIGTERM\nto resume from {run.folder}" in run.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_command_line_says_how_to_continue_and_leaves_no_process(number, start):
    run = start()
    run.wait_for(run.ranks)
    os.kill(run.process.pid, number)
    run.require_ended(128 + number)
    assert f"training was stopped by {number.name}\nto resume from the beginning" in run.output
    assert "--resume" in run.output and "Traceback" not in run.output


def test_ranks_end_at_once_with_a_launcher_that_is_killed_while_they_import(start):
    run = start()
    ranks = run.wait_for(run.ranks)
    run.process.kill()
    # 2 s on idle cores; an extension that is being loaded holds Python.
    _, alive = psutil.wait_procs(ranks, timeout=8)
    assert not alive, run.output[-2000:]
    run.require_ended(-signal.SIGKILL)
