"""Rows of tables: Parquet, Arrow, archives of WebDataset, folders and data sets of the Hub.

The library ``datasets`` is not asked, for it opens what a folder names, wherever that is
(:mod:`folders`), and decodes a whole row group at once. Tables are read a few rows at a time, and
images in them are not decoded.
"""

import json
import os
import shlex
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..terminal_text import pip_install
from .cards import choose_split, read_subset
from .columns import IMAGE_FILES, NO_CELL
from .folders import Folder, HubFolder
from .formats import find_format
from .source import COMPRESSED, CURE_OF_FOLDER, OF_CSV, OF_FILES, SAVED, DataSource, is_saved, suffix_of
from .text_rows import OF_LINES, RowProblem, Numbered, kind_of_file, read_text

KINDS = {
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "webdataset": (".tar",),
    "json": (".jsonl", ".json"),
    "csv": OF_CSV,
    "imagefolder": IMAGE_FILES,
    "text": (".txt",),
}
"""Kinds of folders by the suffixes of their files; of kinds with as many files, the first."""
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
MOST_ROWS_AT_ONCE = 64
MOST_BYTES_AT_ONCE = 2**27
MOST_REPEATED = 2**22
"""Bytes of row groups whose texts in lists are looked at before they are repeated."""
MOST_BYTES = 2**30
"""Of a row, in which an image may have 2**29."""
MOST_VALUES = 2**24
"""In the lists of a row, or in a column of a small Parquet file."""
VALUES_A_BYTE, BYTES_A_BYTE = 64, 256
"""More than these of a file's bytes are made by nothing but repetition."""
MOST_BYTES_OF_STATE = 2**24
OLD_COMPRESSION = b"ARROW:experimental_compression"  # of Arrow 0.17, among custom metadata
DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), lambda content: content.decode()),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
}
"""Of files in archives of WebDataset by their suffix; others stay bytes."""


def read_table(source: DataSource) -> Numbered:
    """The number of each row, from 1, and its values by the names of columns, :data:`NO_CELL` for
    null: images are their bytes or paths, and classes their names.

    Raises:
        ValueError: there is no such table, or it cannot be read.
        RuntimeError: the library is missing.
    """
    with _errors_of(source):
        for number, row in enumerate(_open(source), start=1):
            if isinstance(row, RowProblem):
                yield number, row._replace(line=number)
                continue
            full = {key: NO_CELL if of is None else of for key, of in row.items()}
            yield number, _without_nulls(full)


@contextmanager
def _errors_of(source: DataSource) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise RuntimeError(f"{source.path} is read by pyarrow: {pip_install('pyarrow')}") from error
    except Exception as error:  # of pyarrow, tarfile and the Hub's client, each its own
        if str(error).startswith(source.path):
            raise
        raise ValueError(f"{source.path} cannot be read: {error}") from error


def _open(source: DataSource) -> Iterator[Any]:
    path = Path(source.path)
    if path.is_file():
        kind = {".arrow": "arrow", ".tar": "webdataset"}.get(suffix_of(path), "parquet")
        with path.open("rb") as file:
            kind = "arrow" if file.read(6) == b"ARROW1" else kind
        return READERS[kind](source.path, {})
    folder = Folder(source.path) if path.exists() else HubFolder(source.path, source.revision)
    if is_saved(source.path):
        return _rows_of_tables("arrow", folder, _saved_files(folder, source), {})
    return _open_folder(folder, source)


