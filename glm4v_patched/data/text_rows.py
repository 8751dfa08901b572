"""Rows of text files: JSON lines, a JSON array, lists in a JSON object, and CSV.

JSON lines and CSV are read a row at a time. A JSON array or object is read at once, up to
:data:`MAX_DOCUMENT_CHARACTERS`. Compressed files are decompressed while they are read, without an
unpacked copy on the disk.

The library ``datasets`` is not used. Its JSON reader names neither the line nor the key of an
error, and of two equal keys it keeps the last. Its CSV reader turns NA into null and 007 into 7,
and reads everything after an open quote into memory.
"""

import codecs
import csv
import io
import json
import lzma
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..terminal_text import listed, pip_install, shorten
from .columns import EMPTY_CELL, IMAGE_SUFFIXES
from .encodings import INVALID_BYTE_RE, encoding_cure, find_encoding, find_encoding_problem
from .file_signatures import (
    SIGNATURE_HEAD_BYTES,
    SIGNATURE_TAIL_BYTES,
    fill_cure,
    find_signature,
)
from .formats import ROW_FORMATS
from .image_files import file_times
from .messages import MAX_KEYS_LISTED, quoted
from .source import CSV_SUFFIXES, DataSource, suffix_of

# Compressions by the first bytes of a file, with pyarrow's names; xz is read by Python's lzma.
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"(\xb5/\xfd": "zstd", b"\xfd7zXZ": "xz"}
UNPACK_COMMANDS = {"bz2": "bzip2 -dc FILE"} | {k: f"{k} -dc FILE" for k in ("gzip", "zstd", "xz")}
# A control character, or the beginning of HTML, XML, PDF, RTF or a pointer of Git LFS.
BINARY_RE = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]|\A(?:<|%PDF|\{\\rtf|version https://git)")
HEAD_BYTES = 2**16  # read to find out the kind and the encoding of a file
MAX_DIGITS = 300  # of an integer; Python refuses more than 4,300
MAX_ROW_CHARACTERS = 2**27
"""Limit of one row; several copies of it are in memory at a time."""
MAX_UNPACKED_BYTES, MAX_EXPANSION = 2**30, 256
"""A compressed file may unpack to this many bytes, or to this many times its own size if that is
more. Real data does not compress better."""
TOO_LONG = (
    f"has {MAX_ROW_CHARACTERS:,} characters or more: save its images as files, or close an open "
    "quote"
)
MAX_KEYS = 2**20
"""Limit on the keys of one object and on the columns of a CSV, because each costs time."""
TOO_DEEPLY_NESTED = "objects or lists are nested too deeply"
MAX_DOCUMENT_CHARACTERS = 2**28
"""Limit of a JSON array or object, because all of it is in memory."""
BLANKS_RE = re.compile(r"[ \t\r\n]*")  # as JSON defines them
KNOWN_ROW_KEYS = {
    "image",
    *(key for row_format in ROW_FORMATS.values() for key in row_format.identifying_keys),
}
SNIFFED_CHARACTERS = 2**16  # read at once to find out the kind of a JSON file
NON_ROW_LISTS = ("info", "licenses", "categories")
"""Keys of lists that contain no rows, in files such as COCO's."""
LINE_KINDS = ("JSON lines", "CSV")
"""Kinds of files in which each row has its own line."""
CELL_VALUE_RE = re.compile(r"-?\d+(?:\.\d+)?|\d{4}[-/.]\d\d?[-/.]\d\d?.*", re.DOTALL)
"""Matches texts that cannot be names of columns: numbers and dates."""
COLUMN_NAME_CHARACTERS_RE = re.compile(r"[\w\s.()\[\]{}/?!'\"-]")
"""Matches characters of a column's name. If the first line of a CSV seems to be a single name with
another character in it, that character is probably the delimiter."""
JSON_CURE = (
    "JSON has no comments, no comma before a bracket or after the last value, no single quotes and "
    "no True, False or None (write it with json.dumps); a table must be named .csv or .tsv"
)
SEPARATOR_LINE_RE = re.compile(r'"?sep=(.)"?\r?\n', re.IGNORECASE)


class RowProblem(NamedTuple):
    """The reason why a row cannot be used."""

    line: int
    """The row's line, or its number (from 1) if rows of the source have no lines of their own."""
    text: str


NumberedRows = Iterator[tuple[int, Any]]
"""Pairs of a row's line, as in :class:`RowProblem`, and the row's value or problem."""


def read_text(
    source: DataSource, kind: str, must_parse: Callable[[int], bool] = lambda row: True
) -> NumberedRows:
    """Yield the rows of a text file.

    Args:
        kind: The kind of the file, from :func:`file_kind`.
        must_parse: Takes the index of a row. If it returns False, a row of JSON lines is not
            parsed, and its value is None.

    Raises:
        ValueError: The file cannot be read.
    """
    path = Path(source.path)
    readers: dict[str, Callable[[Path], NumberedRows]] = {
        "CSV": _read_csv,
        "JSON lines": partial(_read_json_lines, must_parse=must_parse),
        "JSON array": _read_json_array,
        "JSON object": _read_json_object,
    }
    with _name_file_in_errors(path):
        yield from readers[kind](path)


@contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as ``ValueError`` with the file's path."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, UnicodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, UnicodeError):
            reason = f"{reason}; save it as UTF-8 where you made it"
        raise ValueError(f"{path} cannot be read: {reason}") from error
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow: {pip_install('pyarrow')}") from error


def count_lines(path: Path) -> int:
    """Return the number of line feeds in a file; a compressed file is not unpacked."""
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(partial(file.read, 2**20), b""))


def file_kind(path: Path) -> str:
    """Return the kind of a file: "table", "CSV", "JSON lines", "JSON array", or "JSON object",
    which is one object that contains a list of rows.

    Raises:
        ValueError: The file cannot be read, or its kind is not supported.
    """
    with _name_file_in_errors(path):
        with _open_bytes(path) as file:
            head = file.peek(HEAD_BYTES)
        if head.startswith((b"PAR1", b"ARROW1")) or suffix_of(path) in (".arrow", ".tar"):
            return "table"
        _require_text(path, head)
        return "CSV" if suffix_of(path) in CSV_SUFFIXES else _kind_of_json(path)


def _kind_of_json(path: Path) -> str:
    """Return "JSON array", "JSON object" or "JSON lines" by the first line that is not blank."""
    with open_text(path) as file:
        lines = iter(partial(file.readline, SNIFFED_CHARACTERS), "")
        first = next((text for text in lines if text.strip()), "").lstrip()
        if first.startswith("["):
            return "JSON array"
        is_continued = first.endswith(("{\n", "[\n"))  # one object, even in a file named .jsonl
        if not first.startswith("{") or suffix_of(path) == ".jsonl" and not is_continued:
            return "JSON lines"
        if not first.endswith("\n"):
            first += file.readline(MAX_ROW_CHARACTERS)
        has_more = any(text.strip() for text in lines)
    try:
        value, _ = json.JSONDecoder().raw_decode(first)
    except (ValueError, RecursionError):  # continued on later lines, or not JSON
        return "JSON object"
    if has_more or KNOWN_ROW_KEYS & value.keys():
        return "JSON lines"
    lists = (item for item in value.values() if isinstance(item, list) and item)
    contains_rows = any(isinstance(item[0], dict) for item in lists)
    return "JSON object" if contains_rows else "JSON lines"


def _require_text(path: Path, head: bytes) -> None:
    """Raise ``ValueError`` if a file that begins with ``head`` is not text in a known encoding."""
    if find_encoding(head) != "utf-8-sig":
        return
    if BINARY_RE.search(head[:SIGNATURE_HEAD_BYTES]):
        with path.open("rb") as file:
            file.seek(-min(SIGNATURE_TAIL_BYTES, path.stat().st_size), os.SEEK_END)
            name, cure = find_signature(head, file.read()) or ("", "name the folder of an image")
        if not name and head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            name, cure = "damaged UTF-16 or UTF-32", "save it as UTF-8 where you made it"
        if name and (compression := _find_compression(path)):
            name, cure = f"{name}, in a compressed file", f"{UNPACK_COMMANDS[compression]} > RESULT"
        if name or b"\0" in head[:32]:
            cure = fill_cure(cure, str(path))
            raise ValueError(f"{path} is {name or 'not text'}; expected rows: {cure}")


@lru_cache(maxsize=8)  # it may be called for many rows
def _encoding_cure(path: Path, times: tuple[int, int, int] | None) -> str | None:
    """Return how to convert a file to UTF-8 (:func:`encodings.encoding_cure`). ``times`` is only
    part of the cache's key: a file that has changed is read again."""
    with _open_bytes(path) as file:
        head = file.peek(HEAD_BYTES)
    unpack_command = UNPACK_COMMANDS.get(_find_compression(path), "")
    return encoding_cure(str(path), suffix_of(path), head, unpack_command)


def _find_encoding_problem(path: Path, text: str) -> str | None:
    """Return which part of a text was not UTF-8 in the file at ``path``, or None."""
    if INVALID_BYTE_RE.search(text) is None:
        return None
    return find_encoding_problem(text, _encoding_cure(path, file_times(str(path))))


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file, which may be compressed. In UTF-8 files, invalid bytes become surrogates,
    so that the reader can report their line."""
    stream = _open_bytes(path)
    encoding = find_encoding(stream.peek(HEAD_BYTES))
    errors = "surrogateescape" if encoding == "utf-8-sig" else "strict"
    return io.TextIOWrapper(stream, encoding, errors=errors, newline=newline)


def _find_compression(path: Path) -> str:
    """Return the name of a file's compression; empty if it has none."""
    with path.open("rb") as file:
        head = file.read(6)
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), "")


