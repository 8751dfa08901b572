"""Where rows come from: files, tables and the Hub, read a row at a time. Needs no torch.

JSON lines and JSON arrays are read here, all tables (Parquet, Arrow, folders and repositories of
the library ``datasets``) by that library.
"""

import codecs
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..terminal_text import shorten
from .formats import FORMATS, ReadRow, find_format
from .messages import check_messages, kind_of, pictures_of, quoted, replace_pictures
from .pictures import PictureFiles
from .source import Source, fault_of_set

MOST_FAULTS_LISTED = 20
MOST_RANGES = 8  # of the rows that have one fault
OF_MESSAGE = re.compile(r"\Amessage \d+ of \d+: ")  # one fault, in whichever message
UNDECODED = re.compile("[\udc80-\udcff]")  # how "surrogateescape" writes bytes
BINARY = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xd8\xff": "a picture (JPEG)",
    b"\x89PNG": "a picture (PNG)",
}
PARQUET, ARROW = b"PAR1", b"ARROW1"
MOST_DIGITS = 300  # Python itself neither reads nor writes more than 4,300
MOST_CHARACTERS = 2**27
"""Of a row, which is held in memory several times."""
TOO_LONG = (
    f"has {MOST_CHARACTERS:,} characters or more: make files of its pictures, or close its quotes"
)
BLANK = re.compile(r"[ \t\r\n]*")
A_WORD = 16  # of JSON, such as -Infinity, which is one fault where it is cut
CHARACTERS_AT_ONCE = 2**20
CHARACTERS_TO_TELL = 2**16  # what a file is
EXPECTED = 'expected a row a line: {"messages": [...]}'
ARRAY = "of rows in a list within an object, write that list alone: [{...}, {...}]"
AROUND_ROWS = re.compile(r'\{\s*"[^"]*"\s*:\s*[\[{]?')  # at the end of a line


class Row(NamedTuple):
    """A conversation that can be rendered; its pictures have not been looked for."""

    line: int
    """Of the file; of what has no lines, the number of the row, from 1."""
    messages: list[dict]

    @property
    def pictures(self) -> list[str]:
        """Their absolute paths."""
        return pictures_of(self.messages)


class Fault(NamedTuple):
    """A line that cannot be used, and why."""

    line: int
    text: str


def read_conversations(path: str | Path | Source) -> list[list[dict]]:
    """Read a set of conversations, of which every row must be usable; image paths become absolute.

    Pictures must be there and are not opened: :mod:`check` decodes them.

    Raises:
        ValueError: lists up to 20 unusable lines; or there is none at all.
    """
    rows, faults = _split(map(_with_its_files, read_rows(path)))
    if faults:
        raise ValueError(describe_faults(path, faults, len(rows) + len(faults)))
    return [row.messages for row in rows]


def require_first_rows(sources: Sequence[Source]) -> None:
    """See at once what would make all of a file's rows unusable, such as keys of another format.

    Of files of JSON; what is fetched is left for the check, which looks at every row.

    Raises:
        ValueError: a file cannot be read, or none of its first rows can be used.
    """
    for source in sources:
        if source.is_local and not source.allow_urls and _kind_of(source) != "table":
            read = islice(read_rows(source), MOST_FAULTS_LISTED + 1)
            rows, faults = _split(map(_with_its_files, read))
            if not rows:
                all_of_it = len(faults) <= MOST_FAULTS_LISTED
                number = len(faults) if all_of_it else None
                text = describe_faults(source, faults[:MOST_FAULTS_LISTED], number)
                raise ValueError(f"{text}\n{cure_of(text)}")


def _with_its_files(row: "Row | Fault") -> "Row | Fault":
    """A fault, if a picture of the row is not there."""
    if isinstance(row, Row):
        for picture in row.pictures:
            if not os.path.isfile(picture):
                fault = "is no file" if os.path.exists(picture) else "does not exist"
                return Fault(row.line, f"the image {shorten(picture)} {fault}")
    return row


