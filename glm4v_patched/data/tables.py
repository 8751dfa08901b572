"""Rows of tables: Parquet, Arrow, WebDataset archives, folders and data sets of the Hub.

This module reads a few rows at a time and does not decode images. The library ``datasets`` is not
used. It opens every file that a folder's card names, even outside of the folder (:mod:`folders`),
and decodes a complete row group at once.
"""

import json
import os
import shlex
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..terminal_text import pip_install
from .cards import MAX_NESTING, choose_split, read_subset
from .columns import EMPTY_CELL, IMAGE_SUFFIXES
from .folders import Folder, HubFolder
from .formats import find_format
from .source import (
    COMPRESSED_SUFFIXES,
    CSV_SUFFIXES,
    DATA_SUFFIXES,
    FOLDER_CURE,
    STATE_FILE,
    DataSource,
    is_saved_to_disk,
    suffix_of,
)
from .text_rows import LINE_KINDS, NumberedRows, RowProblem, file_kind, read_text

FOLDER_KINDS = {
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "webdataset": (".tar",),
    "json": (".jsonl", ".json"),
    "csv": CSV_SUFFIXES,
    "imagefolder": IMAGE_SUFFIXES,
    "text": (".txt",),
}
"""Suffixes of the files in each kind of folder. A folder has the kind that most of its files have;
on ties, the first of these kinds in this table."""
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of files with the rows of an image folder."""
MAX_ROWS_PER_READ = 64
MAX_BYTES_PER_READ = 2**27  # as Python objects; a larger row is read alone
MAX_DICTIONARY_BYTES = 2**22
"""In row groups up to this size, texts in lists are read as Arrow's dictionary arrays."""
MAX_ROW_BYTES = 2**30
"""Limit of a row; one image in it may have half as much (:data:`decoding.MAX_IMAGE_BYTES`)."""
MAX_ROW_VALUES = 2**24
"""Limit on the values of one column in one row, which may be a list."""
MAX_VALUES_PER_BYTE, MAX_EXPANSION = 64, 256
"""Limits per byte of a file: on the values of a column with over :data:`MAX_ROW_VALUES` values, and
on unpacked bytes. Only files that repeat values many times exceed them."""
MAX_FOOTER_ITEMS = 10_000
"""Limit on each list in the footer of a Parquet file. pyarrow before 26 builds the schema
recursively in C, and at between 10,000 and 20,000 levels this overflows a stack of 8 MiB and ends
the process."""
MAX_STATE_BYTES = 2**24  # of a state.json, which save_to_disk writes
NO_LINE = 0  # of a RowProblem whose number read_table() sets
ARROW_0_17_COMPRESSION = b"ARROW:experimental_compression"  # key of a message's custom metadata
END_OF_ARROW_STREAM = struct.pack("<iI", -1, 0)
"""Bytes that datasets and pyarrow write when they close a file. pyarrow also reads files without
them, which may be cut."""
ClassNames = Mapping[str, list[str]]
"""The names of the classes of columns of labels, by column; a label is an index of this list."""
ARCHIVE_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), lambda content: content.decode()),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
}
"""Functions that decode files of WebDataset archives, by suffix; other files stay bytes."""


def read_table(source: DataSource) -> NumberedRows:
    """Yield pairs of a row's number (from 1) and its values by column.

    :data:`columns.EMPTY_CELL` replaces null, and the name of a class replaces its number. Images
    stay bytes or paths.

    Raises:
        ValueError: There is no such table, or it cannot be read.
        RuntimeError: pyarrow is missing.
    """
    with _name_source_in_errors(source):
        for number, row in enumerate(_open_source(source), start=1):
            if isinstance(row, RowProblem):
                yield number, row._replace(line=number)
                continue
            cells = {key: EMPTY_CELL if value is None else value for key, value in row.items()}
            yield number, _without_nulls(cells)


@contextmanager
def _name_source_in_errors(source: DataSource) -> Iterator[None]:
    """Raise errors of reading a source as ``ValueError`` with the source's path."""
    try:
        yield
    except ImportError as error:
        raise RuntimeError(f"{source.path} needs pyarrow: {pip_install('pyarrow')}") from error
    except Exception as error:  # pyarrow, tarfile and the Hub's client raise many kinds
        if str(error).startswith(source.path):
            raise
        raise ValueError(f"{source.path} cannot be read: {error}") from error


