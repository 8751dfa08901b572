"""Packing: several conversations in one sequence, each computed as if it were alone.

:func:`pack_best_fit` assigns conversations to sequences before training, so that all sequences have
similar lengths. :class:`PackingCollator` concatenates the sequences of a batch without padding.
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

    A pack is a list of conversations that are concatenated to one sequence. Each conversation, the
    longest first, goes to the fullest pack in which it fits. The result is deterministic.

    Args:
        lengths: Tokens of each conversation, with image placeholders expanded
            (:class:`collate.SampleSize`).

    Returns:
        The indices of the conversations in each pack.

    Raises:
        ValueError: Some conversations are longer than a pack.
    """
    too_long = [index for index, length in enumerate(lengths) if length > max_length]
    if too_long:
        raise ValueError(
            f"{len(too_long)} of {len(lengths)} conversations do not fit into a packed sequence; "
            f"number {too_long[0] + 1} is the first: it has {lengths[too_long[0]]} tokens, and a "
            f"sequence has {max_length}. Set data.pack_to to at least {max(lengths)}, or remove "
            "the long conversations"
        )
    packs: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (free tokens, index of the pack), the fullest first
    for conversation in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[conversation]
        position = bisect_left(free_space, (length, 0))
        if position < len(free_space):
            free_tokens, pack = free_space.pop(position)
        else:
            free_tokens, pack = max_length, len(packs)
            packs.append([])
        packs[pack].append(conversation)
        insort(free_space, (free_tokens - length, pack))
    return packs


class PackedDataset(Sequence):
    """A torch data set whose items are packs: lists of conversations, which are read on access.

    Args:
        packs: The indices of the conversations in each pack, from :func:`pack_best_fit`.
    """

    def __init__(self, conversations: Sequence[list[dict]], packs: list[list[int]]):
        self.conversations, self.packs = conversations, packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index):
        return [self.conversations[conversation] for conversation in self.packs[index]]


class PackingCollator(ConversationCollator):
    """Concatenates all packs of a batch to one sequence without padding, as flash attention for
    sequences of variable length expects it. Labels are those of :class:`ConversationCollator`."""

    def __call__(  # type: ignore[override]  # its argument is a list of packs
        self, packs: list[list[list[dict]]]
    ) -> dict[str, Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``labels`` ``(1, L)``, and ``pixel_values`` if
        there is an image.

        There is no attention mask. The model finds the boundaries of conversations by the position
        ids, which restart at 0 in each conversation.
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
