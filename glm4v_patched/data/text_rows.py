"""Rows of text: JSON lines, a JSON array, lists in a JSON object, and CSV, each a row at a time.

Not by ``datasets``: its reader of JSON names neither line nor key of what is wrong, and keeps the
last of two equal keys; its reader of CSV makes null of NA and 7 of 007, and holds in memory all
that stands behind an open quote. Compressed files are read as they are, without an unpacked copy.
"""

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..terminal_text import listed, pip_install, shorten
from .columns import NO_CELL, PICTURE_FILES
from .formats import FORMATS
from .messages import MOST_KEYS_LISTED, quoted
from .source import OF_CSV, Source, suffix_of

UNDECODED = re.compile("[\udc80-\udcff]")  # how "surrogateescape" writes bytes
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
# What is no text, and what makes rows of it that are read.
OTHER_FILES = {
    b"PK\x03\x04": ("a zip archive", "unzip {0} -d {1}, and name what is in it"),
    b"\xff\xd8\xff": ("a picture (JPEG)", "name the folder that it is in"),
    b"\x89PNG": ("a picture (PNG)", "name the folder that it is in"),
    b"\x80\x04": ("Python's pickle", "make Parquet of it where you made it: pickles can run code"),
    b"\xfd7zXZ": ("compressed by xz", "xz -dk {0}"),
    b"SQLite": ("an SQLite database", "sqlite3 -json {0} 'select * from TABLE' > {1}.json"),
}
UNICODE = ("UTF-16 or UTF-32", "iconv -f UTF-16 -t UTF-8 {0} > {1}.utf8")
MOST_DIGITS = 300  # Python itself neither reads nor writes more than 4,300
MOST_CHARACTERS = 2**27
"""Of a row, which is held in memory several times."""
MOST_UNPACKED, BYTES_A_BYTE = 2**30, 256
"""Bytes of a compressed file, or as often its own: repetition alone makes more."""
TOO_LONG = (
    f"has {MOST_CHARACTERS:,} characters or more: make files of its pictures, or close its quotes"
)
MOST_KEYS = 2**20
"""Of an object, or columns of a CSV, each of which is looked at."""
TOO_DEEP = "objects or lists are nested too deeply"
BLANK = re.compile(r"[ \t\r\n]*")
LIST_OF_OBJECTS = re.compile(r'"([^"\\]*+)"\s*+:\s*+\[\s*+\{')
KEYS_OF_ROWS = {"image", *(key for of in FORMATS.values() for key in of.needs)}
A_WORD = 16  # of JSON, such as -Infinity, which is one fault where it is cut
CHARACTERS_AT_ONCE = 2**20
CHARACTERS_TO_TELL = 2**16  # what a file is
BESIDE_ROWS = ("info", "licenses", "categories")
"""Lists beside the rows, in files as COCO's."""
OF_LINES = ("JSON lines", "CSV")
"""Kinds of which a row has a line of its own."""
OF_CELLS = re.compile(r"-?\d+(?:\.\d+)?|\d{4}[-/.]\d\d?[-/.]\d\d?.*", re.DOTALL)
"""What is a cell of a CSV and no name of a column: a number, a date."""
OF_NAMES = re.compile(r"[\w\s.()\[\]{}/?!'\"-]")


class Fault(NamedTuple):
    """A line that cannot be used, and why."""

    line: int
    text: str


Numbered = Iterator[tuple[int, Any]]
"""The line of each row, or its number where a row has no line of its own; and its value, or a
:class:`Fault`."""


