"""Inputs of both models: unexpanded prompts, with three tokens for an image, as published."""

from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..data.collate import ConversationCollator
from ..demo.images import draw_data_set
from ..models.base import ModelSource
from ..models.loading import load_processor
from ..remote.loss import IGNORE_INDEX

CASES_FILE = "cases.safetensors"
# Questions and answers of two lengths, so that one sample is padded in their batch.
SAMPLE_TEXTS = (
    ("Hello.", "Hello to you."),
    ("What do you see?", "A shape on a dark ground."),
    ("Which shape is it, and which color does it have?", "A circle, I think."),
)


def write_cases(folder: Path, model: Path) -> tuple[int, dict[str, int]]:
    """Write the inputs of each case to ``CASES_FILE`` in ``folder``.

    Args:
        model: Folder of the published model, whose tokenizer and image size are used.

    Returns:
        Length of the longest sequence, with its image placeholder expanded, and the number of
        supervised tokens of each case.

    Raises:
        ValueError, OSError: the tokenizer cannot be loaded.
    """
    processor = load_processor(ModelSource(str(model)))
    collator = ConversationCollator(processor)
    side = processor.tokenizer.image_size
    about_images = draw_data_set(folder / "images", 2, seed=0, side=side)
    images = [conversation[0]["image"] for conversation in about_images]
    text, first, second = (
        [
            {"role": "user", "content": question} | ({"image": image} if image else {}),
            {"role": "assistant", "content": answer},
        ]
        for (question, answer), image in zip(SAMPLE_TEXTS, [None, *images], strict=True)
    )
    expanded, pixel_inputs = collator.encode([text, first, second])
    sequences = [_unexpand(ids, collator, processor) for ids in expanded]
    pixels: Tensor = pixel_inputs["pixel_values"]
    cases = {
        "text": _left_padded_batch([sequences[0]], collator),
        "image": _left_padded_batch([sequences[1]], collator) | {"images": pixels[:1]},
        "other image": _left_padded_batch([sequences[2]], collator) | {"images": pixels[1:]},
        "batch": _left_padded_batch(sequences[1:], collator) | {"images": pixels},
        "swapped": _left_padded_batch(sequences[1:], collator) | {"images": pixels.flip(0)},
        "prompt text": {"input_ids": _prompt_ids(sequences[0], collator)},
        "prompt image": {"input_ids": _prompt_ids(sequences[1], collator), "images": pixels[:1]},
    }
    tensors = {f"{case}/{name}": t for case, inputs in cases.items() for name, t in inputs.items()}
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / CASES_FILE)
    labels = {case: inputs["labels"] for case, inputs in cases.items() if "labels" in inputs}
    supervised = {case: int((x[:, 1:] != IGNORE_INDEX).sum()) for case, x in labels.items()}
    return max(map(len, expanded)), supervised


def _unexpand(ids: list[int], collator: ConversationCollator, processor) -> list[int]:
    """Replace the image tokens of each image by one published placeholder, <|endoftext|>."""
    image_token, placeholder = processor.image_token_id, collator.end_id
    return [
        placeholder if token == image_token else token
        for previous, token in pairwise([placeholder, *ids])
        if not previous == token == image_token
    ]


def _left_padded_batch(
    sequences: list[list[int]], collator: ConversationCollator
) -> dict[str, Tensor]:
    """Pad on the left; make the mask and the position ids that the published tokenizer makes."""
    length = max(map(len, sequences))
    batch: dict[str, list[list[int]]] = {
        name: [] for name in ("input_ids", "attention_mask", "position_ids", "labels")
    }
    for ids in sequences:
        padding = length - len(ids)
        batch["input_ids"].append([collator.end_id] * padding + ids)
        batch["attention_mask"].append([0] * padding + [1] * len(ids))
        batch["position_ids"].append([0] * padding + list(range(len(ids))))
        batch["labels"].append([IGNORE_INDEX] * padding + collator.labels(ids))
    return {name: torch.tensor(values) for name, values in batch.items()}


def _prompt_ids(sequence: list[int], collator: ConversationCollator) -> Tensor:
    """Return the sequence up to the assistant's turn, in shape ``(1, length)``."""
    end = sequence.index(collator.assistant_id) + 1
    return torch.tensor([sequence[:end]])
