"""Builds, from options, a model that is ready to train, and its optimizer.

The recipe, the bench and the loss curves all use it; nothing else builds a model for training.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..remote.modeling_chatglm import GLM4VForCausalLM
from .activation_checkpointing import checkpoint_layers, compile_layers
from .deepspeed import internals
from .deepspeed.config import deepspeed_config
from .deepspeed.zero3 import adapt_zero3, wait_for_every_gather
from .implementations import Use, use_implementations
from .memory_plan import GIB
from .options import ADAMW, MAX_GRAD_NORM, EngineOptions
from .trainable import continue_adapters, quantization_options, select_weights, upcast_trained

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
    (``TrainingArguments``, or :func:`start`), so that weights come straight into shards.

    Args:
        options: Decided (:func:`memory_plan.decide`).
        build: Given ``dtype`` and what else ``from_pretrained`` takes, returns the model.
        adapters: peft's adapters to go on with, instead of new ones.
    """
    assert options.is_decided, "memory_plan.decide() comes first"
    if not options.quantises_built:
        _limit_memory(options)
    if options.zero_stage == 3:
        wait_for_every_gather()
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
        model = continue_adapters(built, adapters)
    else:
        model = select_weights(built, options.trained, options.lora)
    if options.zero_stage == 0:
        upcast_trained(model)
    use_implementations(model, Use.training(options))
    # Of weights that were quantised, only now: bench's random ones were whole on the GPU before.
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


def join_processes(options: EngineOptions) -> None:
    """Make this process one of DeepSpeed's group, on its own GPU; nothing without ZeRO."""
    local_device()
    if options.zero_stage:
        import deepspeed

        with internals.nothing_compiled():
            deepspeed.init_distributed(verbose=False)


def start(
    options: EngineOptions,
    build: Callable[..., GLM4VForCausalLM],
    micro_batch: int,
    learning_rate: float,
    zero_changes: Mapping[str, Any] | None = None,
) -> "Engine":
    """A prepared model with its optimizer, for whoever trains without transformers' Trainer, in
    processes that were joined; ``zero_changes`` is laid over DeepSpeed's ``zero_optimization``."""
    device = local_device()
    config = deepspeed_config(options, micro_batch, 1, MAX_GRAD_NORM)
    if config is None:
        with device:
            model = prepare_model(options, build)
        return Engine(model, make_optimizer(model, options, learning_rate), options)
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config["zero_optimization"] |= zero_changes or {}
    # Under stage 3 new parameters come straight into shards while it is alive, and transformers
    # asks it later, too.
    hf_config = HfDeepSpeedConfig(config)
    with nullcontext() if options.zero_stage == 3 else device:
        model = prepare_model(options, build)
    optimizer = make_optimizer(model, options, learning_rate)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    return _Zero(engine, options, hf_config)


def make_optimizer(
    model: nn.Module, options: EngineOptions, learning_rate: float
) -> torch.optim.Optimizer:
    """AdamW over what is trained; the same that the recipe asks the Trainer for."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=learning_rate, fused=True, **ADAMW)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(trained, lr=learning_rate, **ADAMW)


class Engine:
    """A training step in three parts, of a model with its optimizer.

    Of one process without ZeRO: what is trained is held in fp32 and computed with under autocast.
    """

    def __init__(self, model: nn.Module, optimizer: Any, options: EngineOptions):
        self.model, self.optimizer, self.options = model, optimizer, options

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Train one step; returns its loss, detached."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return loss.detach()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        enabled = self.options.precision == "bf16"
        with torch.autocast(local_device().type, torch.bfloat16, enabled=enabled):
            return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(
            (p for p in self.model.parameters() if p.requires_grad), MAX_GRAD_NORM
        )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def optimizer_tensors(self) -> list[Tensor]:
        """States of the optimizer, and under ZeRO the fp32 weights that they belong to."""
        return _state_tensors(self.optimizer)

    def gradient_buffers(self) -> list[Tensor]:
        """What holds gradients from one step to the next."""
        return []

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


class _Zero(Engine):
    """DeepSpeed at stage 1 to 3."""

    def __init__(self, engine: Any, options: EngineOptions, hf_config: Any):
        super().__init__(engine.module, engine.optimizer, options)
        self.engine, self.hf_config = engine, hf_config

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.engine(**batch).loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def optimizer_tensors(self) -> list[Tensor]:
        masters = internals.masters(self.optimizer, self.options.zero_stage)
        return [*masters, *_state_tensors(self.optimizer.optimizer)]

    def gradient_buffers(self) -> list[Tensor]:
        return internals.gradient_buffers(self.optimizer, self.options.zero_stage)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]
