"""Data sources of any size, read while training, with only a shuffle buffer in memory.

The order of rows depends only on the seed, the size of the buffer and the number of training
processes, not on the number of worker processes. So a resumed run finds its position by counting
rows. ``IterableDataset`` of ``datasets`` is not used. With it, one worker process would decode all
images of a file, and a resumed run would lose the rows of the buffer.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .check import (
    ROW_ENCODER,
    describe_image_problem,
    find_length_problem,
    find_size_problem,
    measure_conversations,
)
from .collate import ConversationCollator
from .decoding import check_image_file, has_decodable_header
from .messages import images_of
from .rows import ConversationRow, iter_rows, location_prefix
from .source import DataSource

BAD_ROWS_KEY, UNREADABLE_KEY = "row_problems", "unreadable"
"""Keys of a batch with lists of messages. The first has the problems of rows that were dropped from
the batch. The second has the reasons why sources cannot be read further, which must end the run."""
# Replaces a batch without usable rows.
UNSUPERVISED_CONVERSATION: list[dict] = [
    {"role": "user", "content": "-"},
    {"role": "assistant", "content": "-", "train": False},
]


class StreamedRow(NamedTuple):
    """A row, or a problem in place of a row that cannot be used.

    Attributes:
        location: The row's file and line, for messages.
        ends_source: Whether the source cannot be read further because of this problem.
    """

    messages: list[dict]
    location: str
    problem: str | None = None
    ends_source: bool = False


class StreamDataset(IterableDataset):
    """The endless rows of one training process, shuffled anew in each pass through a source.

    Args:
        sources: The data sources. The source of each row is chosen at random, by weight.
        batch_size: Rows of a batch; each worker process yields the rows of complete batches.
        shard: ``(k, n)``: this is training process k of n, and yields every n-th row.
        buffer_size: Number of rows in the shuffle buffers of all sources together.
        num_used: Number of rows that this process used before the run was resumed.
    """

    def __init__(
        self,
        sources: Sequence[DataSource],
        batch_size: int,
        shard: tuple[int, int] = (0, 1),
        seed: int = 0,
        buffer_size: int = 1000,
        num_used: int = 0,
    ):
        self.sources, self.batch_size, self.shard = sources, batch_size, shard
        self.seed, self.num_used = seed, num_used
        self.buffer_size = max(buffer_size // len(sources), 1)  # of each source

    def __iter__(self) -> Iterator[StreamedRow]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        # Each worker process reads all rows, and yields those of every num_workers-th batch.
        for index, row in enumerate(islice(self._mix_sources(), self.num_used, None)):
            if index // self.batch_size % num_workers == worker:
                yield row

    def _mix_sources(self) -> Iterator[StreamedRow]:
        """Yield rows of all sources without end."""
        streams = [self._endless_passes(index) for index in range(len(self.sources))]
        weights = np.array([source.weight for source in self.sources])
        generator = np.random.default_rng([self.seed, self.shard[0]])
        while True:
            source_index = 0
            if len(streams) > 1:
                source_index = generator.choice(len(streams), p=weights / weights.sum())
            yield next(streams[source_index])

    def _endless_passes(self, source_index: int) -> Iterator[StreamedRow]:
        """Yield the rows of a source without end, in another order in each pass."""
        source = self.sources[source_index]
        for epoch in count():
            generator = np.random.default_rng([self.seed, self.shard[0], source_index, epoch])
            buffer: list[StreamedRow] = []
            for row in self._rows(source):
                if len(buffer) < self.buffer_size:
                    buffer.append(row)
                    continue
                index = int(generator.integers(self.buffer_size))
                yield buffer[index]
                buffer[index] = row
            yield from (buffer[index] for index in generator.permutation(len(buffer)))

    def _rows(self, source: DataSource) -> Iterator[StreamedRow]:
        """Yield the rows of a pass through a source.

        A row that cannot be used is replaced by its problem. So the other rows keep their positions
        if the row is corrected, or if only one of the worker processes cannot download its image.
        If the source cannot be read further, the problem is yielded without end.
        """
        process, num_processes = self.shard
        location, cannot_continue = source.path, True  # until a usable row is read
        problem = (
            f"none of the rows of training process {process + 1} of {num_processes} can be used; "
            "expected more rows, or fewer processes"
        )
        try:
            prefix = location_prefix(source)
            for row in iter_rows(source, shard=self.shard):
                if isinstance(row, ConversationRow):
                    cannot_continue = False
                    yield StreamedRow(row.messages, f"{prefix}{row.line}")
                else:
                    yield StreamedRow([], f"{prefix}{row.line}", row.text)
        except ValueError as error:
            cannot_continue = True
            line, _, problem = str(error).removeprefix(source.path).partition(": ")
            location += line
        while cannot_continue:
            yield StreamedRow([], location, problem, ends_source=True)


class StreamingCollator:
    """Collates rows that were not checked before the training.

    A row that cannot be used is dropped from its batch, which has the row's problem under
    :data:`BAD_ROWS_KEY` or :data:`UNREADABLE_KEY`. If no row remains, the batch has a
    conversation without supervised tokens, because all processes must take the step.

    Args:
        collator: Collates the usable rows.
        max_tokens: Number of tokens of the longest row for which memory was planned.
        max_positions: Number of position ids that the model supports.
    """

    def __init__(self, collator: ConversationCollator, max_tokens: int, max_positions: int):
        self.collator, self.max_tokens, self.max_positions = collator, max_tokens, max_positions

    def __call__(self, rows: list[StreamedRow]) -> dict:
        checked = [(row, row.problem or self._find_problem(row.messages)) for row in rows]
        batch = self._collate(row.messages for row, problem in checked if problem is None)
        if isinstance(batch, str):  # for example, an image is damaged after its header
            checked = [
                (row, problem or self._find_problem_alone(row.messages)) for row, problem in checked
            ]
            batch = self._collate(row.messages for row, problem in checked if problem is None)
        if isinstance(batch, str):
            raise RuntimeError(f"each row can be collated alone, but not all together: {batch}")
        problems: dict[str, list[str]] = {BAD_ROWS_KEY: [], UNREADABLE_KEY: []}
        for row, problem in checked:
            if problem is not None:
                key = UNREADABLE_KEY if row.ends_source else BAD_ROWS_KEY
                problems[key].append(f"{row.location}: {problem}")
        return batch | problems

    def _collate(self, conversations: Iterable[list[dict]]) -> dict[str, torch.Tensor] | str:
        """Return a batch, or the reason why the conversations cannot be collated."""
        try:
            return self.collator([*conversations] or [UNSUPERVISED_CONVERSATION])
        except Exception as error:  # Pillow's readers raise any kind
            return f"cannot be collated into a batch: {error}"

    def _find_problem_alone(self, messages: list[dict]) -> str | None:
        """Decode the images of a row and collate it alone; return why this fails, or None."""
        if problem := _first_image_problem(images_of(messages)):
            return problem
        batch = self._collate([messages])
        return batch if isinstance(batch, str) else None

    def _find_problem(self, messages: list[dict]) -> str | None:
        """Return what is wrong with a row's text or the headers of its images, or None."""
        if problem := find_length_problem(ROW_ENCODER.encode(messages)):
            return problem
        [size] = measure_conversations([messages], self.collator)
        if isinstance(size, str):
            return size
        images = images_of(messages)
        if problem := find_size_problem(len(images), size, self.max_positions, None):
            return problem
        if size.tokens > self.max_tokens:
            return (
                f"takes {size.tokens:,} tokens, but memory was planned for {self.max_tokens:,}, "
                "the length of the longest row that was checked before the training: check more "
                "rows (data.check), or shorten the conversation"
            )
        return _first_image_problem([path for path in images if not has_decodable_header(path)])


def _first_image_problem(paths: list[str]) -> str | None:
    problems = (describe_image_problem(path, check_image_file(path)) for path in paths)
    return next(filter(None, problems), None)
