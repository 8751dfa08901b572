"""Rows of tables, by the library ``datasets``: Parquet, Arrow, saved folders and the Hub.

Tables are read a part at a time; pictures in them are not decoded.
"""

import glob
import logging
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..terminal_text import pip_install
from .source import COMPRESSED, Source, is_saved, suffix_of
from .text_rows import OF_LINES, Fault, Numbered, kind_of_file, read_text

METADATA = ("metadata.csv", "metadata.jsonl")
PLAIN = re.compile(r"[\w./ -]+")


def read_table(source: Source) -> Iterator[tuple[int, Any]]:
    """The number of each row, from 1, and its values by the names of columns, without nulls.

    Raises:
        ValueError: there is no such table, or it cannot be read.
        RuntimeError: the library is missing.
    """
    with _library(source) as datasets, _open(datasets, source) as (table, linked):
        if isinstance(table, list):
            yield from _rows_of_text(table)
            return
        plain = _Plain(datasets, table.features, linked)
        if plain.features not in (None, table.features):
            table = table.cast(plain.features)
        # By batches: of single rows datasets gives each process that reads for a training a share,
        # and whole files at that.
        for number, batch in enumerate(table.iter(batch_size=1), start=1):
            yield number, plain.row({name: values[0] for name, values in batch.items()})


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


@contextmanager
def _open(datasets: Any, source: Source) -> Iterator[tuple[Any, Path | None]]:
    """A table, or the files of text that are read instead; and the folder of :func:`_folder`."""
    path = Path(source.path)
    if not path.exists():
        options = {"revision": source.revision, "streaming": True}
        split = source.split or "train"
        yield datasets.load_dataset(source.path, source.subset, split=split, **options), None
    elif is_saved(source.path):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, dict):
            saved = saved[_split(source, saved)]
        # Not the set itself: a cast writes a copy beside it.
        yield saved.to_iterable_dataset(), None
    elif path.is_dir():
        with _folder(datasets, source) as (builder, linked):
            splits = builder.config.data_files
            split = _split(source, splits)
            files = [_target(str(file), linked) for file in splits[split]]
            for file in files if builder.name == "webdataset" else ():
                require_plain_tar(Path(file))
            texts = _text_files(builder, files)
            yield texts or builder.as_streaming_dataset(split=split), linked
    else:
        kind = {".arrow": "arrow", ".tar": "webdataset"}.get(suffix_of(path), "parquet")
        if _begins(path, b"ARROW1"):
            kind = "arrow"
        if kind == "webdataset":
            require_plain_tar(path)
        name = glob.escape(str(path))
        yield datasets.load_dataset(kind, data_files=[name], split="train", streaming=True), None


@contextmanager
def _folder(datasets: Any, source: Source) -> Iterator[Any]:
    """The builder of a folder, which has found its files and their splits, and the folder of links
    that it was given in its place, or None."""
    path, linked = Path(source.path), None
    with TemporaryDirectory() as folder:
        if not PLAIN.fullmatch(str(path)):  # datasets takes it for a pattern
            path = linked = _linked(path, Path(folder, "rows"))
        yield datasets.load_dataset_builder(str(path), source.subset), linked


def _text_files(builder: Any, files: list[str]) -> list[str]:
    """Those that are not read by the builder: all of JSON or CSV, or those that say what is in a
    folder's pictures."""
    if builder.name == "imagefolder":
        return [file for file in files if os.path.basename(file) in METADATA]
    return files if builder.name in ("json", "csv") else []


def _rows_of_text(files: list[str]) -> Numbered:
    """Rows of several files, numbered together; faults of their text name their file."""
    number = 0
    for file in files:
        kind = kind_of_file(Path(file))
        for line, row in read_text(Source(file), kind):
            number += 1
            if isinstance(row, Fault):
                row = Fault(
                    number, f"{file}{':' if kind in OF_LINES else ', row '}{line}: {row.text}"
                )
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


def _linked(folder: Path, new: Path) -> Path:
    """A folder with links to the files of another one."""
    for file in folder.rglob("*"):
        if file.is_file():
            link = new / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.abspath(file))
    return new


def _target(path: str, linked: Path | None) -> str:
    return os.readlink(path) if linked and path.startswith(f"{linked}/") else path


def _split(source: Source, splits: Iterable[Any]) -> str:
    """That of the set's name."""
    names = [*map(str, splits)]
    split = source.split or "train"
    if split not in names:
        raise ValueError(
            f"{source.path} has the splits {', '.join(names)} and not {split}: name one of them "
            "(split)"
        )
    return split


def _begins(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


class _Plain:
    """Makes plain values of a table's: pictures are their bytes or paths, and classes their names.

    A table has each key in each row, with null where a row has no such key; nulls are left out.
    """

    def __init__(self, datasets: Any, features: Any, linked: Path | None):
        self.datasets, self.linked = datasets, linked
        self.features, self.classes = features, {}
        if features is not None:
            self.features = datasets.Features({name: self._of(f) for name, f in features.items()})
            labels = datasets.ClassLabel
            self.classes = {name: f for name, f in features.items() if isinstance(f, labels)}

    def _of(self, feature: Any) -> Any:
        if isinstance(feature, self.datasets.Image):
            return self.datasets.Image(decode=False)
        if isinstance(feature, dict):
            return {name: self._of(inner) for name, inner in feature.items()}
        if isinstance(feature, list):
            return [self._of(inner) for inner in feature]
        if (inner := getattr(feature, "feature", None)) is not None:  # lists have one
            return type(feature)(self._of(inner))
        return feature

    def row(self, row: dict) -> dict:
        for name, of in self.classes.items():
            if row[name] is not None:
                row[name] = of.int2str(row[name])
        return self._without_nulls(row)

    def _without_nulls(self, value: Any) -> Any:
        if isinstance(value, dict):
            if self.linked and isinstance(value.get("path"), str):
                value = value | {"path": _target(value["path"], self.linked)}
            return {name: self._without_nulls(of) for name, of in value.items() if of is not None}
        if isinstance(value, list):
            return [self._without_nulls(of) for of in value]
        return value
