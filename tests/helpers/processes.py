"""Run real training processes; a hang or an orphan is a failure and not a stuck run."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest

from glm4v_patched.engine.environment import path_with_interpreter, rank_environments

ROOT = Path(__file__).parents[2]
SECONDS_TO_SERVE = 300
WORKERS = ROOT / "tests" / "distributed"


@dataclass(frozen=True)
class Ended:
    """How a group of processes ended: ``status`` is ``None`` if it was killed for hanging."""

    status: int | None
    output: str


def gpu_environment() -> dict[str, str]:
    """Return the environment for processes that import this package and the tests' helpers."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": path_with_interpreter(),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cpu_environment() -> dict[str, str]:
    """The same for processes that see no GPU."""
    cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "LOCAL_SIZE": "2"}
    return gpu_environment() | cpu


def in_plain_shell(command: str) -> Ended:
    """Run a command as it was printed, where no Python environment is activated."""
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HOME": os.path.expanduser("~")}
    return run_with_limit(["sh", "-c", command], 60, environment)


def heed_signals() -> None:
    """As ``preexec_fn`` of a process that will be sent SIGINT or SIGHUP: a test that runs in a
    script's background, or under nohup, has inherited that they are ignored, and hands that on."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def serving(
    command: list[str],
    announced: str,
    log: Path,
    environment: dict[str, str] | None = None,
    folder: Path = ROOT,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A command that serves until it is ended, and prints to ``log``.

    Yields what the group of the pattern ``announced`` is in what it printed, and the process.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=cpu_environment() if environment is None else environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=heed_signals,
        )
    try:
        end = time.monotonic() + SECONDS_TO_SERVE
        while not (match := re.search(announced, log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"not served, status {process.poll()}\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        yield match[1], process
    finally:
        process.kill()
        process.wait()


@contextmanager
def on_the_cpu(seconds: int = 300) -> Iterator[None]:
    """For commands of ours in this process: what they start sees no GPU, and after so many seconds
    they are ended by a ``TimeoutError``."""

    def stop(*_) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        with mock.patch.dict(os.environ, cpu_environment()):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_with_limit(
    command: list[str],
    seconds: float,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a command in a folder; when the time is up, kill it and all that it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=cpu_environment() if environment is None else environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            _kill(process)
        output.seek(0)
        return Ended(status, output.read())


def run_without_package(code: str, folder: Path, *arguments: str, **variables: str) -> str:
    """Run Python code in a folder, for 300 s at most; return what it printed, or fail with that.

    The process has its own caches, and finds neither this package's folder nor a network.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {
        "HF_HOME": str(folder / "home"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", code, *arguments]
    ended = run_with_limit(command, 300, environment | variables, folder)
    assert ended.status == 0, ended.output[-4000:]
    # Triton 3.9 lists at the end of a process what it has not freed.
    return ended.output.partition("nanobind: leaked")[0]


def run_ranks(*command: str, seconds: float, ranks: list[dict[str, str]] | None = None) -> Ended:
    """Run a script, with its arguments, as each rank of a job: see tests/distributed/ranks.py.

    Args:
        ranks: The environment variables of each; by default those of two processes.
    """
    variables = json.dumps(rank_environments(2) if ranks is None else ranks)
    return run_with_limit([sys.executable, str(WORKERS / "ranks.py"), variables, *command], seconds)


def _kill(started: subprocess.Popen) -> None:
    """With all that it started: not a process group, for torch's launcher starts every worker in a
    session of its own."""
    if started.poll() is not None:
        return
    process = psutil.Process(started.pid)
    for part in [*process.children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):
            part.kill()
    started.wait()


def run_two_processes(function: Callable[[Path], None], folder: Path, seconds: float) -> str:
    """Run a function of a file of tests/distributed on two processes that have joined, with a
    folder; a hang or an error fails the test. Returns what was printed."""
    module, name = function.__module__.rpartition(".")[2], function.__name__
    ended = run_ranks(str(WORKERS / "rank.py"), module, name, str(folder), seconds=seconds)
    assert ended.status == 0, f"status {ended.status}\n{ended.output[-8000:]}"
    return ended.output
