"""Data sources: the sets of rows that a recipe's ``data.train`` and ``data.eval`` name. Needs no
torch."""

import glob
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..paths import expand_path, is_within
from .boxes import BOX_FORMATS
from .columns import IMAGE_SUFFIXES, find_columns_problem, named_columns
from .folders import matches_pattern
from .formats import ROW_FORMATS
from .messages import describe_value, quoted, read_each

MAX_WEIGHT = 1_000_000
CSV_SUFFIXES = (".csv", ".tsv")
TABLE_SUFFIXES = (".parquet", ".arrow", ".tar")
DATA_SUFFIXES = (".json", ".jsonl", *TABLE_SUFFIXES, *CSV_SUFFIXES)
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".lz4")
LLAMA_FACTORY_INFO = "dataset_info.json"
"""The file that describes the data sets of a LLaMA-Factory folder. ``save_to_disk`` of ``datasets``
writes a file of the same name with other content."""
STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
"""Files that ``save_to_disk`` of ``datasets`` writes for a data set, and for several splits."""
FOLDER_CURE = (
    "expected a data file, a folder written by save_to_disk of datasets, or a folder that contains "
    "data files or images"
)


@dataclass(frozen=True)
class DataSource:
    """One data set of a recipe, and how to read its rows.

    Attributes:
        path: A file, a folder (written by ``save_to_disk``, or with data files or images in it), or
            an id of the Hub.
        format: A name from :data:`formats.ROW_FORMATS`, or "auto".
        weight: How many times each row occurs in an epoch.
        split, subset: Which part of a folder or of a data set of the Hub is read; the split
            defaults to "train".
        revision: Which commit of a data set of the Hub is read.
        image_folder: The folder to which image paths are relative; defaults to the folder of the
            file.
        image_root: Beginning of image paths in rows that ``image_folder`` replaces.
        ignore: Keys of rows that are not read.
        allow_urls: Whether images may be downloaded over http(s).
        columns: Which columns are the question, the answer and the images (:mod:`columns`).
        max_samples: Only this many rows are read, from the start.
        boxes: The format of boxes in texts (:data:`boxes.BOX_FORMATS`), which are converted to
            thousandths; None leaves texts as they are.
    """

    path: str
    format: str = "auto"
    weight: float = 1.0
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    image_folder: str | None = None
    image_root: str | None = None
    ignore: tuple[str, ...] = ()
    allow_urls: bool = False
    columns: Mapping[str, Any] | None = None
    max_samples: int | None = None
    boxes: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The data file, if the source is one; empty for folders and the Hub."""
        return (self.path,) if os.path.isfile(self.path) else ()

    @property
    def is_local(self) -> bool:
        """Whether the source is a local file or folder, or cannot be an id of the Hub."""
        is_hub_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.path, re.ASCII)
        return os.path.lexists(self.path) or not is_hub_id or suffix_of(self.path) in DATA_SUFFIXES


def folders_of_source(source: DataSource, name: str) -> list[tuple[str, str]]:
    """Return the folders that a source is read from, as pairs of a description and a path, for
    :func:`paths.refuse_overlap`.

    An ``image_folder`` that contains the source itself, such as ``.``, is left out: it may only be
    the folder to which paths are relative.
    """
    folders = [(f"a folder of {name}", source.path)]
    image_folder = source.image_folder
    if image_folder is not None and not is_within(source.path, image_folder):
        folders.append(("an image_folder", image_folder))
    return folders


def suffix_of(path: str | Path) -> str:
    """Return the lower-case suffix of a file's name without that of a compression: ``.csv`` for
    ``rows.csv.gz``."""
    name = str(path).lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return os.path.splitext(name)[1]


def find_path_problem(path: str) -> str | None:
    """Return why no rows can be read from a path, or None. No file is opened."""
    if not os.path.lexists(path):
        if files := _expand_glob(path):
            problems = ((file, find_path_problem(file)) for file in files)
            return next((f"{file}: {problem}" for file, problem in problems if problem), None)
        return "there is no such file" if DataSource(path).is_local else None
    if os.path.isdir(path):
        suffixes = DATA_SUFFIXES + IMAGE_SUFFIXES
        files = [str(file) for file in Path(path).rglob("*") if suffix_of(file) in suffixes]
        if not files:
            return f"this folder contains no data set; {FOLDER_CURE}"
        unreadable = [file for file in files if not (os.path.isfile(file) or os.path.isdir(file))]
        return f"{unreadable[0]} is a broken link or a pipe" if unreadable else None
    if not os.path.isfile(path):
        return "not a regular file, but a broken link, a pipe, a socket or a device"
    if not os.access(path, os.R_OK):
        return "no permission to read it"
    compressed_tar = tuple(f".tar{suffix}" for suffix in COMPRESSED_SUFFIXES)
    if path.lower().endswith((*compressed_tar, ".tgz", ".txz")):
        return f"a compressed archive, which cannot be read; unpack it: tar -xf {path} -C FOLDER"
    return None if os.path.getsize(path) else "it is empty"


def _expand_glob(path: str) -> list[str]:
    return sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []


def named_paths(value: str | Sequence[Any]) -> list[str]:
    """Return the paths, ids and glob patterns that a value for :func:`make_sources` names."""
    values = [value] if isinstance(value, str) else value
    return [expand_path(item if isinstance(item, str) else item["path"]) for item in values]


def pattern_reaches(pattern: str, folder: str) -> bool:
    """Return whether a glob pattern may match files that are written to ``folder`` or below it."""
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return False
    pattern_names = os.path.abspath(pattern).split(os.sep)[:-1]  # without the file's name
    literal_names = [*itertools.takewhile(lambda name: not glob.has_magic(name), pattern_names)]
    # Links are resolved in the names before the first wildcard, and in the folder.
    pattern_names[: len(literal_names)] = os.path.realpath(
        os.sep.join(literal_names) or os.sep
    ).split(os.sep)
    folder_names = os.path.realpath(folder).split(os.sep)
    # If the folder matches a beginning of the pattern, the rest may match a path below the folder.
    return any(
        matches_pattern(folder_names, pattern_names[:length])
        for length in range(len(literal_names), len(pattern_names) + 1)
    )


def is_saved_to_disk(path: str) -> bool:
    """Return whether a folder was written by ``save_to_disk`` of ``datasets``."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (STATE_FILE, SPLITS_FILE))


