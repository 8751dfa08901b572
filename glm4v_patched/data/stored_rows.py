"""Rows as they were read and measured, in Arrow files of which nothing is held in memory."""

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from ..atomic import open_atomically
from ..terminal_text import pip_install

try:
    import pyarrow as pa
except ImportError as error:
    raise RuntimeError(
        f"rows are kept in Arrow files: {pip_install('glm4v-patched[train]')}"
    ) from error

ROWS_AT_ONCE = 1000
SCHEMA = pa.schema(
    {
        "messages": pa.string(),  # JSON, for keys differ from row to row
        "images": pa.list_(pa.string()),  # paths, in their order
        "source": pa.int32(),
        "line": pa.int64(),
        "digest": pa.binary(),  # sha256 of the messages without their images
        "positions": pa.int32(),
        "in_table": pa.int32(),
        "num_images": pa.int32(),
        "learned": pa.int32(),
        "fault": pa.string(),
    }
)


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows of an Arrow file, which is mapped: processes share its pages, and a pickle has its path.

    Attributes:
        path: None of a file without a name, which is gone with this process.
        numbers: Which rows of the file these are, in ascending order.
    """

    path: Path | None
    table: pa.Table
    numbers: np.ndarray

    @classmethod
    def open(cls, path: Path, numbers: np.ndarray | None = None) -> "StoredRows":
        with path.open("rb") as file:
            rows = cls.map(file, path)
        return rows if numbers is None else replace(rows, numbers=numbers)

    @classmethod
    def map(cls, file: Any, path: Path | None = None) -> "StoredRows":
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        table = pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()
        return cls(path, table, np.arange(len(table)))

    def __reduce__(self):
        assert self.path is not None, "rows of a check are written before processes have them"
        return StoredRows.open, (self.path, self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.table.slice(self.numbers[row], 1).to_pylist()[0]

    def select(self, rows: Sequence[int] | np.ndarray) -> "StoredRows":
        """Return some of the rows, which are named in ascending order."""
        return replace(self, numbers=self.numbers[rows])

    def batches(self, *names: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows with such columns, some at a time."""
        begin = 0
        for batch in self.table.select(names).to_batches():
            first, last = np.searchsorted(self.numbers, (begin, begin + len(batch)))
            yield batch.take(pa.array(self.numbers[first:last] - begin))
            begin += len(batch)


def store_rows(rows: Iterable[list[dict[str, Any]]], folder: Path | None) -> StoredRows:
    """Write rows, some at a time, to a file without a name.

    Args:
        rows: With the keys of :data:`SCHEMA`.
        folder: On the disk that takes the file; where it cannot be written, the system's for
            temporary files does, which may be memory.
    """
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = folder if folder.is_dir() and os.access(folder, os.W_OK) else None
    with TemporaryFile(dir=folder) as file:
        _write((pa.RecordBatch.from_pylist(some, SCHEMA) for some in rows), file)
        file.flush()
        return StoredRows.map(file)


def _write(batches: Iterable[pa.RecordBatch], file: Any) -> None:
    with pa.ipc.new_stream(file, SCHEMA) as target:
        for batch in batches:
            target.write_batch(batch)


def write_stored(rows: StoredRows, path: Path) -> StoredRows:
    """The same rows in a file of their own, which is whole or not there."""
    with open_atomically(path) as file:
        _write(rows.batches(*SCHEMA.names), file)
    return read_stored(path, len(rows))


def read_stored(path: Path, number: int) -> StoredRows:
    """The rows of a file of :func:`write_stored`, which are so many.

    Raises:
        ValueError: the file is not there, or does not hold them.
    """
    try:
        rows = StoredRows.open(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise ValueError(f"{path} does not hold {number:,} rows: {error}") from error
    if len(rows) != number or rows.table.schema != SCHEMA:
        has = f"{len(rows):,} rows of {rows.table.column_names}"
        raise ValueError(f"{path} does not hold {number:,} rows: it has {has}")
    return rows


def column(rows: StoredRows, name: str) -> np.ndarray:
    """The values of all rows, of a column of numbers."""
    return rows.table.column(name).to_numpy()[rows.numbers]


def values(rows: StoredRows, *names: str) -> Iterator[tuple]:
    """The values of each row in such columns."""
    for batch in rows.batches(*names):
        yield from zip(*batch.to_pydict().values(), strict=True)


class ConversationDataset(Sequence):
    """Conversations, each read from the disk when it is asked for: a data set for torch.

    Args:
        order: Which rows, in which order; a row may come several times.
    """

    def __init__(self, rows: StoredRows, order: np.ndarray):
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.order)

    @property
    def max_images(self) -> int:
        """Of one conversation."""
        return int(column(self.rows, "num_images")[self.order].max(initial=0))

    def __getitem__(self, index):
        if isinstance(index, slice):
            return ConversationDataset(self.rows, self.order[index])
        number = self.rows.numbers[self.order[index]]
        return json.loads(self.rows.table.column("messages")[int(number)].as_py())
