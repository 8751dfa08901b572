"""Programs for the head of ``PATH`` that run as forks of warm processes (:mod:`warm`).

``python``, ``glm4v-patched`` and the like are a few lines that hand their standard streams, folder,
environment and arguments to a warm process, wait for its fork, and end as it does. What that starts
with ``sys.executable``, such as torch's launcher its ranks, comes here again.

A module of ours or of torch's launcher is a fork of a process that has imported all, and a script
of one that has imported torch. Where none has imported with the same environment, or for what is
asked in another way, Python itself is started; so it is for ``glm4v_patched.run``.

Unlike a fresh process:

- Modules have been imported already, and one order of sets is that of all processes.
- Its parent, session and number are others: a signal to what was typed is no signal to the fork,
  which is killed, with all that it has started, once what was typed has ended.
- What Python reads of the environment before anything else, such as ``PYTHONWARNINGS``, is ignored.
"""

import json
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

PROGRAMS = {
    "python": [],
    "deepspeed": ["-m", "deepspeed.launcher.runner"],
    "glm4v-patched": ["-m", "glm4v_patched"],
    "torchrun": ["-m", "torch.distributed.run"],
}
# Modules that begin so are forks.
MODULES = ("glm4v_patched", "hub_upload", "torch.distributed.run")
# Beside what imports themselves read.
READ = {"all": ("PYTHONPATH", "HF_ENDPOINT"), "torch": ()}
# What is about how Python starts is not, nor what is started with one of these variables.
START = "glm4v_patched.run"
STARTED_FRESH = {"STARTED_FRESH": "1"}
FRESH = {*STARTED_FRESH, "GLM4V_PATCHED"}

WARM: list = []


def write_programs(folder: Path, environment: dict[str, str], *kinds: str) -> None:
    """Write them to a folder, for which warm processes of these kinds are started."""
    from tests.helpers.warm import WarmProcess

    folder.mkdir(parents=True)
    known = {}
    for kind in kinds:
        # One that has imported less fits many folders.
        name = "typed-torch" if kind == "torch" else f"typed-{os.getpid()}-{len(WARM)}"
        WARM.append(WarmProcess(name, kind, environment))
        read = WARM[-1].imported_with | {name: environment.get(name) for name in READ[kind]}
        known[kind] = [str(WARM[-1].address), read]
    (folder / "warm.json").write_text(json.dumps(known))
    for name, command in PROGRAMS.items():
        start = [sys.executable, "-IS", __file__, str(folder), sys.executable, *command]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(start)} "$@"\n')
        (folder / name).chmod(0o755)


def main(folder: str, python: str, *arguments: str) -> None:
    command = list(arguments)
    options = []
    while command[:1] in (["-P"], ["-u"]):
        options.append(command.pop(0))
    if not (address := _warm_process(Path(folder), command)):
        os.execv(python, [python, *arguments])
    request = {"command": command, "folder": os.getcwd(), "environment": dict(os.environ)}
    request |= {"executable": f"{folder}/python", "options": options}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        _, ended = (json.loads(line) for line in connection.makefile())
    _end(ended["status"])


def _warm_process(folder: Path, command: list[str]) -> str | None:
    """The address of one whose fork can run the command."""
    if not command or FRESH & os.environ.keys():
        return None
    kinds = ["torch"] if command[0].endswith(".py") else []
    if command[0] == "-m" and command[1].startswith(MODULES) and command[1] != START:
        kinds = ["all", "torch"]
    known = json.loads((folder / "warm.json").read_text())
    for kind in kinds:
        address, read = known.get(kind, ("", {}))
        if address and all(os.environ.get(name) == value for name, value in read.items()):
            return address
    return None


def _end(status: int) -> NoReturn:
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
