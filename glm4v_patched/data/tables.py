"""Rows of tables, by the library ``datasets``: Parquet, Arrow, saved folders and the Hub.

Tables are read a part at a time; pictures in them are not decoded.
"""

import glob
import logging
import os
import shlex
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..terminal_text import pip_install
from .columns import NO_CELL, PICTURE_FILES
from .formats import find_format
from .source import COMPRESSED, CURE_OF_FOLDER, OF_FILES, Source, is_saved, suffix_of
from .text_rows import OF_LINES, Fault, Numbered, kind_of_file, read_text

BUILDERS = ("arrow", "csv", "imagefolder", "json", "parquet", "webdataset")
"""What datasets may take a folder for: others (text, pickles of pandas) have no rows of ours."""
METADATA = ("metadata.csv", "metadata.jsonl")


def read_table(source: Source) -> Iterator[tuple[int, Any]]:
    """The number of each row, from 1, and its values by the names of columns, :data:`NO_CELL` for
    null: pictures are their bytes or paths, and classes their names.

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
            full = {k: NO_CELL if of is None else of for k, of in (row | named).items()}
            yield number, _without_nulls(full)


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
        require_plain_tars([path])
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
    described = [file for file in files if os.path.basename(file).startswith("metadata.")]
    if builder.name in ("imagefolder", "json", "text") and not described:
        _refuse_pairs(source, files)
    if builder.name not in BUILDERS:
        raise ValueError(
            f"{source.path} is a folder of {builder.name} to datasets (such as {files[0]}), and no "
            f"set; {CURE_OF_FOLDER}"
        )
    if builder.name in ("json", "csv"):
        return files
    if builder.name == "imagefolder":  # some say what is in its pictures
        rows = [name for name in os.listdir(source.path) if suffix_of(name) in OF_FILES]
        if rows and not described:
            raise ValueError(
                f"{source.path} has {rows[0]} beside its images, and datasets would read these "
                "alone: name that file or the folder of the images, or move the file elsewhere"
            )
        described = [file for file in described if os.path.basename(file) in METADATA]
        return described or builder.as_streaming_dataset(split=split)
    if builder.name == "webdataset":
        require_plain_tars([*map(Path, files)])
    return builder.as_streaming_dataset(split=split)


def _refuse_pairs(source: Source, files: list[str]) -> None:
    """Raise ``ValueError`` for images and texts that belong together by their names, 0.png and
    0.txt: datasets would read those of one kind and leave the others out."""
    names = {folder: {*os.listdir(folder)} for folder in {*map(os.path.dirname, files)}}
    pairs = []
    for file in files:
        there = names[os.path.dirname(file)]
        stem = os.path.basename(file).partition(".")[0]
        image = next((f"{stem}{of}" for of in PICTURE_FILES if f"{stem}{of}" in there), None)
        text = next((f"{stem}{of}" for of in (".txt", ".json") if f"{stem}{of}" in there), None)
        if image is not None and text is not None:
            pairs.append((os.path.dirname(file), image, text))
    if 2 * len(pairs) < len(files) or not pairs:  # a note beside an image or two
        return
    where, image, text = pairs[0]
    if text.endswith(".json") and (len(files) == 1 or _is_row(Path(where, text))):
        return
    folder, kind = shlex.quote(source.path), text.rpartition(".")[2]
    answer = {"txt": "txt"}.get(kind, "json.answer")
    raise ValueError(
        f"{source.path} has {image} and {text}, an image and what is said of it, and datasets "
        f"reads one of the two; make an archive of WebDataset of them: tar --sort=name -cf "
        f'{folder}.tar -C {folder} . (data.columns={{question: "...?", answer: {answer}, '
        f"image: {image.rpartition('.')[2]}}})"
    )


def _is_row(path: Path) -> bool:
    """Return whether a JSON file is a row of a known format, which names its images itself."""
    rows = [row for _, row in read_text(Source(str(path)), kind_of_file(path))]
    return bool(rows) and isinstance(rows[0], dict) and find_format(rows[0]) is not None


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
                name = row.pop("file_name", NO_CELL)
                if isinstance(name, str):
                    name = os.path.join(os.path.dirname(file), name)
                row = {"image": name} | row
            yield number, row


def require_plain_tars(paths: Sequence[Path]) -> None:
    """Raise ``ValueError`` for what would be unpacked to a size that no one has looked at, and for
    images of another kind than the first row has, which datasets would leave out."""
    first, kinds = "", set()
    for path in paths:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.issparse() or member.name.lower().endswith(COMPRESSED):
                    raise ValueError(
                        f"{path}: {member.name} is sparse or compressed; expected files that are "
                        "as large as they say: unpack it, and make the archive again"
                    )
                folder, name = os.path.split(member.name)
                stem, _, kind = name.partition(".")
                if not member.isfile() or not stem:
                    continue
                first = first or f"{folder}/{stem}"
                if first == f"{folder}/{stem}":
                    kinds.add(kind)
                elif kind not in kinds and name.lower().endswith(PICTURE_FILES):
                    raise ValueError(
                        f"{path}: {member.name} would be left out, for datasets reads the kinds of "
                        f"files that the first row has ({', '.join(sorted(kinds))}): give all "
                        "images one ending, and make the archive again"
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
