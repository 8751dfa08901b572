"""Rows of tables, by the library ``datasets``: Parquet, Arrow, saved folders and the Hub.

Tables are read a part at a time; pictures in them are not decoded.
"""

import glob
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..printed import pip_install
from .sets import SAVED, Source, fault_of_path


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
        table = _without_decoding(_open(datasets, source), datasets)
        for number, row in enumerate(table, start=1):
            yield number, _without_nulls(row)
    except Exception as error:  # of pyarrow, fsspec and the Hub's client, each its own
        if str(error).startswith(source.path):
            raise
        raise ValueError(f"{source.path} cannot be read by datasets: {error}") from error


def _open(datasets: Any, source: Source) -> Any:
    path = Path(source.path)
    if fault := fault_of_path(source.path):
        raise ValueError(f"{path}: {fault}")
    if not path.exists():
        return datasets.load_dataset(
            source.path,
            source.subset,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
    if path.is_dir() and any((path / name).is_file() for name in SAVED):
        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, datasets.DatasetDict):
            return _lazily(saved)
        if source.split not in saved:
            raise ValueError(
                f"{path} has the splits {', '.join(saved)} and not {source.split}: name one of "
                "them (split)"
            )
        return _lazily(saved[source.split])
    files = [str(path)]
    if path.is_dir():
        files = sorted(str(file) for file in path.glob("*.parquet"))
    kind = "arrow" if path.suffix == ".arrow" or _begins(path, b"ARROW1") else "parquet"
    names = [glob.escape(file) for file in files]  # datasets takes them for patterns
    return datasets.load_dataset(kind, data_files=names, split="train", streaming=True)


def _lazily(table: Any) -> Any:
    """The table, cast a row at a time as it is read; else a cast writes a copy beside it."""
    return table.to_iterable_dataset()


def _begins(path: Path, start: bytes) -> bool:
    if path.is_dir():
        return False
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
