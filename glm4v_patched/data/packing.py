"""Packing: several conversations in one row, each computed and learned as if it were alone.

:func:`share_out` shares a data set out among rows before the training begins, and a batch
of such rows becomes one (:class:`PackingCollator`): nothing is padded, and every batch is about as
large as any other.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from .collate import ConversationCollator


def share_out(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Share out conversations among rows of at most ``max_length`` positions.

    The longest first, each goes to the fullest row that has room for it: the same rows every time.

    Args:
        lengths: Positions of each conversation, with all that its images take
            (:class:`collate.Size`).

    Returns:
        Numbers of conversations, from 0, in each row.

    Raises:
        ValueError: conversations are longer than a row.
    """
    too_long = [number for number, length in enumerate(lengths) if length > max_length]
    if too_long:
        raise ValueError(
            f"{len(too_long)} of {len(lengths)} conversations do not fit into a row; number "
            f"{too_long[0] + 1} is the first: it takes {lengths[too_long[0]]} positions and a row "
            f"has {max_length}. Make rows of at least {max(lengths)} (pack_to in a recipe), or "
            "leave the long ones out"
        )
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (positions left, row), the fullest first
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = bisect_left(rooms, (lengths[number], 0))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = max_length, len(rows)
            rows.append([])
        rows[row].append(number)
        insort(rooms, (room - lengths[number], row))
    return rows


class PackedDataset(Sequence):
    """Rows of conversations, each read when it is asked for.

    Args:
        shares: Of :func:`share_out`.
    """

    def __init__(self, conversations: Sequence[list[dict]], shares: list[list[int]]):
        self.conversations, self.shares = conversations, shares

    def __len__(self) -> int:
        return len(self.shares)

    def __getitem__(self, row):
        return [self.conversations[number] for number in self.shares[row]]


class PackingCollator(ConversationCollator):
    """Turns rows of conversations into one row, supervised as by :class:`ConversationCollator`.

    One, whatever the number of rows, because it needs no padding and is what flash attention takes.
    """

    def __call__(  # type: ignore[override]  # it is given rows of conversations
        self, rows: list[list[list[dict]]]
    ) -> dict[str, Tensor]:
        """Returns ``input_ids``, ``position_ids``, ``labels`` ``(1, L)``, and ``pixel_values`` if
        there is an image. Positions restart with each conversation; that, and no mask, tells the
        model where one ends."""
        conversations = [conversation for row in rows for conversation in row]
        samples, images = self.encode(conversations)
        batch: Mapping[str, Sequence[Sequence[int]]] = {
            "input_ids": samples,
            "position_ids": [range(len(ids)) for ids in samples],
            "labels": [
                self.labels(ids, conversation)
                for ids, conversation in zip(samples, conversations, strict=True)
            ],
        }
        return {name: torch.tensor([[*chain(*parts)]]) for name, parts in batch.items()} | images
