"""The columns of a row that are its question, answer and images (``data.columns``). Needs no torch.

``data.columns`` maps a role, such as ``question``, to a value. The value is the name of a column
(``answer``), a path into a column (``json.answer``, ``captions.0``), or a template: text with
columns in braces (``"Question: {question}"``, ``"{image_id:012}.jpg"``). Text without braces is a
template only if it cannot be the name of a column, for example because it contains a blank. For
``image`` and ``question``, a list of values names several images, or the lines of a question; a row
need not have all of them.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from string import Formatter
from typing import Any

from ..terminal_text import listed, shorten
from .messages import MAX_KEYS_LISTED, describe_value, quoted

COLUMN_ROLES = ("question", "answer", "image", "system", "turns", "history")
LIST_ROLES = ("question", "image")  # roles that may have a list of columns
COLUMN_NAME_RE = re.compile(r"[\w/-]+(?:\.[\w/-]+)*")
WIDTH_RE = re.compile(r"\d{0,3}")  # in a template: 12 pads a value with blanks, 012 with zeros
MAX_PREVIEW_CHARACTERS = 40
TOOL_COLUMNS = ("__key__", "__url__", "__index_level_0__", "Unnamed: 0", "")
"""Columns that WebDataset's reader and pandas add to the data."""
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif", ".jp2", ".jxl", ".dng", ".svg"),
)
EMPTY_CELL = object()
"""Stands for an empty cell. In a table, every row has all columns; a row with an empty cell is read
as if it did not have the column."""

Columns = Mapping[str, Any]


def find_columns_problem(columns: Any) -> str | None:
    """Return what is wrong with a recipe's ``columns``, or None."""
    example = "expected {question: COLUMN, answer: COLUMN, image: COLUMN}"
    if not isinstance(columns, Mapping) or not columns:
        return f"is {describe_value(columns)}; {example}"
    for role, value in columns.items():
        if role not in COLUMN_ROLES:
            return f"has {describe_value(role)}; expected {', '.join(COLUMN_ROLES)}"
        templates = value if isinstance(value, list) and value and role in LIST_ROLES else [value]
        for template in templates:
            if not isinstance(template, str) or not template.strip():
                problem = f"{role} is {describe_value(template)}"
                return f"{problem}; expected the name of a column, or text"
            try:
                _parse_template(template)
            except ValueError as error:
                problem = f"{role} is {quoted(template)}: {error}"
                return f"{problem}; write {{column}}, and {{{{ for a brace"
    if not {"question", "image", "turns"} & columns.keys():
        return f"has none of question, image and turns; {example}"
    if "history" in columns and "turns" in columns:
        return "has both history and turns, and turns has the complete conversation: keep one"
    return None


def named_columns(value: str | list[str]) -> list[str]:
    """Return the columns that occur in a template, or in a list of templates."""
    templates = value if isinstance(value, list) else [value]
    parsed = chain.from_iterable(map(_parse_template, templates))
    return [name for _, name, _ in parsed if name is not None]