def find_source_problem(source: DataSource) -> str | None:
    """Return why a source cannot be read (:func:`find_path_problem`), which of its fields has no
    effect, or which of its fields contradict each other; None if there is no problem."""
    if path_problem := find_path_problem(source.path):
        return path_problem
    supported: tuple[str, ...] = ("split", "subset")
    if not os.path.lexists(source.path):
        supported = "split", "subset", "revision"
    elif os.path.isfile(source.path):
        supported = ()
    elif is_saved_to_disk(source.path):
        supported = () if os.path.isfile(os.path.join(source.path, STATE_FILE)) else ("split",)
    elif os.path.isfile(os.path.join(source.path, LLAMA_FACTORY_INFO)):
        return (
            f"a folder of LLaMA-Factory, whose {LLAMA_FACTORY_INFO} is not read; name the file of "
            "one of its data sets, and its columns: {path: FILE, columns: {...}}"
        )
    for name in ("split", "subset", "revision"):
        if name not in supported and (value := getattr(source, name)) is not None:
            problem = f"{name} is {value!r}, and has no effect on this kind of file or folder"
            return f"{problem}; expected {' or '.join(supported) if supported else f'no {name}'}"
    if source.columns and source.format != "auto":
        return (
            f"has both columns and format: {source.format}, which defines the columns; set only "
            "one of them"
        )
    for template in (source.columns or {}).values():
        for name in named_columns(template):
            if name in source.ignore:
                return f"{quoted(name)} is in both columns and ignore: remove it from one of them"
    return None


def make_sources(value: Any, defaults: Mapping[str, Any]) -> tuple[DataSource, ...]:
    """Build the sources that a recipe's ``data.train`` or ``data.eval`` names.

    Args:
        value: A path, or a list of paths and of mappings with fields of :class:`DataSource`.
        defaults: Values for fields that an entry does not set.

    Raises:
        ValueError: An entry is invalid; the message says which one.
    """
    values = [value] if isinstance(value, str) else value
    if not values:
        raise ValueError("an empty list; expected at least one data set")
    return tuple(sum(read_each(values, "set", lambda item: _sources_of_entry(item, defaults)), []))


def _is_printable_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


# Fields of an entry that are not text: the check of a value, and its valid values in messages.
FIELD_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "weight": (
        lambda value: type(value) in (int, float) and 0 < value <= MAX_WEIGHT,
        f"a number above 0 and at most {MAX_WEIGHT:,}",
    ),
    "format": (lambda value: value in ("auto", *ROW_FORMATS), f"auto, {', '.join(ROW_FORMATS)}"),
    "ignore": (
        lambda value: isinstance(value, list) and all(isinstance(key, str) for key in value),
        "a list of names",
    ),
    "allow_urls": (lambda value: isinstance(value, bool), "true or false"),
    "max_samples": (lambda value: type(value) is int and value > 0, "an integer above 0"),
    "boxes": (lambda value: value is None or value in BOX_FORMATS, ", ".join(BOX_FORMATS)),
}


def _sources_of_entry(entry: Any, defaults: Mapping[str, Any]) -> list[DataSource]:
    """Build the source of an entry, or a source for each file that its glob pattern matches."""
    entry = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict):
        raise ValueError(
            f"is {describe_value(entry)}; expected a path or {{path: FILE, weight: 1.0}}"
        )
    names = [field.name for field in fields(DataSource)]
    for name, value in entry.items():
        if name not in names:
            raise ValueError(
                f"{describe_value(name)} is not a field of a data set; expected {', '.join(names)}"
            )
        is_valid, expected = FIELD_CHECKS.get(name, (_is_printable_text, "text"))
        if name == "columns":
            if problem := find_columns_problem(value):
                raise ValueError(f"columns {problem}")
        elif not is_valid(value):
            raise ValueError(f"{name} is {describe_value(value)}; expected {expected}")
    if "path" not in entry:
        raise ValueError("path is missing; expected {path: FILE, weight: 1.0}")
    values = dict(defaults) | entry
    if "format" in entry and "columns" not in entry:  # the format replaces the default columns
        values.pop("columns", None)
    values["ignore"] = tuple(values.get("ignore", ()))
    values["path"] = expand_path(values["path"])
    if (folder := values.get("image_folder")) is not None:
        values["image_folder"] = os.path.abspath(expand_path(folder))
    source = DataSource(**values)
    if not source.is_local:
        return [source]
    # A file whose name contains characters such as [ is not a pattern.
    matches = [] if os.path.lexists(source.path) else _expand_glob(source.path)
    return [replace(source, path=os.path.abspath(path)) for path in matches or [source.path]]
