"""Rows of tables, by the library ``datasets``: Parquet, Arrow, saved folders and the Hub.

Tables are read a part at a time; pictures in them are not decoded.
"""

import glob
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..terminal_text import pip_install
from .source import Source, is_saved

PLAIN = re.compile(r"[\w./ -]+")


def read_table(source: Source) -> Iterator[tuple[int, Any]]:
    """The number of each row, from 1, and its values by the names of columns, without nulls.

    Raises:
        ValueError: there is no such table, or it cannot be read.
        RuntimeError: the library is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError(
            f"{source.path} is read by the library datasets: {pip_install('datasets')}"
        ) from error
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what is wrong is raised, too
    try:
        with _open(datasets, source) as table:
            for number, row in enumerate(_without_decoding(table, datasets), start=1):
                yield number, _without_nulls(row)
    except Exception as error:  # of pyarrow, fsspec and the Hub's client, each its own
        if str(error).startswith(source.path):
            raise
        raise ValueError(f"{source.path} cannot be read by datasets: {error}") from error


@contextmanager
def _open(datasets: Any, source: Source) -> Iterator[Any]:
    path = Path(source.path)
    if not path.exists():
        options = {"revision": source.revision, "streaming": True}
        split = source.split or "train"
        yield datasets.load_dataset(source.path, source.subset, split=split, **options)
    elif is_saved(source.path):
        saved = datasets.load_from_disk(str(path))
        yield _split(saved, source).to_iterable_dataset()  # else a cast writes a copy beside it
    elif path.is_dir():
        with TemporaryDirectory() as folder:
            if not PLAIN.fullmatch(str(path)):  # datasets takes it for a pattern
                path = _linked(path, Path(folder, "rows"))
            yield _split(datasets.load_dataset(str(path), source.subset, streaming=True), source)
    else:
        kind = "arrow" if path.suffix == ".arrow" or _begins(path, b"ARROW1") else "parquet"
        name = glob.escape(str(path))
        yield datasets.load_dataset(kind, data_files=[name], split="train", streaming=True)


def _linked(folder: Path, new: Path) -> Path:
    """A folder with links to the Parquet files of another one, and to its card."""
    for file in [*folder.rglob("*.parquet"), folder / "README.md"]:
        link = new / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.abspath(file))
    return new


def _split(table: Any, source: Source) -> Any:
    """That of the set's name, of a table that has splits."""
    if not isinstance(table, dict):
        return table
    split = source.split or "train"
    if split not in table:
        raise ValueError(
            f"{source.path} has the splits {', '.join(table)} and not {split}: name one of them "
            "(split)"
        )
    return table[split]


def _begins(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _without_decoding(table: Any, datasets: Any) -> Any:
    """The table with pictures as they stand: their bytes and paths."""
    features = table.features
    if features is None:
        return table
    plain = datasets.Features({name: _plain(of, datasets) for name, of in features.items()})
    return table if plain == features else table.cast(plain)


def _plain(feature: Any, datasets: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, dict):
        return {name: _plain(inner, datasets) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_plain(inner, datasets) for inner in feature]
    if (inner := getattr(feature, "feature", None)) is not None:  # lists have one
        return type(feature)(_plain(inner, datasets))
    return feature


def _without_nulls(value: Any) -> Any:
    """A table has each key in each row, with null where a row has no such key."""
    if isinstance(value, dict):
        return {name: _without_nulls(of) for name, of in value.items() if of is not None}
    if isinstance(value, list):
        return [_without_nulls(of) for of in value]
    return value
