"""Processes of tests that are forked from ones which have imported everything already.

A process imports torch, transformers, DeepSpeed and peft for five seconds before it does anything,
and of two ranks torch's launcher is a third one. What a test says of numbers or of files does not
depend on that. So a few processes import once and then wait, and a process of a test is a fork of
one of them: it has nothing in common with the one before it but the modules.

- ``all``: two processes, one for each rank, so that ranks differ as fresh ones do in the order of
  their sets. For training.
- ``torch``: one that has imported torch and what else knows nothing of this package, and no part of
  transformers or huggingface_hub. For what loads without the package.

Not for what is said of launchers, of a first start, or of the order of imports: that is started as
a user starts it (:mod:`processes`).
"""

import fcntl
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from types import ModuleType

# What is read while modules are imported: a fork cannot have another value than the warm process.
READ_BY_IMPORTS = {
    "torch": ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    "all": (
        *("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "HF_HOME", "HF_HUB_OFFLINE"),
        *("HF_MODULES_CACHE", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    ),
}
# What a rank is told by torch's launcher.
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# torch's launcher gives the others 30 seconds to end.
SECONDS_TO_END = 10
# How often a warm process looks whether it may still be needed.
SECONDS_TO_LOOK = 2


class WarmProcess:
    """One of them, on the side of the tests. All processes of xdist share it, and all of pytest for
    which ``WARM_PROCESSES`` names one folder; it ends once the process has ended whose number that
    folder's name ends with."""

    def __init__(self, name: str, imports: str, environment: dict[str, str]):
        self.names = READ_BY_IMPORTS[imports]
        self.address = _folder() / name
        with open(f"{self.address}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._is_there():
                self._begin(imports, environment)
        self.imported_with = json.loads(Path(f"{self.address}.json").read_text())
        self.pid: int | None = None

    def _is_there(self) -> bool:
        with socket.socket(socket.AF_UNIX) as trying:
            try:
                trying.connect(str(self.address))
            except OSError:  # there is none, or it was killed
                self.address.unlink(missing_ok=True)
                return False
        return True

    def _begin(self, imports: str, environment: dict[str, str]) -> None:
        read = {name: environment.get(name) for name in self.names}
        Path(f"{self.address}.json").write_text(json.dumps(read))
        if (
            imports == "torch"
        ):  # it imports nothing from there, and its forks have paths of their own
            environment = {k: v for k, v in environment.items() if k != "PYTHONPATH"}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self.address))
            listening.listen()
            subprocess.Popen(
                [sys.executable, "-P", __file__, imports, str(self.address)],
                env=environment,
                stdin=listening,
                start_new_session=True,  # Ctrl-C is for the tests
            )

    def start(self, request: dict) -> None:
        """Fork a process."""
        wanted = {name: request["environment"].get(name) for name in self.names}
        assert wanted == self.imported_with, f"{wanted}, not {self.imported_with}: start it fresh"
        assert self.pid is None, f"process {self.pid} has not ended"
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(self.address))
        # Not buffered: select tells of what can be read.
        self.channel = self.connection.makefile("rwb", buffering=0)
        with open(os.devnull) as nothing, open(request.pop("output"), "a") as output:
            files = [nothing.fileno(), output.fileno(), output.fileno()]
            socket.send_fds(self.connection, [b"\n"], files)
        self.channel.write(json.dumps(request).encode() + b"\n")
        self.pid = self._read()["pid"]

    def ended(self, seconds: float) -> bool:
        """Wait for the end of the fork."""
        return bool(select([self.connection], [], [], max(seconds, 0))[0])

    def status(self) -> int:
        self.pid = None
        with self.connection, self.channel:
            return self._read()["status"]

    def leave(self) -> None:
        """Its fork, if there is one, is killed."""
        if self.pid is not None:
            self.pid = None
            self.channel.close()
            self.connection.close()

    def kill(self, number: signal.Signals) -> None:
        """The fork, and on SIGKILL what it has started."""
        assert self.pid is not None
        kill(self.pid, number)

    def _read(self) -> dict:
        line = self.channel.readline()
        assert line, f"the warm process at {self.address} has ended"
        return json.loads(line)


WARM: dict[str, WarmProcess] = {}


def kill(pid: int, number: signal.Signals) -> None:
    """Tell a process to end, and on SIGKILL what it has started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        parts = process.children(recursive=True) if number == signal.SIGKILL else []
        for part in [*parts, process]:
            with suppress(psutil.NoSuchProcess):
                part.send_signal(number)


@cache
def _folder() -> Path:
    given = os.environ.get("WARM_PROCESSES")
    in_xdist = "PYTEST_XDIST_WORKER" in os.environ
    name = f"warm-{os.getppid() if in_xdist else os.getpid()}"
    folder = Path(given or Path(tempfile.gettempdir(), name))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_ranks(
    command: list[str], processes: int | None, seconds: float, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Run ``[SCRIPT, *arguments]`` or ``["-m", MODULE, *arguments]`` on each rank.

    Args:
        processes: How many ranks there are; ``None`` for one process that is none.

    Returns:
        The first status that is not 0, or ``None`` if ranks were killed for hanging; and what all
        ranks printed. If one fails, the others are told to end, as by torch's launcher.
    """
    request = {"command": command, "folder": os.getcwd()}
    if processes is None:
        return _run("all", [request | {"environment": environment}], seconds)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    requests = []
    for rank in range(processes):
        values = (rank, rank, processes, processes, "localhost", port)
        told = dict(zip(OF_A_RANK, map(str, values), strict=True))
        requests.append(request | {"environment": environment | told})
    return _run("all", requests, seconds)


