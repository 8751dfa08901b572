"""Rows that were read and measured, in memory-mapped Arrow files."""

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
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
        f"checked rows are stored in Arrow files, which needs pyarrow: "
        f"{pip_install('glm4v-patched[train]')}"
    ) from error

ROWS_PER_BATCH = 1000
SCHEMA = pa.schema(
    {
        "messages": pa.string(),  # JSON, because keys differ from row to row
        "images": pa.list_(pa.string()),  # paths, in order
        "source": pa.int32(),  # index of the source
        "line": pa.int64(),
        "text_digest": pa.binary(),  # sha256 of the messages without their images
        "tokens": pa.int32(),
        "position_ids": pa.int32(),
        "num_images": pa.int32(),
        "supervised": pa.int32(),
        "problem": pa.string(),
    }
)


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Some rows of a memory-mapped Arrow file.

    A pickle of this object contains only the path and the indices, so that processes share the
    pages of the file.

    Attributes:
        path: None for a temporary file, which disappears with this process.
        table: All rows of the file.
        indices: The indices of these rows in the file, in ascending order.
    """

    path: Path | None
    table: pa.Table
    indices: np.ndarray

    @classmethod
    def open(cls, path: Path, indices: np.ndarray | None = None) -> "StoredRows":
        """Return rows of a file; all if ``indices`` is None."""
        with path.open("rb") as file:
            rows = cls.map(file, path)
        return rows if indices is None else replace(rows, indices=indices)

    @classmethod
    def map(cls, file: Any, path: Path | None = None) -> "StoredRows":
        """Return all rows of an open file."""
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        table = pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()
        return cls(path, table, np.arange(len(table)))

    def __reduce__(self):
        assert self.path is not None, "rows must be written to a file before they are pickled"
        return StoredRows.open, (self.path, self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.table.slice(self.indices[row], 1).to_pylist()[0]

    def select(self, rows: Sequence[int] | np.ndarray) -> "StoredRows":
        """Return some of these rows. ``rows`` has their positions in this object, ascending."""
        return replace(self, indices=self.indices[rows])

    def batches(self, *names: str) -> Iterator[pa.RecordBatch]:
        """Yield these rows in batches, with only the named columns."""
        start = 0  # index of the batch's first row in the file
        for batch in self.table.select(names).to_batches():
            first, last = np.searchsorted(self.indices, (start, start + len(batch)))
            yield batch.take(pa.array(self.indices[first:last] - start))
            start += len(batch)


def store_rows(batches: Iterable[list[dict[str, Any]]], folder: Path | None) -> StoredRows:
    """Write batches of rows to a temporary file, and return the rows as stored there.

    Args:
        batches: Batches of rows with the keys of :data:`SCHEMA`.
        folder: Folder for the file. If it is not writable, the file is in the system's folder for
            temporary files, which may be in memory.
    """
    with TemporaryFile(dir=writable_folder(folder)) as file:
        write_rows(batches, file)
        file.flush()
        return StoredRows.map(file)


def interleave_rows(shards_by_source: Iterable[list[Path]], folder: Path | None) -> StoredRows:
    """Write the rows of sharded sources in order to a temporary file in ``folder``.

    Args:
        shards_by_source: The n files of each source. File k has every n-th row, starting with row
            k, in batches of equal size (:func:`write_rows`).
    """

    def batches() -> Iterator[pa.RecordBatch]:
        for paths in shards_by_source:
            shards = [StoredRows.open(path).table.to_batches() for path in paths]
            for group in zip_longest(*shards):  # one batch of each shard, while it has any
                present = [(k, batch) for k, batch in enumerate(group) if batch is not None]
                positions = [np.arange(len(batch)) * len(paths) + k for k, batch in present]
                joined = pa.Table.from_batches([batch for _, batch in present])
                order = np.argsort(np.concatenate(positions))
                yield from joined.take(order).to_batches()

    with TemporaryFile(dir=writable_folder(folder)) as file:
        _write_batches(batches(), file)
        file.flush()
        return StoredRows.map(file)


def writable_folder(folder: Path | None) -> Path | None:
    """Create a folder if it is missing, and return it; None if no file can be written to it."""
    if folder is None:
        return None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def write_rows(batches: Iterable[list[dict[str, Any]]], file: Any) -> None:
    """Write batches of rows with the keys of :data:`SCHEMA` to an open file."""
    _write_batches((pa.RecordBatch.from_pylist(batch, SCHEMA) for batch in batches), file)


def _write_batches(batches: Iterable[pa.RecordBatch], file: Any) -> None:
    with pa.ipc.new_stream(file, SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)


def write_stored(rows: StoredRows, path: Path) -> StoredRows:
    """Write rows to a new file atomically, and return the rows as stored there."""
    with open_atomically(path) as file:
        _write_batches(rows.batches(*SCHEMA.names), file)
    return read_stored(path, len(rows))


def read_stored(path: Path, num_rows: int) -> StoredRows:
    """Return the rows of a file that :func:`write_stored` wrote.

    Raises:
        ValueError: The file is missing, or does not contain ``num_rows`` rows.
    """
    try:
        rows = StoredRows.open(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise ValueError(f"{path} does not contain {num_rows:,} rows: {error}") from error
    if len(rows) != num_rows or rows.table.schema != SCHEMA:
        content = f"{len(rows):,} rows of {rows.table.column_names}"
        raise ValueError(f"{path} does not contain {num_rows:,} rows: it has {content}")
    return rows


def column_values(rows: StoredRows, name: str) -> np.ndarray:
    """Return the values of all rows in a numeric column: ``(rows,)``."""
    return rows.table.column(name).to_numpy()[rows.indices]


def iter_values(rows: StoredRows, *names: str) -> Iterator[tuple]:
    """Yield a tuple of each row's values in the named columns."""
    for batch in rows.batches(*names):
        yield from zip(*batch.to_pydict().values(), strict=True)


class ConversationDataset(Sequence):
    """A torch data set of conversations, each read from the disk on access.

    Args:
        order: Indices of rows, in the order of the samples; a row may occur several times.
    """

    def __init__(self, rows: StoredRows, order: np.ndarray):
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.order)

    @property
    def max_images(self) -> int:
        """The largest number of images in a conversation."""
        return int(column_values(self.rows, "num_images")[self.order].max(initial=0))

    def __getitem__(self, index):
        if isinstance(index, slice):
            return ConversationDataset(self.rows, self.order[index])
        row = self.rows.indices[self.order[index]]
        return json.loads(self.rows.table.column("messages")[int(row)].as_py())
