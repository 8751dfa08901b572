"""The installed transformers: tests of the model and of ``apply()``, and a recipe that trains.

``python -m tests.every_version`` writes a row of docs/benchmarks/transformers.json, in place of
that of the same versions; ``--page`` writes the table into docs/numerics.md. The session
``versions`` of tests/noxfile.py does both for every minor release that is supported.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from glm4v_patched.atomic import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "transformers.json"
PAGE = ROOT / "docs" / "numerics.md"
BEGIN, END = "<!-- rows of transformers.json -->", "<!-- end of the rows of transformers.json -->"
FOLDERS = ("remote", "patch", "parity")
SECONDS = 1800  # of each command: what hangs has failed


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def run_tests(report: Path, options: list[str]) -> None:
    # Without the processes of pytest-xdist as many as there are cores: nox runs beside others.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *options]
    subprocess.run([*command, *(f"tests/{name}" for name in FOLDERS)], cwd=ROOT, timeout=SECONDS)


def counts(report: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """What became of the tests of each folder, and the names of those that failed."""
    outcomes: dict[str, Counter] = {name: Counter() for name in FOLDERS}
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        folder = case.attrib["classname"].split(".")[1]
        kinds = {child.tag for child in case}
        is_failed = bool(kinds & {"failure", "error"})
        outcome = "failed" if is_failed else "skipped" if "skipped" in kinds else "passed"
        outcomes[folder][outcome] += 1
        if is_failed:
            failed.append(f"{folder}: {case.attrib['name']}")
    return {name: dict(counted) for name, counted in outcomes.items()}, failed


def run_recipe(folder: Path) -> bool:
    """Whether README's first command trains and answers, in a few steps."""
    command = [sys.executable, "-m", "glm4v_patched", "demo", "--steps", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=folder, timeout=SECONDS, stdout=subprocess.DEVNULL)
    return done.returncode == 0 and (folder / "demo_output" / "metrics.json").is_file()


def row(options: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.xml")
        run_tests(report, options)
        outcomes, failed = counts(report)
        recipe = run_recipe(Path(temporary))
    packages = ("transformers", "torch", "torchvision", "tokenizers", "huggingface_hub", "peft")
    return {
        **{name: installed(name) for name in packages},
        "python": ".".join(map(str, sys.version_info[:2])),
        "outcomes": outcomes,
        "failed": failed,
        "recipe": recipe,
        "date": time.strftime("%Y-%m-%d"),
    }


def read() -> list[dict]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def write(new: dict) -> None:
    def key(one: dict) -> tuple:
        return Version(one["transformers"]), bool(one["torchvision"])

    rows = {key(one): one for one in [*read(), new]}
    lines = [json.dumps(rows[each], ensure_ascii=False) for each in sorted(rows)]
    write_atomically(RESULTS, "[\n" + ",\n".join(lines) + "\n]\n")


def table(rows: list[dict]) -> str:
    """Markdown: a line for each row."""
    heads = [
        "transformers",
        "Python",
        "torch",
        "torchvision",
        *(f"tests/{name}" for name in FOLDERS),
    ]
    heads += ["a recipe trains and answers", "date"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for one in rows:
        cells = [
            one["transformers"],
            one["python"],
            one["torch"].partition("+")[0],
            one["torchvision"] or "-",
        ]
        for name in FOLDERS:
            counted = one["outcomes"].get(name, {})
            cells.append(f"{counted.get('passed', 0)} passed, {counted.get('failed', 0)} failed")
        cells += ["yes" if one["recipe"] else "no", one["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write the table into docs/numerics.md")
    given, for_pytest = parser.parse_known_args()
    if given.page:
        text = PAGE.read_text(encoding="utf-8")
        between = rf"(?s)(?<={re.escape(BEGIN)}\n).*(?={re.escape(END)})"
        write_atomically(PAGE, re.sub(between, lambda _: table(read()) + "\n", text))
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    new = row(for_pytest)
    write(new)
    print("\n".join(new["failed"]) or "no test failed")
    sys.exit(bool(new["failed"]) or not new["recipe"])


if __name__ == "__main__":
    main()
