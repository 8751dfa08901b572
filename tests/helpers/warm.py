"""Ranks that are forked from processes which have imported everything already.

A process of two imports torch, transformers, DeepSpeed and peft for five seconds before it does
anything, and torch's launcher is a third one. What a test says of numbers does not depend on that.
So two processes, one for each rank, import once and then wait; a rank of a test is a fork of one
of them, which has no more in common with the rank before it than the modules. There is one process
for each rank, so that ranks differ as fresh ones do in the order of their sets.

Not for what is said of launchers, of a first start, or of the order of imports: that is started as
a user starts it (:mod:`processes`).
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from select import select

# What is read while modules are imported: a fork cannot have another value than the warm process.
READ_BY_IMPORTS = (
    "CUDA_VISIBLE_DEVICES",
    "DS_ACCELERATOR",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_MODULES_CACHE",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
# What a rank is told by torch's launcher.
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# torch's launcher gives the others 30 seconds to end.
SECONDS_TO_END = 10


class WarmProcess:
    """One of them, on the side of the tests."""

    def __init__(self, environment: dict[str, str]):
        self.imported_with = {name: environment.get(name) for name in READ_BY_IMPORTS}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests
            text=True,
        )
        self.pid: int | None = None

    def start(self, request: dict) -> None:
        """Fork a rank."""
        environment = request["environment"]
        wanted = {name: environment.get(name) for name in READ_BY_IMPORTS}
        assert wanted == self.imported_with, f"{wanted}, not {self.imported_with}: start it fresh"
        assert self.pid is None, f"rank {self.pid} has not ended"
        self._write(request)
        self.pid = self._read()["pid"]

    def ended(self, seconds: float) -> bool:
        """Wait for the end of the rank."""
        return bool(select([self.process.stdout], [], [], max(seconds, 0))[0])

    def status(self) -> int:
        self.pid = None
        return self._read()["status"]

    def kill(self, number: signal.Signals) -> None:
        """The rank, and on SIGKILL what it has started."""
        import psutil

        with suppress(psutil.NoSuchProcess):
            rank = psutil.Process(self.pid)
            parts = rank.children(recursive=True) if number == signal.SIGKILL else []
            for part in [*parts, rank]:
                with suppress(psutil.NoSuchProcess):
                    part.send_signal(number)

    def _write(self, request: dict) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        assert line, f"a warm process has ended, with status {self.process.wait()}"
        return json.loads(line)


WARM: list[WarmProcess] = []


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
    number = processes or 1
    while len(WARM) < number:
        WARM.append(WarmProcess(environment))
        atexit.register(WARM[-1].process.stdin.close)
    ranks = WARM[:number]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        output.touch()
        for rank, process in enumerate(ranks):
            values = (rank, rank, number, number, "localhost", port)
            told = dict(zip(OF_A_RANK, map(str, values), strict=True)) if processes else {}
            request = {"command": command, "output": str(output), "folder": os.getcwd()}
            process.start(request | {"environment": environment | told})
        status = _wait(ranks, time.monotonic() + seconds)
        return status, output.read_text(errors="replace")


def _wait(ranks: list[WarmProcess], end: float) -> int | None:
    failed, hung, statuses = False, False, []
    running = list(ranks)
    while running:
        done = [rank for rank in running if rank.ended(0.02 / len(running))]
        statuses += [rank.status() for rank in done]
        running = [rank for rank in running if rank not in done]
        if not failed and any(statuses):
            failed, end = True, time.monotonic() + SECONDS_TO_END
            for rank in running:
                rank.kill(signal.SIGTERM)
        elif running and time.monotonic() > end:
            hung |= not failed
            for rank in running:
                rank.kill(signal.SIGKILL)
    return None if hung else next(filter(None, statuses), 0)


# On the other side


def main() -> None:
    import gc

    # All that any rank of a test imports and that takes long.
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._inductor.compile_fx  # DeepSpeed needs it for one of its optimizers  # noqa: F401
    import transformers.integrations.deepspeed  # noqa: F401
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    import glm4v_patched.finetune.trainer  # noqa: F401

    torch.set_num_threads(1)
    is_zero_supported_optimizer(torch.optim.SGD([torch.zeros(1)], lr=1))  # imports optimizers
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            return become(request)
        print(json.dumps({"pid": pid}), file=answers, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"status": status}), file=answers, flush=True)


def become(request: dict) -> None:
    """The process that a fresh one would be, once it has imported everything."""
    import random

    import numpy

    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in enumerate((nothing, output, output)):
        os.dup2(target, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # Fresh processes draw unlike numbers.
    random.seed()
    numpy.random.seed()
    first, *arguments = request["command"]
    if first == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
