"""What the check of a data set has found, and the rows that it has read: what training reads."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from ..atomic import write_atomically
from ..terminal_text import listed, own_command
from .columns import IMAGE_FILES
from .image_files import IMAGE_NAMES, FileStamp
from .missing_media import ANY_WORD
from .packing import share_out
from .rows import folder_of_images, row_location
from .source import DataSource
from .stored_rows import ConversationDataset, StoredRows, column, read_stored, values, write_stored

MOST_NAMES = 10_000  # looked at in a folder
RULES = 8
"""Raised with every change after which what was good may no longer be."""


class Counts(NamedTuple):
    """Of all rows that are learned, as often as they come."""

    rows: int
    images: int
    """As often as they are shown."""
    positions: int
    """With all that the images take."""
    learned: int
    """Positions that are labels."""


class BatchSequences(NamedTuple):
    """The rows of batches: packed ones, if they are packed."""

    lengths: np.ndarray
    """Positions of each."""
    images: np.ndarray
    """How many each has."""
    shares: list[list[int]] | None
    """The conversations of each, of packed ones."""

    @property
    def samples_per_sequence(self) -> float:
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
        images: Each file that is shown.
        skipped: How many rows cannot be used.
        eval: The rows for evaluation, if there are to be any.
        asked: What ``data.eval`` was: null, a share, or the paths of its sets.
    """

    sources: tuple[DataSource, ...]
    files: tuple[FileStamp, ...]
    pack_to: int | None
    rows: StoredRows
    images: tuple[FileStamp, ...]
    skipped: int
    eval: "CheckedData | None" = None
    asked: Any = None

    @property
    def path(self) -> str:
        """Of the first set."""
        return self.sources[0].path

    @property
    def stamps(self) -> dict[str, FileStamp]:
        """What each image was, by its path."""
        return {image.path: image for image in self.images}

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
        """Of each conversation, in order: "positions", "in_table", "num_images" or "learned" of its
        :class:`Size`."""
        return column(self.rows, name)[self.order]

    @cached_property
    def row_digests(self) -> tuple[str, ...]:
        """Of each conversation, by :func:`row_digests`."""
        return tuple(self._digests[row] for row in self.order.tolist())

    @cached_property
    def row_labels(self) -> tuple[int | str, ...]:
        """The line of each conversation; where there are several sets, with the name of its own."""
        lines = self.column("line").tolist()
        if len(self.sources) == 1:
            return tuple(lines)
        of_set = self.column("source").tolist()
        names = [os.path.basename(source.path) for source in self.sources]
        return tuple(f"{names[n]}:{line}" for n, line in zip(of_set, lines, strict=True))

    @cached_property
    def counts(self) -> Counts:
        sums = [int(self.column(name).sum()) for name in ("num_images", "positions", "learned")]
        return Counts(len(self.order), *sums)

    def find_warnings(self) -> Iterator[str]:
        """Yield what is most likely a mistake in sets: samples without an image where others have
        one, images beside a set that shows none, and words that stand for what is not there."""
        of_set, images = column(self.rows, "source"), column(self.rows, "num_images")
        worded = _rows_with_words(self.rows)
        for number, source in enumerate(self.sources):
            rows = np.flatnonzero(of_set == number)
            without = rows[images[rows] == 0]
            if len(without) and (told := _doubt_of_images(source, len(without), len(rows))):
                yield f"{source.path}: {told}{self._first_of(without)}"
            words = rows[worded[rows]]
            if len(words):
                yield (
                    f"{source.path}: {len(words):,} of {len(rows):,} samples have words such as "
                    "<video>, <audio> or <box>, which are learned as words: nothing is shown for "
                    f"them{self._first_of(words)}"
                )
        if self.eval is not None and not isinstance(self.asked, float):
            yield from self.eval.find_warnings()

    def _first_of(self, rows: np.ndarray) -> str:
        row = self.rows[int(rows[0])]
        return f"; the first is {row_location(self.sources[row['source']], row['line'])}"

    def batch_sequences(self) -> BatchSequences:
        """The rows that batches are made of, for ``pack_to``."""
        lengths, images = self.column("positions"), self.column("num_images")
        if self.pack_to is None:
            return BatchSequences(lengths, images, None)
        shares = share_out(lengths.tolist(), self.pack_to)
        lengths, images = (
            np.array([of_each[share].sum() for share in shares]) for of_each in (lengths, images)
        )
        return BatchSequences(lengths, images, shares)

    def row_location(self, conversation: int) -> str:
        """Where a conversation stands, for people."""
        row = self.rows[int(self.order[conversation])]
        return row_location(self.sources[row["source"]], row["line"])

    def conversations(self) -> ConversationDataset:
        """The conversations of an epoch, which are read from the disk.

        Raises:
            ValueError: a file or an image is not what was checked.
        """
        for file in (*self.files, *self.images):
            if file.has_changed():
                raise ValueError(
                    f"{file.path} has changed since it was checked: start the training again, so "
                    "that it is checked"
                )
        return ConversationDataset(self.rows, self.order)

    def write(self, path: Path) -> "CheckedData":
        """Write what was found to a JSON file, and the rows beside it, which are read there."""
        moved, found = self._written(path, path.with_suffix(".arrow"))
        write_atomically(path, json.dumps(found | {"rules": RULES}))
        return moved

    def _written(self, path: Path, rows: Path) -> tuple["CheckedData", dict[str, Any]]:
        names = ("files", "pack_to", "images", "skipped", "asked")
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
        sources = [DataSource(**of | {"ignore": tuple(of["ignore"])}) for of in found["sources"]]
        stamps = {of: tuple(FileStamp(*item) for item in found[of]) for of in ("files", "images")}
        evaluated = found["eval"] and cls._of(found["eval"], folder)
        rows = read_stored(folder / name, number)
        made = {"sources": tuple(sources), "rows": rows, "eval": evaluated} | stamps
        return cls(**found | made)


