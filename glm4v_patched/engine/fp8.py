"""Choice of the linear layers that multiply in fp8, and requirements on model and machine."""

from collections.abc import Iterator

import torch

from ..remote.configuration_chatglm import ChatGLMConfig
from .gpus import find_fp8_problem
from .options import LANGUAGE_TARGETS, TOWER_TARGETS, EngineOptions

FP8_SIZE_MULTIPLE = 16
"""fp8 products need numbers of input and output channels that are multiples of this."""

FP8_LAYERS = {"tower": TOWER_TARGETS, "language_model": LANGUAGE_TARGETS}

_allow_cpu = False
"""Whether fp8 is allowed on a CPU, where it is slow; only tests set it."""


def is_fp8_candidate(part: str, layer: str) -> bool:
    """Return whether transformer layers of a part have a linear layer of the name ``layer``."""
    return layer in FP8_LAYERS.get(part, ())


def why_not_fp8(part: str, layer: str, has_fused_quantization: bool) -> str | None:
    """Return why a linear layer stays in bf16 although fp8 is on, or None.

    The times were measured on one H200 with 25,604 tokens. ``dense`` (1,792 -> 1,792) takes 0.215
    ms in bf16. In fp8, its product takes 0.119 ms, and a separate quantization of its input 0.128
    ms. ``fc2`` (15,360 -> 1,792) takes 1.996 ms in bf16. In fp8, its product takes 0.998 ms, and
    the separate quantization 0.785 ms. The other layers are 1.45 to 1.83 times as fast in fp8,
    because fused kernels quantize their inputs.

    Args:
        part: One of :data:`options.MODEL_PARTS`.
        layer: The layer's own name, such as "fc1".
        has_fused_quantization: Whether the kernel that computes the input of ``fc2`` also quantizes
            it, as in compiled layers and in inference.
    """
    if not is_fp8_candidate(part, layer):
        return "it is not a linear layer of a transformer layer, or it is an adapter's"
    if (part, layer) == ("tower", "dense"):
        return "no fused kernel quantizes its input, so fp8 gains nothing"
    if (part, layer) == ("tower", "fc2") and not has_fused_quantization:
        return "fp8 gains nothing here unless layers are compiled"
    return None


def require_fp8(options: EngineOptions, config: ChatGLMConfig) -> None:
    """Check that this process can train the model in fp8, if the options ask for it.

    Raises:
        RuntimeError: There is no GPU, it is too old, or torch lacks the function for fp8 products.
        ValueError: The model's sizes are not multiples of :data:`FP8_SIZE_MULTIPLE`.
    """
    if not options.fp8:
        return
    require_fp8_matmul()
    for name, size in _channel_counts(config):
        if size % FP8_SIZE_MULTIPLE:
            raise ValueError(
                f"{name} is {size}, and fp8 needs multiples of {FP8_SIZE_MULTIPLE}; "
                "leave out fp8 for this model"
            )


def require_fp8_matmul() -> None:
    """Raise ``RuntimeError`` if this process cannot multiply in fp8."""
    if not hasattr(torch, "_scaled_mm"):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch._scaled_mm, which fp8 needs; "
            "install a tested one (README, What you need), or leave out fp8"
        )
    if not _allow_cpu:
        if not torch.cuda.is_available():
            raise RuntimeError("fp8 needs a GPU, and torch sees none; leave out fp8")
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if problem := find_fp8_problem(name, capability):
            raise RuntimeError(problem)


def _channel_counts(config: ChatGLMConfig) -> Iterator[tuple[str, int]]:
    """Yield the numbers of channels of linear layers, each after its name in the config."""
    yield "hidden_size", config.hidden_size
    yield "ffn_hidden_size", config.ffn_hidden_size
    yield "num_attention_heads * kv_channels", config.num_attention_heads * config.kv_channels
    yield "multi_query_group_num * kv_channels", config.multi_query_group_num * config.kv_channels
    yield "vision_config.hidden_size", config.vision.hidden_size
    yield "vision_config.intermediate_size", config.vision.intermediate_size
