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
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.tables import installed, markdown, on_page, put_rows, read_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "frameworks.json"
PAGE = ROOT / "docs" / "frameworks.md"
HEADS = ["system", "job", "outcome", "loss", "right / swapped", "reloaded", "with", "date"]


class Missed(AssertionError):
    """A job ran to its end and learned too little; the message is its row's outcome."""


@dataclass(kw_only=True)
class Row:
    """One job; right and swapped as drawn_task.py has them."""

    system: str
    job: str
    command: str
    """What a reader types, or the class that a script uses."""
    version: str = ""
    transformers: str = ""
    torch: str = ""
    outcome: str = "works"
    loss: tuple[float, float] | None = None
    """The first and the last."""
    reward: tuple[float, float] | None = None
    """The means of the first and of the last steps of online training."""
    right: float | None = None
    swapped: float | None = None
    reloaded: bool | None = None
    """Whether what was saved was loaded by a process without this package."""
    seconds: float = 0.0
    date: str = ""
    note: str = ""

    def as_json(self) -> dict:
        fields = asdict(self) | {"seconds": round(self.seconds)}
        for name in ("loss", "reward"):
            fields[name] = fields[name] and [float(f"{value:.3g}") for value in fields[name]]
        for name in ("right", "swapped"):
            fields[name] = None if fields[name] is None else round(fields[name], 3)
        return fields


@contextmanager
def job(system: str, name: str, command: str, package: str) -> Iterator[Row]:
    """Run a job and write its row, also if it fails; its :class:`Row` is to be filled."""
    names = {"version": package, "transformers": "transformers", "torch": "torch"}
    versions = {field: installed(name) or "not installed" for field, name in names.items()}
    row = Row(system=system, job=name, command=command, **versions)
    started, failed = time.monotonic(), None
    try:
        yield row
    except (Exception, pytest.fail.Exception) as error:  # neither Ctrl-C nor a skip is an outcome
        failed = error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind = "" if isinstance(error, Missed) else f"{type(error).__name__}: "
        row.outcome = f"{kind}{lines[-1] if lines else ''}"[:300]
    row.seconds, row.date = time.monotonic() - started, time.strftime("%Y-%m-%d", time.gmtime())
    if path := os.environ.get("FRAMEWORKS_RECORD"):
        # An error may name a folder of the machine.
        row.outcome = re.sub(r"(?<!\w)/(?:[\w.-]+/)+", "", row.outcome)
        merge([row], Path(path))
    if failed is not None:
        raise failed


def read(path: Path = RESULTS) -> list[Row]:
    return [Row(**fields) for fields in read_rows(path)]


def merge(rows: list[Row], path: Path) -> None:
    """Put rows in the places of those with the same key, and new ones behind their system's."""
    systems = list(dict.fromkeys(row.system for row in [*read(path), *rows]))
    put_rows(
        path,
        [row.as_json() for row in rows],
        key=lambda row: (row["system"], row["version"], row["job"]),
        order=lambda row: systems.index(row["system"]),
    )


def table(rows: list[Row]) -> str:
    lines = [
        [
            f"{row.system} {row.version}",
            f"{row.job}: `{row.command}`",
            row.outcome + (f"; {row.note}" if row.note else ""),
            _arrow(row.loss) if row.reward is None else f"reward {_arrow(row.reward)}",
            "" if row.right is None else f"{row.right:.2f} / {_number(row.swapped)}",
            {None: "", True: "yes", False: "no"}[row.reloaded],
            f"transformers {row.transformers}",
            row.date,
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
    print(table(read()))
    if "--page" in sys.argv[1:]:
        PAGE.write_text(on_page(PAGE.read_text("utf-8"), RESULTS, table(read())))
