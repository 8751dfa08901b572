"""The rows that both models are given, in the published form: three ids where an image stands."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..data.collate import ConversationCollator
from ..demo.images import draw_data_set
from ..models.base import ModelSource
from ..models.loading import load_processor
from ..remote.loss import IGNORE_INDEX

# Rows of two lengths, so that one is padded in their batch.
SAMPLE_TEXTS = (
    ("Hello.", "Hello to you."),
    ("What do you see?", "A shape on a dark ground."),
    ("Which shape is it, and which color does it have?", "A circle, I think."),
)


def write_cases(folder: Path, model: Path) -> int:
    """Write the inputs of each case to ``folder/cases.safetensors``.

    Args:
        model: Folder of the published model, whose tokenizer and image size are used.

    Returns:
        Positions of the longest row, with all that an image takes.

    Raises:
        ValueError, OSError: its tokenizer cannot be loaded.
    """
    processor = load_processor(ModelSource(str(model)))
    collator = ConversationCollator(processor)
    side = processor.tokenizer.image_size
    drawn = draw_data_set(folder / "images", 2, seed=0, side=side)
    images = [conversation[0]["image"] for conversation in drawn]
    text, first, second = (
        [
            {"role": "user", "content": question} | ({"image": image} if image else {}),
            {"role": "assistant", "content": answer},
        ]
        for (question, answer), image in zip(SAMPLE_TEXTS, [None, *images], strict=True)
    )
    grown, pixel_inputs = collator.encode([text, first, second])
    rows = [_unexpand(ids, collator, processor) for ids in grown]
    pixels: Tensor = pixel_inputs["pixel_values"]
    cases = {
        "text": _left_padded_batch([rows[0]], collator),
        "image": _left_padded_batch([rows[1]], collator) | {"images": pixels[:1]},
        "other image": _left_padded_batch([rows[2]], collator) | {"images": pixels[1:]},
        "batch": _left_padded_batch(rows[1:], collator) | {"images": pixels},
        "swapped": _left_padded_batch(rows[1:], collator) | {"images": pixels.flip(0)},
        "prompt text": {"input_ids": _prompt_ids(rows[0], collator)},
        "prompt image": {"input_ids": _prompt_ids(rows[1], collator), "images": pixels[:1]},
    }
    tensors = {f"{case}/{name}": t for case, inputs in cases.items() for name, t in inputs.items()}
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "cases.safetensors")
    return max(map(len, grown))


def count_supervised_tokens(folder: Path) -> dict[str, int]:
    """Of each case, how many positions are labels that a loss counts."""
    from safetensors.torch import load_file

    rows = load_file(folder / "cases.safetensors")
    found = {}
    for key, tensor in rows.items():
        case, _, name = key.partition("/")
        if name == "labels":
            found[case] = int((tensor[:, 1:] != IGNORE_INDEX).sum())
    return found


def _unexpand(ids: list[int], collator: ConversationCollator, processor) -> list[int]:
    """A grown row with one id in the place of all that stand for its image."""
    fill = processor.image_token_id
    row: list[int] = []
    for token in ids:
        if token != fill:
            row.append(token)
        elif row[-1] == collator.image_id:
            row.append(collator.end_id)  # the published placeholder is <|endoftext|>
    return row


def _left_padded_batch(rows: list[list[int]], collator: ConversationCollator) -> dict[str, Tensor]:
    """Padded on the left, with the mask and the positions that the published tokenizer makes."""
    length = max(map(len, rows))
    batch: dict[str, list[list[int]]] = {
        name: [] for name in ("input_ids", "attention_mask", "position_ids", "labels")
    }
    for row in rows:
        missing = length - len(row)
        batch["input_ids"].append([collator.end_id] * missing + row)
        batch["attention_mask"].append([0] * missing + [1] * len(row))
        batch["position_ids"].append([0] * missing + list(range(len(row))))
        batch["labels"].append([IGNORE_INDEX] * missing + collator.labels(row))
    return {name: torch.tensor(values) for name, values in batch.items()}


def _prompt_ids(row: list[int], collator: ConversationCollator) -> Tensor:
    end = row.index(collator.assistant_id) + 1
    return torch.tensor([row[:end]])
