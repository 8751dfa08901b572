"""Samples of a measured training: a constant batch in memory, or conversations about JPEG files.

Both kinds have the same numbers of tokens and of supervised tokens, so the difference in speed is
the cost of reading images. ``python -m glm4v_patched.bench.samples FOLDER SETTINGS SAMPLES`` writes
a model with random weights, the conversations and their images.
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
from .roofline import benchmark_config, num_supervised
from .settings import TrainingSettings, image_size

NUM_IMAGE_FILES = 16
JPEG_QUALITY = 90


class ConstantBatchCollator:
    """Collator that always returns the same batch and ignores the samples.

    Each sample of the batch is one image and then text, whose second half is supervised. Samples
    are padded, or packed into one sequence.
    """

    def __init__(self, config: ChatGLMConfig, settings: TrainingSettings, seed: int):
        generator = torch.Generator().manual_seed(seed)
        first_special = min(config.boi_token_id, config.pad_token_id)
        image = torch.tensor([config.boi_token_id, config.pad_token_id, config.eoi_token_id])
        lengths = settings.text_lengths()
        texts = [
            torch.randint(0, first_special, (length,), generator=generator) for length in lengths
        ]
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


def config_and_processor(
    settings: TrainingSettings,
) -> tuple[ChatGLMConfig, ChatGLMProcessor | None]:
    """Return the config and the processor of the trained model.

    The processor is ``None`` for a batch in memory. For random weights, the processor has a
    vocabulary of letters, and the config has that vocabulary's special tokens.
    """
    config = benchmark_config(settings.config, settings.model)
    if settings.from_files is None:
        return config, None
    if settings.model is not None:
        return config, load_processor(ModelSource(settings.model))
    alphabet = [" " + " ".join(string.ascii_lowercase)]
    processor = build_processor(alphabet, config.vision.image_size, config.seq_length)
    return ChatGLMConfig(**config.to_dict() | special_token_ids(processor.tokenizer)), processor


def make_conversations(
    processor: ChatGLMProcessor, settings: TrainingSettings, folder: Path, num_samples: int
) -> list[list[dict]]:
    """Write JPEG files to ``folder``, and return ``num_samples`` conversations, each about one."""
    images = _write_images(folder, settings, min(NUM_IMAGE_FILES, num_samples))
    generator, lengths = random.Random(0), settings.text_lengths()
    return [
        _make_conversation(processor, images[n % len(images)], lengths[n % len(lengths)], generator)
        for n in range(num_samples)
    ]


def _write_images(folder: Path, settings: TrainingSettings, num_images: int) -> list[str]:
    """Write blurred colors with noise, which take as long to decode as photographs."""
    width, height = map(int, image_size(settings.from_files or "").split("x"))
    generator, images = random.Random(0), []
    for number in range(num_images):
        colors = Image.frombytes("RGB", (40, 30), generator.randbytes(40 * 30 * 3))
        blurred = colors.resize((width, height), Image.Resampling.BICUBIC)
        noise = Image.effect_noise((width, height), 12).convert("RGB")
        image = Image.blend(blurred, noise, 0.25)
        images.append(str(folder / f"{number:02}.jpg"))
        image.save(images[-1], quality=JPEG_QUALITY)
    return images


def _make_conversation(
    processor: ChatGLMProcessor, image: str, text_tokens: int, generator: random.Random
) -> list[dict]:
    """Return a conversation of one image and ``text_tokens``, whose second half is supervised."""

    def letters(num_letters: int) -> str:
        return " ".join(generator.choices(string.ascii_lowercase, k=num_letters))

    def build(question_length: int, answer_length: int) -> list[dict]:
        user = {"role": "user", "image": image, "content": letters(question_length)}
        return [user, {"role": "assistant", "content": letters(answer_length)}]

    # Each letter is one token, so the tokens of the chat format are those of the smallest
    # conversation without its two letters.
    [smallest] = ConversationCollator(processor).measure([build(1, 1)])
    answer_length = num_supervised(text_tokens) - smallest.supervised + 1
    num_tokens = processor.num_image_tokens + 2 + text_tokens
    question_length = num_tokens - smallest.tokens - answer_length + 2
    if min(question_length, answer_length) < 1:
        raise ValueError(
            f"--text-tokens {text_tokens} is too small for a question and an answer in the chat "
            "format; give more"
        )
    return build(question_length, answer_length)


def write_benchmark_data(folder: Path, settings: TrainingSettings, num_samples: int) -> None:
    """Write ``train.jsonl`` with ``num_samples`` conversations, and their images.

    Unless the settings name a model, ``model/`` is also written.
    """
    config, processor = config_and_processor(settings)
    assert processor is not None, "only for samples that are read from files"
    if settings.model is None:
        torch.manual_seed(0)
        with local_device():
            save(build_random_model(config, dtype=torch.bfloat16), processor, folder / "model")
    conversations = make_conversations(processor, settings, folder, num_samples)
    write_conversations(folder / "train.jsonl", conversations, overwrite=True)


if __name__ == "__main__":
    write_benchmark_data(
        Path(sys.argv[1]), TrainingSettings.from_json(sys.argv[2]), int(sys.argv[3])
    )