def _open_bytes(path: Path) -> io.BufferedReader:
    """Open a file, which may be compressed."""
    compression = _find_compression(path)
    if not compression:
        return io.BufferedReader(io.FileIO(path), HEAD_BYTES)
    return io.BufferedReader(_UnpackedFile(path, compression), 2**20)


class _UnpackedFile(io.RawIOBase):
    """The unpacked bytes of a compressed file, of which there may be at most ``max_bytes``.

    The limit protects against decompression bombs.
    """

    def __init__(self, path: Path, compression: str):
        import pyarrow  # imported here because only compressed files need it

        self.path, self.size, self.num_unpacked = path, path.stat().st_size, 0
        self.max_bytes = max(MAX_UNPACKED_BYTES, MAX_EXPANSION * self.size)
        open_stream: Any = lzma.open if compression == "xz" else pyarrow.input_stream
        options = {} if compression == "xz" else {"compression": compression}
        self.stream = open_stream(str(path), **options)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.stream.read(len(buffer))
        self.num_unpacked += len(content)
        if self.num_unpacked > self.max_bytes:
            raise ValueError(
                f"{self.path} has {self.size:,} bytes, and unpacks to over "
                f"{self.max_bytes:,}; real data does not compress so well: if this is intended, "
                "unpack it yourself"
            )
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self.stream.close()
        super().close()


