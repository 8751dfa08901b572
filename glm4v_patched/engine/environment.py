"""How processes of Python are started: their commands, and the environment of training ones."""

import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO

ROOT = Path(__file__).resolve().parents[2]


def python_module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this Python, which imports nothing from the current
    folder: that may be somebody else's, with a ``numpy.py`` of its own."""
    return [sys.executable, *([] if _is_at_root() else ["-P"]), "-m", module, *arguments]


def rank_environments(processes: int) -> list[dict[str, str]]:
    """What tells each of so many processes of this machine which one it is, and where to meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), **size, **place} for rank in range(processes)
    ]


def run_with_timeout(
    seconds: float, command: list[str], environment: Mapping[str, str], output: IO | None = None
) -> int | None:
    """The exit status of a command, which prints to ``output``; ``None`` if it was not done in time
    and was ended."""
    with Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            return process.wait(seconds)
        except TimeoutExpired:
            process.terminate()  # torch's launcher ends its processes first
            return None


def exit_when_stdin_closes() -> None:
    """End this process when its standard input ends: when whoever holds the other end is gone,
    however that died. Each process has a session of its own, so no signal to a group reaches it."""

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def _is_at_root() -> bool:
    """Whether this is run in a checkout, where it may not be installed, and what lies there is as
    trusted as itself."""
    try:
        return Path.cwd().resolve() == ROOT
    except OSError:  # it was removed
        return False


def training_environment(processes: int, on_cpu: bool = False) -> dict[str, str]:
    """This process's environment, with what so many training processes of this machine need beside
    it. What the reader has set stays, but for the devices where there are to be none."""
    threads = max((os.cpu_count() or 1) // processes, 1)  # an offloaded optimizer needs them
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # DeepSpeed calls collectives by names that torch 2.13 deprecates: a warning each would
        # bury the progress bar.
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        # Gathered weights come and go in many sizes; this keeps the allocator from falling to
        # pieces.
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if not _is_at_root():
        # torch's launcher starts its processes by itself, with no -P as in python_module_command.
        defaults["PYTHONSAFEPATH"] = "1"
    cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    return defaults | os.environ | cpu | {"PATH": path_with_interpreter()}


def single_process_environment(on_cpu: bool) -> dict[str, str]:
    """The environment of a process that trains alone, without ZeRO. It sees one GPU: the Trainer
    would spread it over all."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    one = {} if on_cpu else {"CUDA_VISIBLE_DEVICES": first}
    return training_environment(1, on_cpu) | one


def path_with_interpreter() -> str:
    """``PATH`` with the programs of this Python environment first: torch starts ``ninja`` by name,
    and pip puts it beside the interpreter."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
