"""Load a build with its published code, in separate processes.

The processes run :mod:`load_check` on a copy of the checked bytes, offline and without a token.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from glm4v_patched.terminal_text import show_progress

from .checks import FAILED, Check
from .files import BuiltFiles
from .load_check import STEPS

LOAD_CHECK = Path(__file__).with_name("load_check.py")
LOAD_TIMEOUT_S = 1800
# Weights above this size are not loaded; :mod:`checks` compares only their names and shapes.
MAX_LOADED_BYTES = 1_000_000_000


def check_loading(target: BuiltFiles, pythons: Sequence[str] = (sys.executable,)) -> list[Check]:
    """Run :mod:`load_check` with each interpreter, up to the first failure; return its checks.

    Weights above :data:`MAX_LOADED_BYTES` are left out.
    """
    checks: list[Check] = []
    with TemporaryDirectory() as home:
        source = Path(home, "snapshot")
        source.mkdir()
        loads_weights = sum(file.size for file in target.weights.values()) <= MAX_LOADED_BYTES
        for name, file in target.files.items():
            if file.content is not None:
                (source / name).write_bytes(file.content)
            elif file.path and loads_weights:
                (source / name).symlink_to(os.path.realpath(file.path))
        for number, python in enumerate(pythons):
            print(
                f"loading {target.name} with {python} and the published code",
                file=sys.stderr,
                flush=True,
            )
            with show_progress("it loads, answers and trains one step"):
                lines, end = run_published_code(python, source, Path(home, str(number)))
            steps = [Check(*json.loads(line)) for line in lines]
            steps += [Check(name, FAILED, f"{python}: {end}") for name in STEPS[len(steps) :][:1]]
            checks += steps
            if steps[-1].status == FAILED:
                break
    return checks


def run_published_code(python: str, source: Path, home: Path) -> tuple[list[str], str]:
    """Run :mod:`load_check` with empty caches; return its output lines, and how it ended.

    The whole process group is killed when the process ends or exceeds :data:`LOAD_TIMEOUT_S`.
    """
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    environment |= {"HF_HOME": str(home / "cache"), "HF_MODULES_CACHE": str(home / "modules")}
    environment |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # -I: neither this repository nor PYTHONPATH can be imported.
    command = [python, "-I", str(LOAD_CHECK), str(source)]
    # Output goes to files: a child process could keep a pipe open after the process has ended.
    output, errors = home / "output", home / "errors"
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            end = f"ended with status {process.wait(LOAD_TIMEOUT_S)} in this step"
        except subprocess.TimeoutExpired:
            end = f"was stopped in this step, after {LOAD_TIMEOUT_S} s in all"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last_error = errors.read_text(errors="replace").strip().splitlines()[-1:]
    lines = output.read_text(errors="replace").splitlines(keepends=True)
    # A killed process may have written half a line.
    complete = [line for line in lines if line.endswith("\n")]
    return complete, f"the process {end}: {last_error[0] if last_error else 'it printed no error'}"
