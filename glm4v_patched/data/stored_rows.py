"""Rows as they were read and measured, in Arrow files of which nothing is held in memory.

What was read once is kept in the user's cache folder, and is there at once when the same files are
checked for the same model again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from ..atomic import open_atomically
from ..terminal_text import pip_install

try:
    import datasets
    import pyarrow as pa
    from datasets import Dataset
except ImportError as error:
    raise RuntimeError(
        f"rows are kept in Arrow files: {pip_install('glm4v-patched[train]')}"
    ) from error

ROWS_AT_ONCE = 1000
SECONDS_KEPT = 30 * 24 * 3600
"""Of what no check has asked for since."""
FEATURES = datasets.Features(
    {
        "messages": datasets.Value("string"),  # JSON, for keys differ from row to row
        "pictures": datasets.List(datasets.Value("string")),  # paths, in their order
        "source": datasets.Value("int32"),
        "line": datasets.Value("int64"),
        "digest": datasets.Value("binary"),  # sha256 of the messages without their pictures
        "positions": datasets.Value("int32"),
        "in_table": datasets.Value("int32"),
        "images": datasets.Value("int32"),
        "learned": datasets.Value("int32"),
        "fault": datasets.Value("string"),
    }
)


def kept_rows(key: str, folder: Path) -> Dataset | None:
    """The rows that :func:`store_rows` kept by that key. What was damaged is removed, and what
    nobody asked for lately."""
    found = None
    for path in folder.glob("*.arrow"):
        with suppress(OSError):  # another check removes it, too
            if path.name.startswith(f"{key}-") and path.stem.endswith(_digest(path)):
                os.utime(path)
                found = Dataset.from_file(str(path))
            elif path.name.startswith(key) or path.stat().st_mtime < time.time() - SECONDS_KEPT:
                path.unlink()
    return found


def store_rows(
    rows: Iterable[list[dict[str, Any]]],
    folder: Path | None,
    key: str,
    is_kept: Callable[[Dataset], bool],
) -> Dataset:
    """Write rows, some at a time, to a file that is gone when nobody reads it any more.

    Args:
        rows: With the keys of ``FEATURES``.
        folder: For the file; where it cannot be written, the system's for temporary files is.
        key: By which :func:`kept_rows` finds the rows, if they are kept.
    """
    place = None  # /tmp may be memory
    with suppress(OSError):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            place = folder if os.access(folder, os.W_OK) else None
    with NamedTemporaryFile(dir=place, suffix=".arrow") as file:
        _write((pa.Table.from_pylist(some, FEATURES.arrow_schema) for some in rows), file)
        file.flush()
        stored = Dataset.from_file(file.name)
        if is_kept(stored) and place is not None:
            with suppress(OSError):  # another check keeps them, too; or links cannot be made
                os.link(file.name, place / f"{key}-{_digest(Path(file.name))}.arrow")
    return stored


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(tables: Iterable[pa.Table], file: Any) -> None:
    with pa.ipc.new_stream(file, FEATURES.arrow_schema) as target:
        for table in tables:
            target.write_table(table)


def write_stored(rows: Dataset, path: Path) -> Dataset:
    """The same rows in a file of their own, which is whole or not there."""
    with open_atomically(path) as file:
        columns = rows.select_columns([*FEATURES])
        _write(columns.with_format("arrow").iter(ROWS_AT_ONCE), file)
    return read_stored(path, len(rows))


def read_stored(path: Path, number: int) -> Dataset:
    """The rows of a file of :func:`write_stored`, which are so many.

    Raises:
        ValueError: the file is not there, or does not hold them.
    """
    try:
        rows = Dataset.from_file(str(path))
        if rows.features != FEATURES or len(rows) != number:
            raise ValueError(f"it has {len(rows):,} rows of {[*rows.features]}")
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise ValueError(f"{path} does not hold {number:,} rows: {error}") from error
    return rows


def column(rows: Dataset, name: str) -> np.ndarray:
    """The values of all rows, of a column of numbers."""
    table = rows.select_columns([name]).with_format("arrow")[:]
    return table.column(name).to_numpy()


def values(rows: Dataset, *names: str) -> Iterator[tuple]:
    """The values of each row in such columns."""
    for part in rows.select_columns([*names]).iter(ROWS_AT_ONCE):
        yield from zip(*part.values(), strict=True)


class Conversations(Sequence):
    """Conversations, each read from the disk when it is asked for: a data set for torch.

    Args:
        order: Which rows, in which order; a row may come several times.
    """

    def __init__(self, rows: Dataset, order: np.ndarray):
        self.rows, self.order = rows, order
        self.messages = rows.select_columns(["messages"])

    def __len__(self) -> int:
        return len(self.order)

    @property
    def most_images(self) -> int:
        """Of one conversation."""
        return int(column(self.rows, "images")[self.order].max(initial=0))

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Conversations(self.rows, self.order[index])
        return json.loads(self.messages[int(self.order[index])]["messages"])