def _split(read: "Iterable[Row | Fault]") -> tuple[list[Row], list[Fault]]:
    rows: list[Row] = []
    faults: list[Fault] = []
    for row in read:
        if isinstance(row, Row):
            rows.append(row)
        else:
            faults.append(row)
    return rows, faults


def cure_of(faults: str, folder: str = "data.image_folder") -> str:
    """What is to be done about the faults of rows; ``folder`` is what names that of pictures."""
    if "does not exist" not in faults:
        return "correct them"
    return f"correct them (paths are relative to the file's folder; {folder} names another one)"


def describe_faults(path: str | Path | Source, faults: list[Fault], number: int | None) -> str:
    """Up to 20 of them with file and line, each once, and how many of ``number`` rows they are;
    None, if they are the first rows, and it is not known how many there are."""
    source = as_source(path)
    told = f"none of its first {len(faults):,} rows can be used"
    if number is not None:
        told = f"{len(faults):,} of {number:,} rows cannot be used"
    lines = [f"{source.path}: {told}:"]
    same: dict[str, list[Fault]] = {}
    for fault in faults:
        same.setdefault(OF_MESSAGE.sub("", fault.text), []).append(fault)
    listed = [*same.values()][:MOST_FAULTS_LISTED]
    for (line, text), *others in listed:
        also = _ranges([other.line for other in others])
        kind = "line" if _has_lines(source) else "row"
        also = f"; also {kind}{'s' * (len(others) > 1)} {also}" if others else ""
        lines.append(f"  {place(source, line)}: {text}{also}")
    if more := len(faults) - sum(map(len, listed)):
        lines.append(f"  and {more:,} more")
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """Numbers in rising order, for people: "2 to 20, 22 and 34 more"."""
    runs = groupby(enumerate(numbers), lambda numbered: numbered[1] - numbered[0])
    ranges = [[number for _, number in run] for _, run in runs]
    told = ", ".join(
        f"{first}{f' to {rest[-1]}' if rest else ''}" for first, *rest in ranges[:MOST_RANGES]
    )
    more = sum(map(len, ranges[MOST_RANGES:]))
    return told + (f" and {more:,} more" if more else "")


def place(source: Source, number: int) -> str:
    """Where a row stands, for people: its line, where the file has lines."""
    return f"{source.path}:{number}" if _has_lines(source) else f"{source.path}, row {number}"


def _has_lines(source: Source) -> bool:
    return os.path.isfile(source.path) and _kind(Path(source.path)) == "JSON lines"


def as_source(path: str | Path | Source) -> Source:
    return path if isinstance(path, Source) else Source(str(path))


def read_rows(path: str | Path | Source, to_learn: bool = True) -> Iterator[Row | Fault]:
    """Each row, in order; lines that are blank are none.

    Args:
        to_learn: As :func:`check_messages` takes it.

    Raises:
        ValueError: the source cannot be read, or has no row.
    """
    source = as_source(path)
    given = _given_rows(source)
    first = next(given, None)
    if first is None:
        raise ValueError(f"{source.path}: 0 conversations; expected at least 1 line")
    second = next(given, None)
    if second is None:
        _refuse_object_around_rows(source, first[1])
    read_row: ReadRow | None = None
    if source.format != "auto":
        read_row = FORMATS[source.format][1]
    folder = source.image_folder or (source.path if os.path.isdir(source.path) else None)
    pictures = PictureFiles(folder or os.path.dirname(source.path), source.allow_urls)
    for line, row in chain([first], [second] if second else (), given):
        try:
            if isinstance(row, Fault):
                yield row
                continue
            if not isinstance(row, dict):
                raise ValueError(f'is a {kind_of(row)}; expected {{"messages": [...]}}')
            row = {key: value for key, value in row.items() if key not in source.ignore}
            if read_row is None:
                read_row = FORMATS[find_format(row)][1]
            yield Row(line, check_messages(read_row(row), pictures.path_of, to_learn))
        except ValueError as error:
            yield Fault(line, sys.intern(str(error)))  # of many rows, often the same
        except RecursionError:
            yield Fault(line, "objects or lists are nested too deeply")


