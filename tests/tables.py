"""Results of what is run by hand: files with a row a line, and their tables in pages."""

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from glm4v_patched.atomic import write_atomically


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def read_rows(file: Path) -> list[dict]:
    return json.loads(file.read_text("utf-8") or "[]") if file.exists() else []


def put_rows(file: Path, rows: list[dict], key: Callable[[dict], object], order=None) -> None:
    """Replace the rows of the same key; sort by ``order``, if it is given."""
    every = [*{key(row): row for row in [*read_rows(file), *rows]}.values()]
    if order is not None:
        every.sort(key=order)
    lines = [json.dumps(row, ensure_ascii=False) for row in every]
    write_atomically(file, "[\n" + ",\n".join(lines) + "\n]\n")


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head, *lines = [f"| {' | '.join(line)} |" for line in (heads, *cells)]
    return "\n".join([head, "|" + "---|" * len(heads), *lines])


def on_page(page: str, file: Path, table: str) -> str:
    """The text of a page with the table of a file of rows between its two marks."""
    begin, end = f"<!-- rows of {file.name} -->\n", f"<!-- end of the rows of {file.name} -->"
    return page.partition(begin)[0] + begin + table + "\n" + end + page.partition(end)[2]
