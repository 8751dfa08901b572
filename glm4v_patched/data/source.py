"""Sets of rows, as a recipe names them. Needs no torch."""

import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .formats import FORMATS
from .messages import as_words

MOST_REPEATED = 1_000_000
OF_FILES = (".json", ".jsonl", ".parquet", ".arrow")
OF_TEXT = (".csv", ".tsv")
SAVED = ("state.json", "dataset_dict.json")
"""What ``save_to_disk`` of ``datasets`` writes."""


@dataclass(frozen=True)
class Source:
    """A set of rows, and how it is read.

    Attributes:
        path: A file, a folder that ``datasets`` saved or with Parquet files below it, or an id of
            the Hub.
        format: A name of :data:`formats.FORMATS`, or "auto".
        weight: How often each of its rows comes in an epoch.
        split, subset, revision: Of what has them, by :func:`fault_of_set`; of one that has splits,
            "train" by default.
        image_folder: What paths of pictures are relative to; default the folder of the file.
        ignore: Keys of a row that are left out.
        allow_urls: Whether pictures may be fetched by http(s).
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

    @property
    def is_local(self) -> bool:
        """Whether it is a file or folder, or can be nothing else."""
        is_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.path, re.ASCII)
        return os.path.lexists(self.path) or not is_id or self.path.endswith(OF_FILES)


def fault_of_path(path: str) -> str | None:
    """Why no rows can be read from a path, as far as is seen without reading."""
    if not os.path.lexists(path):
        return "there is no such file" if Source(path).is_local else None
    if os.path.isdir(path):
        files = [file for file in Path(path).rglob("*") if file.suffix in OF_FILES]
        for file in files:
            if not (file.is_file() or file.is_dir()):
                return f"{file} is {_no_file(file)}"
        if is_saved(path) or any(file.suffix == ".parquet" for file in files):
            return None
        return (
            "a folder without a data set; expected a file, or a folder that datasets has saved "
            "(save_to_disk) or with *.parquet files below it"
        )
    if not os.path.isfile(path):
        return _no_file(path)
    if not os.access(path, os.R_OK):
        return "it may not be read"
    if path.lower().endswith(OF_TEXT):
        return csv_cure(path)
    return None if os.path.getsize(path) else "it is empty"


def _no_file(path: str | Path) -> str:
    if not os.path.exists(path):
        return "no file, but a link to nothing"
    return "no file, but a pipe, a socket or a device: write its rows to a file"


def is_saved(path: str) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote a folder."""
    return any(os.path.isfile(os.path.join(path, name)) for name in SAVED)


def fault_of_set(source: Source) -> str | None:
    """What :func:`fault_of_path` and :func:`fault_of_fields` say."""
    return fault_of_path(source.path) or fault_of_fields(source)


def fault_of_fields(source: Source) -> str | None:
    """Which field would have no effect on such a set."""
    if not os.path.lexists(source.path):
        return None
    has: tuple[str, ...] = ()
    what = "a file, whose rows are all read"
    if os.path.isfile(os.path.join(source.path, SAVED[0])):
        what = "a single set that datasets has saved"
    elif is_saved(source.path):
        has, what = ("split",), "a folder that datasets has saved"
    elif os.path.isdir(source.path):
        has, what = ("split", "subset"), "a folder"
    for name in ("split", "subset", "revision"):
        if name not in has and (value := getattr(source, name)) is not None:
            return f"{name} is {value!r}, and has no effect on {what}; expected no {name}"
    return None


def csv_cure(path: str) -> str:
    """Why a file of comma-separated values is not read, and what to do."""
    of = [json.dumps(path), *['sep="\\t"'] * path.lower().endswith(".tsv")]
    made = json.dumps(os.path.splitext(path)[0] + ".parquet")
    code = f"import datasets; datasets.Dataset.from_csv({', '.join(of)}).to_parquet({made})"
    return (
        "CSV is not read; give its columns the names of a row's keys, as image, prompt (which "
        "begins with <image> for the picture) and completion, and make it Parquet: "
        f"python -c {shlex.quote(code)}"
    )


def make_sources(value: Any, defaults: Mapping[str, Any]) -> tuple[Source, ...]:
    """The sets of a recipe's ``data.train`` or ``data.eval``.

    Args:
        value: A path, or a list of paths and of mappings with fields of :class:`Source`.
        defaults: Fields for sets that do not have them.

    Raises:
        ValueError: says which set is wrong.
    """
    values = [value] if isinstance(value, str) else value
    if not values:
        raise ValueError("an empty list; expected at least 1 set")
    sources = []
    for number, one in enumerate(values, start=1):
        try:
            sources.append(_make_source(one, defaults))
        except ValueError as error:
            raise ValueError(f"set {number} of {len(values)}: {error}") from None
    return tuple(sources)


EXPECTED = {
    "weight": f"a number above 0, of {MOST_REPEATED:,} at most",
    "format": f"auto, {', '.join(FORMATS)}",
    "ignore": "a list of names",
    "allow_urls": "true or false",
}


def _make_source(given: Any, defaults: Mapping[str, Any]) -> Source:
    given = {"path": given} if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise ValueError(f"is {as_words(given)}; expected a path, or {{path: FILE, weight: 1.0}}")
    names = [field.name for field in fields(Source)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            cure = f"did you mean {near[0]}?" if near else f"expected {', '.join(names)}"
            raise ValueError(f"{as_words(name)} is not a field of a set; {cure}")
    if "path" not in given:
        raise ValueError("path is missing; expected {path: FILE, weight: 1.0}")
    for name, value in given.items():
        if not _fits(name, value):
            expected = EXPECTED.get(name, "text")
            raise ValueError(f"{name} is {as_words(value)}; expected {expected}")
    values = dict(defaults) | given
    source = Source(**values | {"ignore": tuple(values.get("ignore", ()))})
    if source.is_local:
        values["path"] = os.path.abspath(source.path)
    return Source(**values | {"ignore": source.ignore})


def _fits(name: str, value: Any) -> bool:
    if name == "weight":
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and 0 < value <= MOST_REPEATED
    if name == "ignore":
        return isinstance(value, (list, tuple)) and all(isinstance(key, str) for key in value)
    if name == "allow_urls":
        return isinstance(value, bool)
    if name == "format":
        return value == "auto" or (isinstance(value, str) and value in FORMATS)
    return isinstance(value, str) and bool(value) and value.isprintable()