def read_text(source: Source, kind: str) -> Numbered:
    """Rows of a file of such a kind, of :func:`kind_of_file`.

    Raises:
        ValueError: it cannot be read.
    """
    path = Path(source.path)
    readers = {"CSV": _csv, "JSON lines": _lines, "JSON array": _array, "JSON object": _of_object}
    try:
        yield from readers[kind](path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def kind_of_file(path: Path) -> str:
    """What a file is: "table", "CSV", "JSON lines", "JSON array" or "JSON object" (around rows).

    Raises:
        ValueError: it cannot be read, or is of no kind that is.
    """
    try:
        with path.open("rb") as file:
            head = file.read(6)
        if head.startswith((b"PAR1", b"ARROW1")) or suffix_of(path) in (".arrow", ".tar"):
            return "table"
        _require_text(path, head)
        if suffix_of(path) in OF_CSV:
            return "CSV"
        with open_text(path) as lines:
            # A whole array may stand in one line.
            begins = iter(partial(lines.read, CHARACTERS_TO_TELL), "")
            first = next((text for begin in begins if (text := begin.lstrip())), "")
    except OSError as error:
        told = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {told}") from error
    if first.startswith("["):
        return "JSON array"
    is_line = suffix_of(path) == ".jsonl" and "\n" not in first.strip()
    if first.startswith("{") and not is_line and _is_around_rows(first):
        return "JSON object"
    if first.partition("\n")[0].strip() == "{":
        told = "it is one JSON object over several lines; expected a row a line: "
        told += '{"messages": [...]} (pandas: to_json(FILE, orient="records", lines=True))'
        raise ValueError(f"{path}: {told}")
    return "JSON lines"


def _require_text(path: Path, head: bytes) -> None:
    if head.startswith(tuple(COMPRESSIONS)):
        return
    other = next((of for magic, of in OTHER_FILES.items() if head.startswith(magic)), None)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        other = other or UNICODE
    if other is not None:
        cure = other[1].format(quoted(str(path)), quoted(str(path.with_suffix(""))))
        raise ValueError(f"{path} is {other[0]}; expected a row of JSON a line, in UTF-8: {cure}")


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """A file of text, which may be compressed. Bytes that are no UTF-8 become surrogates, which
    UTF-8 never holds: a fault of their line."""
    stream: Any = path.open("rb")
    head = stream.peek(6)
    kind = next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), None)
    if kind is not None:
        stream.close()
        stream = io.BufferedReader(_Unpacked(path, kind), CHARACTERS_AT_ONCE)
    return io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline=newline)


class _Unpacked(io.RawIOBase):
    """The bytes of a compressed file, of which no more are read than data makes."""

    def __init__(self, path: Path, kind: str):
        try:
            import pyarrow  # late, for it is needed here alone
        except ImportError as error:
            raise ValueError(f"{path} is read by pyarrow: {pip_install('pyarrow')}") from error
        self.path, self.size, self.unpacked = path, path.stat().st_size, 0
        self.most = max(MOST_UNPACKED, BYTES_A_BYTE * self.size)
        self.stream = pyarrow.input_stream(str(path), compression=kind)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.stream.read(len(buffer))
        self.unpacked += len(content)
        if self.unpacked > self.most:
            raise ValueError(
                f"{self.path} has {self.size:,} bytes, and makes over {self.most:,} of them; "
                "expected what data makes: unpack it yourself, if it is meant"
            )
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self.stream.close()
        super().close()


