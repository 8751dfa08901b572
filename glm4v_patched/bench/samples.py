"""What a measured training reads: a batch that lies in memory, or conversations about JPEG files.

Both have the same number of positions and of supervised tokens, so that their speeds show what
reading images costs. ``python -m glm4v_patched.bench.samples FOLDER SETTINGS SAMPLES`` writes a
model with random weights, the conversations and their images.
"""

import random
import string
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.collate import ConversationCollator
from ..data.rows import write_conversations
from ..demo.tiny_model import build_processor, save, special_token_ids
from ..engine.prepare import local_device
from ..engine.trainable import build_random_model
from ..models.base import ModelSource
from ..models.loading import load_processor
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import IGNORE_INDEX
from ..remote.processing_chatglm import ChatGLMProcessor
from .roofline import config_of, num_supervised
from .settings import TrainingSettings, image_size

NUM_IMAGE_FILES = 16
JPEG_QUALITY = 90


class ConstantBatchCollator:
    """A collator whose every batch is the same one, whatever samples it is given.

    Its samples have one image and then text, of which the second half is supervised. They are
    padded, or packed into one sequence.
    """

    def __init__(self, config: ChatGLMConfig, settings: TrainingSettings, seed: int):
        generator = torch.Generator().manual_seed(seed)
        most = min(config.boi_token_id, config.pad_token_id)  # text has smaller ids
        image = torch.tensor([config.boi_token_id, config.pad_token_id, config.eoi_token_id])
        lengths = settings.text_lengths()
        texts = [torch.randint(0, most, (length,), generator=generator) for length in lengths]
        ids = [torch.cat((image, text)) for text in texts]
        labels = [sample.clone() for sample in ids]
        for sample, length in zip(labels, lengths, strict=True):
            sample[: len(sample) - num_supervised(length)] = IGNORE_INDEX
        pad = partial(pad_sequence, batch_first=True)
        batch = {"input_ids": pad(ids), "labels": pad(labels, padding_value=IGNORE_INDEX)}
        if settings.packed:
            positions = torch.cat([torch.arange(len(sample)) for sample in ids])[None]
            batch = {"input_ids": torch.cat(ids)[None], "labels": torch.cat(labels)[None]}
            batch["position_ids"] = positions
        elif lengths[-1] < lengths[0]:
            batch["attention_mask"] = pad([torch.ones_like(sample) for sample in ids])
        vision = config.vision
        shape = (settings.micro_batch, vision.in_channels, vision.image_size, vision.image_size)
        batch["pixel_values"] = torch.randn(shape, generator=generator)
        self.batch = batch

    def __call__(self, samples: Any) -> dict[str, Tensor]:
        return dict(self.batch)


def config_and_processor(settings: TrainingSettings) -> tuple[ChatGLMConfig, ChatGLMProcessor | None]:
    """Of the model that is trained; a batch in memory needs no processor. Random weights have one
    that knows letters, and a config for its special tokens."""
    sizes = config_of(settings)
    if settings.from_files is None:
        return sizes, None
    if settings.model is not None:
        return sizes, load_processor(ModelSource(settings.model))
    alphabet = [" " + " ".join(string.ascii_lowercase)]
    processor = build_processor(alphabet, sizes.vision.image_size, sizes.seq_length)
    return ChatGLMConfig(**sizes.to_dict() | special_token_ids(processor.tokenizer)), processor


def conversations(
    processor: ChatGLMProcessor, settings: TrainingSettings, folder: Path, samples: int
) -> list[list[dict]]:
    """So many conversations, each about one of the JPEG files that are written to the folder."""
    images = _write_images(folder, settings, samples)
    generator, lengths = random.Random(0), settings.text_lengths()
    return [
        _conversation(processor, images[n % len(images)], lengths[n % len(lengths)], generator)
        for n in range(samples)
    ]


def _write_images(folder: Path, settings: TrainingSettings, samples: int) -> list[str]:
    """Of soft colors with noise on them, so that one is decoded as slowly as a photograph."""
    width, height = map(int, image_size(settings.from_files or "").split("x"))
    generator, images = random.Random(0), []
    for number in range(min(NUM_IMAGE_FILES, samples)):
        soft = Image.frombytes("RGB", (40, 30), generator.randbytes(40 * 30 * 3))
        noise = Image.effect_noise((width, height), 12).convert("RGB")
        image = Image.blend(soft.resize((width, height), Image.Resampling.BICUBIC), noise, 0.25)
        images.append(str(folder / f"{number:02}.jpg"))
        image.save(images[-1], quality=JPEG_QUALITY)
    return images


def _conversation(
    processor: ChatGLMProcessor, image: str, text_tokens: int, generator: random.Random
) -> list[dict]:
    """One with so many text tokens beside the image, of which the second half is supervised."""

    def words(number: int) -> str:
        return " ".join(generator.choices(string.ascii_lowercase, k=number))

    def conversation(asked: int, answered: int) -> list[dict]:
        user = {"role": "user", "image": image, "content": words(asked)}
        return [user, {"role": "assistant", "content": words(answered)}]

    [least] = ConversationCollator(processor).measure([conversation(1, 1)])
    answered = num_supervised(text_tokens) - least.learned + 1
    asked = processor.num_image_tokens + 2 + text_tokens - least.positions - answered + 2
    if min(asked, answered) < 1:
        raise ValueError(f"--text-tokens {text_tokens} leaves no room for question and answer")
    return conversation(asked, answered)


def write(folder: Path, settings: TrainingSettings, samples: int) -> None:
    """Write ``train.jsonl`` and its images; and the folder ``model``, if there is no other one."""
    config, processor = config_and_processor(settings)
    assert processor is not None, "of samples that are read from files"
    if settings.model is None:
        torch.manual_seed(0)
        with local_device():
            save(build_random_model(config, dtype=torch.bfloat16), processor, folder / "model")
    made = conversations(processor, settings, folder, samples)
    write_conversations(folder / "train.jsonl", made, overwrite=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), TrainingSettings.read(sys.argv[2]), int(sys.argv[3]))
