"""The result of checking data sources, and the rows that training reads."""

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
from .columns import IMAGE_SUFFIXES
from .image_files import IMAGE_KEY_RE, FileStamp
from .missing_media import MEDIA_WORDS_RE
from .packing import pack_best_fit
from .rows import image_folder_of, row_location
from .source import DataSource
from .stored_rows import (
    ConversationDataset,
    StoredRows,
    column_values,
    iter_values,
    read_stored,
    write_stored,
)

MAX_NAMES_PER_FOLDER = 10_000  # that are searched for images
CHECK_VERSION = 8
"""Version of the checks. Raise it with each change that may refuse images that passed before."""


class EpochCounts(NamedTuple):
    """Counts over all samples of an epoch, in which rows are repeated by weight.

    Attributes:
        images: Number of images; an image counts each time that it occurs.
        tokens: Number of tokens, with image placeholders expanded.
        supervised: Number of tokens with a label other than -100.
    """

    samples: int
    images: int
    tokens: int
    supervised: int


class EpochSequences(NamedTuple):
    """The sequences of an epoch, of which batches consist; they are packed if ``pack_to`` is set.

    Attributes:
        lengths: Number of tokens of each sequence: ``(sequences,)``.
        images: Number of images of each sequence: ``(sequences,)``.
        packs: Indices of the conversations in each packed sequence; None without packing.
    """

    lengths: np.ndarray
    images: np.ndarray
    packs: list[list[int]] | None

    @property
    def samples_per_sequence(self) -> float:
        """The mean number of conversations per sequence."""
        return 1 if self.packs is None else sum(map(len, self.packs)) / len(self.packs)


