"""Loads what is published in processes of its own, by the code that it will be loaded by.

:mod:`load_check` runs there on a copy of the bytes that were checked, offline and without a token.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from packaging.version import Version

from glm4v_patched.models.base import Base
from glm4v_patched.models.loading import load_processor
from glm4v_patched.remote.configuration_chatglm import (
    FIRST_UNTESTED_TRANSFORMERS,
    OLDEST_TRANSFORMERS,
)

from .checks import FAILED, PASSED, SKIPPED, Check, Target
from .load_check import STEPS, inputs_of

LOAD_CHECK = Path(__file__).with_name("load_check.py")
SECONDS = 1800
# Larger weights are compared by names and shapes, with an empty model.
LARGEST_TO_LOAD = 1_000_000_000


def load(target: Target, pythons: Sequence[str] = (sys.executable,)) -> list[Check]:
    """Return the checks of :mod:`load_check` by each interpreter, up to the first that fails.

    Weights are linked, if they are small enough.
    """
    checks: list[Check] = []
    with TemporaryDirectory() as home:
        source = Path(home, "snapshot")
        source.mkdir()
        small = sum(target.files[name].size for name in target.tensors) <= LARGEST_TO_LOAD
        for name, file in target.files.items():
            if file.content is not None:
                (source / name).write_bytes(file.content)
            elif file.path and small:
                (source / name).symlink_to(os.path.realpath(file.path))
        try:  # within limits, which the processes below do not have
            inputs_of(load_processor(Base(str(source))), 0, torch.float32)
        except Exception as error:  # of a processor and template of others, of any kind
            return [Check(STEPS[0], FAILED, str(error).replace(str(source), target.name))]
        for number, python in enumerate(pythons):
            print(f"loading it with {python}, by the code beside it", file=sys.stderr, flush=True)
            lines, ended = run(python, source, Path(home, str(number)))
            steps = [Check(*json.loads(line)) for line in lines]
            steps += [Check(name, FAILED, f"{python}: {ended}") for name in STEPS[len(steps) :][:1]]
            checks += steps
            if steps[-1].status == FAILED:
                return checks
    return [*checks, _tried(checks)]


def _tried(checks: list[Check]) -> Check:
    """Say which versions of transformers have loaded it, and which end of the range has not."""
    found = [re.match(r"transformers (\S+),", check.detail) for check in checks]
    versions = sorted({Version(match[1]) for match in found if match})
    major, minor = map(int, FIRST_UNTESTED_TRANSFORMERS.split("."))
    newest = f"{major}.{minor - 1}"
    missing = [OLDEST_TRANSFORMERS] * (Version(OLDEST_TRANSFORMERS) not in versions)
    missing += [newest] * all(version.release[:2] != (major, minor - 1) for version in versions)
    told = f"transformers {', '.join(map(str, versions))}"
    if missing:
        told += f"; not tried with {' and '.join(missing)}, an end of the supported range: give "
        told += "--python PATH of an environment that has it"
    return Check("versions", SKIPPED if missing else PASSED, told)


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
