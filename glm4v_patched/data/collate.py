"""Collate conversations about images into training batches."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..remote.loss import IGNORE_INDEX
from .image_files import FileStamp
from .messages import drop_train_flags, images_of, supervised_turns
from .token_counts import TokenCounter


class SampleSize(NamedTuple):
    """The size of a conversation.

    Attributes:
        tokens: Number of tokens, with image placeholders expanded.
        position_ids: Number of position ids; an image takes three.
        num_images: Number of image placeholders that the chat template writes.
        supervised: Number of tokens with a label other than -100.
    """

    tokens: int
    position_ids: int
    num_images: int
    supervised: int


class ConversationCollator:
    """Collates conversations into a batch in which only the assistant's turns are supervised.

    A turn of the assistant is supervised from the newline after its role token to the token that
    ends it: the next role token, or ``<|endoftext|>`` after the last turn. A turn with ``"train":
    False`` is not supervised.
    """

    def __init__(self, processor, stamps: Mapping[str, FileStamp] = MappingProxyType({})):
        """Create a collator.

        Args:
            processor: A ``ChatGLMProcessor``.
            stamps: Stamps of checked images, by path. If one of these images has changed since,
                a batch with it is an error.
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
        """Return ``input_ids``, ``attention_mask`` and ``labels`` ``(B, L)``, padded on the right,
        and ``pixel_values`` if there is an image."""
        sequences, images = self.encode(conversations)
        length = max(map(len, sequences))
        batch = {
            "input_ids": [ids + [self.end_id] * (length - len(ids)) for ids in sequences],
            "attention_mask": [[1] * len(ids) + [0] * (length - len(ids)) for ids in sequences],
            "labels": [
                self.labels(ids, conversation) + [IGNORE_INDEX] * (length - len(ids))
                for ids, conversation in zip(sequences, conversations, strict=True)
            ],
        }
        return {name: torch.tensor(values) for name, values in batch.items()} | images

    def encode(self, conversations: list[list[dict]]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Return the token ids of each conversation, with expanded image placeholders and the end
        token, and a dict with the ``pixel_values`` of all images; empty if there are none."""
        for conversation in conversations:
            for path in images_of(conversation):
                # Conversations that were not read from files may contain PIL images.
                if (
                    isinstance(path, str)
                    and path in self.stamps
                    and self.stamps[path].has_changed()
                ):
                    raise ValueError(
                        f"{path} has changed since the training began: restore the image, or "
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

    @cached_property
    def _counter(self) -> TokenCounter:
        return TokenCounter(self.processor)

    def measure(self, conversations: list[list[dict]]) -> list[SampleSize]:
        """Return the size of each conversation; images are not opened."""
        lengths_of_all = self._counter.count(conversations)
        uncounted = [
            conversation
            for conversation, lengths in zip(conversations, lengths_of_all, strict=True)
            if not lengths
        ]
        encoded = iter(self._encode_unexpanded(uncounted))
        tokens_added_per_image = self.processor.num_image_tokens - 1
        sizes = []
        for conversation, lengths in zip(conversations, lengths_of_all, strict=True):
            if lengths:
                num_ids, num_images = sum(lengths), len(images_of(conversation))
                # A turn's role token is not supervised, but the token after the turn is. So there
                # are as many supervised tokens as the turn has tokens.
                supervised = sum(
                    length
                    for length, message in zip(lengths[1:], conversation, strict=True)
                    if message["role"] == "assistant" and message.get("train", True)
                )
            else:
                ids = [*next(encoded), self.end_id]
                num_ids, num_images = len(ids), ids.count(self.image_id)
                supervised = num_ids - self.labels(ids, conversation).count(IGNORE_INDEX)
            # An unexpanded image is three ids. The middle one is replaced by num_image_tokens ids.
            tokens = num_ids + num_images * tokens_added_per_image
            sizes.append(SampleSize(tokens, num_ids, num_images, supervised))
        return sizes

    def _encode_unexpanded(self, conversations: list[list[dict]]) -> list[list[int]]:
        if not conversations:
            return []
        return self.processor.tokenizer.encode_chats(
            [drop_train_flags(conversation) for conversation in conversations],
            chat_template=self.processor.chat_template,
        )["input_ids"]

    def labels(self, ids: list[int], conversation: Sequence[dict] = ()) -> list[int]:
        """Return the labels of a conversation: its ids in supervised turns, and -100 elsewhere.

        Args:
            ids: Token ids of a conversation with its end token; image placeholders may be expanded.
            conversation: The conversation; if omitted, all turns of the assistant are supervised.

        Raises:
            ValueError: A turn has ``"train": False``, and ids and conversation have different
                numbers of turns.
        """
        supervised = supervised_turns(conversation)
        if all(supervised):
            supervised = [True] * len(ids)
        elif len(supervised) != ids.count(self.assistant_id):
            raise ValueError(
                f"the conversation has {len(supervised)} turns of the assistant, but the chat "
                f"template writes {ids.count(self.assistant_id)}, so that turns with train: false "
                "cannot be located: use the template of this package's tokenizer"
            )
        is_supervised = iter(supervised)
        labels = [IGNORE_INDEX] * len(ids)
        starts = [index for index, token in enumerate(ids) if token in self.role_ids]
        ends = [*starts[1:], len(ids) - 1]  # the next role token, or the end token
        for start, end in zip(starts, ends, strict=False):
            if ids[start] == self.assistant_id and next(is_supervised):
                labels[start + 1 : end + 1] = ids[start + 1 : end + 1]
        return labels
