"""Which columns of a row are its question, answer and images (``data.columns``). Needs no torch.

A value names a column (``answer``; ``json.answer`` and ``captions.0`` are inside of one), or it is
words with columns among them (``"Question: {question}"``, ``"{image_id:012}.jpg"``). Words without
a column hold a blank or another character that no plain name has. A list is of several: parts of a
question, one below the other, of which a row may lack some; or images.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from string import Formatter
from typing import Any

from ..terminal_text import listed, shorten
from .messages import MOST_KEYS_LISTED, describe_value, quoted

NAMES = ("question", "answer", "image", "system", "turns", "history")
LISTS = ("question", "image")
NAME = re.compile(r"[\w/-]+(?:\.[\w/-]+)*")
SPEC = re.compile(r"\d{0,3}")  # a width, as 012
MOST_OF_A_LOOK = 40
OF_TOOLS = ("__key__", "__url__", "__index_level_0__", "Unnamed: 0", "")
"""Columns that WebDataset's reader and pandas add."""
IMAGE_FILES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
NO_CELL = object()
"""An empty cell: a table has each column in each row, and a row that lacks one has no such key."""

Columns = Mapping[str, Any]


def find_columns_problem(columns: Any) -> str | None:
    """What is wrong with such a value of a recipe."""
    example = "expected {question: COLUMN, answer: COLUMN, image: COLUMN}"
    if not isinstance(columns, Mapping) or not columns:
        return f"is {describe_value(columns)}; {example}"
    for name, value in columns.items():
        if name not in NAMES:
            return f"has {describe_value(name)}; expected {', '.join(NAMES)}"
        values = value if isinstance(value, list) and value and name in LISTS else [value]
        for one in values:
            if not isinstance(one, str) or not one.strip():
                return f"{name} is {describe_value(one)}; expected the name of a column, or words"
            try:
                _parts(one)
            except ValueError as error:
                return f"{name} is {quoted(one)}: {error}; write {{column}}, and {{{{ for a brace"
    if not {"question", "image", "turns"} & columns.keys():
        return f"has neither question nor image nor turns; {example}"
    if "history" in columns and "turns" in columns:
        return "has history and turns, which say the same: give one of them"
    return None


def named_columns(value: str | list[str]) -> list[str]:
    """The columns that such words, or a list of them, are made of."""
    words = value if isinstance(value, list) else [value]
    return [name for one in words for _, name, _ in _parts(one) if name is not None]


def unnamed_columns(row: dict, named: Collection[str], before: str = "") -> Iterator[str]:
    """Yield the columns of a row that hold something and are not in ``named``: of an object of
    which some is named, what else it holds."""
    for key, value in row.items():
        name = before + key
        if name in named or name in OF_TOOLS or is_empty(value):
            continue
        if not any(other.startswith(f"{name}.") for other in named):
            yield name
        elif isinstance(value, dict):
            yield from unnamed_columns(value, named, f"{name}.")


def describe_columns(row: dict, names: Iterable[str]) -> str:
    """Return the names of columns, each with the beginning of its value."""

    def look(name: str) -> str:
        value = value_of(row, name)
        if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:  # an image in a table
            value = value.get("bytes") or value.get("path")
        return f"{quoted(name)} ({shorten(describe_value(value), MOST_OF_A_LOOK)})"

    return listed([look(name) for name in names], MOST_KEYS_LISTED)


def describe_unnamed(row: dict, names: Iterable[str]) -> str:
    """Say that columns of a row are neither used nor ignored."""
    return (
        f"{describe_columns(row, names)}: in neither data.columns nor data.ignore; name in columns "
        "what the sample is made of, images first, and in ignore what is left out (docs/data.md, "
        '"Columns"; answer, evaluate: --columns, --ignore)'
    )


def value_of(row: Any, name: str) -> Any:
    """The value of a column, or what lies within it by a path with dots; None if there is none."""
    if isinstance(row, list):
        row = {str(at): value for at, value in enumerate(row)}
    if not isinstance(row, dict):
        return None
    head, rest = name, ""
    while head not in row:  # the names of columns may have dots, too
        head, dot, tail = head.rpartition(".")
        if not dot:
            return None
        rest = f"{tail}.{rest}" if rest else tail
    return value_of(row[head], rest) if rest else row[head]


def text_of_column(row: dict, words: str) -> str | None:
    """The text of a column or words; None where the row has no such column.

    Raises:
        ValueError: it is no text, or of the words a column is missing.
    """
    if (column := _column_of(words)) is not None:
        value = value_of(row, column)
        return None if value is None else _as_text(value, column)
    if words in row:
        raise ValueError(f"{quoted(words)} is a column: write {quoted(f'{{{words}}}')} for it")
    made = ""
    for said, name, width in _parts(words):
        text = "" if name is None else _as_text(required(row, name), name)
        made += said + text.rjust(int(width or 0), "0" if width.startswith("0") else " ")
    return made


def required(row: dict, name: str) -> Any:
    """The value of a column. Raises ``ValueError`` if there is none."""
    value = value_of(row, name)
    if value is None:
        has = listed([*map(quoted, row)], MOST_KEYS_LISTED)
        cure = "words that are no column end with . or ?"
        told = f"the column {quoted(name)} {'is null' if name in row else 'is missing'}"
        raise ValueError(f"{told}; the row has {has}; {cure}")
    return value


@cache
def _parts(words: str) -> list[tuple[str, str | None, str]]:
    """Words, the column after them, and how wide it is to be."""
    if NAME.fullmatch(words):
        return [("", words, "")]
    parts = []
    for said, name, spec, conversion in Formatter().parse(words):
        if name == "" or conversion or not SPEC.fullmatch(spec or ""):
            raise ValueError("is no such text")
        parts.append((said, name, spec or ""))
    return parts


def _column_of(words: str) -> str | None:
    """The column that the words are and nothing else."""
    (said, column, width), *more = _parts(words)
    return None if said or width or more else column


def _as_text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    cure = f"; {name}.0 is its first" if isinstance(value, list) else ""
    raise ValueError(f"{name} is {describe_value(value)}; expected text{cure}")


def images_of_columns(row: dict, names: str | list[str] | None) -> list:
    """The images of a row, in the order of the names; a row may have none."""
    images: list[Any] = []
    for name in [names] if isinstance(names, str) else names or []:
        column = _column_of(name)
        found = text_of_column(row, name) if column is None else value_of(row, column)
        images += found if isinstance(found, list) else [found]
    return [image for image in images if not is_empty(image)]


def is_empty(value: Any) -> bool:
    """Return whether a value is null or an empty text, or holds nothing else."""
    if isinstance(value, (dict, list)):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value is None or value == "" or value == b""
