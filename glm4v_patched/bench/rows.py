"""Files of measured rows: a JSON array with one object a line."""

import json
import os
from pathlib import Path

REQUIRED = {"workload", "gpus", "micro_batch", "text_tokens", "settings"}
_EXPECTED = "expected what `glm4v-patched bench --out FILE` writes, or a new file"


def read_rows(path: Path) -> list[dict]:
    """The rows of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no JSON array of rows.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path} is no file of rows ({error}); {_EXPECTED}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a JSON {type(rows).__name__}, no array; {_EXPECTED}")
    for number, row in enumerate(rows, 1):
        missing = REQUIRED - row.keys() if isinstance(row, dict) else REQUIRED
        if missing:
            raise ValueError(
                f"{path}: entry {number} of {len(rows)} has no {', '.join(sorted(missing))}; "
                f"{_EXPECTED}"
            )
    return rows


def check_addable(path: Path) -> None:
    """Raises ``ValueError`` or ``FileNotFoundError`` if rows cannot be added to this file."""
    if path.exists():
        read_rows(path)
    elif not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path.absolute().parent} is no folder; make it first")


def add_row(path: Path, row: dict) -> None:
    """Add a row to a file, which is replaced as a whole: nothing is lost if this is interrupted."""
    replace_file(path, format_rows([*(read_rows(path) if path.exists() else []), row]))


def format_rows(rows: list[dict]) -> str:
    """A JSON array with one object a line; numbers that JSON does not have become ``null``."""
    # A loss may be NaN, which json writes and reads although JSON has no word for it.
    finite = json.loads(json.dumps(rows), parse_constant=lambda constant: None)
    return "[\n" + ",\n".join(json.dumps(row) for row in finite) + "\n]\n"


def replace_file(path: Path, text: str) -> None:
    """Write a file that holds either what it held or all of ``text``, whatever happens."""
    path = path.resolve()  # a link stays one
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
