"""Rows of text: JSON lines, a JSON array, lists in a JSON object, and CSV.

JSON lines and CSV are read a row at a time; the text of an array or object is read at once, up to
:data:`MOST_OF_DOCUMENT`. Not by ``datasets``: its reader of JSON names neither line nor key of what
is wrong, and keeps the last of two equal keys; its reader of CSV makes null of NA and 7 of 007, and
holds in memory all that stands behind an open quote. Compressed files are read as they are, without
an unpacked copy.
"""

import codecs
import csv
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..terminal_text import listed, pip_install, shorten
from .columns import IMAGE_FILES, NO_CELL
from .formats import ROW_FORMATS
from .messages import MOST_KEYS_LISTED, quoted
from .source import OF_CSV, DataSource, suffix_of

UNDECODED = re.compile("[\udc80-\udcff]")  # how "surrogateescape" writes bytes
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
# What is no text, and what makes rows of it that are read.
OTHER_FILES = {
    b"PK\x03\x04": ("a zip archive", "unzip {0} -d {1}, and name what is in it"),
    b"\xff\xd8\xff": ("an image (JPEG)", "name the folder that it is in"),
    b"\x89PNG": ("an image (PNG)", "name the folder that it is in"),
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
    f"has {MOST_CHARACTERS:,} characters or more: make files of its images, or close its quotes"
)
MOST_KEYS = 2**20
"""Of an object, or columns of a CSV, each of which is looked at."""
TOO_DEEP = "objects or lists are nested too deeply"
MOST_OF_DOCUMENT = 2**28
"""Characters of a JSON array or object, of which all is in memory."""
BLANK = re.compile(r"[ \t\r\n]*")
KEYS_OF_ROWS = {"image", *(key for of in ROW_FORMATS.values() for key in of.needs)}
CHARACTERS_TO_TELL = 2**16  # what a file is
BESIDE_ROWS = ("info", "licenses", "categories")
"""Lists beside the rows, in files as COCO's."""
OF_LINES = ("JSON lines", "CSV")
"""Kinds of which a row has a line of its own."""
OF_CELLS = re.compile(r"-?\d+(?:\.\d+)?|\d{4}[-/.]\d\d?[-/.]\d\d?.*", re.DOTALL)
"""What is a cell of a CSV and no name of a column: a number, a date."""
OF_NAMES = re.compile(r"[\w\s.()\[\]{}/?!'\"-]")


class RowProblem(NamedTuple):
    """A line that cannot be used, and why."""

    line: int
    text: str


Numbered = Iterator[tuple[int, Any]]
"""The line of each row, or its number where a row has no line of its own; and its value, or a
:class:`Fault`."""


def read_text(source: DataSource, kind: str) -> Numbered:
    """Rows of a file of such a kind, of :func:`kind_of_file`.

    Raises:
        ValueError: it cannot be read.
    """
    path = Path(source.path)
    readers = {"CSV": _csv, "JSON lines": _lines, "JSON array": _array, "JSON object": _of_object}
    with _errors_of(path):
        yield from readers[kind](path)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        told = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {told}") from error
    except ImportError as error:
        raise ValueError(f"{path} is read by pyarrow: {pip_install('pyarrow')}") from error


def kind_of_file(path: Path) -> str:
    """What a file is: "table", "CSV", "JSON lines", "JSON array" or "JSON object" (around rows).

    Raises:
        ValueError: it cannot be read, or is of no kind that is.
    """
    with _errors_of(path):
        with path.open("rb") as file:
            head = file.read(6)
        if head.startswith((b"PAR1", b"ARROW1")) or suffix_of(path) in (".arrow", ".tar"):
            return "table"
        _require_text(path, head)
        return "CSV" if suffix_of(path) in OF_CSV else _kind_of_json(path)


def _kind_of_json(path: Path) -> str:
    with open_text(path) as file:
        lines = iter(partial(file.readline, CHARACTERS_TO_TELL), "")
        first = next((text for text in lines if text.strip()), "").lstrip()
        if first.startswith("["):
            return "JSON array"
        goes_on = first.endswith(("{\n", "[\n"))  # whatever the file is called
        if not first.startswith("{") or suffix_of(path) == ".jsonl" and not goes_on:
            return "JSON lines"
        if not first.endswith("\n"):
            first += file.readline(MOST_CHARACTERS)
        has_more = any(text.strip() for text in lines)
    try:
        value, _ = json.JSONDecoder().raw_decode(first)
    except (ValueError, RecursionError):  # it goes on in the lines below, or is no JSON
        return "JSON object"
    lists = (of for of in value.values() if isinstance(of, list) and of)
    has_rows = any(isinstance(of[0], dict) for of in lists) and not KEYS_OF_ROWS & value.keys()
    return "JSON lines" if has_more or not has_rows else "JSON object"


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
        stream = io.BufferedReader(_Unpacked(path, kind), 2**20)
    return io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline=newline)


class _Unpacked(io.RawIOBase):
    """The bytes of a compressed file, of which no more are read than data makes."""

    def __init__(self, path: Path, kind: str):
        import pyarrow  # late, for it is needed here alone

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
                yield line, RowProblem(line, TOO_LONG)
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
        return RowProblem(line, read.fault_of(text) or told)
    except RecursionError:
        return RowProblem(line, TOO_DEEP)
    fault = read.fault_of(text)
    return value if fault is None else RowProblem(line, fault)


