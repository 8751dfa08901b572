"""Sets of rows, as a recipe names them. Needs no torch."""

import glob
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..paths import expand_path, is_within
from .columns import IMAGE_FILES, find_columns_problem, named_columns
from .folders import matches
from .formats import ROW_FORMATS
from .messages import describe_value, quoted, read_each

MOST_REPEATED = 1_000_000
OF_CSV = (".csv", ".tsv")
OF_TABLES = (".parquet", ".arrow", ".tar")
OF_FILES = (".json", ".jsonl", *OF_TABLES, *OF_CSV)
COMPRESSED = (".gz", ".zst", ".bz2")
LLAMA_FACTORY = "dataset_info.json"
"""Describes the sets in a folder of LLaMA-Factory's; ``save_to_disk`` writes another one."""
SAVED = ("state.json", "dataset_dict.json")
"""What ``save_to_disk`` of ``datasets`` writes: of a single set, or of several splits."""
CURE_OF_FOLDER = (
    "expected a file, or a folder that datasets has saved (save_to_disk) or with files of rows or "
    "images below it"
)


@dataclass(frozen=True)
class DataSource:
    """A set of rows, and how it is read.

    Attributes:
        path: A file, a folder that ``datasets`` saved or with Parquet files below it, or an id of
            the Hub.
        format: A name of :data:`formats.FORMATS`, or "auto".
        weight: How often each of its rows comes in an epoch.
        split, subset, revision: Of what has them, by :func:`find_source_problem`; of one that has splits,
            "train" by default.
        image_folder: What paths of images are relative to; default the folder of the file.
        ignore: Keys of a row that are left out.
        allow_urls: Whether images may be fetched by http(s).
        columns: Which columns of a row are its question, answer and images (:mod:`columns`).
        max_samples: Only so many rows are read, the first ones.
    """

    path: str
    format: str = "auto"
    weight: float = 1.0
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    image_folder: str | None = None
    ignore: tuple[str, ...] = ()
    allow_urls: bool = False
    columns: Mapping[str, Any] | None = None
    max_samples: int | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The file that its rows are read from; none, where these are in a folder or on the Hub."""
        return (self.path,) if os.path.isfile(self.path) else ()

    @property
    def is_local(self) -> bool:
        """Whether it is a file or folder, or can be nothing else."""
        is_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.path, re.ASCII)
        return os.path.lexists(self.path) or not is_id or suffix_of(self.path) in OF_FILES


def folders_of_source(source: DataSource, name: str) -> list[tuple[str, str]]:
    """Return the folders that a set is read from, for :func:`paths.require_apart`.

    An ``image_folder`` around the set itself, such as ``.``, is a prefix of paths and no folder of
    images.
    """
    folders, images = [(f"a folder of {name}", source.path)], source.image_folder
    if images is not None and not is_within(source.path, images):
        folders.append(("an image_folder", images))
    return folders


def suffix_of(path: str | Path) -> str:
    """What tells the kind of a file, in small letters; of a compressed one the suffix before."""
    name = str(path).lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return os.path.splitext(name)[1]


def find_path_problem(path: str) -> str | None:
    """Why no rows can be read from a path, as far as is seen without reading."""
    if not os.path.lexists(path):
        if files := _files_of_pattern(path):
            faults = ((file, find_path_problem(file)) for file in files)
            return next((f"{file}: {fault}" for file, fault in faults if fault), None)
        return "there is no such file" if DataSource(path).is_local else None
    if os.path.isdir(path):
        files = [str(of) for of in Path(path).rglob("*") if suffix_of(of) in OF_FILES + IMAGE_FILES]
        if not files:
            return f"a folder without a data set; {CURE_OF_FOLDER}"
        others = [file for file in files if not (os.path.isfile(file) or os.path.isdir(file))]
        return f"{others[0]} is a link to nothing, or a pipe" if others else None
    if not os.path.isfile(path):
        return "not a regular file, but a broken link, a pipe, a socket or a device"
    if not os.access(path, os.R_OK):
        return "it may not be read"
    if path.lower().endswith((*(f".tar{suffix}" for suffix in COMPRESSED), ".tgz")):
        return f"a compressed archive; expected one that is not: tar -xf {path} -C FOLDER"
    return None if os.path.getsize(path) else "it is empty"


def _files_of_pattern(path: str) -> list[str]:
    return sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []


def named_paths(value: str | Sequence[Any]) -> list[str]:
    """Return the paths, ids and patterns of :func:`make_sources`'s sets as they were given."""
    values = [value] if isinstance(value, str) else value
    return [expand_path(each if isinstance(each, str) else each["path"]) for each in values]


