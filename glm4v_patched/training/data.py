"""Conversations about pictures: reading them from JSONL, and making training batches of them.

A line of the file is ``{"messages": [...]}``; a message is ``{"role", "content"}``, one from the
user may carry ``"image"``: a path, relative to the file's folder.
"""

import json
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..remote.loss import IGNORE_INDEX

ROLES = ("system", "user", "assistant", "observation")


def read_conversations(path: str | Path) -> list[list[dict]]:
    """Read a JSONL file of conversations; image paths become absolute.

    Raises:
        ValueError: a line that is no conversation ending with the assistant, or an image that
            cannot be read; names the line.
    """
    path = Path(path)
    conversations = []
    # By the file, not by splitlines(): JSON strings may hold other line separators.
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                conversations.append(_parse(line, path.parent))
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                raise ValueError(f"{path}:{number}: {_explain(error, line)}") from error
    if not conversations:
        raise ValueError(f"{path}: 0 conversations; expected at least 1 line")
    return conversations


def _explain(error: Exception, line: str) -> str:
    if type(error) is ValueError:
        return str(error)
    return f'expected {{"messages": [{{"role": ..., "content": ...}}]}}, got {line[:80]!r}'


def _parse(line: str, folder: Path) -> list[dict]:
    messages = json.loads(line)["messages"]
    for message in messages:
        if message["role"] not in ROLES:
            raise ValueError(f"the role {message['role']!r} is not one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ValueError(f"content is a {type(message['content']).__name__}; expected text")
        if "image" in message:
            message["image"] = str(_checked_image(folder / message["image"]))
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("expected a question and, at the end, a message of the assistant to learn")
    return messages


def _checked_image(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"the image {path} does not exist")
    try:
        with Image.open(path) as image:
            image.verify()
    except Exception as error:  # Pillow raises whatever a broken file makes its readers raise
        raise ValueError(f"the image {path} cannot be read: {error}") from error
    return path.resolve()


def write_conversations(path: Path, conversations: list[list[dict]]) -> None:
    """Write conversations as JSONL, with image paths relative to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for messages in conversations:
            relative = [
                message | {"image": str(Path(message["image"]).relative_to(path.parent))}
                if "image" in message
                else message
                for message in messages
            ]
            file.write(json.dumps({"messages": relative}, ensure_ascii=False) + "\n")


class ConversationCollator:
    """Turns conversations into a batch in which only the assistant's words are learned.

    A turn of the assistant is supervised from the newline after its role token to the token that
    ends it: the next role token, or ``<|endoftext|>`` after the last turn.
    """

    def __init__(self, processor):
        self.processor = processor
        tokenizer = processor.tokenizer
        self.end_id = tokenizer.eos_token_id
        self.image_id = tokenizer.convert_tokens_to_ids("<|begin_of_image|>")
        self.assistant_id = tokenizer.convert_tokens_to_ids("<|assistant|>")
        self.role_ids = tokenizer.convert_tokens_to_ids(
            ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
        )

    def __call__(self, conversations: list[list[dict]]) -> dict[str, Tensor]:
        """Returns ``input_ids``, ``attention_mask``, ``labels`` ``(B, L)`` padded on the right,
        and ``pixel_values`` if there is an image."""
        rows, images = self.encode(conversations)
        length = max(map(len, rows))
        batch = {
            "input_ids": [row + [self.end_id] * (length - len(row)) for row in rows],
            "attention_mask": [[1] * len(row) + [0] * (length - len(row)) for row in rows],
            "labels": [self.labels(row) + [IGNORE_INDEX] * (length - len(row)) for row in rows],
        }
        return {name: torch.tensor(values) for name, values in batch.items()} | images

    def encode(self, conversations: list[list[dict]]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Grown ids of each conversation with the token that ends it, and ``pixel_values`` of all,
        if there is an image."""
        encoded = self.processor.apply_chat_template(
            conversations, tokenize=True, return_dict=True, return_tensors=None
        )
        images = {}
        if "pixel_values" in encoded:
            images["pixel_values"] = torch.as_tensor(encoded["pixel_values"])
        return [[*ids, self.end_id] for ids in encoded["input_ids"]], images

    def count(self, conversation: list[dict]) -> tuple[int, int]:
        """How many ids :meth:`encode` makes of a conversation, and how many images it has, which
        are not opened."""
        ids = self.processor.tokenizer.apply_chat_template(
            conversation, chat_template=self.processor.chat_template, return_dict=False
        )
        images = ids.count(self.image_id)
        # In what the tokenizer writes, an image has one id for all its inner positions.
        return len(ids) + 1 + images * (self.processor.num_image_tokens - 1), images

    def labels(self, ids: list[int]) -> list[int]:
        """The ids of the assistant's turns, -100 elsewhere."""
        labels, speaking = [], False
        for at, token in enumerate(ids):
            ends_turn = token in self.role_ids or at == len(ids) - 1
            labels.append(token if speaking else IGNORE_INDEX)
            if ends_turn:
                speaking = token == self.assistant_id
        return labels
