"""Rows of a data source, read one at a time from files, tables and the Hub. Needs no torch.

:mod:`text_rows` reads text files; :mod:`tables` reads tables (Parquet, Arrow, WebDataset archives),
folders and data sets of the Hub.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from ..terminal_text import listed, shorten
from .boxes import box_lists_to_text, convert_boxes
from .columns import EMPTY_CELL, describe_unmapped_columns, find_unmapped_columns, named_columns
from .folders import hub_cache_folder
from .formats import (
    MessagesAndImages,
    describe_unknown_format,
    find_format,
    read_columns,
    read_row_as,
)
from .image_files import ImageFiles
from .messages import check_messages, describe_value, images_of, replace_images
from .missing_media import require_no_missing_media
from .source import DataSource, find_source_problem
from .text_rows import LINE_KINDS, TOO_DEEPLY_NESTED, NumberedRows, RowProblem, file_kind, read_text

ROWS_CURE = (
    "correct these rows. Image paths are relative to the file's folder, or to data.image_folder. "
    "If images were moved, set data.image_root to the beginning of the old paths, and "
    "data.image_folder to the folder that replaces it (answer and evaluate: --image-root and "
    "--image-folder)"
)
MAX_PROBLEMS_LISTED = 20
MAX_LINES_LISTED = 8  # line numbers listed for a problem that several rows share


class ConversationRow(NamedTuple):
    """A row whose conversation has the form of :mod:`messages`; its images are not checked yet."""

    line: int
    """The line in the file, or the row's number (from 1) where rows have no lines."""
    messages: list[dict]

    @property
    def images(self) -> list[str]:
        """Absolute paths of the conversation's images."""
        return images_of(self.messages)


def read_conversations(path: str | Path | DataSource) -> list[list[dict]]:
    """Read conversations from a source whose rows must all be usable. Image paths become absolute.

    Image files must exist. They are not opened; :mod:`check` decodes them.

    Raises:
        ValueError: Some rows cannot be used (the message lists up to 20), or there are none.
    """
    rows, problems = split_usable_rows(iter_rows(path))
    if problems:
        raise ValueError(describe_problems(path, problems, len(rows) + len(problems)))
    return [row.messages for row in rows]


def require_first_rows(sources: Sequence[DataSource]) -> None:
    """Check the first rows of each source, to fail early if none of its rows can be used.

    Sources that may need downloads are skipped. The full check looks at every row.

    Raises:
        ValueError: A source cannot be read, or none of its first rows can be used.
    """
    for source in sources:
        if source.is_local and not source.allow_urls:
            # One row more than can be listed shows whether the source has further rows.
            rows, problems = split_usable_rows(islice(iter_rows(source), MAX_PROBLEMS_LISTED + 1))
            if not rows:
                is_complete = len(problems) <= MAX_PROBLEMS_LISTED
                num_rows = len(problems) if is_complete else None
                text = describe_problems(source, problems[:MAX_PROBLEMS_LISTED], num_rows)
                raise ValueError(f"{text}\n{ROWS_CURE}")


def split_usable_rows(
    rows: Iterable[ConversationRow | RowProblem],
) -> tuple[list[ConversationRow], list[RowProblem]]:
    """Return the rows whose images all exist, and the problems of the others."""
    usable: list[ConversationRow] = []
    problems: list[RowProblem] = []
    for row in rows:
        if isinstance(row, RowProblem):
            problems.append(row)
        elif missing := next((path for path in row.images if not os.path.isfile(path)), None):
            problem = "is not a file" if os.path.exists(missing) else "does not exist"
            problems.append(RowProblem(row.line, f"the image {shorten(missing)} {problem}"))
        else:
            usable.append(row)
    return usable, problems


def describe_problems(
    path: str | Path | DataSource, problems: list[RowProblem], num_rows: int | None
) -> str:
    """Return a report of up to 20 different problems, with the file and the lines of each.

    Args:
        num_rows: Number of rows that were checked; None if only the first few rows were read.
    """
    source = as_source(path)
    summary = f"none of its first {len(problems):,} rows can be used"
    if num_rows is not None:
        summary = f"{len(problems):,} of {num_rows:,} rows cannot be used"
    by_text: dict[str, list[RowProblem]] = {}
    for problem in problems:
        by_text.setdefault(problem.text, []).append(problem)
    report, prefix = [f"{source.path}: {summary}:"], location_prefix(source)
    for first, *others in islice(by_text.values(), MAX_PROBLEMS_LISTED):
        also = listed([other.line for other in others], MAX_LINES_LISTED)
        report.append(f"  {prefix}{first.line}: {first.text}{f'; also {also}' if others else ''}")
    num_unlisted = sum(map(len, islice(by_text.values(), MAX_PROBLEMS_LISTED, None)))
    return "\n".join(report) + (f"\n  and {num_unlisted:,} more" if num_unlisted else "")


def row_location(source: DataSource, line: int) -> str:
    """Return the location of a row for messages: the file, and the line or the row's number."""
    return f"{location_prefix(source)}{line}"


def location_prefix(source: DataSource) -> str:
    """Return the part of :func:`row_location` before the number: ``FILE:`` or ``FILE, row``."""
    path = Path(source.path)
    return f"{path}:" if path.is_file() and file_kind(path) in LINE_KINDS else f"{path}, row "


def as_source(path: str | Path | DataSource) -> DataSource:
    return path if isinstance(path, DataSource) else DataSource(str(path))


