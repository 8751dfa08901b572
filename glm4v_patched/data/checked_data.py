"""What the check of a data set has found, and the rows that it has read: what training reads."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from ..atomic import write_atomically
from ..terminal_text import own_command
from .packing import share_out
from .pictures import Stamp
from .rows import place
from .source import Source
from .stored_rows import Conversations, column, read_stored, values, write_stored

RULES = 7
"""Raised with every change after which what was good may no longer be."""


class Counts(NamedTuple):
    """Of all rows that are learned, as often as they come."""

    rows: int
    pictures: int
    """As often as they are shown."""
    positions: int
    """With all that the pictures take."""
    learned: int
    """Positions that are labels."""


class BatchRows(NamedTuple):
    """The rows of batches: packed ones, if they are packed."""

    lengths: np.ndarray
    """Positions of each."""
    images: np.ndarray
    """How many each has."""
    shares: list[list[int]] | None
    """The conversations of each, of packed ones."""

    @property
    def samples_per_row(self) -> float:
        """Conversations, in the mean."""
        return 1 if self.shares is None else sum(map(len, self.shares)) / len(self.shares)


@dataclass(frozen=True, eq=False)
class CheckedData:
    """Which rows are trained on, and what they were when they were checked.

    Attributes:
        sources: The sets.
        files: Those sets that are files.
        pack_to: The length of a packed row that the rows were checked against.
        rows: Those that are kept, once each; :attr:`order` has how often they come.
        pictures: Each file that is shown.
        skipped: How many rows cannot be used.
        eval: The rows for evaluation, if there are to be any.
        asked: What ``data.eval`` was: null, a share, or the paths of its sets.
    """

    sources: tuple[Source, ...]
    files: tuple[Stamp, ...]
    pack_to: int | None
    rows: Dataset
    pictures: tuple[Stamp, ...]
    skipped: int
    eval: "CheckedData | None" = None
    asked: Any = None

    @property
    def path(self) -> str:
        """Of the first set."""
        return self.sources[0].path

    @property
    def stamps(self) -> dict[str, Stamp]:
        """What each picture was, by its path."""
        return {picture.path: picture for picture in self.pictures}

    @cached_property
    def _digests(self) -> list[str]:
        return [*row_digests(self.rows, self.stamps)]

    @cached_property
    def order(self) -> np.ndarray:
        """The row of each conversation of an epoch, before it is shuffled: ``(conversations,)``.

        Of a set with weight 1.5, each row comes once, and half of them, which are always the same,
        a second time.
        """
        weights = [source.weight for source in self.sources]
        if all(weight == 1 for weight in weights):
            return np.arange(len(self.rows))
        of_set = column(self.rows, "source")
        digests = np.array([digest[:16] for digest in self._digests])
        chosen_rows = []
        for number, weight in enumerate(weights):
            rows = np.flatnonzero(of_set == number)
            more = round((weight - int(weight)) * len(rows))
            chosen = rows[np.argsort(digests[rows], kind="stable")[:more]]
            chosen_rows += [rows] * int(weight) + [np.sort(chosen)]
        return np.concatenate(chosen_rows)

    def column(self, name: str) -> np.ndarray:
        """Of each conversation, in order: "positions", "in_table", "images" or "learned" of its
        :class:`Size`."""
        return column(self.rows, name)[self.order]

    @cached_property
    def row_digests(self) -> tuple[str, ...]:
        """Of each conversation, by :func:`row_digests`."""
        return tuple(self._digests[row] for row in self.order.tolist())

    @cached_property
    def row_lines(self) -> tuple[int | str, ...]:
        """The line of each conversation; where there are several sets, with the name of its own."""
        lines = self.column("line").tolist()
        if len(self.sources) == 1:
            return tuple(lines)
        of_set = self.column("source").tolist()
        names = [os.path.basename(source.path) for source in self.sources]
        return tuple(f"{names[n]}:{line}" for n, line in zip(of_set, lines, strict=True))

    @cached_property
    def counts(self) -> Counts:
        sums = [int(self.column(name).sum()) for name in ("images", "positions", "learned")]
        return Counts(len(self.order), *sums)

    def batch_rows(self) -> BatchRows:
        """The rows that batches are made of, for ``pack_to``."""
        lengths, images = self.column("positions"), self.column("images")
        if self.pack_to is None:
            return BatchRows(lengths, images, None)
        shares = share_out(lengths.tolist(), self.pack_to)
        lengths, images = (
            np.array([of_each[share].sum() for share in shares]) for of_each in (lengths, images)
        )
        return BatchRows(lengths, images, shares)

    def place(self, conversation: int) -> str:
        """Where a conversation stands, for people."""
        row = self.rows[int(self.order[conversation])]
        return place(self.sources[row["source"]], row["line"])

    def conversations(self) -> Conversations:
        """The conversations of an epoch, which are read from the disk.

        Raises:
            ValueError: a file or a picture is not what was checked.
        """
        for file in (*self.files, *self.pictures):
            if file.has_changed():
                raise ValueError(
                    f"{file.path} has changed since it was checked: start the training again, so "
                    "that it is checked"
                )
        return Conversations(self.rows, self.order)

    def write(self, path: Path) -> "CheckedData":
        """Write what was found to a JSON file, and the rows beside it, which are read there."""
        moved, found = self._written(path, path.with_suffix(".arrow"))
        write_atomically(path, json.dumps(found | {"rules": RULES}))
        return moved

    def _written(self, path: Path, rows: Path) -> tuple["CheckedData", dict[str, Any]]:
        names = ("files", "pack_to", "pictures", "skipped", "asked")
        found = {name: getattr(self, name) for name in names}
        found["sources"] = [asdict(source) for source in self.sources]
        found["rows"] = [rows.name, len(self.rows)]
        moved, found["eval"] = replace(self, rows=write_stored(self.rows, rows)), None
        if self.eval is not None:
            of_eval = path.with_name(f"{path.stem}_eval.arrow")
            evaluated, found["eval"] = self.eval._written(path, of_eval)
            moved = replace(moved, eval=evaluated)
        return moved, found

    @classmethod
    def read(cls, path: Path) -> "CheckedData":
        """What :meth:`write` wrote.

        Raises:
            ValueError: it is not there, or it is no such file.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("rules") != RULES:
                raise ValueError("it was written by another version of this package")
            return cls._of(found, path.parent)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} does not say which rows were checked ({error}): start the training with "
                f"{own_command('train')}, which checks them first"
            ) from error

    @classmethod
    def _of(cls, found: dict, folder: Path) -> "CheckedData":
        name, number = found["rows"]
        sources = [Source(**of | {"ignore": tuple(of["ignore"])}) for of in found["sources"]]
        stamps = {of: tuple(Stamp(*item) for item in found[of]) for of in ("files", "pictures")}
        evaluated = found["eval"] and cls._of(found["eval"], folder)
        rows = read_stored(folder / name, number)
        made = {"sources": tuple(sources), "rows": rows, "eval": evaluated} | stamps
        return cls(**found | made)


def row_digests(rows: Dataset, pictures: Mapping[str, Any]) -> Iterator[str]:
    """sha256 of each row's words and of the bytes of its pictures, wherever they lie.

    Args:
        pictures: What has the ``sha256`` of each, by its path.
    """
    for words, shown in values(rows, "digest", "pictures"):
        of_pictures = "".join(pictures[path].sha256 for path in shown).encode()
        yield hashlib.sha256(words + of_pictures).hexdigest()