def _refuse_object_around_rows(source: Source, row: Any) -> None:
    """Of the only row there is: whether it holds the rows, as {"data": [...]}."""
    keys = {key for key, _ in FORMATS.values()}
    if not isinstance(row, dict) or keys & row.keys():
        return
    for key, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and keys & {*value[0]}:
            raise ValueError(
                f"{source.path} is one object with {len(value):,} rows under {quoted(key)}; {ARRAY}"
            )


def _given_rows(source: Source) -> Iterator[tuple[int, Any]]:
    """The number of each row and its value as it stands, or a fault."""
    path = Path(source.path)
    kind = _kind_of(source)
    if kind == "table":
        from .tables import read_table  # the library is imported only where it is needed

        return read_table(source)
    return _lines(path) if kind == "JSON lines" else _array(path)


def _kind_of(source: Source) -> str:
    path = Path(source.path)
    if fault := fault_of_set(source):  # before it is opened: a pipe would be waited for
        raise ValueError(f"{path}: {fault}")
    return _kind(path) if source.is_local and not path.is_dir() else "table"


def _kind(path: Path) -> str:
    """What a file is: "table", "JSON lines" or "JSON array".

    Raises:
        ValueError: it cannot be read, or is of no kind that is.
    """
    try:
        with path.open("rb") as file:
            head = file.read(6)
            if head.startswith(PARQUET) or head.startswith(ARROW) or path.suffix == ".arrow":
                return "table"
            _require_text(path, head[:4])
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            # A whole array may stand in one line.
            begins = iter(partial(lines.readline, CHARACTERS_TO_TELL), "")
            first = next((text for begin in begins if (text := begin.strip())), "")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if first == "{" or AROUND_ROWS.fullmatch(first):
        raise ValueError(f"{path} is one JSON object over several lines; {EXPECTED}; {ARRAY}")
    return "JSON array" if first.startswith("[") else "JSON lines"


def _require_text(path: Path, head: bytes) -> None:
    kind = None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        kind = "UTF-16 or UTF-32"
    kind = next((kind for magic, kind in BINARY.items() if head.startswith(magic)), kind)
    if kind is not None:
        raise ValueError(f"{path} is {kind}; expected a row of JSON a line, in UTF-8")


