"""The installed transformers: tests of the model and of ``apply()``, and a recipe that trains.

``python -m tests.every_version`` writes a row of docs/benchmarks/transformers.json, in place of
that of the same versions; ``--page`` writes the table into docs/numerics.md. The session
``versions`` of tests/noxfile.py does both for every minor release that is supported.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from functools import partial
from pathlib import Path

from packaging.version import Version

from tests.tables import installed, markdown, on_page, put_rows, read_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "transformers.json"
PAGE = ROOT / "docs" / "numerics.md"
FOLDERS = ("remote", "patch", "parity")
SECONDS = 1800  # of each command: what hangs has failed


def counts(report: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return the outcome of each folder's tests, and the names of failed tests."""
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


def row(options: list[str]) -> dict:
    run = partial(subprocess.run, timeout=SECONDS)
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.xml")
        # Without the processes of pytest-xdist as many as there are cores: nox runs beside others.
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *options]
        run([*pytest, *(f"tests/{name}" for name in FOLDERS)], cwd=ROOT)
        outcomes, failed = counts(report)
        # README's first command, in a few steps.
        demo = [sys.executable, "-m", "glm4v_patched", "demo", "--steps", "2", "--device", "cpu"]
        ended = run(demo, cwd=temporary, stdout=subprocess.DEVNULL)
        metrics = Path(temporary, "demo_output", "metrics.json")
        recipe = ended.returncode == 0 and metrics.is_file()
    packages = ("transformers", "torch", "torchvision", "tokenizers", "huggingface_hub", "peft")
    return {
        **{name: installed(name) for name in packages},
        "python": ".".join(map(str, sys.version_info[:2])),
        "outcomes": outcomes,
        "failed": failed,
        "recipe": recipe,
        "date": time.strftime("%Y-%m-%d"),
    }


def key(row: dict) -> tuple:
    return Version(row["transformers"]), bool(row["torchvision"])


def table(rows: list[dict]) -> str:
    folders = [f"tests/{name}" for name in FOLDERS]
    heads = ["transformers", "Python", "torch", "torchvision", *folders]
    lines = []
    for row in rows:
        torch = row["torch"].partition("+")[0]
        cells = [row["transformers"], row["python"], torch, row["torchvision"] or "-"]
        for name in FOLDERS:
            counted = row["outcomes"].get(name, {})
            cells.append(f"{counted.get('passed', 0)} passed, {counted.get('failed', 0)} failed")
        lines.append([*cells, "yes" if row["recipe"] else "no", row["date"]])
    return markdown([*heads, "a recipe trains and answers", "date"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write the table into docs/numerics.md")
    options, for_pytest = parser.parse_known_args()
    if options.page:
        PAGE.write_text(on_page(PAGE.read_text("utf-8"), RESULTS, table(read_rows(RESULTS))))
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    new = row(for_pytest)
    put_rows(RESULTS, [new], key, order=key)
    print("\n".join(new["failed"]) or "no test failed")
    sys.exit(bool(new["failed"]) or not new["recipe"])


if __name__ == "__main__":
    main()
