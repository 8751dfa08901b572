"""Rows that are read while they are learned: sets of any size, with nothing held but a buffer.

The order of rows is a matter of the seed, the buffer and the number of training processes alone, so
that a run which continues finds its place by counting; how many processes read images changes
nothing. Not by the ``IterableDataset`` of ``datasets``: that shares out files among the processes
which read images, so that those of one file are all decoded by one, and forgets its buffer when
it continues.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .check import ENCODER, fault_of_image, fault_of_size, fault_of_text, measure
from .collate import ConversationCollator
from .decoding import may_be_decoded, check_image_file
from .messages import images_of
from .rows import ConversationRow, before_number, iter_rows
from .source import DataSource

ROW_PROBLEMS, UNREADABLE = "faults", "unreadable"
"""In a batch: what is wrong with rows that are not in it, a line each with the place; and why a set
cannot be read on, after which no run may go on."""
NOTHING_LEARNED: list[dict] = [
    {"role": "user", "content": "-"},
    {"role": "assistant", "content": "-", "train": False},
]


class Streamed(NamedTuple):
    """A row on its way into a batch, or what stands in its place in the order: a fault."""

    messages: list[dict]
    place: str
    fault: str | None = None
    is_last: bool = False
    """Whether the set cannot be read on."""


class StreamDataset(IterableDataset):
    """The rows of one training process, without an end; each pass through a set in another order.

    Args:
        sources: The sets. Where there are several, the next row is of one that is drawn by weight.
        batch_size: Rows of a batch; each process that reads images reads whole batches.
        share: ``(k, n)``: this is training process k of n, whose rows differ.
        buffer: The next row is drawn from so many, which are shared out among the sets.
        start: Rows of this process that a run which is continued has learned.
    """

    def __init__(
        self,
        sources: Sequence[DataSource],
        batch_size: int,
        share: tuple[int, int] = (0, 1),
        seed: int = 0,
        buffer: int = 1000,
        start: int = 0,
    ):
        self.sources, self.batch_size, self.share = sources, batch_size, share
        self.seed, self.start = seed, start
        self.buffer = max(buffer // len(sources), 1)

    def __iter__(self) -> Iterator[Streamed]:
        reader = get_worker_info()
        number, readers = (reader.id, reader.num_workers) if reader else (0, 1)
        for place_in_order, row in enumerate(islice(self._mixed(), self.start, None)):
            if place_in_order // self.batch_size % readers == number:
                yield row

    def _mixed(self) -> Iterator[Streamed]:
        sets = [self._passes(number) for number in range(len(self.sources))]
        weights = np.array([source.weight for source in self.sources])
        drawn = np.random.default_rng([self.seed, self.share[0]])
        while True:
            number = drawn.choice(len(sets), p=weights / weights.sum()) if len(sets) > 1 else 0
            yield next(sets[number])

    def _passes(self, number: int) -> Iterator[Streamed]:
        source = self.sources[number]
        for of_pass in count():
            draws = np.random.default_rng([self.seed, self.share[0], number, of_pass])
            held: list[Streamed] = []
            for row in self._rows(source):
                if len(held) < self.buffer:
                    held.append(row)
                    continue
                at = int(draws.integers(self.buffer))
                yield held[at]
                held[at] = row
            yield from (held[at] for at in draws.permutation(len(held)))

    def _rows(self, source: DataSource) -> Iterator[Streamed]:
        """The rows of a pass, and faults where they stand: a row that is corrected, or that one
        reader alone cannot fetch, moves no other. Where the set cannot be read on, it has no end.
        """
        process, of = self.share
        where, is_empty = source.path, True
        fault = (
            f"none of the rows of training process {process + 1} of {of} can be used; expected "
            "more rows, or fewer processes"
        )
        try:
            start = before_number(source)
            for found in iter_rows(source, share=self.share):
                if isinstance(found, ConversationRow):
                    is_empty = False
                    yield Streamed(found.messages, f"{start}{found.line}")
                else:
                    yield Streamed([], f"{start}{found.line}", found.text)
        except ValueError as error:
            is_empty, (line, _, fault) = True, str(error).removeprefix(source.path).partition(": ")
            where += line
        while is_empty:
            yield Streamed([], where, fault, is_last=True)


class StreamingCollator:
    """Makes batches of rows that nobody has looked at.

    A row that cannot be learned from is not in its batch, and the batch says so under
    :data:`FAULTS`, or :data:`UNREADABLE`. Without any other row it has one of which nothing is
    learned, for all processes have to take the step.

    Args:
        longest: Positions of a row for which the run's memory was planned.
        max_positions: Of the model's position table.
    """

    def __init__(self, collator: ConversationCollator, longest: int, max_positions: int):
        self.collator, self.longest, self.max_positions = collator, longest, max_positions

    def __call__(self, rows: list[Streamed]) -> dict:
        found = [(row, row.fault or self._fault_of(row.messages)) for row in rows]
        batch = self._batch(row.messages for row, fault in found if fault is None)
        if isinstance(batch, str):
            found = [(row, fault or self._fault_alone(row.messages)) for row, fault in found]
            batch = self._batch(row.messages for row, fault in found if fault is None)
        if isinstance(batch, str):
            raise RuntimeError(f"rows that make batches alone make none together: {batch}")
        told: dict[bool, list[str]] = {False: [], True: []}
        for row, fault in found:
            if fault is not None:
                told[row.is_last].append(f"{row.place}: {fault}")
        return {**batch, ROW_PROBLEMS: told[False], UNREADABLE: told[True]}

    def _batch(self, conversations: Iterable[list[dict]]) -> dict[str, torch.Tensor] | str:
        """Return a batch, or why there is none."""
        try:
            return self.collator([*conversations] or [NOTHING_LEARNED])
        except Exception as error:  # of an image; Pillow raises what it likes
            return f"cannot be made into a batch: {error}"

    def _fault_alone(self, messages: list[dict]) -> str | None:
        batch = _fault_of_images(images_of(messages)) or self._batch([messages])
        return batch if isinstance(batch, str) else None

    def _fault_of(self, messages: list[dict]) -> str | None:
        """What is wrong with a row's words, or with the size of its images."""
        if fault := fault_of_text(ENCODER.encode(messages)):
            return fault
        [size] = measure([messages], self.collator)
        if isinstance(size, str):
            return size
        images = images_of(messages)
        if fault := fault_of_size(len(images), size, self.max_positions, None):
            return fault
        if size.positions > self.longest:
            return (
                f"takes {size.positions:,} positions, and memory was planned for {self.longest:,}, "
                "which the rows that were checked suggest: check more of them (data.check), or "
                "shorten the conversation"
            )
        return _fault_of_images([path for path in images if not may_be_decoded(path)])


def _fault_of_images(paths: list[str]) -> str | None:
    faults = (fault_of_image(path, check_image_file(path)) for path in paths)
    return next(filter(None, faults), None)
