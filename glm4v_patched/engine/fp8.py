"""Which linear layers multiply in fp8, and what that needs of model and machine."""

from collections.abc import Iterator

import torch

from ..remote.configuration_chatglm import ChatGLMConfig
from .gpus import find_fp8_problem
from .options import LANGUAGE_TARGETS, TOWER_TARGETS, EngineOptions

MULTIPLE = 16
"""Channels of a layer are a multiple of it: what the GPU's products take."""

TARGETS = {"tower": TOWER_TARGETS, "language_model": LANGUAGE_TARGETS}

_allow_cpu = False
"""For tests: products of fp8 on a CPU, which are slow there."""


def is_fp8_candidate(part: str, layer: str) -> bool:
    """Return whether a linear layer is one of those of the towers' layers."""
    return layer in TARGETS.get(part, ())


def bf16_reason(part: str, layer: str, has_fused_quantization: bool) -> str | None:
    """Return why a linear layer stays in bf16 where fp8 is asked for, or None.

    On one H200, of 25,604 rows, in ms: bf16; fp8, and quantizing the input by itself:
    ``dense`` (1,792 -> 1,792) 0.215; 0.119 + 0.128. ``fc2`` (15,360 -> 1,792) 1.996; 0.998 + 0.785.
    The others gain 1.45 to 1.83 times, quantized by kernels of their own.

    Args:
        part: One of :data:`options.PARTS`.
        has_fused_quantization: A kernel that makes the activations of ``fc2`` quantizes them: layers are
            compiled, or the model is for inference.
    """
    if not is_fp8_candidate(part, layer):
        return "it is outside of the towers' layers, or an adapter's"
    if (part, layer) == ("tower", "dense"):
        return "no kernel that makes its input quantizes it, so that fp8 gains nothing"
    if (part, layer) == ("tower", "fc2") and not has_fused_quantization:
        return "fp8 gains nothing here where layers are not compiled"
    return None


def require_fp8(options: EngineOptions, config: ChatGLMConfig) -> None:
    """Raise if fp8 is asked for and this process cannot train the model with it.

    Raises:
        RuntimeError: no GPU, an old one, or a torch without what is used of it.
        ValueError: the model's sizes are not multiples of :data:`MULTIPLE`.
    """
    if not options.fp8:
        return
    require_fp8_matmul()
    for name, size in _sizes(config):
        if size % MULTIPLE:
            raise ValueError(
                f"fp8 with {name} {size}: its products take multiples of {MULTIPLE}; "
                "leave out fp8 for this model"
            )


def require_fp8_matmul() -> None:
    """Raise ``RuntimeError`` if this process cannot multiply in fp8."""
    if not hasattr(torch, "_scaled_mm"):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch._scaled_mm, with which fp8 multiplies; "
            "install a tested one (README, What you need), or leave out fp8"
        )
    if not _allow_cpu:
        if not torch.cuda.is_available():
            raise RuntimeError("fp8 needs a GPU, and torch sees none; leave out fp8")
        found = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if fault := find_fp8_problem(*found):
            raise RuntimeError(fault)


def _sizes(config: ChatGLMConfig) -> Iterator[tuple[str, int]]:
    yield "hidden_size", config.hidden_size
    yield "ffn_hidden_size", config.ffn_hidden_size
    yield "num_attention_heads * kv_channels", config.num_attention_heads * config.kv_channels
    yield "multi_query_group_num * kv_channels", config.multi_query_group_num * config.kv_channels
    yield "vision_config.hidden_size", config.vision.hidden_size
    yield "vision_config.intermediate_size", config.vision.intermediate_size
