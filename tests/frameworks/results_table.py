"""What happened in other people's frameworks: rows of a file, and the table of docs/frameworks.md.

A test of this folder writes a row within :func:`job`, if the environment has ``FRAMEWORKS_RECORD``,
the file to write to, in the place of that of the same system, version and job.
``python -m tests.frameworks.results_table`` prints the table; ``--page`` writes it into the page.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tables import installed, markdown, on_page, put_rows, read_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "frameworks.json"
PAGE = ROOT / "docs" / "frameworks.md"
HEADS = ["system", "job", "outcome", "loss", "right / swapped", "reloaded", "with", "date"]


class Missed(AssertionError):
    """A job ran to its end and learned too little; the message is its row's outcome."""


# What a job measures; right and swapped as drawn_task.py has them.
UNMEASURED = {
    "outcome": "works",
    "loss": None,  # the first and the last
    "reward": None,  # the means of the first and of the last steps of online training
    "right": None,
    "swapped": None,
    "reloaded": None,  # whether a process without this package loaded what was saved
    "seconds": 0,
    "date": "",
    "note": "",
}


@contextmanager
def job(system: str, name: str, command: str, package: str) -> Iterator[dict]:
    """Run a job and write its row, also if it fails; yield the row, which is to be filled."""
    names = {"version": package, "transformers": "transformers", "torch": "torch"}
    versions = {field: installed(name) or "not installed" for field, name in names.items()}
    row = {"system": system, "job": name, "command": command} | versions | UNMEASURED
    started, failed = time.monotonic(), None
    try:
        yield row
    except (Exception, pytest.fail.Exception) as error:  # neither Ctrl-C nor a skip is an outcome
        failed = error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind = "" if isinstance(error, Missed) else f"{type(error).__name__}: "
        row["outcome"] = f"{kind}{lines[-1] if lines else ''}"[:300]
    row["seconds"] = round(time.monotonic() - started)
    row["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    if path := os.environ.get("FRAMEWORKS_RECORD"):
        # An error may name a folder of the machine.
        row["outcome"] = re.sub(r"(?<!\w)/(?:[\w.-]+/)+", "", row["outcome"])
        merge(row, Path(path))
    if failed is not None:
        raise failed


def merge(row: dict, path: Path) -> None:
    """Put a row in the place of that with the same key, or behind its system's."""
    systems = list(dict.fromkeys(known["system"] for known in [*read_rows(path), row]))
    put_rows(
        path,
        [row],
        key=lambda row: (row["system"], row["version"], row["job"]),
        order=lambda row: systems.index(row["system"]),
    )


def table(rows: list[dict]) -> str:
    lines = [
        [
            f"{row['system']} {row['version']}",
            f"{row['job']}: `{row['command']}`",
            row["outcome"] + (f"; {row['note']}" if row["note"] else ""),
            _arrow(row["loss"]) if row["reward"] is None else f"reward {_arrow(row['reward'])}",
            "" if row["right"] is None else f"{row['right']:.2f} / {_number(row['swapped'])}",
            {None: "", True: "yes", False: "no"}[row["reloaded"]],
            f"transformers {row['transformers']}",
            row["date"],
        ]
        for row in rows
    ]
    return markdown(HEADS, lines)


def _arrow(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{_number(pair[0])} to {_number(pair[1])}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1g}"


if __name__ == "__main__":
    print(table(read_rows(RESULTS)))
    if "--page" in sys.argv[1:]:
        PAGE.write_text(on_page(PAGE.read_text("utf-8"), RESULTS, table(read_rows(RESULTS))))
