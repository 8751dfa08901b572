"""Commands and environment variables of the Python processes that this package starts."""

import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO

from ..cpu import count_cores

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]


def python_module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python.

    The new process imports nothing from the current folder unless that is this repository: another
    folder may belong to somebody else and contain a ``numpy.py``.
    """
    return [sys.executable, *([] if _is_at_root() else ["-P"]), "-m", module, *arguments]


def rank_environments(processes: int) -> list[dict[str, str]]:
    """Return each rank's variables for ``torch.distributed`` on this machine, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), **size, **master} for rank in range(processes)
    ]


def run_with_timeout(
    seconds: float, command: list[str], environment: Mapping[str, str], output: IO | None = None
) -> int | None:
    """Run a command and wait for its end.

    Args:
        output: File for the command's stdout and stderr; by default those of this process.

    Returns:
        The exit status, or None if the command was terminated after ``seconds``.
    """
    with Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            return process.wait(seconds)
        except TimeoutExpired:
            process.terminate()  # torch's launcher ends its processes first
            return None


def exit_when_stdin_closes() -> None:
    """Exit this process when its standard input closes, that is, when its parent has died.

    The process has its own session, so no signal to the parent's process group reaches it.
    """

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def _is_at_root() -> bool:
    """Return whether the current folder is this package's repository, whose files are trusted."""
    try:
        return Path.cwd().resolve() == REPOSITORY_ROOT
    except OSError:  # the current folder was removed
        return False


def training_environment(processes: int, on_cpu: bool = False) -> dict[str, str]:
    """Return this process's environment with the defaults of training processes.

    Variables that are already set keep their values, except that the folder of this Python is
    added to ``PATH``.

    Args:
        processes: Training processes on this machine, which share its cores.
        on_cpu: Hide all GPUs, even if ``CUDA_VISIBLE_DEVICES`` is set.
    """
    threads = max(count_cores() // processes, 1)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # DeepSpeed calls collectives by names that torch 2.13 deprecates: a warning for each call
        # would bury the progress bar.
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        # ZeRO-3 gathers weights of many sizes; this setting keeps them from fragmenting the GPU's
        # memory.
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if not _is_at_root():
        # This has the effect of python_module_command's -P on processes of torch's launcher.
        defaults["PYTHONSAFEPATH"] = "1"
    no_gpus = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    return defaults | os.environ | no_gpus | {"PATH": path_with_interpreter()}


def single_process_environment(on_cpu: bool) -> dict[str, str]:
    """Return the environment of a single training process, without ZeRO.

    The process sees only one GPU: with several, the Trainer would use DataParallel.
    """
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    one_gpu = {} if on_cpu else {"CUDA_VISIBLE_DEVICES": first_gpu}
    return training_environment(1, on_cpu) | one_gpu


def path_with_interpreter() -> str:
    """Return ``PATH`` with the interpreter's folder first.

    pip installs ``ninja`` there, which torch starts by its name to compile extensions.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