def pattern_reaches(pattern: str, folder: str) -> bool:
    """Return whether a pattern of files looks into ``folder`` or into folders below it, so that it
    would match what is written there."""
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return False
    parts = os.path.abspath(pattern).split(os.sep)[:-1]
    plain = [*itertools.takewhile(lambda part: not glob.has_magic(part), parts)]
    parts[: len(plain)] = os.path.realpath(os.sep.join(plain) or os.sep).split(os.sep)
    wanted = os.path.realpath(folder).split(os.sep)
    return any(matches(wanted, parts[:n]) for n in range(len(plain), len(parts) + 1))


def is_saved(path: str) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote a folder."""
    return any(os.path.isfile(os.path.join(path, name)) for name in SAVED)


def find_source_problem(source: DataSource) -> str | None:
    """What :func:`find_path_problem` says, or which field would have no effect on such a set."""
    if fault := find_path_problem(source.path):
        return fault
    has: tuple[str, ...] = ("split", "subset")
    if not os.path.lexists(source.path):
        has = "split", "subset", "revision"
    elif os.path.isfile(source.path):
        has = ()
    elif is_saved(source.path):
        has = () if os.path.isfile(os.path.join(source.path, SAVED[0])) else ("split",)
    elif os.path.isfile(os.path.join(source.path, LLAMA_FACTORY)):
        return (
            f"LLaMA-Factory's folder, whose {LLAMA_FACTORY} is not read; expected the file of one "
            "of its sets, with its columns: {path: FILE, columns: {...}}"
        )
    for name in ("split", "subset", "revision"):
        if name not in has and (value := getattr(source, name)) is not None:
            told = f"{name} is {value!r}, and has no effect on such a file or folder"
            return f"{told}; expected {' or '.join(has) if has else f'no {name}'}"
    if source.columns and source.format != "auto":
        return f"has columns, and the format {source.format}, which names them: give one of them"
    named = (name for words in (source.columns or {}).values() for name in named_columns(words))
    both = next((name for name in named if name in source.ignore), None)
    return both and f"{quoted(both)} is in columns and in ignore: take it out of one of them"


def make_sources(value: Any, defaults: Mapping[str, Any]) -> tuple[DataSource, ...]:
    """The sets of a recipe's ``data.train`` or ``data.eval``.

    Args:
        value: A path, or a list of paths and of mappings with fields of :class:`DataSource`.
        defaults: Fields for sets that do not have them.

    Raises:
        ValueError: says which set is wrong.
    """
    values = [value] if isinstance(value, str) else value
    if not values:
        raise ValueError("an empty list; expected at least 1 set")
    return tuple(sum(read_each(values, "set", lambda given: _make_sources(given, defaults)), []))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


# Of fields that are no text: what they are, and in words.
EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "weight": (
        lambda value: type(value) in (int, float) and 0 < value <= MOST_REPEATED,
        f"a number above 0, of {MOST_REPEATED:,} at most",
    ),
    "format": (lambda value: value in ("auto", *ROW_FORMATS), f"auto, {', '.join(ROW_FORMATS)}"),
    "ignore": (
        lambda value: isinstance(value, list) and all(isinstance(key, str) for key in value),
        "a list of names",
    ),
    "allow_urls": (lambda value: isinstance(value, bool), "true or false"),
    "max_samples": (lambda value: type(value) is int and value > 0, "a whole number above 0"),
}


def _make_sources(given: Any, defaults: Mapping[str, Any]) -> list[DataSource]:
    """A set; of a pattern of files, one for each."""
    given = {"path": given} if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise ValueError(f"is {describe_value(given)}; expected a path, or {{path: FILE, weight: 1.0}}")
    names = [field.name for field in fields(DataSource)]
    for name, value in given.items():
        if name not in names:
            raise ValueError(
                f"{describe_value(name)} is not a field of a set; expected {', '.join(names)}"
            )
        is_right, expected = EXPECTED.get(name, (_is_text, "text"))
        if name == "columns":
            if fault := find_columns_problem(value):
                raise ValueError(f"columns {fault}")
        elif not is_right(value):
            raise ValueError(f"{name} is {describe_value(value)}; expected {expected}")
    if "path" not in given:
        raise ValueError("path is missing; expected {path: FILE, weight: 1.0}")
    values = dict(defaults) | given
    if "format" in given and "columns" not in given:
        values.pop("columns", None)
    values["ignore"] = tuple(values.get("ignore", ()))
    values["path"] = expand_path(values["path"])
    if (folder := values.get("image_folder")) is not None:
        values["image_folder"] = os.path.abspath(expand_path(folder))
    source = DataSource(**values)
    if not source.is_local:
        return [source]
    is_there = os.path.lexists(source.path)
    paths = [] if is_there else _files_of_pattern(source.path)
    return [replace(source, path=os.path.abspath(path)) for path in paths or [source.path]]
