"""The sizes of a measurement: the model's, and what decides its memory."""

import json
from pathlib import Path

from ..engine.memory_plan import Training
from ..remote.configuration_chatglm import ChatGLMConfig
from .settings import Settings


def config_of(settings: Settings) -> ChatGLMConfig:
    """The real size, unless a file says otherwise."""
    return ChatGLMConfig(
        **(json.loads(Path(settings.config).read_text()) if settings.config else {})
    )


def training_of(settings: Settings, config: ChatGLMConfig, processes: int) -> Training:
    """What decides the memory of one of so many processes."""
    lengths = [config.vision.num_image_tokens + 2 + text for text in settings.text_lengths()]
    return Training(
        trained=settings.trained,
        micro_batch=1 if settings.packed else settings.micro_batch,
        row_length=sum(lengths) if settings.packed else lengths[0],
        images_per_row=settings.micro_batch if settings.packed else 1,
        zero_stage=settings.zero_stage,
        processes=processes,
        optimizer=settings.optimizer,
        offload=settings.offload,
        loss_chunk=settings.loss_chunk_size,
        compiled=settings.compile,
    )