def find_unmapped_columns(row: dict, mapped: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield the non-empty columns of a row that are not in ``mapped``.

    If ``mapped`` has a path into a column, such as ``json.answer``, the column's other keys are
    yielded, such as ``json.id``.
    """
    for key, value in row.items():
        name = prefix + key
        if name in mapped or name in TOOL_COLUMNS or is_blank_value(value):
            continue
        if not any(path.startswith(f"{name}.") for path in mapped):
            yield name
        elif isinstance(value, dict):
            yield from find_unmapped_columns(value, mapped, f"{name}.")


def describe_columns(row: dict, names: Iterable[str]) -> str:
    """Return the names of columns, each with the beginning of its value."""

    def preview(name: str) -> str:
        value = column_value(row, name)
        if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:  # an image in a table
            value = value.get("bytes") or value.get("path")
        return f"{quoted(name)} ({shorten(describe_value(value), MAX_PREVIEW_CHARACTERS)})"

    return listed([preview(name) for name in names], MAX_KEYS_LISTED)


def describe_unmapped_columns(row: dict, names: Iterable[str]) -> str:
    """Return a message for columns of a row that are neither used nor ignored."""
    return (
        f"{describe_columns(row, names)}: in neither data.columns nor data.ignore; add columns "
        "with images or texts of the sample to data.columns, and the others to data.ignore "
        '(docs/data.md, "Columns"; answer, evaluate: --columns, --ignore)'
    )


def column_value(row: Any, name: str) -> Any:
    """Return the value of a column, or of a path into a column such as ``captions.0``; None if
    there is no such value."""
    if isinstance(row, list):
        row = {str(index): value for index, value in enumerate(row)}
    if not isinstance(row, dict):
        return None
    head, rest = name, ""
    while head not in row:  # names of columns may contain dots
        head, dot, tail = head.rpartition(".")
        if not dot:
            return None
        rest = f"{tail}.{rest}" if rest else tail
    return column_value(row[head], rest) if rest else row[head]


def column_text(row: dict, template: str) -> str | None:
    """Return the text of a column or a template; None if the row has no such column.

    Raises:
        ValueError: The value is not text, or a column of the template is missing.
    """
    if (column := _plain_column(template)) is not None:
        value = column_value(row, column)
        return None if value is None else _cell_text(value, column)
    if template in row:
        raise ValueError(
            f"{quoted(template)} is the name of a column: write {quoted(f'{{{template}}}')} for it"
        )
    result = ""
    for literal, name, width in _parse_template(template):
        text = "" if name is None else _cell_text(require_column(row, name), name)
        result += literal + text.rjust(int(width or 0), "0" if width.startswith("0") else " ")
    return result


def require_column(row: dict, name: str) -> Any:
    """Return the value of a column; raise ``ValueError`` if there is none."""
    value = column_value(row, name)
    if value is not None:
        return value
    if name in row:
        raise ValueError(f"the column {quoted(name)} is empty; write its text or drop the row")
    columns = listed([*map(quoted, row)], MAX_KEYS_LISTED)
    raise ValueError(
        f"the column {quoted(name)} is missing; the row has {columns}; if {quoted(name)} is text "
        "and not the name of a column, end it with . or ?"
    )


@cache
def _parse_template(template: str) -> list[tuple[str, str | None, str]]:
    """Split a template into triples: a text, the column after it (None at the end), and the width
    to which the column's value is padded, as text (:data:`WIDTH_RE`)."""
    if COLUMN_NAME_RE.fullmatch(template):
        return [("", template, "")]
    triples = []
    for literal, name, width, conversion in Formatter().parse(template):
        if name == "" or conversion or not WIDTH_RE.fullmatch(width or ""):
            raise ValueError("not a valid template")
        triples.append((literal, name, width or ""))
    return triples


def _plain_column(template: str) -> str | None:
    """Return the column if a template consists of nothing but its name, else None."""
    (literal, column, width), *more = _parse_template(template)
    return None if literal or width or more else column


def _cell_text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    cure = f"; {name}.0 names its first element" if isinstance(value, list) else ""
    raise ValueError(f"{name} is {describe_value(value)}; expected text{cure}")


def images_of_columns(row: dict, templates: str | list[str] | None) -> list:
    """Return the images of a row that are in columns, or whose paths are templates of columns.
    Empty columns are left out."""
    images: list[Any] = []
    for template in [templates] if isinstance(templates, str) else templates or []:
        column = _plain_column(template)
        value = column_text(row, template) if column is None else column_value(row, column)
        images += value if isinstance(value, list) else [value]
    return [image for image in images if not is_blank_value(image)]


def is_blank_value(value: Any) -> bool:
    """Return whether a value is null, NaN, empty text or bytes, or contains only such values."""
    if isinstance(value, (dict, list)):
        return all(map(is_blank_value, value.values() if isinstance(value, dict) else value))
    is_nan = value != value  # NaN is not equal to itself
    return value is None or is_nan or value == "" or value == b""