class _JsonReader:
    """Decodes JSON values. A repeated key or a huge integer becomes the value's problem."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        self.decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_int=self._integer)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict:
        values = dict(pairs)
        if len(values) < len(pairs):
            [(repeated, times)] = Counter(key for key, _ in pairs).most_common(1)
            self.problem = f"the key {quoted(repeated)} occurs {times} times in one object"
        if len(values) > MAX_KEYS:
            self.problem = f"an object has {len(values):,} keys; expected at most {MAX_KEYS:,}"
            return {}
        return values

    def _integer(self, digits: str) -> int:
        if len(digits) <= MAX_DIGITS:
            return int(digits)
        self.problem = f"a number has {len(digits):,} characters; expected at most {MAX_DIGITS}"
        return 0

    def pop_problem(self, text: str) -> str | None:
        """Return the problem of the value that was decoded last, or None, and forget it. ``text``
        is the JSON of this value."""
        problem, self.problem = self.problem, None
        return _find_encoding_problem(self.path, text) or problem


def _read_json_lines(path: Path, must_parse: Callable[[int], bool]) -> NumberedRows:
    reader, row_indices = _JsonReader(path), count()
    # readline() is used because splitlines() also splits at line separators inside of JSON strings.
    with open_text(path) as lines:
        read_line = partial(lines.readline, MAX_ROW_CHARACTERS)
        for line, text in enumerate(iter(read_line, ""), start=1):
            if len(text) == MAX_ROW_CHARACTERS and text[-1] != "\n":
                next(row_indices)
                yield line, RowProblem(line, TOO_LONG)
                while text and text[-1] != "\n":
                    text = read_line()
            elif text.strip():
                is_needed = must_parse(next(row_indices))
                yield line, _parse_json_line(line, text, reader) if is_needed else None


def _parse_json_line(line: int, text: str, reader: _JsonReader) -> Any:
    value = None
    try:
        # The line feed is removed, because with it some errors would name the next line. A byte
        # order mark is inside of a file that was joined from several files.
        value = reader.decoder.decode(text.removeprefix("\ufeff").rstrip("\n"))
    except json.JSONDecodeError as error:
        problem = f"not JSON ({error.msg}, column {error.colno}): {shorten(text.strip())}"
        problem += f"; {JSON_CURE}"
        return RowProblem(line, reader.pop_problem(text) or problem)
    except RecursionError:
        return RowProblem(line, TOO_DEEPLY_NESTED)
    value_problem = reader.pop_problem(text)
    return value if value_problem is None else RowProblem(line, value_problem)


def _read_json_array(path: Path) -> NumberedRows:
    return ((number, value) for _, number, value in _iter_elements(path))


def _read_json_object(path: Path) -> NumberedRows:
    """Return the rows of a JSON object: the elements of its only list whose key is not one of
    :data:`NON_ROW_LISTS`."""
    document: dict[str, Any] = {}
    for name, number, value in _iter_elements(path):
        if number:
            document.setdefault(name, []).append((number, value))
        else:
            document[name] = value
    if KNOWN_ROW_KEYS & document.keys():
        raise ValueError(
            f"{path}: it is one JSON object over several lines; expected one row per line: "
            '{"messages": [...]} (pandas: to_json(FILE, orient="records", lines=True))'
        )
    lists = {name: rows for name, rows in document.items() if isinstance(rows, list)}
    names = sorted(lists.keys() - {*NON_ROW_LISTS})
    if len(names) == 1:
        return iter(lists[names[0]])
    content = f"the lists {listed([*map(quoted, names)], MAX_KEYS_LISTED)}" if names else "no rows"
    raise ValueError(
        f"{path} is one object with {content}; expected one list, which contains the rows: "
        f"jq .NAME {path} > NAME.json (docs/data.md shows how to join those of COCO and VQA)"
    )


def _find_header_problem(path: Path, first: str, names: list[str]) -> str | None:
    """Return why the first line of a CSV does not look like names of columns; None if it does."""
    problem = _find_encoding_problem(path, first)
    if problem or not names:
        return problem
    values = [
        name
        for name in names
        if name.lower().endswith(IMAGE_SUFFIXES) or CELL_VALUE_RE.fullmatch(name)
    ]
    # Names 0, 1, 2 and so on are accepted: pandas gives them to columns without a name.
    if values != [*map(str, range(len(values)))]:
        return (
            f"{quoted(values[0])} is a value, not the name of a column: add a first line with the "
            "names of the columns, such as image,question,answer"
        )
    delimiter = next((c for c in names[0] if not COLUMN_NAME_CHARACTERS_RE.fullmatch(c)), None)
    if len(names) > 1 or delimiter is None:
        return None
    command = fill_cure(f"sed '1isep={delimiter}' FILE > RESULT.csv", str(path))
    return (
        f"has one column, {quoted(names[0])}, with {quoted(delimiter)} in its name; expected names "
        "separated by commas, semicolons or tabs (in a .tsv: tabs), or a line that names the "
        f"separator: {command}"
    )


def _read_csv(path: Path) -> NumberedRows:
    """Yield the rows of a CSV, keyed by the names in its first line."""
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    num_characters, line = 0, 1

    def read_lines(file: TextIO) -> Iterator[str]:
        nonlocal num_characters
        for text in iter(partial(file.readline, MAX_ROW_CHARACTERS), ""):
            num_characters += len(text)
            if num_characters > MAX_ROW_CHARACTERS:
                raise ValueError(f"{path}:{line}: a row {TOO_LONG}")
            yield text.removeprefix("\ufeff")  # inside of files that were joined from several

    with open_text(path, newline="") as file:
        lines = read_lines(file)
        first = next(lines, "")
        separator = SEPARATOR_LINE_RE.fullmatch(first)  # "sep=;", a line that Excel writes
        first = next(lines, "") if separator else first
        unquoted = re.sub('"[^"]*"', "", first)
        delimiter = "\t" if suffix_of(path) == ".tsv" else max(",;\t", key=unquoted.count)
        delimiter = separator[1] if separator else delimiter
        rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        names = next(rows, [])
        if len(names) > MAX_KEYS:
            raise ValueError(f"{path}:1: {len(names):,} columns; expected at most {MAX_KEYS:,}")
        if header_problem := _find_header_problem(path, first, names):
            raise ValueError(f"{path}:1: {header_problem}")
        if repeated := [name for name, times in Counter(names).items() if times > 1]:
            raise ValueError(
                f"{path}:1: {listed([*map(quoted, repeated)])} names several columns: rename them"
            )
        while True:
            num_characters, line = 0, rows.line_num + (2 if separator else 1)
            cells, problem = [], None
            try:
                cells = next(rows)
                if len(cells) not in (0, len(names)):
                    problem = (
                        f"has {len(cells)} cells, but the first line names {len(names)} columns"
                    )
            except csv.Error as error:
                problem = f"not CSV ({error}): inside quotes, write a quote twice"
            except StopIteration:
                return
            problem = problem or _find_encoding_problem(path, "".join(cells))
            row = {name: cell or EMPTY_CELL for name, cell in zip(names, cells, strict=False)}
            if cells or problem:
                yield line, row if problem is None else RowProblem(line, problem)


def _iter_elements(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield the elements of a JSON array, or of each list in a JSON object.

    They are yielded as triples: the list's key (empty for an array), the element's number (from 1),
    and the element or a :class:`RowProblem`. A value in the object that is not a list has the
    number 0.
    """
    document = _JsonDocument(path)
    if document.next_character() == "[":
        for number in document.iter_items("[]"):
            yield "", number, document.read_value(number)
    else:
        keys: set[str] = set()
        for _ in document.iter_items("{}"):
            if document.next_character() != '"':
                document.read_character('"')
            key = str(document.read_value())
            if key in keys:
                raise document.error(f"the key {quoted(key)} occurs twice")
            keys.add(key)
            document.read_character(":")
            if document.next_character() == "[":
                for number in document.iter_items("[]"):
                    yield key, number, document.read_value(number)
            else:
                yield key, 0, document.read_value()
    if document.next_character():
        raise document.error("the JSON value has ended, but the file continues")


