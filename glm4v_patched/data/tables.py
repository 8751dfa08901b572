"""Rows of tables, by the library ``datasets``: Parquet, Arrow, saved folders and the Hub.

Tables are read a part at a time; pictures in them are not decoded.
"""

import glob
import logging
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..terminal_text import pip_install
from .source import COMPRESSED, Source, is_saved, suffix_of
from .text_rows import OF_LINES, Fault, Numbered, kind_of_file, read_text

METADATA = ("metadata.csv", "metadata.jsonl")


def read_table(source: Source) -> Iterator[tuple[int, Any]]:
    """The number of each row, from 1, and its values by the names of columns, without nulls:
    pictures are their bytes or paths, and classes their names.

    Raises:
        ValueError: there is no such table, or it cannot be read.
        RuntimeError: the library is missing.
    """
    with _library(source) as datasets:
        table = _open(datasets, source)
        if isinstance(table, list):
            yield from _rows_of_text(table)
            return
        features = table.features or {}
        classes = {k: of for k, of in features.items() if isinstance(of, datasets.ClassLabel)}
        table = table.decode(False) if features else table
        # By batches: of single rows datasets gives each process that reads for a training a share,
        # and whole files at that.
        for number, batch in enumerate(table.iter(batch_size=1), start=1):
            row = {name: values[0] for name, values in batch.items()}
            named = {k: of.int2str(row[k]) for k, of in classes.items() if row[k] is not None}
            yield number, _without_nulls(row | named)


@contextmanager
def _library(source: Source) -> Iterator[Any]:
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError(
            f"{source.path} is read by the library datasets: {pip_install('datasets')}"
        ) from error
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what is wrong is raised, too
    try:
        yield datasets
    except Exception as error:  # of pyarrow, fsspec and the Hub's client, each its own
        if str(error).startswith(source.path):
            raise
        raise ValueError(f"{source.path} cannot be read by datasets: {error}") from error


def _open(datasets: Any, source: Source) -> Any:
    """A table, or the files of text that are read instead."""
    path = Path(source.path)
    if not path.exists():
        options = {"revision": source.revision, "streaming": True}
        split = source.split or "train"
        return datasets.load_dataset(source.path, source.subset, split=split, **options)
    if is_saved(source.path):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, dict):
            saved = saved[_split(source, saved)]
        # Not the set itself: a cast writes a copy beside it.
        return saved.to_iterable_dataset()
    if path.is_dir():
        return _open_folder(datasets, source)
    kind = {".arrow": "arrow", ".tar": "webdataset"}.get(suffix_of(path), "parquet")
    with path.open("rb") as file:
        kind = "arrow" if file.read(6) == b"ARROW1" else kind
    if kind == "webdataset":
        require_plain_tar(path)
    name = glob.escape(str(path))
    return datasets.load_dataset(kind, data_files=[name], split="train", streaming=True)


def _open_folder(datasets: Any, source: Source) -> Any:
    if glob.has_magic(source.path) or "::" in source.path:
        raise ValueError(
            f"{source.path} has one of *, ?, [ and :: in its name, which datasets takes for a "
            "pattern or a chain of files: rename it"
        )
    builder = datasets.load_dataset_builder(source.path, source.subset)
    split = _split(source, builder.config.data_files)
    files = [*map(str, builder.config.data_files[split])]
    if builder.name in ("json", "csv"):
        return files
    if builder.name == "imagefolder":  # some say what is in its pictures
        described = [file for file in files if os.path.basename(file) in METADATA]
        return described or builder.as_streaming_dataset(split=split)
    for file in files if builder.name == "webdataset" else ():
        require_plain_tar(Path(file))
    return builder.as_streaming_dataset(split=split)


def _rows_of_text(files: list[str]) -> Numbered:
    """Rows of several files, numbered together; faults of their text name their file."""
    number = 0
    for file in files:
        kind = kind_of_file(Path(file))
        for line, row in read_text(Source(file), kind):
            number += 1
            if isinstance(row, Fault):
                before = f"{file}:" if kind in OF_LINES else f"{file}, row "
                row = Fault(number, f"{before}{line}: {row.text}")
            elif os.path.basename(file) in METADATA and isinstance(row, dict):
                # Of a picture, which datasets calls "image", too.
                name = os.path.join(os.path.dirname(file), str(row.pop("file_name", "")))
                row = {"image": name} | row
            yield number, row


def require_plain_tar(path: Path) -> None:
    """Raise ``ValueError`` for what would be unpacked to a size that no one has looked at."""
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.issparse() or member.name.lower().endswith(COMPRESSED):
                raise ValueError(
                    f"{path}: {member.name} is sparse or compressed; expected files that are as "
                    "large as they say: unpack it, and make the archive again"
                )


def _split(source: Source, splits: Any) -> str:
    """That of the set's name."""
    names = [*map(str, splits)]
    split = source.split or "train"
    if split not in names:
        raise ValueError(
            f"{source.path} has the splits {', '.join(names)} and not {split}: name one of them "
            "(split)"
        )
    return split


def _without_nulls(value: Any) -> Any:
    """A table has each key in each row, with null where a row has no such key."""
    if isinstance(value, dict):
        return {name: _without_nulls(of) for name, of in value.items() if of is not None}
    if isinstance(value, list):
        return [_without_nulls(of) for of in value]
    return value
