"""Build a model and prepare it for training. No other module prepares a model."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..remote.modeling_chatglm import GLM4VForCausalLM
from .activation_checkpointing import checkpoint_layers, compile_layers
from .deepspeed import internals
from .deepspeed.zero3 import adapt_zero3, serialize_gloo_gathers
from .implementations import ModelUsage, use_implementations
from .memory_plan import GIB
from .options import EngineOptions
from .trainable import (
    load_adapters,
    quantization_options,
    select_weights,
    upcast_trained,
)

PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def local_device() -> torch.device:
    """Make this process's GPU the current one and return it; return the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def prepare_model(
    options: EngineOptions,
    build: Callable[..., GLM4VForCausalLM],
    adapters: Path | None = None,
) -> nn.Module:
    """Build a model and apply the options: freeze weights, set implementations and checkpointing.

    Under ZeRO-3, create ``TrainingArguments`` first: they register DeepSpeed's configuration with
    transformers, which then loads weights directly into shards.

    Args:
        options: Options that :func:`memory_plan.decide_options` has decided.
        build: Called with ``dtype`` and other keywords of ``from_pretrained``; returns the model.
        adapters: Folder of peft adapters to train further, instead of new ones.
    """
    assert options.is_decided, "memory_plan.decide_options() comes first"
    if not options.quantizes_after_build:
        _limit_memory(options)
    if options.zero_stage == 3:
        serialize_gloo_gathers()
    dtype = PRECISION_DTYPES[options.precision]
    kwargs: dict[str, Any] = {"dtype": dtype}
    if options.trained == "qlora":
        kwargs |= quantization_options(dtype, local_device())
    base = build(**kwargs)
    if adapters is not None:
        model = load_adapters(base, adapters)
    else:
        model = select_weights(base, options.trained, options.lora)
    if options.zero_stage == 0:
        upcast_trained(model)
    use_implementations(model, ModelUsage.training(options))
    # Here the frozen weights are quantized in any case. Before, they may exceed the limit, because
    # bench builds its random model on the GPU.
    _limit_memory(options)
    is_compiled_fp8 = options.fp8 and options.compile is True
    checkpoint_layers(
        model.train(), options.tower, options.language, marks_every_operator=is_compiled_fp8
    )
    if options.compile:
        compile_layers(model)
    if options.zero_stage == 3:
        adapt_zero3(model, options)
    return model


def _limit_memory(options: EngineOptions) -> None:
    """Apply ``memory_limit`` to torch's allocator. Memory of the driver and NCCL is not limited."""
    if options.memory_limit is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        fraction = options.memory_limit * GIB / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0))


def join_process_group(options: EngineOptions) -> None:
    """Join DeepSpeed's process group with this process's GPU; without ZeRO only select the GPU."""
    local_device()
    if options.zero_stage:
        import deepspeed

        with internals.skip_collectives_compilation():
            deepspeed.init_distributed(verbose=False)
