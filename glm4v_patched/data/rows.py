"""Where rows come from: files, tables and the Hub, read a row at a time. Needs no torch.

Text is read by :mod:`text_rows`; tables (Parquet, Arrow, tar of WebDataset), folders and data sets
of the Hub by :mod:`tables`.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from ..terminal_text import listed, shorten
from .columns import NO_CELL, describe_unnamed, named_columns, unnamed_columns
from .folders import hub_cache_of
from .formats import Found, describe_unknown, find_format, read_as, read_columns
from .image_files import ImageFiles
from .missing_media import require_nothing_left_out
from .messages import describe_value, check_messages, images_of, replace_images
from .source import DataSource, find_source_problem
from .text_rows import OF_LINES, TOO_DEEP, RowProblem, Numbered, kind_of_file, read_text

CURE = (
    "correct them (paths of images are relative to the file's folder, or to data.image_folder; "
    "answer, evaluate: --image-folder)"
)
MOST_FAULTS_LISTED = 20
MOST_LINES_LISTED = 8  # of the rows that have one fault


class ConversationRow(NamedTuple):
    """A conversation that can be rendered; its images have not been looked for."""

    line: int
    """Of the file; of what has no lines, the number of the row, from 1."""
    messages: list[dict]

    @property
    def images(self) -> list[str]:
        """Their absolute paths."""
        return images_of(self.messages)


def read_conversations(path: str | Path | DataSource) -> list[list[dict]]:
    """Read a set of conversations, of which every row must be usable; image paths become absolute.

    Images must be there and are not opened: :mod:`check` decodes them.

    Raises:
        ValueError: lists up to 20 unusable lines; or there is none at all.
    """
    rows, faults = split_usable_rows(iter_rows(path))
    if faults:
        raise ValueError(describe_problems(path, faults, len(rows) + len(faults)))
    return [row.messages for row in rows]


def require_first_rows(sources: Sequence[DataSource]) -> None:
    """See at once what would make all of a file's rows unusable, such as keys of another format.

    What is fetched is left for the check, which looks at every row.

    Raises:
        ValueError: a file cannot be read, or none of its first rows can be used.
    """
    for source in sources:
        if source.is_local and not source.allow_urls:
            rows, faults = split_usable_rows(islice(iter_rows(source), MOST_FAULTS_LISTED + 1))
            if not rows:
                all_of_it = len(faults) <= MOST_FAULTS_LISTED
                number = len(faults) if all_of_it else None
                text = describe_problems(source, faults[:MOST_FAULTS_LISTED], number)
                raise ValueError(f"{text}\n{CURE}")


def split_usable_rows(read: "Iterable[Row | Fault]") -> tuple[list[ConversationRow], list[RowProblem]]:
    """Rows of which all images are there, and the faults of others."""
    rows: list[ConversationRow] = []
    faults: list[RowProblem] = []
    for row in read:
        if isinstance(row, RowProblem):
            faults.append(row)
        elif lost := next((of for of in row.images if not os.path.isfile(of)), None):
            fault = "is no file" if os.path.exists(lost) else "does not exist"
            faults.append(RowProblem(row.line, f"the image {shorten(lost)} {fault}"))
        else:
            rows.append(row)
    return rows, faults


def describe_problems(path: str | Path | DataSource, faults: list[RowProblem], number: int | None) -> str:
    """Up to 20 of them with file and line, each once, and how many of ``number`` rows they are;
    None, if they are the first rows, and it is not known how many there are."""
    source = as_source(path)
    told = f"none of its first {len(faults):,} rows can be used"
    if number is not None:
        told = f"{len(faults):,} of {number:,} rows cannot be used"
    same: dict[str, list[RowProblem]] = {}
    for fault in faults:
        same.setdefault(fault.text, []).append(fault)
    lines, start = [f"{source.path}: {told}:"], before_number(source)
    for first, *others in islice(same.values(), MOST_FAULTS_LISTED):
        also = listed([other.line for other in others], MOST_LINES_LISTED)
        lines.append(f"  {start}{first.line}: {first.text}{f'; also {also}' if others else ''}")
    more = sum(len(of) for of in islice(same.values(), MOST_FAULTS_LISTED, None))
    return "\n".join(lines) + (f"\n  and {more:,} more" if more else "")


def row_location(source: DataSource, number: int) -> str:
    """Where a row stands, for people."""
    return f"{before_number(source)}{number}"


def before_number(source: DataSource) -> str:
    """What stands before a row's number: the file, of which it is a line if that has lines."""
    path = Path(source.path)
    return f"{path}:" if path.is_file() and kind_of_file(path) in OF_LINES else f"{path}, row "