def _saved_files(folder: Folder, source: DataSource) -> list[str]:
    """Return the files of a set, or of one of the splits, that ``save_to_disk`` wrote.

    Raises:
        ValueError: there is no such split, or the set names what is no file of it.
    """
    state, below = SAVED[0], ""
    if not folder.has(state):
        end = f"/{state}"
        splits = [file.removesuffix(end) for file in folder.files if file.endswith(end)]
        below = choose_split(folder, splits, source.split) + "/"
    text = folder.read_text(below + state, MOST_BYTES_OF_STATE)
    where = f"{folder.path}/{below}{state}: _data_files"
    try:
        files = [below + of["filename"] for of in json.loads(text)["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{where} is missing; save the set again (save_to_disk)") from None
    if others := [file for file in files if file not in folder.files]:
        raise ValueError(
            f"{where} names {others[0].removeprefix(below)!r}, which is no file inside of "
            f"{folder.path}; save the set again (save_to_disk)"
        )
    return files


def _open_folder(folder: Folder, source: DataSource) -> Iterator[Any]:
    of_split, classes = read_subset(folder, source.subset, source.split)
    kind, files = _kind_of_files(of_split)
    described = [file for file in files if os.path.basename(file) in METADATA]
    is_local = not isinstance(folder, HubFolder)
    if is_local and kind in ("imagefolder", "json", "text") and not described:
        _refuse_pairs(folder, files)
    if kind in ("", "text"):
        such = f" (such as {of_split[0]})" if of_split else ""
        raise ValueError(
            f"{source.path} is a folder of {kind or 'other files'}{such}, and no set; "
            f"{CURE_OF_FOLDER}"
        )
    if kind in ("json", "csv"):
        return _rows_of_text(folder, files)
    if kind == "imagefolder":  # some say what is in its images
        if described:
            return _rows_of_metadata(folder, described)
        rows = [of for of in folder.files if "/" not in of and suffix_of(of) in OF_FILES]
        if rows:
            raise ValueError(
                f"{source.path} has {rows[0]} beside its images, and it is not known which of them "
                "are the set: name that file or the folder of the images, or move the file "
                "elsewhere"
            )
        return _rows_of_images(folder, files)
    return _rows_of_tables(kind, folder, files, classes)


def _kind_of_files(files: list[str]) -> tuple[str, list[str]]:
    """Return the most frequent kind, with its files; none if no file is of a known kind."""
    known = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}
    kinds = {file: known.get(suffix_of(file), "") for file in files}
    described = [file for file in files if os.path.basename(file) in METADATA]
    if "imagefolder" in kinds.values():
        kinds |= dict.fromkeys(described, "imagefolder")
    number = Counter(kind for kind in kinds.values() if kind)
    kind = max(KINDS, key=lambda kind: number[kind])  # the first of equals
    return (kind if number else ""), [file for file, of in kinds.items() if of == kind]


def _rows_of_images(folder: Folder, files: list[str]) -> Iterator[dict]:
    """Rows of images, with the names of their folders if these are several, side by side."""
    labels = {os.path.basename(os.path.dirname(file)) for file in files}
    has_labels = len(labels) > 1 and len({file.count("/") for file in files}) == 1
    for file in files:
        row = {"image": folder.local_path(file)}
        yield row | ({"label": os.path.basename(os.path.dirname(file))} if has_labels else {})


def _rows_of_metadata(folder: Folder, files: list[str]) -> Iterator[Any]:
    """Rows that say what is in images, which ``file_name`` names relative to their file."""
    for file in files:
        is_table = suffix_of(file) == ".parquet"
        rows = _rows_of_tables("parquet", folder, [file], {}) if is_table else None
        for row in rows or _rows_of_text(folder, [file]):
            if isinstance(row, RowProblem):
                yield row
                continue
            try:
                yield _with_image(row, folder, os.path.dirname(file))
            except ValueError as error:
                yield RowProblem(0, f"{folder.path}/{file}: {error}")


def _with_image(row: dict, folder: Folder, below: str) -> dict:
    if row.keys() >= {"file_name", "image"}:
        raise ValueError("file_name and image are both for the image: give one of them")
    made = {"image" if key == "file_name" else key: value for key, value in row.items()}
    if isinstance(name := row.get("file_name"), str):
        made["image"] = folder.local_path(os.path.join(below, name))
    return made


def _refuse_pairs(folder: Folder, files: list[str]) -> None:
    """Raise ``ValueError`` for images and texts that belong together by their names, 0.png and
    0.txt: datasets would read those of one kind and leave the others out."""
    there, pairs = {*folder.files}, []
    for file in files:
        stem = os.path.splitext(file)[0]
        image = next((stem + of for of in IMAGE_FILES if stem + of in there), None)
        text = next((stem + of for of in (".txt", ".json") if stem + of in there), None)
        if image is not None and text is not None:
            pairs.append((image, text))
    if 2 * len(pairs) < len(files) or not pairs:  # a note beside an image or two
        return
    image, text = pairs[0]
    if text.endswith(".json") and (len(files) == 1 or _is_row(folder, text)):
        return
    path, answer = shlex.quote(folder.path), "txt" if text.endswith(".txt") else "json.answer"
    raise ValueError(
        f"{folder.path} has {os.path.basename(image)} and {os.path.basename(text)}, an image and "
        "what is said of it, and datasets reads one of the two; make an archive of WebDataset of "
        "them: tar --sort=name -cf "
        f'{path}.tar -C {path} . (data.columns={{question: "...?", answer: {answer}, '
        f"image: {image.rpartition('.')[2]}}})"
    )


