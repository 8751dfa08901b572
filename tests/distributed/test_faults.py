"""Killed processes and launchers: what ends, what stays, what is said. Two real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from glm4v_patched.finetune.checkpoints import last_complete_checkpoint, step_of
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.terminal_text import own_command
from tests.helpers.processes import cpu_environment, heed_signals
from tests.helpers.recipes import drawn_recipe

# On two busy cores a run takes a minute, nearly all of it imports; idle, some 12 seconds.
SECONDS_TO_RUN = 300
# torch's launcher gives processes that it ends 30 seconds before it kills them.
SECONDS_TO_END = 45


class CommandLine:
    """``glm4v-patched train`` in processes that can be found, killed and counted."""

    def __init__(self, recipe: Recipe, *options: str):
        self.folder = Path(recipe.out)
        self.folder.mkdir(exist_ok=True)
        settings = self.folder / "mine.json"
        recipe.write(settings)
        self.log = self.folder / "output.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "glm4v_patched.cli"]
                + ["train", str(settings), "--processes", "2", "--device", "cpu", *options],
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
        """All processes of this run, whoever their parents are: the folder is in their command."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(str(self.folder) in argument for argument in process.info["cmdline"] or [])
        ]

    def rank(self, number: int) -> psutil.Process | None:
        for process in self.alive():
            try:
                if process.environ().get("RANK") == str(number):
                    return process
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile
                continue
        return None

    def wait_for(self, condition: Callable, seconds: float):
        end = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > end or self.process.poll() is not None:
                pytest.fail(f"status {self.process.poll()}\n{self.output[-8000:]}")
            time.sleep(0.05)
        return found

    def wait_for_checkpoint(self, after_step: int = 0) -> Path:
        def newer() -> Path | None:
            checkpoint = last_complete_checkpoint(self.folder)
            return checkpoint if checkpoint and step_of(checkpoint) > after_step else None

        return self.wait_for(newer, SECONDS_TO_RUN)

    def status(self) -> int:
        try:
            return self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {SECONDS_TO_END} s\n{self.output[-8000:]}")

    def require_none_alive(self) -> None:
        end = time.monotonic() + SECONDS_TO_END
        while alive := self.alive():
            assert time.monotonic() < end, f"still there: {alive}\n{self.output[-8000:]}"
            time.sleep(0.05)


@pytest.fixture
def start() -> Iterator[Callable[..., CommandLine]]:
    started = []
    # Under nohup, programs inherit that it is ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def start(*arguments) -> CommandLine:
        started.append(CommandLine(*arguments))
        return started[-1]

    yield start
    signal.signal(signal.SIGHUP, before)
    for run in started:
        for process in run.alive():
            process.kill()
        run.process.wait()


@pytest.fixture
def endless(tmp_path) -> Recipe:
    steps = {"max_steps": 10**6, "save_steps": 2, "save_total_limit": 2}
    return drawn_recipe(tmp_path, {f"trainer.{name}": value for name, value in steps.items()})


@pytest.mark.slow
def test_a_killed_rank_and_a_killed_launcher_end_the_run_and_leave_no_process(
    endless, start, monkeypatch
):
    run = start(endless)
    run.wait_for_checkpoint()
    worker = run.rank(1)
    worker.kill()
    assert run.status() == 1
    run.require_none_alive()
    assert f"process 1 (PID {worker.pid}) was killed (SIGKILL), as the system does" in run.output
    assert "Traceback" not in run.output.rpartition("training on 2 processes failed")[2]
    checkpoint = last_complete_checkpoint(run.folder)
    settings = str(run.folder / "recipe.json")
    monkeypatch.setenv("PATH", cpu_environment()["PATH"])  # where the run was started
    resume = own_command("train", settings, *["--processes", "2", "--device", "cpu", "--resume"])
    assert run.output.endswith(f"to continue from {checkpoint}:\n  {resume}\n")

    run = start(endless, "--resume")
    run.wait_for_checkpoint(after_step=step_of(checkpoint))
    assert f"training continues from {checkpoint}, after step" in run.output
    assert len(run.alive()) == 3  # the command line, two ranks
    run.process.kill()
    assert run.status() == -signal.SIGKILL
    run.require_none_alive()
    assert last_complete_checkpoint(run.folder)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_command_line_says_how_to_continue_and_leaves_no_process(
    number, endless, start
):
    run = start(endless)
    run.wait_for(lambda: run.rank(0) and run.rank(1), SECONDS_TO_RUN)
    os.kill(run.process.pid, number)
    assert run.status() == 128 + number
    run.require_none_alive()
    assert f"training was stopped by {number.name}\nto continue from the beginning" in run.output
    assert "--resume" in run.output and "Traceback" not in run.output


def test_ranks_end_at_once_with_a_launcher_that_is_killed_while_they_import(endless, start):
    run = start(endless)
    ranks = run.wait_for(lambda: (a := run.rank(0)) and (b := run.rank(1)) and [a, b], 60)
    run.process.kill()
    # 2 s on idle cores; an extension that is being loaded holds Python.
    _, alive = psutil.wait_procs(ranks, timeout=8)
    assert not alive, run.output[-2000:]
    run.require_none_alive()