def as_source(path: str | Path | DataSource) -> DataSource:
    return path if isinstance(path, DataSource) else DataSource(str(path))


def iter_rows(
    path: str | Path | DataSource, for_training: bool = True, share: tuple[int, int] = (0, 1)
) -> Iterator[ConversationRow | RowProblem]:
    """Each row, in order; lines that are blank are none.

    Args:
        for_training: As :func:`check_messages` takes it.
        share: ``(k, n)``: of n processes that share the rows, those of process k.

    Raises:
        ValueError: the source cannot be read, or has no row.
    """
    source = as_source(path)
    if fault := find_source_problem(source):  # before it is opened: a pipe would be waited for
        raise ValueError(f"{source.path}: {fault}")
    reader, number = _RowReader(source, for_training), -1
    for number, (line, row) in enumerate(islice(_given_rows(source), source.max_samples)):
        is_own = number % share[1] == share[0]
        if is_own or not reader.is_known:
            found = reader.read(line, row)
            if is_own:
                yield found
    if number < 0:
        raise ValueError(f"{source.path}: 0 conversations; expected at least 1 line")


def folder_of_images(source: DataSource) -> str:
    """Return what paths of images are relative to."""
    if source.image_folder:
        return source.image_folder
    if not source.is_local:
        return hub_cache_of(source.path)
    return source.path if os.path.isdir(source.path) else os.path.dirname(source.path)


class _RowReader:
    """Makes messages of the rows of a set, by its columns or a format: that which is named, or the
    one of the first row that has any."""

    def __init__(self, source: DataSource, for_training: bool):
        self.source, self.for_training = source, for_training
        self.format = None if source.format == "auto" else source.format
        folder = folder_of_images(source)
        # What comes from the Hub may name no file of this machine.
        within = None if source.is_local else folder
        self.files = ImageFiles(folder, source.allow_urls, within=within)
        columns = source.columns or {}
        of_turns = ("question", "answer") if "turns" in columns else ()  # keys of these
        named = [named_columns(words) for part, words in columns.items() if part not in of_turns]
        self.named = {*chain(*named), *source.ignore}
        self.faults: dict[tuple[str, ...], str] = {}
        """What is said of columns: once, with the values of the first row that has them."""

    @property
    def is_known(self) -> bool:
        """Whether all rows to come are read in one way, whoever reads which."""
        return bool(self.source.columns or self.format)

    def read(self, line: int, row: Any) -> ConversationRow | RowProblem:
        if isinstance(row, RowProblem):
            return row
        try:
            return ConversationRow(line, self._messages_of(row))
        except ValueError as error:
            return RowProblem(line, sys.intern(str(error)))  # of many rows, often the same
        except RecursionError:
            return RowProblem(line, TOO_DEEP)

    def _messages_of(self, row: Any) -> list[dict]:
        if not isinstance(row, dict):
            raise ValueError(f'is {describe_value(row)}; expected {{"messages": [...]}}')
        messages, shown = self._find(row)
        checked = check_messages(messages, self.for_training, shown)
        checked = replace_images(checked, self.files.path_of)
        require_nothing_left_out(row, checked, self.source, self.files)
        return checked

    def _find(self, given: dict) -> Found:
        row = {
            key: value
            for key, value in given.items()
            if key not in self.source.ignore and value is not NO_CELL
        }
        if columns := self.source.columns:
            found = read_columns(row, columns, self.source.ignore)
            if others := tuple(unnamed_columns(row, self.named)):
                raise ValueError(self.faults.setdefault(others, describe_unnamed(row, others)))
            return found
        self.format = self.format or find_format(row)
        if self.format is None:
            keys = tuple(given)
            raise ValueError(self.faults.setdefault(keys, describe_unknown(row, keys)))
        return read_as(self.format, row)


def _given_rows(source: DataSource) -> Numbered:
    """The number of each row and its value as it stands, or a fault."""
    path = Path(source.path)
    if source.is_local and path.is_file() and (kind := kind_of_file(path)) != "table":
        return read_text(source, kind)
    from .tables import read_table  # the library is imported only where it is needed

    return read_table(source)


def write_conversations(
    path: Path, conversations: list[list[dict]], overwrite: bool = False
) -> None:
    """Write conversations as JSONL, with image paths relative to the file.

    Raises:
        FileExistsError: the file exists and ``overwrite`` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if overwrite else "x", encoding="utf-8") as file:
        for messages in conversations:
            relative = replace_images(
                messages, lambda image: str(Path(image).relative_to(path.parent))
            )
            file.write(json.dumps({"messages": relative}, ensure_ascii=False) + "\n")
