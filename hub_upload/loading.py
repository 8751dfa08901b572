"""Loads what is published in processes of its own, by the code that it will be loaded by.

:mod:`load_check` runs there on a copy of the bytes that were checked, offline and without a token.
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

from .checks import FAILED, Check
from .files import Build
from .load_check import STEPS

LOAD_CHECK = Path(__file__).with_name("load_check.py")
SECONDS = 1800
# Larger weights are compared by names and shapes, with an empty model.
LARGEST_TO_LOAD = 1_000_000_000


def load(target: Build, pythons: Sequence[str] = (sys.executable,)) -> list[Check]:
    """Return the checks of :mod:`load_check` by each interpreter, up to the first that fails.

    Weights are linked, if they are small enough.
    """
    checks: list[Check] = []
    with TemporaryDirectory() as home:
        source = Path(home, "snapshot")
        source.mkdir()
        small = sum(file.size for file in target.weights.values()) <= LARGEST_TO_LOAD
        for name, file in target.files.items():
            if file.content is not None:
                (source / name).write_bytes(file.content)
            elif file.path and small:
                (source / name).symlink_to(os.path.realpath(file.path))
        for number, python in enumerate(pythons):
            print(f"loading it with {python}, by the code beside it", file=sys.stderr, flush=True)
            lines, ended = run(python, source, Path(home, str(number)))
            steps = [Check(*json.loads(line)) for line in lines]
            steps += [Check(name, FAILED, f"{python}: {ended}") for name in STEPS[len(steps) :][:1]]
            checks += steps
            if steps[-1].status == FAILED:
                break
    return checks


def run(python: str, source: Path, home: Path) -> tuple[list[str], str]:
    """Run the published code, with empty caches: what it says, and how the process ended.

    No process of it is left: the whole group is killed when its first one ends, or is late.
    """
    home.mkdir()
    given = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    given |= {"HF_HOME": str(home / "cache"), "HF_MODULES_CACHE": str(home / "modules")}
    given |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # -I: neither this repository nor what PYTHONPATH names can be imported.
    command = [python, "-I", str(LOAD_CHECK), str(source)]
    # Files, for a pipe that some process keeps open would be waited for.
    output, errors = home / "output", home / "errors"
    with output.open("wb") as said, errors.open("wb") as told:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=told,
            start_new_session=True,
        )
        try:
            ended = f"ended with status {process.wait(SECONDS)} here"
        except subprocess.TimeoutExpired:
            ended = f"was stopped here, not done after {SECONDS} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = errors.read_text(errors="replace").strip().splitlines()[-1:]
    lines = output.read_text(errors="replace").splitlines(keepends=True)
    # A process that was killed may have written half a line.
    whole = [line for line in lines if line.endswith("\n")]
    return whole, f"the process {ended}: {last[0] if last else 'it said nothing'}"
