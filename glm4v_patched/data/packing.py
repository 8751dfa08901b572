"""Packing: several conversations in one sequence, each computed as if it were alone.

:func:`pack_best_fit` assigns conversations to sequences before training, and
:class:`PackingCollator` concatenates the sequences of a batch: no sequence is padded, and batches
have similar sizes.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from .collate import ConversationCollator


def pack_best_fit(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Assign conversations to packs of at most ``max_length`` tokens, by best-fit decreasing bin
    packing.

    Each conversation, the longest first, goes to the fullest pack in which it fits. The result is
    deterministic.

    Args:
        lengths: Tokens of each conversation, with image placeholders expanded
            (:class:`collate.SampleSize`).

    Returns:
        The indices of the conversations in each pack.

    Raises:
        ValueError: Some conversations are longer than a pack.
    """
    too_long = [number for number, length in enumerate(lengths) if length > max_length]
    if too_long:
        raise ValueError(
            f"{len(too_long)} of {len(lengths)} conversations do not fit into a packed sequence; "
            f"number {too_long[0] + 1} is the first: it has {lengths[too_long[0]]} tokens, and a "
            f"sequence has {max_length}. Set data.pack_to to at least {max(lengths)}, or remove "
            "the long conversations"
        )
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, pack), the fullest first
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        index = bisect_left(free, (lengths[number], 0))
        if index < len(free):
            free_tokens, pack = free.pop(index)
        else:
            free_tokens, pack = max_length, len(packs)
            packs.append([])
        packs[pack].append(number)
        insort(free, (free_tokens - lengths[number], pack))
    return packs


class PackedDataset(Sequence):
    """A torch data set of packs of conversations, each read on access.

    Args:
        packs: From :func:`pack_best_fit`.
    """

    def __init__(self, conversations: Sequence[list[dict]], packs: list[list[int]]):
        self.conversations, self.packs = conversations, packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index):
        return [self.conversations[number] for number in self.packs[index]]


class PackingCollator(ConversationCollator):
    """Concatenates packs of conversations into one sequence, with the labels of
    :class:`ConversationCollator`.

    All packs of a batch become one sequence without padding, as flash attention takes it.
    """

    def __call__(  # type: ignore[override]  # takes packs of conversations
        self, packs: list[list[list[dict]]]
    ) -> dict[str, Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``labels`` ``(1, L)``, and ``pixel_values`` if
        there is an image.

        There is no mask. The model finds the boundaries of conversations by their position ids,
        which restart at each conversation.
        """
        conversations = [conversation for pack in packs for conversation in pack]
        sequences, images = self.encode(conversations)
        batch: Mapping[str, Sequence[Sequence[int]]] = {
            "input_ids": sequences,
            "position_ids": [range(len(ids)) for ids in sequences],
            "labels": [
                self.labels(ids, conversation)
                for ids, conversation in zip(sequences, conversations, strict=True)
            ],
        }
        return {name: torch.tensor([[*chain(*values)]]) for name, values in batch.items()} | images
