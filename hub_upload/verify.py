"""Check a built folder, or a repository on the Hub, before trusting it.

The files are read once, and checked without running code in them (:mod:`checks`). Then the folder
is built again from its own files, and both builds are compared. This proves that this clone writes
every byte except the weights. Only then does the code of the folder run (:mod:`load_check`).
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import glm4v_patched
from glm4v_patched.patch.config_json import parse_json_object
from glm4v_patched.terminal_text import printable

from .build import build_contents
from .checks import (
    FAILED,
    GIT_FILES,
    PASSED,
    Check,
    check_loading,
    check_weight_files,
    require_that,
    run_checks,
)
from .files import BuiltFiles, read_folder
from .hub import read_repository, without_secrets
from .manifest import ID_PATTERN, MANIFEST


def check_files(target: BuiltFiles) -> str:
    """Build the folder again from its own files; compare names and bytes except the weights'.

    Code, card, requirements.txt, license and settings must be what this clone writes, whatever the
    manifest says. The card gives the repository's id and the license's location.

    Raises:
        ValueError: The builds differ; the error names the first difference.
    """
    version = target.manifest.version
    require_that(
        version == glm4v_patched.__version__,
        f"{MANIFEST}: version is {version}, expected this clone's {glm4v_patched.__version__}: use "
        "the clone that built it, or build again",
    )
    card = target.read("README.md").decode()
    name = re.search(f'(?m)^name, revision = "({ID_PATTERN})"', card)
    licensed = re.search(r"(?m)^license_link: \S+/(MODEL_LICENSE|LICENSE|LICENSE\.md)$", card)
    # A card without them differs from any that build writes.
    expected = build_contents(target, name[1] if name else "", licensed[1] if licensed else None)
    names = expected.keys() | target.files.keys() - target.weights.keys() - GIT_FILES
    for file in [*sorted(names - {MANIFEST}), MANIFEST]:  # last, as it differs whenever a file does
        actual, ours = target.content(file), expected.get(file)
        if actual is None or actual != ours:
            raise ValueError(
                f"{_difference(file, actual, ours)}; this differs from what this clone builds as "
                f"version {version}: build again, or use the clone that built it. None of its code "
                "was run"
            )
    return f"{len(expected)} files, as this clone builds them"


def _difference(name: str, actual: bytes | None, expected: bytes | None) -> str:
    """Return the first difference between a file's two contents, as a message that quotes both."""
    if expected is None:
        return f"{name} exists; expected no such file"
    if actual is None:
        return f"{name} is missing, or is not text"
    if name.endswith(".json"):
        values, ours = (parse_json_object(content, name) for content in (actual, expected))
        for key in {**ours, **values}:
            actual_text, expected_text = (
                json.dumps(side[key]) if key in side else "absent" for side in (values, ours)
            )
            if actual_text != expected_text:
                return f"{name}: {key} is {actual_text:.80}, expected {expected_text:.80}"
    contents = (actual, expected)
    lines = zip_longest(*(text.decode(errors="replace").split("\n") for text in contents))
    number, actual_text, expected_text = next(
        (n, a, b) for n, (a, b) in enumerate(lines, 1) if a != b
    )
    return f"{name}, line {number} is {actual_text!r:.80}, expected {expected_text!r:.80}"


@dataclass
class VerifyReport:
    """The checks of a folder or repository; ``revision`` is the commit on the Hub."""

    name: str
    revision: str | None
    checks: list[Check]

    @property
    def failures(self) -> list[str]:
        """Names of the failed checks."""
        return [check.name for check in self.checks if check.status == FAILED]

    def as_json(self) -> str:
        """Return the report as JSON."""
        report = {
            "target": self.name,
            "revision": self.revision,
            "passed": not self.failures,
            "checks": [check._asdict() for check in self.checks],
        }
        return json.dumps(report, indent=2, ensure_ascii=False)

    def as_table(self) -> str:
        """Return a line for each check and a summary."""
        rows = [printable(f"{c.name:<12}  {c.status:<7}  {c.detail}") for c in self.checks]
        at = f"@{self.revision}" if self.revision else ""
        return "\n".join([*rows, f"{self.name}{at}: {FAILED if self.failures else PASSED}"])


def check_build(
    target: BuiltFiles, pythons: Sequence[str], read_weights: bool = False
) -> list[Check]:
    """Run the checks up to the first failure; the folder's own code runs only in the last one."""
    steps = {
        "files": partial(check_files, target),
        "weights": partial(check_weight_files, target, read_weights),
        "loads": partial(check_loading, target, pythons),
    }
    return run_checks(steps)


def verify(
    name: str,
    revision: str | None = None,
    read_weights: bool = False,
    pythons: Sequence[str] = (),
) -> VerifyReport:
    """Check a folder or a repository on the Hub.

    Args:
        name: Folder, or org/name.
        revision: Commit, tag or branch of a repository.
        read_weights: Also compare the sha256 of a folder's weights.
        pythons: Interpreters to load the model with, in place of this one.

    Raises:
        ValueError: ``name`` is neither a folder nor an id, or not a build of ours; or an
            interpreter is missing.
    """
    for python in pythons:
        require_that(shutil.which(python), f"--python {python}: no such program")
    with tempfile.TemporaryDirectory() as home:
        commit = None
        if Path(name).is_dir():
            require_that(
                revision is None, f"{name} is a folder, which has no --revision {revision}"
            )
            files = read_folder(Path(name), hidden=True)
        else:
            problem = f"{name} is neither a folder nor an id on the Hub: expected DIR or org/name"
            require_that(re.fullmatch(ID_PATTERN, name), problem)
            commit, files = read_repository(name, revision, Path(home, "download"))
        checks = check_build(
            BuiltFiles(name, files, commit), pythons or [sys.executable], read_weights
        )
    # A server's messages may contain the token.
    return VerifyReport(
        name, commit, [Check(c.name, c.status, without_secrets(c.detail)) for c in checks]
    )
