"""Checks a built folder, or a repository of the Hub, as a careful person would before trusting it.

What can be told from the files is told of bytes that are read once (:mod:`checks`). Then the
folder is built again from its own files and compared, so that no byte but the weights' is somebody
else's. Only if all of it is this clone's does the published code run (:mod:`loading`).
"""

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import glm4v_patched
from glm4v_patched.patch.config_json import parse_json_object
from glm4v_patched.terminal_text import printable

from .build import contents
from .checks import (
    FAILED,
    OF_GIT,
    SKIPPED,
    Check,
    check_adapters,
    check_files,
    check_weights,
    require,
    run_checks,
)
from .files import Build, read_folder
from .hub import read_repository, without_secrets
from .layout import ID, MANIFEST
from .load_check import STEPS
from .loading import load

OF_MODEL, OF_ADAPTERS = ["files", "rebuilt", "weights", *STEPS], ["files", "adapters", "weights"]


def check_rebuilt(target: Build) -> str:
    """Build the folder from its own files, and compare every byte but the weights'.

    So code, card, requirements.txt, license and settings are what this clone writes, whatever the
    manifest says of them. The id in the card, and where the original has its license, are as found.
    """
    version = target.manifest.version
    require(
        version == glm4v_patched.__version__,
        f"{MANIFEST}: version is {version}, expected {glm4v_patched.__version__}, this clone's: "
        "use the clone that built it, or build again",
    )
    card = target.read("README.md").decode()
    name = re.search(f'(?m)^name, revision = "({ID})"', card)
    licensed = re.search(r"(?m)^license_link: \S+/(MODEL_LICENSE|LICENSE|LICENSE\.md)$", card)
    if name is None or licensed is None:
        raise ValueError(
            "README.md names no id of a repository, or no license; expected the card that build "
            "writes: build again"
        )
    expected = contents(target, name[1], licensed[1])
    names = expected.keys() | target.files.keys() - target.weights.keys() - OF_GIT
    for file in [*sorted(names - {MANIFEST}), MANIFEST]:  # which differs wherever another does
        found, ours = target.content(file), expected.get(file)
        if found is None or found != ours:
            raise ValueError(
                f"{_difference(file, found, ours)}; it is not what this clone builds of version "
                f"{version}: build again, or use the clone that built it. None of it was run"
            )
    return f"{len(expected)} files, as this clone builds them"


def _difference(name: str, found: bytes | None, expected: bytes | None) -> str:
    """Return where two contents of a file differ first, with both sides."""
    if expected is None:
        return f"{name} is there; expected no such file"
    if found is None:
        return f"{name} is missing, or is no text; expected one"
    if name.endswith(".json"):
        here, ours = (parse_json_object(content, name) for content in (found, expected))
        for key in {**ours, **here}:
            one, other = (json.dumps(of[key]) if key in of else "absent" for of in (here, ours))
            if one != other:
                return f"{name}: {key} is {one:.80}, expected {other:.80}"
    lines = zip_longest(*(text.decode(errors="replace").split("\n") for text in (found, expected)))
    number, one, other = next((n, a, b) for n, (a, b) in enumerate(lines, 1) if a != b)
    return f"{name}, line {number}: found {one!r:.80}, expected {other!r:.80}"


@dataclass
class Report:
    name: str
    revision: str | None
    checks: list[Check]

    @property
    def failures(self) -> list[str]:
        return [check.name for check in self.checks if check.status == FAILED]

    def to_json_bytes(self) -> str:
        told = {"target": self.name, "revision": self.revision, "passed": not self.failures}
        checks = {"checks": [check._asdict() for check in self.checks]}
        return json.dumps(told | checks, indent=2, ensure_ascii=False)

    def as_table(self) -> str:
        rows = [printable(f"{c.name:<12}  {c.status:<7}  {c.detail}") for c in self.checks]
        counts = Counter(check.status for check in self.checks)
        summary = ", ".join(f"{number} {status}" for status, number in counts.items())
        at = f"@{self.revision}" if self.revision else ""
        return "\n".join([*rows, f"{self.name}{at}: {summary}"])


def check_build(target: Build, pythons: Sequence[str], read_weights: bool = False) -> list[Check]:
    """Run every check up to the first that fails; the published code of a model runs last."""
    of_adapters = target.manifest.is_of_adapters
    settings = partial(check_adapters if of_adapters else check_rebuilt, target)
    names = OF_ADAPTERS if of_adapters else OF_MODEL
    steps = partial(check_files, target, read_weights), settings, partial(check_weights, target)
    checks = run_checks(dict(zip(names, steps, strict=False)))
    if checks[-1].status != FAILED and not of_adapters:
        checks += load(target, pythons)
    why = f"not run because of: {checks[-1].name}"
    done = {check.name for check in checks}
    return checks + [Check(name, SKIPPED, why) for name in names if name not in done]


def verify(
    name: str,
    revision: str | None = None,
    read_weights: bool = False,
    pythons: Sequence[str] = (),
) -> Report:
    """Run every check on a folder, or on a commit, tag or branch of an id on the Hub.

    Args:
        pythons: Interpreters that load it, in place of this one: each of an environment with
            another transformers.

    ``ValueError`` if it is neither, or no build of ours, or there is no such interpreter.
    """
    for python in pythons:
        require(shutil.which(python), f"--python {python} is no program; expected a Python's path")
    with tempfile.TemporaryDirectory() as home:
        commit = None
        if Path(name).is_dir():
            require(revision is None, f"{name} is a folder and has no revision {revision}")
            files = read_folder(Path(name), hidden=True)
        else:
            told = f"{name} is neither a folder nor an id on the Hub: give DIR or org/name"
            require(re.fullmatch(ID, name), told)
            commit, files = read_repository(name, revision, Path(home, "download"))
        checks = check_build(Build(name, files, commit), pythons or [sys.executable], read_weights)
    # A server may repeat the token in what it says.
    return Report(
        name, commit, [Check(c.name, c.status, without_secrets(c.detail)) for c in checks]
    )
