"""What settings mean to the engine: the model's size, a step's batch, the options."""

import json
from dataclasses import fields, replace
from pathlib import Path

from ..engine.memory_plan import Batch
from ..engine.options import EngineOptions
from ..remote.configuration_chatglm import ChatGLMConfig
from .settings import Settings


def config_of(settings: Settings) -> ChatGLMConfig:
    """The real size, unless a file says otherwise."""
    return ChatGLMConfig(
        **(json.loads(Path(settings.config).read_text()) if settings.config else {})
    )


def batch_of(settings: Settings, config: ChatGLMConfig, processes: int) -> Batch:
    """Of one of so many processes."""
    lengths = [config.vision.num_image_tokens + 2 + text for text in settings.text_lengths()]
    return Batch(
        rows=1 if settings.packed else settings.micro_batch,
        row_length=sum(lengths) if settings.packed else lengths[0],
        images_per_row=settings.micro_batch if settings.packed else 1,
        processes=processes,
    )


def options_of(settings: Settings) -> EngineOptions:
    """The recipe's defaults, but for what is asked; of the original's code, nothing of ours."""
    shared = {each.name for each in fields(EngineOptions)} & {
        each.name for each in fields(settings)
    }
    asked = {name: getattr(settings, name) for name in shared}
    options = EngineOptions(skip_logits=not settings.all_logits, **asked)
    if settings.against is None:
        return options
    theirs = {"tower": "full", "language": "full", "compile": False}
    return replace(options, **theirs, norms_in_place=False, layers_ahead=0)
