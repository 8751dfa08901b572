"""Makes training batches of conversations about images."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..remote.loss import IGNORE_INDEX
from .image_files import FileStamp
from .messages import images_of, learned_turns, drop_train_flags


class SampleSize(NamedTuple):
    """What a conversation takes and teaches."""

    positions: int
    """Of a row, with all that its images take."""
    in_table: int
    """Entries of the position table: an image takes three."""
    num_images: int
    learned: int
    """Positions that are labels."""


class ConversationCollator:
    """Turns conversations into a batch in which only the assistant's words are learned.

    A turn of the assistant is supervised from the newline after its role token to the token that
    ends it: the next role token, or ``<|endoftext|>`` after the last turn. One with ``"train":
    False`` is not.
    """

    def __init__(self, processor, stamps: Mapping[str, FileStamp] = MappingProxyType({})):
        """
        Args:
            stamps: What images were that must not change.
        """
        self.processor = processor
        self.stamps = stamps
        tokenizer = processor.tokenizer
        self.end_id = tokenizer.eos_token_id
        self.image_id = tokenizer.convert_tokens_to_ids("<|begin_of_image|>")
        self.assistant_id = tokenizer.convert_tokens_to_ids("<|assistant|>")
        roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
        self.role_ids = frozenset(tokenizer.convert_tokens_to_ids(roles))

    def __call__(self, conversations: list[list[dict]]) -> dict[str, Tensor]:
        """Returns ``input_ids``, ``attention_mask``, ``labels`` ``(B, L)`` padded on the right,
        and ``pixel_values`` if there is an image."""
        rows, images = self.encode(conversations)
        length = max(map(len, rows))
        batch = {
            "input_ids": [row + [self.end_id] * (length - len(row)) for row in rows],
            "attention_mask": [[1] * len(row) + [0] * (length - len(row)) for row in rows],
            "labels": [
                self.labels(row, conversation) + [IGNORE_INDEX] * (length - len(row))
                for row, conversation in zip(rows, conversations, strict=True)
            ],
        }
        return {name: torch.tensor(values) for name, values in batch.items()} | images

    def encode(self, conversations: list[list[dict]]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Grown ids of each conversation with the token that ends it, and ``pixel_values`` of all,
        if there is an image."""
        for conversation in conversations:
            for path in images_of(conversation):
                # Of a conversation that was not read from a file they may be images.
                if (
                    isinstance(path, str)
                    and path in self.stamps
                    and self.stamps[path].has_changed()
                ):
                    raise ValueError(
                        f"{path} has changed since the training began: put the image back, or "
                        "start again"
                    )
        encoded = self.processor.apply_chat_template(
            [drop_train_flags(conversation) for conversation in conversations],
            tokenize=True,
            return_dict=True,
            return_tensors=None,
        )
        images = {}
        if "pixel_values" in encoded:
            images["pixel_values"] = torch.as_tensor(encoded["pixel_values"])
        return [[*ids, self.end_id] for ids in encoded["input_ids"]], images

    def measure(self, conversations: list[list[dict]]) -> list[SampleSize]:
        """Sizes of what :meth:`encode` makes of each; images are not opened."""
        rows = self.processor.tokenizer.encode_chats(
            [drop_train_flags(conversation) for conversation in conversations],
            chat_template=self.processor.chat_template,
        )["input_ids"]
        sizes = []
        for ids, conversation in zip(rows, conversations, strict=True):
            ids = [*ids, self.end_id]
            images = ids.count(self.image_id)
            # In what the tokenizer writes, an image has one id for all its inner positions.
            positions = len(ids) + images * (self.processor.num_image_tokens - 1)
            labels = self.labels(ids, conversation)
            learned = len(labels) - labels.count(IGNORE_INDEX)
            sizes.append(SampleSize(positions, len(ids), images, learned))
        return sizes

    def labels(self, ids: list[int], conversation: Sequence[dict] = ()) -> list[int]:
        """The ids of the assistant's turns that are learned, -100 elsewhere.

        Args:
            conversation: Of these ids; without one, all of its turns are learned.

        Raises:
            ValueError: of one with ``"train": False``, there are not as many turns in the ids.
        """
        learned = learned_turns(conversation)
        if all(learned):
            learned = [True] * len(ids)
        elif len(learned) != ids.count(self.assistant_id):
            raise ValueError(
                f"the conversation has {len(learned)} turns of the assistant, and the chat "
                f"template writes {ids.count(self.assistant_id)}, so that those with train: false "
                "are not known: use the template of this package's tokenizer"
            )
        turns = iter(learned)
        labels = [IGNORE_INDEX] * len(ids)
        roles = [at for at, token in enumerate(ids) if token in self.role_ids]
        for at, ends_at in zip(roles, [*roles[1:], len(ids) - 1], strict=False):
            if ids[at] == self.assistant_id and next(turns):
                labels[at + 1 : ends_at + 1] = ids[at + 1 : ends_at + 1]
        return labels
