"""A row that is trained as users train: the recipe, in its processes, from pictures on disk.

Its rows have as many positions, and as many learned ones, as those that the worker makes up, so
that the two speeds show what reading pictures costs. ``python -m glm4v_patched.bench.from_files
FOLDER SETTINGS ROWS`` writes model, rows and ``recipe.json``.
"""

import json
import random
import string
import sys
from pathlib import Path

import torch
from PIL import Image

from ..data.collate import ConversationCollator
from ..data.rows import write_conversations
from ..demo.tiny_model import build_processor, save, special_ids
from ..engine.prepare import local_device
from ..models.base import Base
from ..models.loading import load_processor
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..remote.processing_chatglm import ChatGLMProcessor
from .roofline import config_of, supervised
from .settings import OF_ENGINE, Settings, picture_size

PICTURES = 16
JPEG_QUALITY = 90


def write_model(folder: Path, settings: Settings) -> None:
    """Random weights of the real size, or of ``--config``, with a processor, as a folder."""
    sizes = config_of(settings)
    processor = build_processor(
        [" " + " ".join(string.ascii_lowercase)], sizes.vision.image_size, sizes.seq_length
    )
    config = ChatGLMConfig(**sizes.to_dict() | special_ids(processor.tokenizer))
    torch.manual_seed(0)
    with local_device():
        model = GLM4VForCausalLM._from_config(config, dtype=torch.bfloat16)
    save(model, processor, folder)


def write_rows(folder: Path, settings: Settings, rows: int) -> None:
    """``train.jsonl`` of so many rows, and its JPEG files: of soft colours with noise on them, so
    that one is decoded as slowly as a photograph."""
    folder.mkdir(exist_ok=True)
    width, height = map(int, picture_size(settings.from_files or "").split("x"))
    generator, pictures = random.Random(0), []
    for number in range(min(PICTURES, rows)):
        soft = Image.frombytes("RGB", (40, 30), generator.randbytes(40 * 30 * 3))
        noise = Image.effect_noise((width, height), 12).convert("RGB")
        picture = Image.blend(soft.resize((width, height), Image.Resampling.BICUBIC), noise, 0.25)
        pictures.append(str(folder / f"{number:02}.jpg"))
        picture.save(pictures[-1], quality=JPEG_QUALITY)
    processor = load_processor(Base(str(settings.model or folder / "model")))
    lengths = settings.text_lengths()
    written = [
        _row(processor, pictures[number % len(pictures)], lengths[number % len(lengths)], generator)
        for number in range(rows)
    ]
    write_conversations(folder / "train.jsonl", written, overwrite=True)


def _row(
    processor: ChatGLMProcessor, picture: str, text_tokens: int, generator: random.Random
) -> list[dict]:
    """A conversation with so many ids of text beside the picture, its second half learned."""

    def words(number: int) -> str:
        return " ".join(generator.choices(string.ascii_lowercase, k=number))

    def conversation(asked: int, answered: int) -> list[dict]:
        user = {"role": "user", "image": picture, "content": words(asked)}
        return [user, {"role": "assistant", "content": words(answered)}]

    [least] = ConversationCollator(processor).measure([conversation(1, 1)])
    answered = supervised(text_tokens) - least.learned + 1
    asked = processor.num_image_tokens + 2 + text_tokens - least.positions - answered + 2
    if min(asked, answered) < 1:
        raise ValueError(f"--text-tokens {text_tokens} leaves no room for question and answer")
    return conversation(asked, answered)


def recipe_of(settings: Settings, folder: Path) -> dict:
    """What ``glm4v-patched train`` is given."""
    return {
        "model": settings.model or str(folder / "model"),
        "out": str(folder / "out"),
        "trained": settings.trained,
        "data": {"train": str(folder / "train.jsonl")},
        "engine": {name: getattr(settings, name) for name in OF_ENGINE},
        "trainer": {
            "max_steps": settings.warm_up + settings.steps,
            "per_device_train_batch_size": settings.micro_batch,
            "learning_rate": 1e-5,
            "save_strategy": "no",
        },
    }


if __name__ == "__main__":
    folder, settings = Path(sys.argv[1]), Settings(**json.loads(sys.argv[2]))
    if settings.model is None:
        write_model(folder / "model", settings)
    write_rows(folder, settings, int(sys.argv[3]))
    (folder / "recipe.json").write_text(json.dumps(recipe_of(settings, folder)))
