"""Checks a built folder, or a repository of the Hub, as a careful person would before trusting it.

What can be told from the files is told by :mod:`checks`, of bytes that are read once. What needs
the published code to run is told by :mod:`load_check` in a fresh process, from a copy of those
bytes, offline and without a token; and only if nothing else has failed. Code that is not this
clone's own, whatever its manifest says, is run for nobody but who asks for it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import Target, check_files
from .errors import printable, without_secrets
from .files import download, read_folder, read_repository
from .layout import ID
from .load_check import FAILED, PASSED, SKIPPED, STEPS, Check

LOAD_CHECK = Path(__file__).with_name("load_check.py")
SECONDS = 3600
# What the process that runs the code gets of this one's environment: no token, proxy or home.
ENVIRONMENT = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT"}
ENVIRONMENT |= {"LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}


@dataclass
class Report:
    target: Target
    checks: list[Check]

    @property
    def failures(self) -> list[str]:
        return [check.name for check in self.checks if check.status == FAILED]

    def as_json(self) -> str:
        checks = [check._asdict() for check in self.checks]
        values: dict[str, Any] = {"target": self.target.name, "revision": self.target.revision}
        values |= {"passed": not self.failures, "checks": checks}
        return json.dumps(values, indent=2, ensure_ascii=False)

    def as_table(self) -> str:
        rows = [printable(f"{c.name:<17}  {c.status:<7}  {c.detail}") for c in self.checks]
        counts = Counter(check.status for check in self.checks)
        summary = ", ".join(f"{number} {status}" for status, number in counts.items())
        return "\n".join([*rows, f"{self.target.where}: {summary}"])


def verify(
    name: str,
    revision: str | None = None,
    check_weights: bool = False,
    code_only: bool = False,
    run_code: bool = False,
) -> Report:
    """Run every check on a folder, or on a commit, tag or branch of an id on the Hub.

    ``ValueError`` if it is neither, ``Failure`` if the Hub does not give its files.
    """
    with tempfile.TemporaryDirectory() as home:
        if Path(name).is_dir() and revision is not None:
            raise ValueError(f"{name} is a folder and has no revision {revision}: leave that out")
        commit = None
        if Path(name).is_dir():
            files = read_folder(Path(name))
        elif re.fullmatch(ID, name):
            commit, files = read_repository(name, revision, Path(home, "download"))
        else:
            told = f"{name} is neither a folder nor an id on the Hub"
            raise ValueError(f"{told}: give DIR or org/name")
        target = Target(name, files, commit, code_only, check_weights, run_code)
        checks = check_files(target)
        if failed := [check.name for check in checks if check.status == FAILED]:
            why = f"nothing is run because of: {', '.join(failed)}"
            checks += [Check(step, SKIPPED, why) for step in STEPS]
        else:
            checks += _load(target, Path(home))
    # A server may repeat the token in what it says.
    checks = [check._replace(detail=without_secrets(check.detail)) for check in checks]
    return Report(target, checks)


def _load(target: Target, home: Path) -> list[Check]:
    """Run the checks of :mod:`load_check` in a process of its own, with empty caches."""
    shapes = {name: shape for part in target.tensors.values() for name, shape in part.items()}
    request, results = home / "request.json", home / "results.jsonl"
    values = {"shapes": shapes or None, "whole": target.may_be_loaded, "results": str(results)}
    values["source"] = str(_snapshot(target, home))
    request.write_text(json.dumps(values), encoding="utf-8")
    if target.foreign_code:
        told = f"--run-code: running {len(target.foreign_code)} files of code of {target.where} "
        told += f"that are not this clone's: {', '.join(target.foreign_code)}. They get no token, "
        told += "an empty home and HF_HUB_OFFLINE=1; what your account may read and write here, "
        print(printable(f"{told}they may."), file=sys.stderr, flush=True)
    ended = _run(request, home)
    checks = _read_results(results)
    why = f"not run after: {checks[-1].name}" if checks else ""
    if len(checks) < len(STEPS) and not (checks and checks[-1].status == FAILED):
        checks.append(Check(STEPS[len(checks)], FAILED, ended))
        why = f"the process ended at: {checks[-1].name}"
    return checks + [Check(step, SKIPPED, why) for step in STEPS[len(checks) :]]


def _snapshot(target: Target, home: Path) -> Path:
    """A folder with the bytes that were checked, and with the weights where they are loaded."""
    folder = home / "snapshot"
    folder.mkdir()
    weights = list(target.tensors) if target.may_be_loaded else []
    if target.revision and weights:
        download(target.name, target.revision, weights, home / "download")
    for name in weights:
        path = target.files[name].path or home / "download" / name
        (folder / name).symlink_to(os.path.realpath(path))
    for name in {*target.manifest.code, *target.manifest.files} & target.files.keys():
        (folder / name).write_bytes(target.read(name))
    return folder


def _run(request: Path, home: Path) -> str:
    """Run the published code; how the process ended."""
    empty, errors = home / "empty", home / "errors"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name in ENVIRONMENT}
    environment |= dict.fromkeys(("HOME", "USERPROFILE", "HF_HOME"), str(empty))
    environment |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    environment |= {"HF_MODULES_CACHE": str(home / "modules"), "TOKENIZERS_PARALLELISM": "false"}
    # -I: neither this repository nor what PYTHONPATH names can be imported.
    command = [sys.executable, "-I", str(LOAD_CHECK), str(request)]
    nothing = subprocess.DEVNULL
    try:
        with errors.open("wb") as file:
            pipes: dict[str, Any] = {"stdin": nothing, "stdout": nothing, "stderr": file}
            ended = subprocess.run(command, cwd=empty, env=environment, timeout=SECONDS, **pipes)
    except subprocess.TimeoutExpired:
        return f"the process was stopped here, not done after {SECONDS} s"
    last = errors.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
    said = last[0] if last else "it said nothing"
    return f"the process ended with status {ended.returncode} here: {said}"


def _read_results(path: Path) -> list[Check]:
    """What the process says; nothing of it, if it is not what ours would say."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
        checks = [Check(*map(str, json.loads(line))) for line in lines]
    except (OSError, ValueError, TypeError, RecursionError):
        return []
    ours = [check.name for check in checks] == STEPS[: len(checks)]
    return checks if ours and {c.status for c in checks} <= {PASSED, FAILED, SKIPPED} else []