def _is_row(folder: Folder, file: str) -> bool:
    """Return whether a JSON file is a row of a known format, which names its images itself."""
    path = folder.local_path(file)
    rows = [row for _, row in read_text(DataSource(path), kind_of_file(Path(path)))]
    return bool(rows) and isinstance(rows[0], dict) and find_format(rows[0]) is not None


def _rows_of_text(folder: Folder, files: list[str]) -> Iterator[Any]:
    """Rows of several files; faults of their text name their file."""
    for file in files:
        path = folder.local_path(file)
        kind = kind_of_file(Path(path))
        for line, row in read_text(DataSource(path), kind):
            if isinstance(row, RowProblem):
                before = f"{path}:" if kind in OF_LINES else f"{path}, row "
                row = RowProblem(0, f"{before}{line}: {row.text}")
            elif not isinstance(row, dict):
                row = RowProblem(0, f"{path}: row {line} is no object")
            yield row


def _rows_of_tables(
    kind: str, folder: Folder, files: list[str], classes: Mapping[str, list[str]]
) -> Iterator[dict]:
    for file in files:
        yield from READERS[kind](folder.local_path(file), classes)


def _rows_of_parquet(path: str, classes: Mapping[str, list[str]]) -> Iterator[dict]:
    """Rows of Parquet, of which no more is in memory than a few rows and what encodes them.

    Raises:
        ValueError: it has columns in other files, or makes more of its bytes than data does.
    """
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path, memory_map=True)
    most = _require_own_data(path, metadata)
    at_once = min(max(MOST_BYTES_AT_ONCE // max(most, 1), 1), MOST_ROWS_AT_ONCE)
    columns = map(metadata.schema.column, range(metadata.num_columns))
    # As they are written: a list may have one text any number of times. In large row groups, which
    # a file of some bytes does not make, that would take time, and Arrow reads 2 GiB at most.
    in_lists = [
        of.path
        for of in columns
        if of.max_repetition_level and of.physical_type == "BYTE_ARRAY" and most <= MOST_REPEATED
    ]
    with pyarrow.parquet.ParquetFile(path, read_dictionary=in_lists, memory_map=True) as file:
        yield from _rows_of_batches(path, file.schema_arrow, file.iter_batches(at_once), classes)


def _require_own_data(path: str, metadata: Any) -> int:
    """Return how many bytes the largest row group has, unpacked."""
    size, largest = os.path.getsize(path), 0
    expected = "expected what data makes: write the table again, in smaller parts"
    most_values = max(MOST_VALUES, VALUES_A_BYTE * size)
    values: Counter[str] = Counter({"the rows": metadata.num_rows})
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        unpacked = 0
        for column in map(group.column, range(group.num_columns)):
            if column.file_path:
                raise ValueError(
                    f"{path}: the column {column.path_in_schema} is in another file, "
                    f"{column.file_path!r}; expected all of the table in one: write it again"
                )
            values[column.path_in_schema] += column.num_values
            unpacked += column.total_uncompressed_size
        if unpacked > max(MOST_BYTES_AT_ONCE, BYTES_A_BYTE * size):
            raise ValueError(
                f"{path} has {size:,} bytes, of which a row group makes {unpacked:,}; {expected}"
            )
        largest = max(largest, unpacked)
    [(name, number)] = values.most_common(1)
    if number > most_values:
        raise ValueError(
            f"{path} has {size:,} bytes, and {name} {number:,} values; at most {most_values:,} "
            f"are read; {expected}"
        )
    return largest


def _rows_of_arrow(path: str, classes: Mapping[str, list[str]]) -> Iterator[dict]:
    """Rows of Arrow, which stay where they are on the disk.

    Raises:
        ValueError: it is compressed, so that nothing bounds what it makes of its bytes.
    """
    import pyarrow

    with pyarrow.memory_map(path) as file:
        # Behind 8 bytes a file is a stream. What its footer says besides is not asked.
        begin = 8 if file.read(6) == b"ARROW1" else 0
        file.seek(begin)
        messages = iter(pyarrow.ipc.MessageReader.open_stream(file))
        if next(messages, None) is None or any(map(_is_compressed, messages)):
            raise ValueError(
                f"{path} is compressed or no stream of batches; expected Arrow as datasets writes "
                "it: make Parquet of it (pandas: read_feather(FILE).to_parquet(OTHER), polars: "
                "read_ipc(FILE).write_parquet(OTHER))"
            )
        file.seek(begin)
        table = pyarrow.ipc.open_stream(file)
        yield from _rows_of_batches(path, table.schema, _own_batches(path, table), classes)


def _is_compressed(message: Any) -> bool:
    """Return whether Arrow would unpack a batch. pyarrow does not show it: by Message.fbs it is
    field 3 of a batch, which is field 2 of its message, or field 1 of the dictionary there."""
    content = message.metadata.to_pybytes()

    def read(kind: str, at: int) -> int:
        return struct.unpack_from(kind, content, at)[0]

    def field(table: int, number: int) -> int:
        """Return where a field of a table of FlatBuffers is; 0, if the table has none."""
        fields, place = table - read("<i", table), 4 + 2 * number
        offset = read("<H", fields + place) if place < read("<H", fields) else 0
        return offset and table + offset

    def follow(at: int) -> int:
        return at + read("<I", at)

    batch = follow(field(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    return field(batch, 3) > 0 or OLD_COMPRESSION in content


def _own_batches(path: str, batches: Any) -> Iterator[Any]:
    """Yield batches that have no more rows than the file's bytes make, and whose offsets lead to
    their own bytes, which Arrow itself does not look at."""
    size, rows = os.path.getsize(path), 0
    most_rows = max(MOST_VALUES, VALUES_A_BYTE * size)
    for batch in batches:
        rows += batch.num_rows
        if rows > most_rows:
            raise ValueError(
                f"{path} has {size:,} bytes and {rows:,} rows or more; expected {most_rows:,} at "
                "most: write the table again, in smaller parts"
            )
        batch.validate(full=True)
        yield batch


def _rows_of_batches(
    path: str, schema: Any, batches: Any, classes: Mapping[str, list[str]]
) -> Iterator[dict]:
    if len({*schema.names}) < len(schema.names):
        raise ValueError(f"{path}: two columns have one name: {', '.join(schema.names)}")
    classes = {**classes, **_classes_of_schema(schema)}
    classes = {name: of for name, of in classes.items() if name in schema.names}
    number = 0
    for batch in batches:
        for row in _parts_of_batch(f"{path}, after row {number:,}", batch):
            number += 1
            for name, names in classes.items():
                row[name] = _name_of_class(f"{path}, row {number}: {name}", row[name], names)
            yield row


def _parts_of_batch(place: str, batch: Any) -> Iterator[dict]:
    """Rows as Python's objects, a few at a time, or one if they are large.

    Raises:
        ValueError: a row is too large. That is known before objects are made of it, for a file can
            repeat a value as often as it likes.
    """
    at, at_once = 0, MOST_ROWS_AT_ONCE
    while at < batch.num_rows:
        part = batch.slice(at, at_once)
        values, size = _measure(place, part.columns)
        limits = (
            ("values", values, MOST_VALUES),
            ("bytes", size, MOST_BYTES_AT_ONCE if at_once > 1 else MOST_BYTES),
        )
        large = [of for of in limits if of[1] > of[2]]
        if large and at_once > 1:
            at_once = 1
            continue
        for what, number, most in large:
            raise ValueError(f"{place}: a row has {number:,} {what}; expected {most:,} at most")
        yield from part.to_pylist()
        at += at_once


def _measure(place: str, columns: Sequence[Any]) -> tuple[int, int]:
    """Return how many values, and how many bytes of text, Python would have of some columns."""
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    arrays, values, size = [*columns], 0, 0
    while arrays:
        array = arrays.pop()
        array = array.storage if isinstance(array, pyarrow.ExtensionArray) else array
        of = array.type
        values = max(values, len(array))
        if is_dictionary := types.is_dictionary(of):
            of = of.value_type
        said = array.dictionary if is_dictionary else array
        if _is_text(of):
            lengths = pc.binary_length(said)
            size += pc.sum(lengths.take(array.indices) if is_dictionary else lengths).as_py() or 0
        elif types.is_string_view(of) or types.is_binary_view(of):  # views of one text, at most
            size += len(array) * said.get_total_buffer_size()
        elif types.is_primitive(of) or types.is_null(of) or types.is_decimal(of):
            pass
        elif is_dictionary:
            raise ValueError(f"{place}: values of the type {array.type} are not read")
        elif types.is_struct(of):
            arrays += array.flatten()
        elif types.is_map(of):
            arrays.append(array.cast(pyarrow.list_(of.field(0).type)))
        elif types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of):
            arrays.append(array.flatten())
        else:
            raise ValueError(f"{place}: values of the type {of} are not read")
    return values, size


def _is_text(of: Any) -> bool:
    from pyarrow import types

    is_text = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_of(of) for is_of in is_text) or types.is_fixed_size_binary(of)


def _classes_of_schema(schema: Any) -> dict[str, list[str]]:
    """Return the names of classes that ``datasets`` wrote into a table."""
    written = (schema.metadata or {}).get(b"huggingface")
    features = json.loads(written).get("info", {}).get("features", {}) if written else {}
    labels = {
        name: of.get("names")
        for name, of in (features or {}).items()
        if isinstance(of, dict) and of.get("_type") == "ClassLabel"
    }
    return {name: [*map(str, of)] for name, of in labels.items() if isinstance(of, list)}


def _name_of_class(place: str, value: Any, names: list[str]) -> Any:
    if not isinstance(value, int):  # null, or a name
        return value
    if not 0 <= value < len(names):
        raise ValueError(f"{place} is {value}; expected a class, from 0 to {len(names) - 1}")
    return names[value]


def _rows_of_archive(path: str, classes: Mapping[str, list[str]]) -> Iterator[dict]:
    """Rows of an archive of WebDataset: neighbors with one name, by what follows its first dot.

    Raises:
        ValueError: a file in it would be unpacked to a size that nothing bounds.
    """
    row: dict[str, Any] = {}
    names: dict[str, str] = {}
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # else it holds all of them
            if member.size < 0:  # and the next would be looked for before it, for ever
                raise ValueError(f"{path}: {member.name} has {member.size:,} bytes; expected 0 up")
            if member.issparse() or member.name.lower().endswith(COMPRESSED):
                raise ValueError(
                    f"{path}: {member.name} is sparse or compressed; expected files that are as "
                    "large as they say: unpack it, and make the archive again"
                )
            folder, name = os.path.split(member.name)
            stem, _, kind = name.partition(".")
            if not member.isfile() or not stem or not kind:
                continue
            if member.size > MOST_BYTES:
                told = f"{member.size:,} bytes; expected {MOST_BYTES:,} at most"
                raise ValueError(f"{path}: {member.name} has {told}")
            key = os.path.join(folder, stem)
            if row and names["__key__"] != key:
                yield row | names
                row = {}
            if kind in row:
                raise ValueError(f"{path}: {member.name} is there twice in one row")
            content = archive.extractfile(member)
            assert content is not None  # of a file
            row[kind] = _decoded(f"{path}: {member.name}", kind, content.read())
            names = {"__key__": key, "__url__": path}
    if row:
        yield row | names


def _decoded(place: str, kind: str, content: bytes) -> Any:
    decode = DECODERS.get(kind.rpartition(".")[2].lower())
    try:
        return decode(content) if decode else content
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} cannot be read: {error}") from None


READERS = {"parquet": _rows_of_parquet, "arrow": _rows_of_arrow, "webdataset": _rows_of_archive}


def _without_nulls(value: Any) -> Any:
    """A table has each key in each row, with null where a row has no such key."""
    if isinstance(value, dict):
        return {name: _without_nulls(of) for name, of in value.items() if of is not None}
    if isinstance(value, list):
        return [_without_nulls(of) for of in value]
    return value