@dataclass(frozen=True, eq=False)
class CheckedData:
    """The rows to train on, and the state of their files when they were checked.

    A row is stored once. A sample is one occurrence of the row in an epoch: a weight of 2 makes two
    samples of each row.

    Attributes:
        sources: The data sources.
        files: Stamps of the sources that are files.
        pack_to: The length of a packed sequence in tokens, which no row exceeds; None without
            packing.
        rows: The usable rows, once each; :attr:`order` repeats them by weight.
        images: Stamps of the image files of these rows.
        skipped: Number of rows that cannot be used.
        eval: The rows to evaluate on, if any.
        eval_option: The value of ``data.eval``: null, a share, or the paths of its sources.
    """

    sources: tuple[DataSource, ...]
    files: tuple[FileStamp, ...]
    pack_to: int | None
    rows: StoredRows
    images: tuple[FileStamp, ...]
    skipped: int
    eval: "CheckedData | None" = None
    eval_option: Any = None

    @property
    def path(self) -> str:
        """The path of the first source."""
        return self.sources[0].path

    @property
    def stamps(self) -> dict[str, FileStamp]:
        """The stamp of each image, by its path."""
        return {image.path: image for image in self.images}

    @cached_property
    def _row_digests(self) -> list[str]:
        return [*row_digests(self.rows, self.stamps)]

    @cached_property
    def order(self) -> np.ndarray:
        """The index of each sample's row, before an epoch is shuffled: ``(samples,)``.

        With weight 1.5, half of a source's rows (those with the lowest digests) occur twice, and
        the other rows once.
        """
        weights = [source.weight for source in self.sources]
        if all(weight == 1 for weight in weights):
            return np.arange(len(self.rows))
        source_numbers = column_values(self.rows, "source")
        digests = np.array([digest[:16] for digest in self._row_digests])
        repeated = []
        for number, weight in enumerate(weights):
            rows = np.flatnonzero(source_numbers == number)
            num_extra = round((weight - int(weight)) * len(rows))
            extra = rows[np.argsort(digests[rows], kind="stable")[:num_extra]]
            repeated += [rows] * int(weight) + [np.sort(extra)]
        return np.concatenate(repeated)

    def column(self, name: str) -> np.ndarray:
        """Return a numeric column of :data:`stored_rows.SCHEMA` for each sample: ``(samples,)``."""
        return column_values(self.rows, name)[self.order]

    @cached_property
    def sample_digests(self) -> tuple[str, ...]:
        """The digest of each sample's row (:func:`row_digests`)."""
        return tuple(self._row_digests[row] for row in self.order.tolist())

    @cached_property
    def sample_labels(self) -> tuple[int | str, ...]:
        """The label of each sample in messages: the line of its row, such as 7. With several
        sources, the name of its source comes first, such as "a.jsonl:7"."""
        lines = self.column("line").tolist()
        if len(self.sources) == 1:
            return tuple(lines)
        source_numbers = self.column("source").tolist()
        names = [os.path.basename(source.path) for source in self.sources]
        return tuple(
            f"{names[source]}:{line}" for source, line in zip(source_numbers, lines, strict=True)
        )

    @cached_property
    def counts(self) -> EpochCounts:
        sums = [int(self.column(name).sum()) for name in ("num_images", "tokens", "supervised")]
        return EpochCounts(len(self.order), *sums)

    def find_warnings(self) -> Iterator[str]:
        """Yield descriptions of likely mistakes in the data.

        Samples may lack an image although other samples have one, or although images are in the
        source's folder. Texts may contain words that stand for content that is missing.
        """
        source_numbers = column_values(self.rows, "source")
        num_images = column_values(self.rows, "num_images")
        has_media_words = _rows_with_media_words(self.rows)
        for number, source in enumerate(self.sources):
            rows = np.flatnonzero(source_numbers == number)
            imageless = rows[num_images[rows] == 0]
            if len(imageless) and (text := _images_warning(source, len(imageless), len(rows))):
                yield f"{source.path}: {text}{self._first_location(imageless)}"
            with_words = rows[has_media_words[rows]]
            if len(with_words):
                yield (
                    f"{source.path}: {len(with_words):,} of {len(rows):,} samples contain words "
                    "such as <video>, <audio> or <box>, which the model reads as text: it gets no "
                    f"video, sound or box for them{self._first_location(with_words)}"
                )
        if self.eval is not None and not isinstance(self.eval_option, float):
            yield from self.eval.find_warnings()

    def _first_location(self, rows: np.ndarray) -> str:
        """Return the end of a message with the location of the first of some rows."""
        row = self.rows[int(rows[0])]
        return f"; the first is {row_location(self.sources[row['source']], row['line'])}"

    def epoch_sequences(self) -> EpochSequences:
        """Return the sequences of an epoch, packed if ``pack_to`` is set."""
        lengths, images = self.column("tokens"), self.column("num_images")
        if self.pack_to is None:
            return EpochSequences(lengths, images, None)
        packs = pack_best_fit(lengths.tolist(), self.pack_to)
        lengths, images = (
            np.array([values[pack].sum() for pack in packs]) for values in (lengths, images)
        )
        return EpochSequences(lengths, images, packs)

    def row_location(self, sample: int) -> str:
        """Return the location of a sample's row for messages (:func:`rows.row_location`)."""
        row = self.rows[int(self.order[sample])]
        return row_location(self.sources[row["source"]], row["line"])

    def conversations(self) -> ConversationDataset:
        """Return the samples of an epoch, which are read from the disk.

        Raises:
            ValueError: A data file or an image has changed since the check.
        """
        for file in (*self.files, *self.images):
            if file.has_changed():
                raise ValueError(
                    f"{file.path} has changed since it was checked: start the training again, "
                    "which checks it again"
                )
        return ConversationDataset(self.rows, self.order)

    def write(self, path: Path) -> "CheckedData":
        """Write the rows to an Arrow file, and the rest to a JSON file beside it; return a copy
        that reads its rows from there."""
        stored, content = self._write_rows(path, path.with_suffix(".arrow"))
        write_atomically(path, json.dumps(content | {"version": CHECK_VERSION}))
        return stored

    def _write_rows(self, path: Path, rows_path: Path) -> tuple["CheckedData", dict[str, Any]]:
        """Write the rows to ``rows_path``; return a copy that reads them from there, and the
        content of the JSON file at ``path``."""
        names = ("files", "pack_to", "images", "skipped", "eval_option")
        content = {name: getattr(self, name) for name in names}
        content["sources"] = [asdict(source) for source in self.sources]
        content["rows"] = [rows_path.name, len(self.rows)]
        stored = replace(self, rows=write_stored(self.rows, rows_path))
        content["eval"] = None
        if self.eval is not None:
            eval_rows = path.with_name(f"{path.stem}_eval.arrow")
            evaluated, content["eval"] = self.eval._write_rows(path, eval_rows)
            stored = replace(stored, eval=evaluated)
        return stored, content

    @classmethod
    def read(cls, path: Path) -> "CheckedData":
        """Read what :meth:`write` wrote.

        Raises:
            ValueError: The file is missing or invalid.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("version") != CHECK_VERSION:
                raise ValueError("it was written by another version of this package")
            return cls._from_content(content, path.parent)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} does not contain the result of a check ({error}): start the training with "
                f"{own_command('train')}, which checks the data first"
            ) from error

    @classmethod
    def _from_content(cls, content: dict, folder: Path) -> "CheckedData":
        file_name, num_rows = content["rows"]
        sources = [
            DataSource(**values | {"ignore": tuple(values["ignore"])})
            for values in content["sources"]
        ]
        stamps = {
            key: tuple(FileStamp(*item) for item in content[key]) for key in ("files", "images")
        }
        evaluated = content["eval"] and cls._from_content(content["eval"], folder)
        rows = read_stored(folder / file_name, num_rows)
        fields = {"sources": tuple(sources), "rows": rows, "eval": evaluated} | stamps
        return cls(**content | fields)


def _images_warning(source: DataSource, num_imageless: int, num_samples: int) -> str | None:
    """Return a warning that ``num_imageless`` of ``num_samples`` samples have no image, or None.

    It is a likely mistake if other samples have an image, if the image column is empty, if the name
    of an ignored key sounds like images, or if the source's folder contains images.
    """
    text = f"{num_imageless:,} of {num_samples:,} samples have no image"
    if num_imageless == num_samples and source.columns and "image" in source.columns:
        return f"{text}: the image column of data.columns is empty"
    if ignored := [key for key in source.ignore if IMAGE_KEY_RE.fullmatch(key)]:
        return f"{text}, and data.ignore drops {listed(ignored)}"
    if num_imageless < num_samples:
        return text
    folder = image_folder_of(source)
    for name in _names_in(folder):
        if name.lower().endswith(IMAGE_SUFFIXES):
            return f"{text}, although their folder contains {os.path.join(folder, name)}"
    return None


def _names_in(folder: str) -> Iterator[str]:
    """Yield the names in a folder and in its direct subfolders."""
    with suppress(OSError):
        for entry in islice(os.scandir(folder), MAX_NAMES_PER_FOLDER):
            yield entry.name
            if entry.is_dir():
                names = os.listdir(entry)[:MAX_NAMES_PER_FOLDER]
                yield from (f"{entry.name}/{name}" for name in names)


def _rows_with_media_words(rows: StoredRows) -> np.ndarray:
    """Return which rows contain words of :data:`missing_media.MEDIA_WORDS_RE`: ``(rows,)`` bool."""
    matches = (
        pc.match_substring_regex(batch["messages"], MEDIA_WORDS_RE, ignore_case=True)
        for batch in rows.batches("messages")
    )
    arrays = (match.to_numpy(zero_copy_only=False) for match in matches)
    return np.concatenate([np.zeros(0, bool), *arrays])  # the first is for no batches


def row_digests(rows: StoredRows, images: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sha256 of each row's text and images; paths of images do not affect it.

    Args:
        images: Stamps or checks of the images, which have the attribute ``sha256``, by path.
    """
    for text_digest, paths in iter_values(rows, "text_digest", "images"):
        image_digests = "".join(images[path].sha256 for path in paths).encode()
        yield hashlib.sha256(text_digest + image_digests).hexdigest()