def _doubt_of_images(source: DataSource, without: int, number: int) -> str | None:
    """Say that samples of a set have no image, if other samples have one, if a key that is called
    as images are is left out, or if there are images beside the set."""
    told = f"{without:,} of {number:,} samples have no image"
    if without == number and source.columns and "image" in source.columns:
        return f"{told}: the column of data.columns is empty"
    if ignored := [key for key in source.ignore if IMAGE_NAMES.fullmatch(key)]:
        return f"{told}, and data.ignore leaves out {listed(ignored)}"
    if without < number:
        return told
    folder = folder_of_images(source)
    names = next((of for of in _names_beside(folder) if of.lower().endswith(IMAGE_FILES)), None)
    return names and f"{told}, and {os.path.join(folder, names)} is an image beside them"


def _names_beside(folder: str) -> Iterator[str]:
    """Yield the names in a folder and in the folders of it."""
    with suppress(OSError):
        for entry in islice(os.scandir(folder), MOST_NAMES):
            yield entry.name
            if entry.is_dir():
                yield from islice((f"{entry.name}/{of}" for of in os.listdir(entry)), MOST_NAMES)


def _rows_with_words(rows: StoredRows) -> np.ndarray:
    """Return which rows have words of :data:`left_out.ANY_WORD`: ``(rows,)``."""
    found = (
        pc.match_substring_regex(batch["messages"], ANY_WORD, ignore_case=True)
        for batch in rows.batches("messages")
    )
    parts = (of.to_numpy(zero_copy_only=False) for of in found)
    return np.concatenate([np.zeros(0, bool), *parts])


def row_digests(rows: StoredRows, images: Mapping[str, Any]) -> Iterator[str]:
    """sha256 of each row's words and of the bytes of its images, wherever they lie.

    Args:
        images: What has the ``sha256`` of each, by its path.
    """
    for words, shown in values(rows, "digest", "images"):
        of_images = "".join(images[path].sha256 for path in shown).encode()
        yield hashlib.sha256(words + of_images).hexdigest()
