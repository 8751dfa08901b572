"""Run real training processes; a hang or an orphan is a failure and not a stuck run."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from glm4v_patched.engine.environment import path_of_processes
from tests.helpers import warm

ROOT = Path(__file__).parents[2]
SECONDS_TO_SERVE = 120
WORKERS = ROOT / "tests" / "distributed"


@dataclass(frozen=True)
class Ended:
    """How a group of processes ended: ``status`` is ``None`` if it was killed for hanging."""

    status: int | None
    output: str


def two_processes(worker: Path, *arguments: str) -> list[str]:
    """The command that runs a script on two processes of this machine, on a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    return [*command, str(worker), *arguments]


def gpu_environment() -> dict[str, str]:
    """For processes that import this package and the tests' helpers."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": path_of_processes(),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cpu_environment() -> dict[str, str]:
    """The same for processes that see no GPU."""
    cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "LOCAL_SIZE": "2"}
    return gpu_environment() | cpu


def in_plain_shell(command: str, path: str = os.defpath) -> subprocess.CompletedProcess[str]:
    """Run a command as it was printed; by default, where no Python environment is activated."""
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": os.environ["HOME"]}
    return subprocess.run(
        command, shell=True, env=environment, capture_output=True, text=True, check=False
    )


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
        while not (found := re.search(announced, log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"not served, status {process.poll()}\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        yield found[1], process
    finally:
        process.kill()
        process.wait()


def run_with_limit(
    command: list[str],
    seconds: float,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a command in a folder; when the time is up, kill it and all that it started."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=cpu_environment() if environment is None else environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # Not a process group: torch's launcher starts every worker in a session of its own.
        for part in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                part.kill()
        output, _ = process.communicate()
        return Ended(None, output)
    return Ended(process.returncode, output)


def run_warm(
    *command: str,
    seconds: float,
    processes: int | None = 2,
    environment: dict[str, str] | None = None,
) -> Ended:
    """Run a script, or ``-m`` and a module, on forks of warm processes (:mod:`warm`).

    ``processes`` is ``None`` for a single one that no launcher has started.
    """
    environment = cpu_environment() if environment is None else environment
    return Ended(*warm.run_ranks(list(command), processes, seconds, environment))


def run_command_warm(command: list[str], seconds: float, environment: dict[str, str]) -> Ended:
    """What a command of Python or of torch's launcher would run, on forks of warm processes."""
    started = [part for part in command[1:] if part != "-P"]
    processes = None
    if started[:2] == ["-m", "torch.distributed.run"]:
        started = started[2:]
        while started[0].startswith("--"):
            option, value, *started = started
            if option == "--nproc_per_node":
                processes = int(value)
    return run_warm(*started, seconds=seconds, processes=processes, environment=environment)


def run_two_processes(worker: str, *arguments: str, seconds: float, fresh: bool = False) -> str:
    """Run a worker of tests/distributed on two processes; a hang or an error fails the test.

    They are forks of warm ones, or ``fresh`` ones that torch's launcher starts.
    """
    path = WORKERS / worker
    if fresh:
        ended = run_with_limit(two_processes(path, *arguments), seconds)
    else:
        ended = run_warm(str(path), *arguments, seconds=seconds)
    if ended.status is None:
        pytest.fail(f"{worker} hung: not done after {seconds} s\n{ended.output[-4000:]}")
    assert ended.status == 0, ended.output[-8000:]
    return ended.output
