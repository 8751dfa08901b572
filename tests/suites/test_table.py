"""The page of transformers' shared suites: what is not as the reasons say ends the session."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

from tests.suites import table

REASONS = [
    {"tests": ["model::Text::test_a_*"], "reason": "It is right so."},
    {"tests": ["model::Text::test_b"], "transformers": ["5.0"], "reason": "Of the new one."},
]


def results(**outcomes: str) -> dict[str, dict]:
    return {
        f"model::Text::test_{name}": {"outcome": outcome, "reason": "Skipped: no GPU"}
        for name, outcome in outcomes.items()
    }


@pytest.mark.parametrize(
    ("version", "outcomes", "surprise"),
    [
        ("4.0", {"a_1": "failed", "a_2": "failed", "b": "passed"}, None),
        ("4.0", {"a_1": "failed", "a_2": "skipped"}, None),
        ("5.0", {"a_1": "failed", "b": "failed"}, None),
        ("4.0", {"a_1": "failed", "b": "failed"}, "test_b failed: Skipped: no GPU"),
        ("4.0", {"a_1": "failed", "a_2": "passed"}, "test_a_2 passed, but reasons.json says"),
        ("5.0", {"a_1": "failed"}, "no test is named model::Text::test_b"),
    ],
)
def test_says_what_is_not_as_expected(version, outcomes, surprise):
    found = table.surprises(version, results(**outcomes), REASONS)
    assert len(found) == (surprise is not None)
    assert surprise is None or surprise in found[0]


def test_the_page_counts_and_explains():
    page = table.page(
        {
            "4.0": results(a_1="failed", a_2="failed", b="passed", c="skipped"),
            "5.0": results(a_1="failed", b="failed", c="passed"),
        },
        REASONS,
    )
    assert "| model | Text | 1 | 2 | 1 | 1 | 2 | 0 |" in page
    assert "| `Text::test_a_*` | 2 | 1 | It is right so. |" in page
    assert "| `Text::test_b` | 0 | 1 | Of the new one. |" in page
    assert "- 1: no GPU" in page


def test_a_checkout_of_another_version_is_refused(tmp_path):
    """What it would run is not what the page says."""
    version = transformers.__version__
    (tmp_path / f"transformers-{version}" / "tests").mkdir(parents=True)
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / f"transformers-{version}", f"transformers-{version}")
    package = tmp_path / "checkouts" / version / "src" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "4.0.0"\n')
    command = [sys.executable, "-m", "tests.suites.run", str(tmp_path / "sdist.tar.gz")]
    result = subprocess.run(
        [*command, "--checkout", str(tmp_path / "checkouts")],
        cwd=Path(table.__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert f"{version} holds 4.0.0, installed is {version}: give a checkout" in result.stderr


def test_every_reason_is_of_a_suite_that_there_is():
    for entry in json.loads(table.REASONS.read_text()):
        assert entry.keys() <= {"tests", "transformers", "reason"} and entry["reason"].endswith(".")
        for pattern in entry["tests"]:
            suite, of_class, _ = pattern.split("::")
            module = (table.REASONS.parent / f"suite_{suite}.py").read_text()
            assert f"class {of_class}(" in module
