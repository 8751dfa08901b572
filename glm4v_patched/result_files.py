"""Files of measured rows, JSON arrays with one row a line; and tables of rows in Markdown."""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from .atomic import write_atomically


def read_rows(required: Collection[str], path: Path, may_be_new: bool = False) -> list[dict]:
    """The rows of a file; none of one that may be new.

    Args:
        required: Fields that every row has.

    Raises:
        FileNotFoundError: there is no such file, or no folder for it.
        ValueError: it is no JSON array of such rows.
    """
    if may_be_new and not path.exists():
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{path.absolute().parent} is no folder; make it first")
        return []
    expected = "expected what the same command writes with --out, or a new file"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path} is no file of rows ({error}); {expected}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a JSON {type(rows).__name__}, no array; {expected}")
    for number, row in enumerate(rows, 1):
        if missing := {*required} - (row.keys() if isinstance(row, dict) else set()):
            lacks = f"entry {number} of {len(rows)} has no {', '.join(sorted(missing))}"
            raise ValueError(f"{path}: {lacks}; {expected}")
    return rows


def add_rows(required: Collection[str], path: Path, rows: list[dict]) -> None:
    """Add rows to a file, which is replaced as a whole: nothing is lost if this is interrupted.
    Raises as :func:`read_rows` does."""
    there = read_rows(required, path, may_be_new=True)
    write_atomically(path.resolve(), format_rows([*there, *rows]))


def format_rows(rows: list[dict]) -> str:
    """A JSON array with one object a line; numbers that JSON does not have become ``null``."""
    # A loss may be NaN, which json writes and reads although JSON has no word for it.
    finite = json.loads(json.dumps(rows), parse_constant=lambda constant: None)
    return "[\n" + ",\n".join(json.dumps(row) for row in finite) + "\n]\n"


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells of plain text."""
    cells = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in lines]
    table = [columns, ["---"] * len(columns), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)
