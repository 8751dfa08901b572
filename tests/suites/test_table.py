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


def document(version: str, generation: str | None, **outcomes: str) -> dict:
    return {"transformers": version, "generation": generation, "results": results(**outcomes)}


def test_the_page_counts_and_explains():
    page = table.page(
        [
            document("4.0", "4.1", a_1="failed", a_2="failed", b="passed", c="skipped"),
            document("5.0", None, a_1="failed", b="failed", c="passed"),
        ],
        REASONS,
    )
    assert "| model | Text | 1 | 2 | 1 | 1 | 2 | 0 |" in page
    assert "| `Text::test_a_*` | 2 | 1 | It is right so. |" in page
    assert "| `Text::test_b` | 0 | 1 | Of the new one. |" in page
    assert "- 1: no GPU" in page
    assert "Below: 4.0 by a checkout of 4.1." in page


def test_reasons_of_suites_that_were_not_run_are_not_missed():
    reasons = [*REASONS, {"tests": ["model::Text::test_c"], "suite": "generation", "reason": "."}]
    found = results(a_1="failed")
    assert not table.surprises("4.0", found, reasons, has_generation=False)
    assert "no test is named model::Text::test_c" in table.surprises("4.0", found, reasons)[0]


def checkout(folder: Path, version: str) -> Path:
    (folder / "src" / "transformers").mkdir(parents=True)
    (folder / "tests" / "generation").mkdir(parents=True)
    (folder / "src" / "transformers" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return folder


def run_suites(tmp_path: Path) -> str:
    """What ``run.py`` says that it cannot do."""
    version = transformers.__version__
    (tmp_path / f"transformers-{version}" / "tests").mkdir(parents=True)
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / f"transformers-{version}", f"transformers-{version}")
    command = [sys.executable, "-m", "tests.suites.run", str(tmp_path / "sdist.tar.gz")]
    ended = subprocess.run(
        [*command, "--checkout", str(tmp_path / "checkouts")],
        cwd=Path(table.__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    return ended.stderr


def test_a_checkout_of_another_major_version_is_refused(tmp_path):
    """What it would run is not what the page says."""
    checkout(tmp_path / "checkouts" / "old", "3.9.0")
    assert f"checkouts of 3.9.0, installed is {transformers.__version__}" in run_suites(tmp_path)


def test_the_nearest_checkout_is_taken(tmp_path):
    major, minor, *_ = map(int, transformers.__version__.split("."))
    for version in (f"{major}.{minor + 9}.0", f"{major}.{minor + 1}.0", f"{major + 1}.{minor}.0"):
        checkout(tmp_path / version, version)
    code = "import sys; from pathlib import Path; from tests.suites.run import nearest_checkout\n"
    code += "print(*nearest_checkout(Path(sys.argv[1])))"
    # A process of its own: the module changes the environment.
    printed = subprocess.check_output(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(table.__file__).parents[2],
        text=True,
    )
    near = f"{major}.{minor + 1}.0"
    assert printed.split() == [str(tmp_path / near), near]


def test_every_reason_is_of_a_suite_that_there_is():
    for entry in json.loads(table.REASONS.read_text()):
        assert entry.keys() <= {"tests", "suite", "transformers", "reason"}
        assert entry["reason"].endswith(".")
        for pattern in entry["tests"]:
            suite, of_class, _ = pattern.split("::")
            module = (table.REASONS.parent / f"suite_{suite}.py").read_text()
            assert of_class == "*" or f"class {of_class}(" in module