def _is_around_rows(text: str) -> bool:
    """Whether a file that begins so is one object, in which a list is of rows: neither a row itself
    nor the first of several lines."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # it goes on behind what was read
        for found in LIST_OF_OBJECTS.finditer(text):
            if found[1] in KEYS_OF_ROWS:
                return False
            if not _is_whole(text[text.index("[", found.end(1)) :]):
                return True
        return False
    lists = (of for of in value.values() if isinstance(of, list) and of)
    has_rows = any(isinstance(of[0], dict) for of in lists) and not KEYS_OF_ROWS & value.keys()
    return has_rows and not text[end:].strip()


def _is_whole(text: str) -> bool:
    try:
        return bool(json.JSONDecoder().raw_decode(text))
    except (ValueError, RecursionError):
        return False


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
        if len(values) > MOST_KEYS:
            self.fault = f"an object has {len(values):,} keys; expected {MOST_KEYS:,} at most"
            return {}
        return values

    def _integer(self, digits: str) -> int:
        if len(digits) <= MOST_DIGITS:
            return int(digits)
        self.fault = f"a number has {len(digits):,} characters; expected {MOST_DIGITS} at most"
        return 0

    def _constant(self, name: str) -> None:
        self.fault = f"{name} is no value of JSON"

    def fault_of(self, text: str) -> str | None:
        """What is wrong with the text that was read last."""
        fault, self.fault = self.fault, None
        return fault_of_bytes(text) or fault


def fault_of_bytes(text: str) -> str | None:
    """Of which byte a character could not be made."""
    undecoded = UNDECODED.search(text)
    if undecoded is None:
        return None
    byte, at = ord(undecoded[0]) - 0xDC00, undecoded.start() + 1
    return f"character {at} is the byte 0x{byte:02x}, which is no UTF-8"


def _lines(path: Path) -> Numbered:
    read = _Json()
    # Not splitlines(): JSON strings may hold other line separators.
    with open_text(path) as lines:
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
        if text.lstrip().startswith("{'"):
            told += "; it is Python's way to write it: write it with json.dumps"
        elif text[error.pos :].strip() == ",":  # behind a whole value
            told += "; leave out the comma: lines are no list"
        return Fault(line, read.fault_of(text) or told)
    except RecursionError:
        return Fault(line, TOO_DEEP)
    fault = read.fault_of(text)
    return value if fault is None else Fault(line, fault)


def _array(path: Path) -> Numbered:
    return ((number, value) for _, number, value in _elements(path))


def _of_object(path: Path) -> Numbered:
    """The elements of the list that holds the rows."""
    names = sorted({name for name, _, _ in _elements(path)} - {*BESIDE_ROWS})
    if len(names) != 1:
        told = f"the lists {listed([*map(quoted, names)], MOST_KEYS_LISTED)}"
        raise ValueError(
            f"{path} is one object with {told if names else 'no rows'}; expected 1 list, of rows: "
            f"jq .NAME {path} > NAME.json (COCO, VQA: docs/data.md joins them)"
        )
    return ((number, value) for name, number, value in _elements(path) if name == names[0])


def _fault_of_names(names: list[str], second: str) -> str | None:
    """Say why the first line of a CSV has no names of columns, as far as its words show it.

    Args:
        second: The second line, which shows what parts the cells where nothing that is read does.
    """
    if names[0][:4].lower() == "sep=":
        return f"{quoted(names[0])} is a line of Excel's: take it out"
    cells = [
        name for name in names if name.lower().endswith(PICTURE_FILES) or OF_CELLS.fullmatch(name)
    ]
    # pandas counts columns that have no names.
    if cells != [*map(str, range(len(cells)))]:
        return (
            f"{quoted(cells[0])} is a cell and no name of a column: write a first line with the "
            "names, such as image,question,answer"
        )
    if len(names) != 1:
        return None
    others = {mark: names[0].count(mark) for mark in names[0] if not OF_NAMES.fullmatch(mark)}
    mark = next((mark for mark, times in others.items() if second.count(mark) >= times), None)
    if mark is None:
        return None
    return (
        f"has one column, {quoted(names[0])}, and cells that {quoted(mark)} may part; expected "
        "commas, semicolons or tabs, and in a .tsv tabs: pandas.read_csv(FILE, "
        f"sep={mark!r}, dtype=str, keep_default_na=False).to_csv(OTHER, index=False)"
    )


def _csv(path: Path) -> Numbered:
    """Rows by the names in the first line."""
    csv.field_size_limit(MOST_CHARACTERS)
    held, line = 0, 1

    def bounded(file: TextIO) -> Iterator[str]:
        nonlocal held
        for text in iter(partial(file.readline, MOST_CHARACTERS), ""):
            held += len(text)
            if held > MOST_CHARACTERS:
                raise ValueError(f"{path}:{line}: a row {TOO_LONG}")
            yield text

    with open_text(path, newline="") as file:
        lines = bounded(file)
        first, second = next(lines, ""), next(lines, "")
        between = "\t" if suffix_of(path) == ".tsv" else max(",;\t", key=first.count)
        rows = csv.reader(chain([first, second], lines), delimiter=between, strict=True)
        names = next(rows, [])
        if len(names) > MOST_KEYS:
            raise ValueError(f"{path}:1: {len(names):,} columns; expected {MOST_KEYS:,} at most")
        if names and (fault := _fault_of_names(names, second)):
            raise ValueError(f"{path}:1: {fault}")
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise ValueError(f"{path}:1: {listed([*map(quoted, twice)])} names several columns")
        while True:
            held, line = 0, rows.line_num + 1
            cells, fault = [], None
            try:
                cells = next(rows)
                if len(cells) not in (0, len(names)):
                    fault = f"has {len(cells)} cells, and the first line {len(names)}"
            except csv.Error as error:
                fault = f"no CSV ({error}): a quote within quotes stands twice"
            except StopIteration:
                return
            fault = fault or fault_of_bytes("".join(cells))
            row = {name: cell or NO_CELL for name, cell in zip(names, cells, strict=False)}
            if cells or fault:
                yield line, row if fault is None else Fault(line, fault)


def _elements(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Each element of an array, or of each list of an object: the list's name, the element's
    number, from 1, and the element, or a :class:`Fault`."""
    with open_text(path) as file:
        text = _JsonText(path, file)
        if text.next_character() == "[":
            for number, value in text.elements():
                yield "", number, value
        else:
            names: set[str] = set()
            for name in text.names():
                if name in names:
                    raise ValueError(f"{path}:{text.line}: the key {quoted(name)} stands twice")
                names.add(name)
                if text.next_character() == "[":
                    for number, value in text.elements():
                        yield name, number, value
                else:
                    text.value(1)
        if text.next_character():
            raise ValueError(f"{path}:{text.line}: something stands after the end")