def _open_source(source: DataSource) -> Iterator[Any]:
    """Return an iterator over the rows of a source, each a dict or a :class:`RowProblem`."""
    path = Path(source.path)
    if path.is_file():
        kind = {".arrow": "arrow", ".tar": "webdataset"}.get(suffix_of(path), "parquet")
        with path.open("rb") as file:
            kind = "arrow" if file.read(6) == b"ARROW1" else kind
        return TABLE_READERS[kind](source.path, {})
    folder = Folder(source.path) if path.exists() else HubFolder(source.path, source.revision)
    if is_saved_to_disk(source.path):
        return _rows_of_tables("arrow", folder, _saved_files(folder, source), {})
    return _open_folder(folder, source)


def _saved_files(folder: Folder, source: DataSource) -> list[str]:
    """Return the files that ``save_to_disk`` wrote for a data set, or for one of its splits.

    Raises:
        ValueError: There is no such split, or ``state.json`` names a file that the folder lacks.
    """
    prefix = ""
    if not folder.has(STATE_FILE):
        suffix = f"/{STATE_FILE}"
        splits = [file.removesuffix(suffix) for file in folder.files if file.endswith(suffix)]
        prefix = choose_split(folder, splits, source.split) + "/"
    text = folder.read_text(prefix + STATE_FILE, MAX_STATE_BYTES)
    location = f"{folder.path}/{prefix}{STATE_FILE}: _data_files"
    try:
        files = [prefix + item["filename"] for item in json.loads(text)["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{location} is missing; save the data set again (save_to_disk)") from None
    if missing := [file for file in files if file not in folder.files]:
        raise ValueError(
            f"{location} names {missing[0].removeprefix(prefix)!r}, which is not a file inside of "
            f"{folder.path}; save the data set again (save_to_disk)"
        )
    return files


def _open_folder(folder: Folder, source: DataSource) -> Iterator[Any]:
    """Return an iterator over the rows of a folder of data files or images."""
    split_files, class_names = read_subset(folder, source.subset, source.split)
    kind, files = _kind_of_files(split_files)
    metadata_files = [file for file in files if os.path.basename(file) in METADATA_FILES]
    is_local = not isinstance(folder, HubFolder)
    if is_local and kind in ("imagefolder", "json", "text") and not metadata_files:
        _refuse_image_text_pairs(folder, files)
    if kind in ("", "text"):
        example = f" (such as {split_files[0]})" if split_files else ""
        raise ValueError(
            f"{source.path} is a folder of {kind or 'other'} files{example}, not a data set; "
            f"{FOLDER_CURE}"
        )
    if kind in ("json", "csv"):
        return _rows_of_text(folder, files)
    if kind == "imagefolder":
        if metadata_files:
            return _rows_of_metadata(folder, metadata_files)
        in_root = (file for file in folder.files if "/" not in file)
        data_files = [file for file in in_root if suffix_of(file) in DATA_SUFFIXES]
        if data_files:
            raise ValueError(
                f"{source.path} has {data_files[0]} beside its images, and either may be the data "
                "set: name that file or the folder of the images, or move the file elsewhere"
            )
        return _rows_of_images(folder, files)
    return _rows_of_tables(kind, folder, files, class_names)


def _kind_of_files(files: list[str]) -> tuple[str, list[str]]:
    """Return the most frequent kind of the files (:data:`FOLDER_KINDS`), and its files. The kind is
    empty if no file has a known one."""
    by_suffix = {suffix: kind for kind, suffixes in FOLDER_KINDS.items() for suffix in suffixes}
    kinds = {file: by_suffix.get(suffix_of(file), "") for file in files}
    metadata_files = [file for file in files if os.path.basename(file) in METADATA_FILES]
    if "imagefolder" in kinds.values():
        kinds |= dict.fromkeys(metadata_files, "imagefolder")
    counts = Counter(kind for kind in kinds.values() if kind)
    kind = max(FOLDER_KINDS, key=lambda kind: counts[kind])  # the first on ties
    return (kind if counts else ""), [file for file in files if kinds[file] == kind]


def _rows_of_images(folder: Folder, files: list[str]) -> Iterator[dict]:
    """Yield a row for each image. If the images are in several folders side by side, the column
    ``label`` has the name of the image's folder."""
    labels = {os.path.basename(os.path.dirname(file)) for file in files}
    has_labels = len(labels) > 1 and len({file.count("/") for file in files}) == 1
    for file in files:
        row = {"image": folder.local_path(file)}
        yield row | ({"label": os.path.basename(os.path.dirname(file))} if has_labels else {})


def _rows_of_metadata(folder: Folder, files: list[str]) -> Iterator[Any]:
    """Yield the rows of metadata files, with the path of the image in place of ``file_name``, which
    is relative to the folder of the metadata file."""
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
                yield RowProblem(NO_LINE, f"{folder.path}/{file}: {error}")


def _with_image(row: dict, folder: Folder, subfolder: str) -> dict:
    if row.keys() >= {"file_name", "image"}:
        raise ValueError("has both file_name and image: keep one of them")
    result = {"image" if key == "file_name" else key: value for key, value in row.items()}
    if isinstance(name := row.get("file_name"), str):
        result["image"] = folder.local_path(os.path.join(subfolder, name))
    return result


def _refuse_image_text_pairs(folder: Folder, files: list[str]) -> None:
    """Raise ``ValueError`` if at least half of the files belong to a pair of an image and a text of
    the same name (0.png, 0.txt): only one file of the pair would be read."""
    paths = {*folder.files}
    pairs = []
    for file in files:
        stem = os.path.splitext(file)[0]
        image = next((stem + suffix for suffix in IMAGE_SUFFIXES if stem + suffix in paths), None)
        text = next((stem + suffix for suffix in (".txt", ".json") if stem + suffix in paths), None)
        if image is not None and text is not None:
            pairs.append((image, text))
    if 2 * len(pairs) < len(files) or not pairs:  # the texts may be a few notes beside images
        return
    image, text = pairs[0]
    if text.endswith(".json") and (len(files) == 1 or _contains_row(folder, text)):
        return
    path = shlex.quote(folder.path)
    answer = "txt" if text.endswith(".txt") else "json.answer"
    raise ValueError(
        f"{folder.path} has {os.path.basename(image)} and {os.path.basename(text)}, an image and "
        "its text, of which only one would be read; make a WebDataset archive of them: "
        f"tar --sort=name -cf {path}.tar -C {path} . "
        f'(data.columns={{question: "...?", answer: {answer}, '
        f"image: {image.rpartition('.')[2]}}})"
    )


def _contains_row(folder: Folder, file: str) -> bool:
    """Return whether a JSON file begins with a row of a known format, which names its images."""
    path = folder.local_path(file)
    rows = [row for _, row in read_text(DataSource(path), file_kind(Path(path)))]
    return bool(rows) and isinstance(rows[0], dict) and find_format(rows[0]) is not None


def _rows_of_text(folder: Folder, files: list[str]) -> Iterator[Any]:
    """Yield the rows of several text files. The problem of a row begins with its file and line."""
    for file in files:
        path = folder.local_path(file)
        kind = file_kind(Path(path))
        for line, row in read_text(DataSource(path), kind):
            if isinstance(row, RowProblem):
                prefix = f"{path}:" if kind in LINE_KINDS else f"{path}, row "
                row = RowProblem(NO_LINE, f"{prefix}{line}: {row.text}")
            elif not isinstance(row, dict):
                row = RowProblem(NO_LINE, f"{path}: row {line} is not an object")
            yield row


def _rows_of_tables(
    kind: str, folder: Folder, files: list[str], class_names: ClassNames
) -> Iterator[dict]:
    for file in files:
        yield from TABLE_READERS[kind](folder.local_path(file), class_names)


def _rows_of_parquet(path: str, class_names: ClassNames) -> Iterator[dict]:
    """Yield the rows of a Parquet file, of which only a few are in memory at a time.

    Raises:
        ValueError: The file has columns in other files, or unpacks to more than real data does.
    """
    import pyarrow.parquet

    open_file = partial(
        pyarrow.parquet.ParquetFile,
        path,
        memory_map=True,
        thrift_container_size_limit=MAX_FOOTER_ITEMS,
    )
    try:
        with open_file() as file:
            metadata = file.metadata
    except OSError as error:
        if "size limit" not in str(error):
            raise
        raise ValueError(
            f"{path} has over {MAX_FOOTER_ITEMS:,} levels, columns or row groups, which is the "
            "limit: write the table again, in larger row groups or fewer columns"
        ) from None
    group_bytes = _check_parquet_size(path, metadata)
    # No row is larger than the largest row group, so this many rows stay below the limit.
    batch_size = min(max(MAX_BYTES_PER_READ // max(group_bytes, 1), 1), MAX_ROWS_PER_READ)
    columns = [*map(metadata.schema.column, range(metadata.num_columns))]
    levels = max((column.path.count(".") for column in columns), default=0)
    if levels > MAX_NESTING:
        raise ValueError(
            f"{path} has a column of {levels:,} levels; expected at most {MAX_NESTING}: write the "
            "table again, with text in place of such values"
        )
    # A small file may repeat a text in lists without limit, so these texts are read as dictionary
    # arrays, which contain each text once. For large row groups, dictionary arrays are slower, and
    # Arrow reads at most 2 GiB of them.
    dictionary_columns = []
    if group_bytes <= MAX_DICTIONARY_BYTES:
        dictionary_columns = [
            column.path
            for column in columns
            if column.max_repetition_level and column.physical_type == "BYTE_ARRAY"
        ]
    with open_file(read_dictionary=dictionary_columns) as file:
        batches = file.iter_batches(batch_size)
        yield from _rows_of_batches(path, file.schema_arrow, batches, class_names)


def _check_parquet_size(path: str, metadata: Any) -> int:
    """Return the unpacked size of the largest row group, in bytes; raise ``ValueError`` if a file
    of this size cannot contain so much real data."""
    size, largest_group = os.path.getsize(path), 0
    cure = "real data does not compress so well: write the table again, in smaller parts"
    max_values = max(MAX_ROW_VALUES, MAX_VALUES_PER_BYTE * size)
    num_values: Counter[str] = Counter({"the rows": metadata.num_rows})  # and of each column
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        unpacked = 0
        for column in map(group.column, range(group.num_columns)):
            if column.file_path:
                raise ValueError(
                    f"{path}: the column {column.path_in_schema} is in another file, "
                    f"{column.file_path!r}; expected the whole table in one file: write it again"
                )
            num_values[column.path_in_schema] += column.num_values
            unpacked += column.total_uncompressed_size
        if unpacked > max(MAX_BYTES_PER_READ, MAX_EXPANSION * size):
            raise ValueError(
                f"{path} has {size:,} bytes, and a row group unpacks to {unpacked:,}; {cure}"
            )
        largest_group = max(largest_group, unpacked)
    [(name, highest)] = num_values.most_common(1)
    if highest > max_values:
        raise ValueError(
            f"{path} has {size:,} bytes, and {highest:,} values of {name}; expected at most "
            f"{max_values:,}: {cure}"
        )
    return largest_group


def _rows_of_arrow(path: str, class_names: ClassNames) -> Iterator[dict]:
    """Yield the rows of a memory-mapped Arrow file.

    Raises:
        ValueError: The file is cut; or it is compressed, which would not limit its unpacked size.
    """
    import pyarrow

    with pyarrow.memory_map(path) as file:
        # An Arrow file consists of 8 bytes, a stream and a footer, which is not read.
        start = 8 if file.read(6) == b"ARROW1" else 0
        file.seek(start)
        messages = iter(pyarrow.ipc.MessageReader.open_stream(file))
        if next(messages, None) is None or any(map(_is_compressed, messages)):
            raise ValueError(
                f"{path} is compressed or not a stream of batches; expected Arrow as datasets "
                "writes it: convert it to Parquet (pandas: read_feather(FILE).to_parquet(OTHER), "
                "polars: read_ipc(FILE).write_parquet(OTHER))"
            )
        end = file.tell()
        file.seek(end - len(END_OF_ARROW_STREAM))
        if file.read(len(END_OF_ARROW_STREAM)) != END_OF_ARROW_STREAM:
            raise ValueError(
                f"{path} ends at byte {end:,} without Arrow's end of a stream, so it may be cut; "
                "make or download it again"
            )
        file.seek(start)
        stream = pyarrow.ipc.open_stream(file)
        batches = _validated_batches(path, stream)
        yield from _rows_of_batches(path, stream.schema, batches, class_names)


def _is_compressed(message: Any) -> bool:
    """Return whether the batch in an Arrow message is compressed.

    pyarrow does not expose it, so the FlatBuffers tables of the message are read. In Arrow's
    Message.fbs, field 2 of a message is a record batch or a dictionary batch, field 1 of a
    dictionary batch is its record batch, and field 3 of a record batch is its compression.
    """
    content = message.metadata.to_pybytes()

    def read(format_code: str, position: int) -> int:
        return struct.unpack_from(format_code, content, position)[0]

    def field(table: int, number: int) -> int:
        """Return the position of a field of the table at ``table``; 0 if the table lacks it."""
        vtable, slot = table - read("<i", table), 4 + 2 * number
        offset = read("<H", vtable + slot) if slot < read("<H", vtable) else 0
        return offset and table + offset

    def follow(position: int) -> int:
        """Return the position to which the offset at ``position`` points."""
        return position + read("<I", position)

    batch = follow(field(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    return field(batch, 3) > 0 or ARROW_0_17_COMPRESSION in content


def _validated_batches(path: str, batches: Any) -> Iterator[Any]:
    """Yield batches after checks that Arrow does not make when it reads.

    Raises:
        ValueError: There are too many rows for a file of this size, or a batch is invalid, for
            example because it has offsets outside of its buffers.
    """
    file_bytes, num_rows = os.path.getsize(path), 0
    max_rows = max(MAX_ROW_VALUES, MAX_VALUES_PER_BYTE * file_bytes)
    for batch in batches:
        num_rows += batch.num_rows
        if num_rows > max_rows:
            raise ValueError(
                f"{path} has {file_bytes:,} bytes and {num_rows:,} rows or more; expected at most "
                f"{max_rows:,}: write the table again, in smaller parts"
            )
        batch.validate(full=True)
        yield batch


def _rows_of_batches(
    path: str, schema: Any, batches: Any, class_names: ClassNames
) -> Iterator[dict]:
    if len({*schema.names}) < len(schema.names):
        raise ValueError(f"{path}: two columns have the same name: {', '.join(schema.names)}")
    class_names = {**class_names, **_class_names_of_schema(schema)}
    class_names = {column: names for column, names in class_names.items() if column in schema.names}
    row_number = 0
    for batch in batches:
        for row in _rows_of_batch(f"{path}, after row {row_number:,}", batch):
            row_number += 1
            for column, names in class_names.items():
                location = f"{path}, row {row_number}: {column}"
                row[column] = _name_of_class(location, row[column], names)
            yield row


def _rows_of_batch(location: str, batch: Any) -> Iterator[dict]:
    """Yield rows as Python objects. A few rows are converted at a time, or only one if they are
    large.

    Raises:
        ValueError: A row is too large. This is checked before the conversion, because a small file
            can repeat a value without limit.
    """
    start, length = 0, MAX_ROWS_PER_READ
    while start < batch.num_rows:
        rows = batch.slice(start, length)
        num_values, num_bytes = _count_values_and_bytes(location, rows.columns)
        max_bytes = MAX_BYTES_PER_READ if length > 1 else MAX_ROW_BYTES
        excess = ""
        if num_values > MAX_ROW_VALUES:
            excess = f"{num_values:,} values; expected at most {MAX_ROW_VALUES:,}"
        elif num_bytes > max_bytes:
            excess = f"{num_bytes:,} bytes; expected at most {max_bytes:,}"
        if excess and length > 1:
            length = 1
            continue
        if excess:
            raise ValueError(f"{location}: a row has {excess}")
        yield from rows.to_pylist()
        start += length


def _count_values_and_bytes(location: str, columns: Sequence[Any]) -> tuple[int, int]:
    """Return the length of the longest array among columns and the arrays in them, and the bytes
    that all texts and binary values take as Python objects."""
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    arrays, longest, size = [*columns], 0, 0
    while arrays:
        array = arrays.pop()
        array = array.storage if isinstance(array, pyarrow.ExtensionArray) else array
        dtype = array.type
        longest = max(longest, len(array))
        if is_dictionary := types.is_dictionary(dtype):
            dtype = dtype.value_type
        dictionary_or_array = array.dictionary if is_dictionary else array
        if _is_text_type(dtype):
            lengths = pc.binary_length(dictionary_or_array)
            size += pc.sum(lengths.take(array.indices) if is_dictionary else lengths).as_py() or 0
        elif types.is_string_view(dtype) or types.is_binary_view(dtype):  # upper bound
            size += len(array) * dictionary_or_array.get_total_buffer_size()
        elif types.is_primitive(dtype) or types.is_null(dtype) or types.is_decimal(dtype):
            pass
        elif is_dictionary:
            raise ValueError(f"{location}: values of the type {array.type} are not supported")
        elif types.is_struct(dtype):
            arrays += array.flatten()
        elif types.is_map(dtype):
            arrays.append(array.cast(pyarrow.list_(dtype.field(0).type)))
        elif types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype):
            arrays.append(array.flatten())
        else:
            raise ValueError(f"{location}: values of the type {dtype} are not supported")
    return longest, size


def _is_text_type(dtype: Any) -> bool:
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(dtype) for test in tests) or types.is_fixed_size_binary(dtype)


def _class_names_of_schema(schema: Any) -> dict[str, list[str]]:
    """Return the class names that ``datasets`` wrote into a table, by column."""
    metadata = (schema.metadata or {}).get(b"huggingface")  # JSON
    features = json.loads(metadata).get("info", {}).get("features", {}) if metadata else {}
    labels = {
        column: feature.get("names")
        for column, feature in (features or {}).items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }
    return {c: [*map(str, names)] for c, names in labels.items() if isinstance(names, list)}


def _name_of_class(location: str, value: Any, names: list[str]) -> Any:
    if not isinstance(value, int):  # null, or already a name
        return value
    if not 0 <= value < len(names):
        raise ValueError(f"{location} is {value}; expected a class from 0 to {len(names) - 1}")
    return names[value]


def _rows_of_archive(path: str, class_names: ClassNames) -> Iterator[dict]:
    """Yield the rows of a WebDataset archive.

    A row consists of successive files whose paths are equal up to the first dot of their names. Its
    columns are the suffixes of these files.

    Raises:
        ValueError: A file in it is too large, or its unpacked size is not known.
    """
    row: dict[str, Any] = {}
    tool_columns: dict[str, str] = {}
    end = 0  # archive.offset may lie beyond a damaged header
    with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            end = archive.offset
            archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all in memory
            if member.size < 0:  # tarfile would go back in the file, without end
                raise ValueError(
                    f"{path}: {member.name} has {member.size:,} bytes; expected 0 or more"
                )
            if member.issparse() or member.name.lower().endswith(COMPRESSED_SUFFIXES):
                raise ValueError(
                    f"{path}: {member.name} is sparse or compressed, so that its size is unknown: "
                    "unpack it, and make the archive again"
                )
            folder, name = os.path.split(member.name)
            stem, _, suffix = name.partition(".")
            if not member.isfile() or not stem or not suffix:
                continue
            if member.size > MAX_ROW_BYTES:
                raise ValueError(
                    f"{path}: {member.name} has {member.size:,} bytes; expected at most "
                    f"{MAX_ROW_BYTES:,}"
                )
            key = os.path.join(folder, stem)
            if row and tool_columns["__key__"] != key:
                yield row | tool_columns
                row = {}
            if suffix in row:
                raise ValueError(f"{path}: {member.name} occurs twice in one row")
            content = archive.extractfile(member)
            assert content is not None  # it is a file
            row[suffix] = _decode_member(f"{path}: {member.name}", suffix, content.read())
            tool_columns = {"__key__": key, "__url__": path}
        _check_end_of_archive(file, end)
    if row:
        yield row | tool_columns


def _check_end_of_archive(file: BinaryIO, offset: int) -> None:
    """Raise ``ValueError`` if other bytes than zeros follow the files of an archive.

    tarfile stops without an error at a damaged header, where an archive is cut, and between
    archives that were joined.
    """
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE or any(block):
        raise ValueError(
            f"{file.name}: neither a file nor the end of the archive is at byte {offset:,}: the "
            "archive is cut or damaged; make or download it again"
        )
    while block := file.read(2**16):
        if block.strip(b"\0"):
            raise ValueError(
                f"{file.name}: other bytes follow the end of the archive at byte {offset:,}; if "
                "archives were joined with cat, join them with tar --concatenate"
            )


def _decode_member(location: str, suffix: str, content: bytes) -> Any:
    decode = ARCHIVE_DECODERS.get(suffix.rpartition(".")[2].lower())
    try:
        return decode(content) if decode else content
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{location} cannot be read: {error}") from None


TABLE_READERS = {
    "parquet": _rows_of_parquet,
    "arrow": _rows_of_arrow,
    "webdataset": _rows_of_archive,
}


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys in it whose value is null. A table has null for keys that are
    missing, because all objects of a column have the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
