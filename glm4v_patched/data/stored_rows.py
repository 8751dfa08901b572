"""Rows as they were read and measured, in Arrow files that the library ``datasets`` writes.

They are read from the disk and not held in memory. What was read once is kept in the user's cache
folder, and is there at once when the same files are checked for the same model again.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
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
CHECKING = "glm4v-checking-"
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


class _Generator:
    """What ``datasets`` calls for the rows. It would pickle all that belongs to a function."""

    def __init__(self, rows: Callable[[], Iterator[dict[str, Any]]] | None = None):
        self.rows = rows

    def __call__(self) -> Iterator[dict[str, Any]]:
        assert self.rows is not None
        return self.rows()

    def __reduce__(self) -> tuple:
        return _Generator, ()


def store_rows(
    rows: Callable[[], Iterator[dict[str, Any]]], key: Any, folder: Path | None
) -> tuple[Dataset, TemporaryDirectory | None]:
    """Write rows to a file of a temporary folder, or take the one that :func:`keep_rows` kept.

    Args:
        rows: Makes them, with the keys of ``FEATURES``.
        key: JSON values on which all of the rows depend; None, if that is not known.
        folder: Of files that are kept. Where it cannot be written, the system's takes the rows.

    Returns:
        The rows, and the temporary folder that holds them; None for rows that were kept.
    """
    if folder is not None and _can_be_written(folder):
        _remove_old(folder)
        for path in _kept(key, folder):
            if path.stem.endswith(_digest(path)):
                with suppress(OSError):
                    os.utime(path)
                    return Dataset.from_file(str(path)), None
            path.unlink(missing_ok=True)  # it was damaged
    else:
        folder = None
    try:
        workplace = TemporaryDirectory(prefix=CHECKING, dir=folder)  # /tmp may be memory
    except OSError:
        workplace = TemporaryDirectory(prefix=CHECKING)
    with _without_bars():
        try:
            stored = Dataset.from_generator(_Generator(rows), FEATURES, cache_dir=workplace.name)
        except datasets.exceptions.DatasetGenerationError as error:
            raise error.__cause__ or error from None
    return stored, workplace


def keep_rows(rows: Dataset, key: Any, folder: Path) -> None:
    """Keep the file of rows for who has an equal key, whole or not at all; nothing may be wrong
    with them, and nothing have changed on which they depend. Where links cannot be made, nothing is
    kept."""
    path = Path(rows.cache_files[0]["filename"])
    with suppress(OSError):
        os.link(path, folder / f"{_name_of(key)}-{_digest(path)}.arrow")


def forget_rows(key: Any, folder: Path) -> None:
    """Have rows read anew next time; those that are open stay readable."""
    for path in _kept(key, folder):
        path.unlink(missing_ok=True)


def _kept(key: Any, folder: Path) -> list[Path]:
    return [] if key is None else [*folder.glob(f"{_name_of(key)}-*.arrow")]


def _name_of(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _remove_old(folder: Path) -> None:
    """What no check has asked for lately, and what killed ones left."""
    for path in (*folder.glob("*.arrow"), *folder.glob(f"{CHECKING}*")):
        with suppress(OSError):  # another check removes it, too
            if path.lstat().st_mtime < time.time() - SECONDS_KEPT:
                path.unlink() if path.suffix == ".arrow" else shutil.rmtree(path)


@contextmanager
def _without_bars() -> Iterator[None]:
    were_disabled = datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.utils.enable_progress_bars()


def read_stored(path: Path, number: int) -> Dataset:
    """The rows of a file of :func:`write_stored`, which are so many.

    Raises:
        ValueError: the file is not there, or does not hold them.
    """
    try:
        rows = Dataset.from_file(str(path))
        if rows.features != FEATURES:
            raise ValueError("its columns are others")
        if len(rows) != number:
            raise ValueError(f"it has {len(rows):,} rows; expected {number:,}")
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise ValueError(f"{path} does not hold the rows: {error}") from error
    return rows


def write_stored(rows: Dataset, path: Path) -> Dataset:
    """The same rows in a file of their own, which is whole or not there."""
    batches = rows.select_columns([*FEATURES]).with_format("arrow").iter(ROWS_AT_ONCE)
    with (
        open_atomically(path) as file,
        pa.ipc.new_stream(file, FEATURES.arrow_schema) as target,
    ):
        for batch in batches:
            target.write_table(batch)
    return read_stored(path, len(rows))


def column(rows: Dataset, name: str) -> np.ndarray:
    """The values of all rows, of a column of numbers."""
    table = rows.select_columns([name]).with_format("arrow")[:]
    return table.column(name).to_numpy()


def parts(rows: Dataset, *names: str) -> Iterator[tuple[int, dict[str, list]]]:
    """The number of the first row of each part, and its columns."""
    taken = rows.select_columns([*names])
    for number, part in enumerate(taken.iter(ROWS_AT_ONCE)):
        yield number * ROWS_AT_ONCE, part


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
