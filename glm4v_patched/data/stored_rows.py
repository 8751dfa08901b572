"""Rows in an Arrow file, which is read from the disk and not held in memory. Needs no torch."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
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
"""In each part of a file but the last."""
SCHEMA = pa.schema(
    {
        "messages": pa.string(),  # JSON, for keys differ from row to row
        "source": pa.int32(),
        "line": pa.int64(),
        "digest": pa.binary(32),
        "positions": pa.int32(),
        "in_table": pa.int32(),
        "images": pa.int32(),
        "learned": pa.int32(),
    }
)


class RowsWriter:
    """Writes a file of rows, a part at a time; of a row that is not measured, sizes are 0."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.number = 0
        self.file = pa.ipc.new_file(str(path), SCHEMA)

    def add(self, **values: Any) -> None:
        self.rows.append(values)
        self.number += 1
        if len(self.rows) == ROWS_AT_ONCE:
            self._write()

    def close(self) -> "StoredRows":
        if self.rows:
            self._write()
        self.file.close()
        return StoredRows(self.path)

    def _write(self) -> None:
        columns = [
            pa.array([row.get(field.name, 0) for row in self.rows], field.type) for field in SCHEMA
        ]
        self.file.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self.rows = []


class StoredRows:
    """The rows of a file; another process opens it for itself.

    Raises:
        ValueError: the file is not there, or is no such file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._open()

    def _open(self) -> None:
        try:
            self.file = pa.ipc.open_file(pa.memory_map(str(self.path)))
            if self.file.schema != SCHEMA:
                raise ValueError("its columns are others")
        except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
            raise ValueError(f"{self.path} does not hold the rows: {error}") from error
        # A row is found by its number alone, for all parts but the last have so many rows.
        parts = self.file.num_record_batches
        first, last = (self.file.get_batch(n).num_rows if parts else 0 for n in (0, parts - 1))
        self.rows_of_part = first or 1
        self.number = max(parts - 1, 0) * first + last

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path
        self._open()

    def __len__(self) -> int:
        return self.number

    def messages(self, row: int) -> list[dict]:
        part = self.file.get_batch(row // self.rows_of_part)
        return json.loads(part.column(0)[row % self.rows_of_part].as_py())

    def column(self, name: str) -> np.ndarray:
        """The values of all rows; of "digest", ``(rows, 32)`` bytes."""
        parts = [self.file.get_batch(n).column(name) for n in range(self.file.num_record_batches)]
        if name == "digest":
            arrays = [
                np.frombuffer(part.buffers()[1], np.uint8)[: len(part) * 32] for part in parts
            ]
            return np.concatenate([np.empty(0, np.uint8), *arrays]).reshape(-1, 32)
        empty = np.empty(0, SCHEMA.field(name).type.to_pandas_dtype())
        return np.concatenate([empty, *(part.to_numpy() for part in parts)])

    def parts(self) -> Iterator[tuple[int, dict[str, list]]]:
        """The number of the first row of each part, and its columns; messages as their JSON."""
        for number in range(self.file.num_record_batches):
            yield number * self.rows_of_part, self.file.get_batch(number).to_pydict()

    def move(self, path: Path) -> "StoredRows":
        """The same rows in another place, where they stay."""
        if os.path.abspath(path) == os.path.abspath(self.path):
            return self
        # Copied, for they may lie on another disk; who made the first file removes it.
        with open(self.path, "rb") as source, open_atomically(path) as target:
            shutil.copyfileobj(source, target, 2**24)
        return StoredRows(path)


class Conversations(Sequence):
    """Conversations, each read from the disk when it is asked for: a data set for torch.

    Args:
        order: Which rows, in which order; a row may come several times.
    """

    def __init__(self, rows: StoredRows, order: np.ndarray):
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.order)

    @property
    def most_images(self) -> int:
        """Of one conversation."""
        return int(self.rows.column("images")[self.order].max(initial=0))

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Conversations(self.rows, self.order[index])
        return self.rows.messages(int(self.order[index]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of any list