class _JsonText:
    """The text of a JSON file, of which no more is held than a row and what is read at once."""

    def __init__(self, path: Path, file: TextIO):
        self.path, self.file = path, file
        self.text, self.at, self.line = "", 0, 1
        self.read = _Json()

    def elements(self) -> Numbered:
        """Those of the array that comes next, numbered from 1."""
        for number in self._items("[]"):
            yield number, self.value(number)

    def names(self) -> Iterator[str]:
        """Those of the object that comes next; its value is then read by who asks."""
        for number in self._items("{}"):
            if self.next_character() != '"':
                self.take('"')
            name = str(self.value(number))
            self.take(":")
            yield name

    def _items(self, brackets: str) -> Iterator[int]:
        self.take(brackets[0])
        if self.next_character() == brackets[1]:
            self.take(brackets[1])
            return
        for number in count(1):
            yield number
            if self.take(f",{brackets[1]}") == brackets[1]:
                return

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
            raise self._error(f"the JSON {said} where {' or '.join(expected)} is expected")
        self._pass_over(1)
        return found

    def value(self, number: int) -> Any:
        self.next_character()
        while True:
            begins = self.at
            try:
                value, end = self.read.decoder.raw_decode(self.text, begins)
            except json.JSONDecodeError as error:
                # Else all of a large file would be read before its first fault is told.
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - A_WORD
                if cut and len(self.text) - self.at > MOST_CHARACTERS:
                    raise self._error(f"row {number} {TOO_LONG}") from None
                if cut and self._read_more():
                    continue
                self.line += error.doc.count("\n", begins, error.pos)
                raise self._error(f"row {number} is no JSON: {error.msg}") from None
            except RecursionError:
                raise self._error(TOO_DEEP) from None
            if end < len(self.text) or not self._read_more():
                break
        fault = self.read.fault_of(self.text[self.at : end])
        self._pass_over(end - self.at)
        return value if fault is None else Fault(number, fault)

    def _error(self, told: str) -> ValueError:
        return ValueError(f"{self.path}:{self.line}: {told}")

    def _pass_over(self, characters: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + characters)
        self.at += characters

    def _read_more(self) -> bool:
        self.read.fault = None  # what is there is read again
        more = self.file.read(max(CHARACTERS_AT_ONCE, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + more, 0
        return bool(more)
