"""Load a model or adapters for inference. Code in their folder is never run."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2.exceptions import TemplateError
from transformers.utils.logging import disable_progress_bar

from ..engine.fp8 import require_fp8_matmul
from ..engine.implementations import ModelUsage, use_implementations
from ..engine.memory_plan import count_parameters
from ..engine.options import choose_precision
from ..engine.ram import free_ram
from ..engine.trainable import load_adapters, quantization_options
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..remote.processing_chatglm import ChatGLMProcessor
from ..terminal_text import format_bytes, show_progress
from .base import ModelSource
from .check_weights import quantized_by
from .limits import LimitedTemplate, require_processor_files, require_short_tokens


class LoadedModel(NamedTuple):
    """A model in eval mode, wrapped by peft if there are adapters, and its processor."""

    model: Any
    processor: ChatGLMProcessor


def load_with_processor(
    source: ModelSource,
    device: str = "cuda",
    weights: str | None = None,
    verbose: bool = True,
    dtype: str = "auto",
) -> LoadedModel:
    """Load a model and its processor.

    Args:
        source: From :func:`find.find_source`.
        device: A device of torch, by its name. Weights are loaded directly to a GPU.
        weights: One of :data:`quantized_weights.WEIGHT_FORMATS`, to which the weights of the layers
            are quantized, or None to keep them as saved. Projector, embeddings and output layer are
            never quantized. For fp8, the model is loaded to CPU memory first, so that the GPU never
            contains all weights in bf16.
        verbose: Print a line while loading.
        dtype: Name of a dtype of torch; "auto" is the dtype in which the model was saved.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError(
            "torch sees no GPU, although the driver has one: is the driver too old for this torch? "
            "To use the CPU: --device cpu"
        )
    if os.path.isdir(source.model):  # during a download, transformers' progress bar is useful
        disable_progress_bar()
    options: dict[str, Any] = {"revision": source.revision or "main", "dtype": dtype}
    build = partial(GLM4VForCausalLM.from_pretrained, source.model, **options)
    with show_progress("loading the model", verbose):
        model = build_on_device(build, device, weights, source.adapters)
    return LoadedModel(model.eval().requires_grad_(False), load_processor(source))


def build_on_device(
    build: Callable[..., Any], device: str, weights: str | None, adapters: Path | None = None
) -> Any:
    """Build a model on a device, quantize it, and set the implementations for inference.

    Args:
        build: Called with further options of ``from_pretrained``; returns the model. It is a
            partial of ``from_pretrained``, or of :func:`trainable.build_random_model`.
        weights: As for :func:`load_with_processor`.
        adapters: Folder of adapters to load on the model.
    """
    options: dict[str, Any] = {}
    if weights in ("4bit", "8bit"):
        bits = int(weights.removesuffix("bit"))
        if bits == 8:
            import bitsandbytes

            logger = logging.getLogger(bitsandbytes.MatmulLtState.__module__)
            logger.addFilter(_is_not_cast_warning)
        options = quantization_options(torch.bfloat16, torch.device(device), bits)
    elif weights == "fp8":
        require_fp8_matmul()
    elif device != "cpu":
        options = {"device_map": {"": torch.device(device)}}
    model = build(**options)
    if adapters is not None:
        model = load_adapters(model, adapters)
    use_implementations(model, ModelUsage.inference(fp8=weights == "fp8"))
    if weights == "fp8":
        # use_implementations has moved the layers that it quantized. Here the rest is moved.
        model.to(torch.device(device))
    return model


def choose_dtype(source: ModelSource, dtype: str, processes: int = 1) -> tuple[str, str]:
    """Return the dtype for inference on a CPU, and the reason for it if ``dtype`` is "auto".

    On a CPU without instructions for bf16, prompts take several times as long in 16 bits as in
    fp32; generated tokens take equally long. "auto" does not convert a model that was saved
    quantized or in fp32, or whose config has no dtype.

    Args:
        dtype: Name of a dtype of torch, or "auto".
        processes: How many processes load the model.

    Raises:
        ValueError: The memory is too small for float32, or a quantized model would be converted.
    """
    config = load_model_config(source)
    saved = str(config.dtype or "torch.auto").removeprefix("torch.")
    precision, reason = choose_precision(on_cpu=True)
    is_quantized = quantized_by(source.model, source.revision) is not None
    if dtype == "auto" and (is_quantized or saved in ("auto", "float32")):
        return "auto", ""
    if is_quantized:
        raise ValueError(f"--dtype {dtype}: {source.model} was saved quantized; remove --dtype")
    if dtype in ("bfloat16", "float16"):
        return dtype, ""
    if dtype == "auto" and precision == "bf16":
        return saved, reason
    needed, free = processes * 4 * sum(count_parameters(config)), free_ram()
    sizes = f"fp32 needs {format_bytes(needed)} of memory, and {format_bytes(free)} are free"
    if needed < free:
        return "float32", reason if dtype == "auto" else ""
    if dtype == "auto":
        return saved, f"{reason}, but {sizes}"
    raise ValueError(f"--dtype float32: {sizes}; expected --dtype {saved}, or a larger machine")


def _is_not_cast_warning(record: logging.LogRecord) -> bool:
    """Return False for the warning that LLM.int8 logs in each matmul: it casts bf16 to fp16."""
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


def load_model_config(source: ModelSource) -> ChatGLMConfig:
    """Return the config of the model; adapters have none of their own."""
    return ChatGLMConfig.from_pretrained(source.model, revision=source.revision or "main")


def load_processor(source: ModelSource) -> ChatGLMProcessor:
    """Return the processor saved with the adapters, or else the model's.

    Raises:
        ValueError: A file of the processor cannot be read, or the chat template fails.
    """
    location, revision = str(source.model), source.revision or "main"
    if source.adapters is not None and (source.adapters / "tokenizer_config.json").is_file():
        location, revision = str(source.adapters), "main"
    try:
        require_processor_files(location, revision)
        processor = ChatGLMProcessor.from_pretrained(location, revision=revision)
        require_short_tokens(location, processor.tokenizer.added_tokens_decoder.values())
        processor.tokenizer.render_template = LimitedTemplate(location)
        # Render the chat template once: errors in it are raised only then.
        processor.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateError:
        return processor  # the template works, and refuses this conversation on purpose
    except Exception as error:  # transformers raises errors of any class, which name no file
        if isinstance(error, ValueError) and str(error).startswith(location):
            raise
        problem = f"{location}: its tokenizer or processor cannot be read"
        raise ValueError(f"{problem} ({type(error).__name__}: {error})") from error
    return processor