def _array(path: Path) -> Numbered:
    return ((number, value) for _, number, value in _elements(path))


def _of_object(path: Path) -> Numbered:
    """The elements of the list that holds the rows."""
    whole: dict[str, Any] = {}
    for name, number, value in _elements(path):
        if number:
            whole.setdefault(name, []).append((number, value))
        else:
            whole[name] = value
    if KEYS_OF_ROWS & whole.keys():
        told = "it is one JSON object over several lines; expected a row a line: "
        told += '{"messages": [...]} (pandas: to_json(FILE, orient="records", lines=True))'
        raise ValueError(f"{path}: {told}")
    lists = {name: rows for name, rows in whole.items() if isinstance(rows, list)}
    names = sorted(lists.keys() - {*BESIDE_ROWS})
    if len(names) == 1:
        return iter(lists[names[0]])
    told = f"the lists {listed([*map(quoted, names)], MOST_KEYS_LISTED)}" if names else "no rows"
    raise ValueError(
        f"{path} is one object with {told}; expected 1 list, of rows: jq .NAME {path} > NAME.json "
        "(COCO, VQA: docs/data.md joins them)"
    )


def _fault_of_names(names: list[str]) -> str | None:
    """Say why the first line of a CSV has no names of columns, as far as its words show it."""
    if names[0][:4].lower() == "sep=":
        return f"{quoted(names[0])} is a line of Excel's: take it out"
    cells = [
        name for name in names if name.lower().endswith(IMAGE_FILES) or OF_CELLS.fullmatch(name)
    ]
    # pandas counts columns that have no names.
    if cells != [*map(str, range(len(cells)))]:
        return (
            f"{quoted(cells[0])} is a cell and no name of a column: write a first line with the "
            "names, such as image,question,answer"
        )
    mark = next((mark for mark in names[0] if not OF_NAMES.fullmatch(mark)), None)
    if len(names) > 1 or mark is None:
        return None
    return (
        f"has one column, {quoted(names[0])}, with {quoted(mark)}; expected names parted by "
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
        first = next(lines, "")
        between = "\t" if suffix_of(path) == ".tsv" else max(",;\t", key=first.count)
        rows = csv.reader(chain([first], lines), delimiter=between, strict=True)
        names = next(rows, [])
        if len(names) > MOST_KEYS:
            raise ValueError(f"{path}:1: {len(names):,} columns; expected {MOST_KEYS:,} at most")
        if names and (fault := _fault_of_names(names)):
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
                yield line, row if fault is None else RowProblem(line, fault)


def _elements(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield the elements of an array, or of each list of an object: the list's name, the element's
    number, from 1, and the element, or a :class:`Fault`. An object's other values have number 0."""
    text = _Document(path)
    if text.next_character() == "[":
        for number in text.items("[]"):
            yield "", number, text.value(number)
    else:
        names: set[str] = set()
        for _ in text.items("{}"):
            if text.next_character() != '"':
                text.take('"')
            name = str(text.value(1))
            if name in names:
                raise text.error(f"the key {quoted(name)} stands twice")
            names.add(name)
            text.take(":")
            if text.next_character() == "[":
                for number in text.items("[]"):
                    yield name, number, text.value(number)
            else:
                yield name, 0, text.value(1)
    if text.next_character():
        raise text.error("something stands after the end")


class _Document:
    """The text of a JSON array or object, of which one value at a time is read."""

    def __init__(self, path: Path):
        with open_text(path) as file:
            self.text = file.read(MOST_OF_DOCUMENT + 1)
        if len(self.text) > MOST_OF_DOCUMENT:
            file_name = shlex.quote(str(path))
            raise ValueError(
                f"{path} has over {MOST_OF_DOCUMENT:,} characters in one array or object, which is "
                "read at once; make JSON lines of it, which are read one by one: "
                f"jq -c '.[]' {file_name} > {file_name}l (of rows under a name: '.NAME[]')"
            )
        self.path, self.at, self.read = path, 0, _Json()

    def items(self, brackets: str) -> Iterator[int]:
        """Number the items of the array or object that comes next, each of which the caller
        reads."""
        self.take(brackets[0])
        if self.next_character() == brackets[1]:
            self.take(brackets[1])
            return
        for number in count(1):
            yield number
            if self.take(f",{brackets[1]}") == brackets[1]:
                return

    def next_character(self) -> str:
        """Return the next one that is not blank; empty at the end."""
        blank = BLANK.match(self.text, self.at)
        assert blank is not None  # it may be empty
        self.at = blank.end()
        return self.text[self.at : self.at + 1]

    def take(self, expected: str) -> str:
        found = self.next_character()
        if not found or found not in expected:
            said = f"has {found!r}" if found else "ends"
            raise self.error(f"the JSON {said} where {' or '.join(expected)} is expected")
        self.at += 1
        return found

    def value(self, number: int) -> Any:
        self.next_character()
        begin = self.at
        try:
            value, self.at = self.read.decoder.raw_decode(self.text, begin)
        except json.JSONDecodeError as error:
            self.at = error.pos
            raise self.error(f"row {number} is no JSON: {error.msg}") from None
        except RecursionError:
            raise self.error(TOO_DEEP) from None
        fault = self.read.fault_of(self.text[begin : self.at])
        return value if fault is None else RowProblem(number, fault)

    def error(self, told: str) -> ValueError:
        line = 1 + self.text.count("\n", 0, self.at)
        return ValueError(f"{self.path}:{line}: {told}")
