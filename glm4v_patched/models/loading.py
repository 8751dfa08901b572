"""Loads a model or adapters to be used, with the package's own code and never the folder's."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2.exceptions import TemplateError

from ..engine.fp8 import require_fp8_matmul
from ..engine.implementations import ModelUsage, use_implementations
from ..engine.trainable import load_trainable_adapters, quantization_options
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..remote.processing_chatglm import ChatGLMProcessor
from ..terminal_text import show_progress
from .base import ModelSource
from .limits import LimitedTemplate, require_settings, require_short_tokens


class LoadedModel(NamedTuple):
    """A model in eval mode, with peft's around it if there are adapters, and its processor."""

    model: Any
    processor: ChatGLMProcessor


def load_with_processor(
    base: ModelSource, device: str = "cuda", weights: str | None = None, tells: bool = True
) -> LoadedModel:
    """Load what :func:`find.find_source` found, in the dtype that it was saved in.

    Args:
        device: As torch takes it. Weights go straight to a GPU.
        weights: How those of the layers are held: one of :data:`quantized_weights.WEIGHTS`, or None
            for as they were saved. Of vision adapter, embeddings and output layer they stay as they
            are. For fp8 the model is loaded into the machine's memory, and the GPU never holds it
            in full.
        tells: Say that it is being done.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError(
            "torch sees no GPU, although the driver has one: is it too old for this torch? To use "
            "the CPU all the same: --device cpu"
        )
    options: dict[str, Any] = {"revision": base.revision or "main", "dtype": "auto"}
    build = partial(GLM4VForCausalLM.from_pretrained, base.model, **options)
    with show_progress("loading the model", tells):
        model = build_on_device(build, device, weights, base.adapters)
    return LoadedModel(model.eval().requires_grad_(False), load_processor(base))


def build_on_device(
    build: Callable[..., Any], device: str, weights: str | None, adapters: Path | None = None
) -> Any:
    """A model on a device, with the weights of its layers held as :func:`load` has it, and with
    adapters, if there are any.

    Args:
        build: Given what else ``from_pretrained`` takes, returns the model: that function, of a
            folder, or :func:`trainable.build_random_model`.
    """
    given: dict[str, Any] = {}
    if weights in ("4bit", "8bit"):
        bits = int(weights.removesuffix("bit"))
        if bits == 8:
            import bitsandbytes

            logger = logging.getLogger(bitsandbytes.MatmulLtState.__module__)
            logger.addFilter(_is_no_cast)
        given = quantization_options(torch.bfloat16, torch.device(device), bits)
    elif weights == "fp8":
        require_fp8_matmul()
    elif device != "cpu":
        given = {"device_map": {"": torch.device(device)}}
    model = build(**given)
    if adapters is not None:
        model = load_trainable_adapters(model, adapters)
    use_implementations(model, ModelUsage.inference(fp8=weights == "fp8"))
    if weights == "fp8":  # layers are on a GPU already, which never holds them all in bf16
        model.to(torch.device(device))
    return model


def _is_no_cast(record: logging.LogRecord) -> bool:
    """LLM.int8 casts to fp16, and says so in each product of a model that is in bf16."""
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


def load_model_config(base: ModelSource) -> ChatGLMConfig:
    """The model's, which adapters share."""
    return ChatGLMConfig.from_pretrained(base.model, revision=base.revision or "main")


def load_processor(base: ModelSource) -> ChatGLMProcessor:
    """That of the adapters; of a model, or of adapters that have none beside them, the model's.
    ``ValueError`` if a file of it cannot be read, or its chat template cannot be rendered."""
    place, revision = str(base.model), base.revision or "main"
    if base.adapters is not None and (base.adapters / "tokenizer_config.json").is_file():
        place, revision = str(base.adapters), "main"
    try:
        require_settings(place, revision)
        processor = ChatGLMProcessor.from_pretrained(place, revision=revision)
        require_short_tokens(place, processor.tokenizer.added_tokens_decoder.values())
        processor.tokenizer.render_template = LimitedTemplate(place)
        # Of a template, what is wrong shows when it is rendered.
        processor.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateError:
        return processor  # wants another conversation
    except Exception as error:  # of transformers' own, of every kind, and few name the file
        if isinstance(error, ValueError) and str(error).startswith(place):
            raise
        told = f"{place}: its tokenizer or processor cannot be read"
        raise ValueError(f"{told} ({type(error).__name__}: {error})") from error
    return processor