class _Json:
    """Reads values, and notes what JSON leaves open."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_int=self._integer, parse_constant=self._constant
        )

    def _object(self, pairs: list[tuple[str, Any]]) -> dict:
        values = dict(pairs)
        if len(values) < len(pairs):
            [(twice, times)] = Counter(key for key, _ in pairs).most_common(1)
            self.fault = f"the key {quoted(twice)} stands {times} times in one object"
        return values

    def _integer(self, digits: str) -> int:
        if len(digits) <= MOST_DIGITS:
            return int(digits)
        self.fault = (
            f"a number has {len(digits):,} characters; expected {MOST_DIGITS} at most: write it as "
            "text"
        )
        return 0

    def _constant(self, name: str) -> None:
        self.fault = f"{name} is no value of JSON"

    def fault_of(self, text: str) -> str | None:
        """What is wrong with the text that was read last."""
        fault, self.fault = self.fault, None
        if undecoded := UNDECODED.search(text):
            byte = ord(undecoded[0]) - 0xDC00
            at = undecoded.start() + 1
            return f"character {at} is the byte 0x{byte:02x}, which is no UTF-8"
        return fault


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    read = _Json()
    # Bytes that are no UTF-8 become surrogates, which UTF-8 never holds: a fault of their line.
    # Not splitlines(): JSON strings may hold other line separators.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        read_line = partial(lines.readline, MOST_CHARACTERS)
        for line, text in enumerate(iter(read_line, ""), start=1):
            if len(text) == MOST_CHARACTERS and text[-1] != "\n":
                yield line, Fault(line, TOO_LONG)
                while text and text[-1] != "\n":
                    text = read_line()
            elif text.strip():
                yield line, _parse(line, text, read)


def _parse(line: int, text: str, read: _Json) -> Any:
    value = None
    try:
        value = read.decoder.decode(text.rstrip("\n"))  # else what is cut ends a line further on
    except json.JSONDecodeError as error:
        told = f"no JSON ({error.msg}, column {error.colno}): {shorten(text.strip())}"
        return Fault(line, read.fault_of(text) or told + _cure_of_json(error))
    except RecursionError:
        return Fault(line, "objects or lists are nested too deeply")
    fault = read.fault_of(text)
    return value if fault is None else Fault(line, fault)


def _cure_of_json(error: json.JSONDecodeError) -> str:
    if error.doc.lstrip().startswith("{'"):
        return "; it is Python's way to write it: write it with json.dumps"
    if error.doc[error.pos :].strip() == ",":  # behind a whole value
        return "; leave out the comma: lines are no list"
    return ""


def _array(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        text = _ArrayText(path, file)
        text.take("[")
        number = 0
        while text.next_character() != "]" or number:
            number += 1
            yield number, text.value(number)
            if text.take(",]") == "]":
                break
        else:
            text.take("]")
        if text.next_character():
            raise ValueError(f"{path}:{text.line}: something stands after the end of the array")


class _ArrayText:
    """The text of a JSON array, of which no more is held than a row and what is read at once."""

    def __init__(self, path: Path, file: TextIO):
        self.path, self.file = path, file
        self.text, self.at, self.line = "", 0, 1
        self.read = _Json()

    def next_character(self) -> str:
        """The next that is not blank; empty at the end."""
        while True:
            blank = BLANK.match(self.text, self.at)
            assert blank is not None  # it may be empty
            self._pass_over(len(blank[0]))
            if self.at < len(self.text) or not self._read_more():
                return self.text[self.at : self.at + 1]

    def take(self, expected: str) -> str:
        found = self.next_character()
        if not found or found not in expected:
            said = f"has {found!r}" if found else "ends"
            raise ValueError(
                f"{self.path}:{self.line}: the JSON array {said} where {' or '.join(expected)} is "
                "expected"
            )
        self._pass_over(1)
        return found

    def value(self, number: int) -> Any:
        self.next_character()
        while True:
            try:
                value, end = self.read.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # Else all of a large file would be read before its first fault is told.
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - A_WORD
                if cut and len(self.text) - self.at > MOST_CHARACTERS:
                    raise ValueError(f"{self.path}:{self.line}: row {number} {TOO_LONG}") from None
                if cut and self._read_more():
                    continue
                line = self.line + self.text.count("\n", self.at, error.pos)
                raise ValueError(
                    f"{self.path}:{line}: row {number} is no JSON: {error.msg}"
                ) from None
            except RecursionError:
                raise ValueError(
                    f"{self.path}:{self.line}: objects or lists are nested too deeply"
                ) from None
            if end < len(self.text) or not self._read_more():
                break
        fault = self.read.fault_of(self.text[self.at : end])
        self._pass_over(end - self.at)
        return value if fault is None else Fault(number, fault)

    def _pass_over(self, characters: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + characters)
        self.at += characters

    def _read_more(self) -> bool:
        self.read.fault = None  # what is there is read again
        more = self.file.read(max(CHARACTERS_AT_ONCE, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + more, 0
        return bool(more)


def write_conversations(
    path: Path, conversations: list[list[dict]], overwrite: bool = False
) -> None:
    """Write conversations as JSONL, with image paths relative to the file.

    Raises:
        ValueError: the file exists and ``overwrite`` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("w" if overwrite else "x", encoding="utf-8")
    except FileExistsError as error:
        raise ValueError(
            f"{path} exists and is not overwritten: move it, or write to another file"
        ) from error
    with file:
        for messages in conversations:
            relative = replace_pictures(
                messages, lambda picture: str(Path(picture).relative_to(path.parent))
            )
            file.write(json.dumps({"messages": relative}, ensure_ascii=False) + "\n")