def run_code(
    code: str, arguments: list[str], folder: Path, environment: dict[str, str], seconds: float
) -> tuple[int | None, str]:
    """As ``python -c`` runs it in a folder; the status, ``None`` if it was killed for hanging, and
    what was printed."""
    request = {"command": ["-c", *arguments], "code": code, "folder": str(folder)}
    return _run("torch", [request | {"environment": environment}], seconds)


def _run(imports: str, requests: list[dict], seconds: float) -> tuple[int | None, str]:
    warm = []
    for rank, request in enumerate(requests):
        name = f"{imports}-{rank}"
        if name not in WARM:
            WARM[name] = WarmProcess(name, imports, request["environment"])
        warm.append(WARM[name])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        output.touch()
        try:
            for process, request in zip(warm, requests, strict=True):
                process.start(request | {"output": str(output)})
            status = _wait(warm, time.monotonic() + seconds)
        finally:
            for process in warm:
                process.leave()
        return status, output.read_text(errors="replace")


def _wait(running: list[WarmProcess], end: float) -> int | None:
    failed, hung, statuses = False, False, []
    while running:
        done = [process for process in running if process.ended(0.02 / len(running))]
        statuses += [process.status() for process in done]
        running = [process for process in running if process not in done]
        if not failed and any(statuses):
            failed, end = True, time.monotonic() + SECONDS_TO_END
            for process in running:
                process.kill(signal.SIGTERM)
        elif running and time.monotonic() > end:
            hung |= not failed
            for process in running:
                process.kill(signal.SIGKILL)
            end = time.monotonic() + SECONDS_TO_END
    return None if hung else next(filter(None, statuses), 0)


# On the other side


def import_torch() -> None:
    """With those parts of it that transformers imports."""
    import jinja2  # noqa: F401
    import PIL.Image  # noqa: F401
    import regex  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401
    import torch.distributed.tensor  # noqa: F401
    import torch.export  # noqa: F401

    assert not {"transformers", "huggingface_hub", "glm4v_patched"} & sys.modules.keys()


def import_all() -> None:
    """All that a rank of any test imports and that takes long."""
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import torch._inductor.compile_fx  # deepspeed.initialize does, for an optimizer
    import transformers.integrations.deepspeed  # noqa: F401

    import glm4v_patched.finetune.worker  # noqa: F401

    torch.set_num_threads(1)


def main(imports: str, address: str) -> None:
    os.dup2(2, 1)  # old DeepSpeed prints while it is imported
    listening = socket.socket(fileno=os.dup(0))
    listening.settimeout(SECONDS_TO_LOOK)
    {"torch": import_torch, "all": import_all}[imports]()
    gc.collect()
    gc.freeze()
    for_whom = Path("/proc", Path(address).parent.name.rpartition("-")[2])
    answering: list[int] = []
    while for_whom.exists():
        answering = [pid for pid in answering if not os.waitpid(pid, os.WNOHANG)[0]]
        with suppress(TimeoutError):
            connection, _ = listening.accept()
            pid = os.fork()
            if pid == 0:
                listening.close()
                return answer(connection)
            connection.close()
            answering.append(pid)
    shutil.rmtree(Path(address).parent, ignore_errors=True)


def answer(connection: socket.socket) -> None:
    """Fork what is asked for, and tell its number and how it ended. Where nobody waits for that any
    more, it and what it has started are killed."""
    connection.settimeout(None)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    if not files:
        os._exit(0)  # it was only asked whether it is there
    channel = connection.makefile("rwb", buffering=0)
    request = json.loads(channel.readline())
    pid = os.fork()
    if pid == 0:
        channel.close()
        connection.close()
        return become(request, files)
    for number in files:
        os.close(number)
    with suppress(BrokenPipeError, ConnectionResetError):
        channel.write(json.dumps({"pid": pid}).encode() + b"\n")
        ended = os.pidfd_open(pid)
        if ended not in select([ended, connection], [], [])[0]:
            kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        channel.write(json.dumps({"status": status}).encode() + b"\n")
    os._exit(0)


def become(request: dict, files: list[int]) -> None:
    """The process that a fresh one would be, once it has imported as much."""
    import faulthandler
    import random

    import numpy
    import torch

    os.setsid()
    for number, target in enumerate(files):
        os.dup2(target, number)
        os.close(target)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # After a fork torch makes its pool of threads anew when it is first asked for: two threads that
    # ask at once end with "Invalid thread pool".
    torch.set_num_threads(torch.get_num_threads())
    # Fresh processes draw unlike numbers.
    random.seed()
    numpy.random.seed()
    sys.executable = request.get("executable", sys.executable)
    run(request["command"], request.get("code"), request.get("options", []))


def run(command: list[str], code: str | None, options: list[str]) -> None:
    """As ``python OPTIONS COMMAND`` does, for its ``-P`` and ``-u``."""
    for stream in (sys.stdout, sys.stderr) if "-u" in options else ():
        stream.reconfigure(write_through=True)
    first, *arguments = sys.argv = command
    place = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    safe = "-P" in options or os.environ.get("PYTHONSAFEPATH")
    others = [path for path in sys.path if path not in given]
    sys.path[:] = [*([] if safe else [place]), *given, *others]
    if first == "-c":
        assert code is not None
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(code, vars(module))
    elif first == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