class _JsonDocument:
    """The text of a JSON array or object, decoded one value at a time."""

    def __init__(self, path: Path):
        with open_text(path) as file:
            self.text = file.read(MAX_DOCUMENT_CHARACTERS + 1)
        if len(self.text) > MAX_DOCUMENT_CHARACTERS:
            file_name = shlex.quote(str(path))
            raise ValueError(
                f"{path} has over {MAX_DOCUMENT_CHARACTERS:,} characters in one array or object, "
                "which is read at once; convert it to JSON lines, which are read one by one: "
                f"jq -c '.[]' {file_name} > {file_name}l (for a list under a key: '.NAME[]')"
            )
        self.path, self.position, self.reader = path, 0, _JsonReader(path)

    def iter_items(self, brackets: str) -> Iterator[int]:
        """Yield the number (from 1) of each item of the array or object at the current position.
        The caller must read an item before it advances this iterator."""
        opening, closing = brackets[0], brackets[1]
        self.read_character(opening)
        if self.next_character() == closing:
            self.read_character(closing)
            return
        for number in count(1):
            yield number
            if self.read_character(f",{closing}") == closing:
                return

    def next_character(self) -> str:
        """Move to the next character that is not blank, and return it; empty at the end."""
        blank = BLANKS_RE.match(self.text, self.position)
        assert blank is not None  # the match may be empty
        self.position = blank.end()
        return self.text[self.position : self.position + 1]

    def read_character(self, expected: str) -> str:
        """Move behind the next character that is not blank, which must be in ``expected``."""
        character = self.next_character()
        if not character or character not in expected:
            has = f"has {character!r}" if character else "ends"
            raise self.error(f"the JSON {has} where {' or '.join(expected)} is expected")
        self.position += 1
        return character

    def read_value(self, number: int = 1) -> Any:
        """Read the value at the current position; ``number`` is its number in messages."""
        self.next_character()
        start = self.position
        try:
            value, self.position = self.reader.decoder.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.position = error.pos
            raise self.error(f"row {number} is not JSON: {error.msg}; {JSON_CURE}") from None
        except RecursionError:
            raise self.error(TOO_DEEPLY_NESTED) from None
        problem = self.reader.pop_problem(self.text[start : self.position])
        return value if problem is None else RowProblem(number, problem)

    def error(self, problem: str) -> ValueError:
        line = 1 + self.text.count("\n", 0, self.position)
        return ValueError(f"{self.path}:{line}: {problem}")