def iter_rows(
    path: str | Path | DataSource, for_training: bool = True, shard: tuple[int, int] = (0, 1)
) -> Iterator[ConversationRow | RowProblem]:
    """Yield the rows of a source in order. A row that cannot be used is yielded as its problem.
    Blank lines are not rows.

    Args:
        for_training: Whether each row must end with an answer of the assistant.
        shard: ``(k, n)``: yield only every n-th row, starting with row k.

    Raises:
        ValueError: The source cannot be read, or has no row.
    """
    source = as_source(path)
    if problem := find_source_problem(source):  # before it is opened: a pipe would block
        raise ValueError(f"{source.path}: {problem}")
    reader = _RowReader(source, for_training)
    shard_index, num_shards = shard

    def must_parse(index: int) -> bool:
        # Rows of other shards are parsed, too, until one of them shows the format.
        return index % num_shards == shard_index or not reader.has_fixed_format

    rows = islice(_raw_rows(source, must_parse), source.max_samples)
    index = -1
    for index, (line, row) in enumerate(rows):
        if must_parse(index):
            result = reader.read(line, row)
            if index % num_shards == shard_index:
                yield result
    if index < 0:
        raise ValueError(f"{source.path}: it contains 0 rows; expected at least 1")


def image_folder_of(source: DataSource) -> str:
    """Return the folder to which image paths of a source are relative."""
    if source.image_folder:
        return source.image_folder
    if not source.is_local:
        return hub_cache_folder(source.path)
    return source.path if os.path.isdir(source.path) else os.path.dirname(source.path)


class _RowReader:
    """Converts rows of a source to conversations.

    The source's ``columns`` or ``format`` say how to read them. If it sets neither, the first row
    that matches a known format decides.
    """

    def __init__(self, source: DataSource, for_training: bool):
        self.source, self.for_training = source, for_training
        self.format = None if source.format == "auto" else source.format
        folder = image_folder_of(source)
        # Rows from the Hub must not name files of this machine.
        allowed_folder = None if source.is_local else folder
        self.image_files = ImageFiles(
            folder, source.allow_urls, allowed_folder=allowed_folder, image_root=source.image_root
        )
        columns = source.columns or {}
        # The column of the role "turns" has a list of objects. The roles "question" and "answer"
        # then name keys of these objects, not columns.
        turn_roles = ("question", "answer") if "turns" in columns else ()
        mapped = [named_columns(value) for role, value in columns.items() if role not in turn_roles]
        self.mapped_or_ignored = {*chain(*mapped), *source.ignore}
        self.descriptions: dict[tuple[str, ...], str] = {}
        """Messages about unknown columns and formats, by the keys of the row. Rows with the same
        keys share a message, so that a report lists them as one problem."""

    @property
    def has_fixed_format(self) -> bool:
        """Whether the columns or the format of all further rows are known."""
        return bool(self.source.columns or self.format)

    def read(self, line: int, row: Any) -> ConversationRow | RowProblem:
        if isinstance(row, RowProblem):
            return row
        try:
            return ConversationRow(line, self._messages_of(row))
        except ValueError as error:
            return RowProblem(line, sys.intern(str(error)))  # many rows may share the text
        except RecursionError:
            return RowProblem(line, TOO_DEEPLY_NESTED)

    def _messages_of(self, row: Any) -> list[dict]:
        if not isinstance(row, dict):
            raise ValueError(f'is {describe_value(row)}; expected {{"messages": [...]}}')
        messages, images = self._messages_and_images(row)
        checked = check_messages(messages, self.for_training, images)
        checked = replace_images(checked, self.image_files.path_of)
        if self.source.boxes:
            # "objects" is ms-swift's key for boxes; placeholders in texts mark their positions.
            reads_objects = not self.source.columns and "objects" not in self.source.ignore
            objects = row.get("objects") if reads_objects else None
            stated_size = row.get("width"), row.get("height")
            checked = convert_boxes(checked, self.source.boxes, objects, stated_size)
        require_no_missing_media(row, checked, self.source, self.image_files)
        return checked

    def _messages_and_images(self, raw: dict) -> MessagesAndImages:
        row = {key: value for key, value in raw.items() if key not in self.source.ignore}
        if columns := self.source.columns:
            row = {key: None if value is EMPTY_CELL else value for key, value in row.items()}
            values = box_lists_to_text(row) if self.source.boxes else row
            result = read_columns(values, columns, self.source.ignore)
            if unmapped := tuple(find_unmapped_columns(row, self.mapped_or_ignored)):
                raise ValueError(
                    self.descriptions.setdefault(unmapped, describe_unmapped_columns(row, unmapped))
                )
            return result
        row = {key: value for key, value in row.items() if value is not EMPTY_CELL}
        if self.source.boxes:
            row.pop("objects", None)  # convert_boxes() reads it from the row as stored in the file
        self.format = self.format or find_format(row)
        if self.format is None:
            keys = tuple(raw)
            raise ValueError(self.descriptions.setdefault(keys, describe_unknown_format(row, keys)))
        return read_row_as(self.format, row)


def _raw_rows(source: DataSource, must_parse: Callable[[int], bool]) -> NumberedRows:
    """Yield the line of each row with its value as stored in the file, or with its problem.

    Args:
        must_parse: As in :func:`text_rows.read_text`.
    """
    path = Path(source.path)
    if source.is_local and path.is_file() and (kind := file_kind(path)) != "table":
        return read_text(source, kind, must_parse)
    from .tables import read_table  # imports pyarrow

    return read_table(source)


def write_conversations(
    path: Path, conversations: list[list[dict]], overwrite: bool = False
) -> None:
    """Write conversations as JSON lines, with image paths relative to the file.

    Raises:
        FileExistsError: The file exists and ``overwrite`` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if overwrite else "x", encoding="utf-8") as file:
        for messages in conversations:
            relative = replace_images(
                messages, lambda image: str(Path(image).relative_to(path.parent))
            )
            file.write(json.dumps({"messages": relative}, ensure_ascii=False) + "\n")
