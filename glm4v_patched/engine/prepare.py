"""Builds, from options, a model that is ready to train; nothing else builds one."""

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
from .implementations import Use, use_implementations
from .memory_plan import GIB
from .options import EngineOptions
from .trainable import load_trainable_adapters, quantization_options, select_weights, upcast_trained

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def local_device() -> torch.device:
    """This process's GPU, made the current one; the CPU where there is none."""
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
    """The model with what is not trained frozen, policies set, compiled, ready for ZeRO.

    Under ZeRO-3, DeepSpeed's configuration must be known to transformers before
    (``TrainingArguments``), so that weights come straight into shards.

    Args:
        options: Decided (:func:`memory_plan.decide`).
        build: Given ``dtype`` and what else ``from_pretrained`` takes, returns the model.
        adapters: peft's adapters to go on with, instead of new ones.
    """
    assert options.is_decided, "memory_plan.decide() comes first"
    if not options.shrinks_after_build:
        _limit_memory(options)
    if options.zero_stage == 3:
        serialize_gloo_gathers()
    dtype = DTYPES[options.precision]
    given: dict[str, Any] = {"dtype": dtype}
    if options.attn_implementation is not None:
        given["attn_implementation"] = options.attn_implementation
    if options.trained == "qlora":
        given |= quantization_options(dtype, local_device())
    built = build(**given)
    built.config.skip_logits = options.skip_logits
    if options.loss_chunk_size is not None:
        built.config.loss_chunk_size = options.loss_chunk_size
    if adapters is not None:
        model = load_trainable_adapters(built, adapters)
    else:
        model = select_weights(built, options.trained, options.lora)
    if options.zero_stage == 0:
        upcast_trained(model)
    use_implementations(model, Use.training(options))
    # Of weights that were quantized, only now: bench's random ones were whole on the GPU before.
    _limit_memory(options)
    in_compiled_fp8 = options.fp8 and options.compile is True
    checkpoint_layers(model.train(), options.tower, options.language, by_operation=in_compiled_fp8)
    if options.compile:
        compile_layers(model)
    if options.zero_stage == 3:
        adapt_zero3(model, options)
    return model


def _limit_memory(options: EngineOptions) -> None:
    """Let torch allocate no more than is asked; the driver's and NCCL's own are beside it."""
    if options.memory_limit is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        share = options.memory_limit * GIB / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))


def join_process_group(options: EngineOptions) -> None:
    """Make this process one of DeepSpeed's group, on its own GPU; nothing without ZeRO."""
    local_device()
    if options.zero_stage:
        import deepspeed

        with internals.skip_collectives_compilation():
            deepspeed.init_distributed(verbose=False)
