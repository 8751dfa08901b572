"""Counts the activations that layers of both towers keep from forward to backward.

It is arithmetic on a config, in channels of a token. ``tests/engine/test_memory_plan.py`` compares
it with what autograd saves and with peaks that were measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from ..remote.configuration_chatglm import ChatGLMConfig
from .activation_policies import POLICIES, LayerSizes, Policy, policies_of_layers
from .fp8 import bf16_reason
from .options import (
    LANGUAGE_TARGETS,
    TOWER_TARGETS,
    EngineOptions,
    is_lora,
    trained_parts,
    trains_tower,
)

BF16, FP32 = 2, 4
# Gradients inside of a layer's backward pass, in channels of its widest activation: its own, and
# those of the activation function's inputs. fp8 adds the gradient in fp32, scaled and not, where
# nothing fuses them into the kernel that quantizes.
INSIDE_BACKWARD, INSIDE_BACKWARD_FP8 = 1.5, 3.5
# Multiply-adds that a GPU does in the time it takes to move one channel of a token: 700 TFLOP/s
# against 4 TB/s, which is what both reach in training on an H200.
WORK_OF_A_CHANNEL = 175


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of one process in a step; lengths in positions, images included."""

    rows: int
    sequence_length: int  # of the longest row
    images_per_sequence: float = 1.0
    processes: int = 1  # that take part in the step, each with such a batch
    accumulates: bool = False  # gradients of earlier micro-batches are there while one is computed


def linear_layers(config: ChatGLMConfig) -> tuple[dict[str, tuple[int, int]], ...]:
    """Return the channels in and out of the linear layers of a tower layer, and of a block of the
    language model, by their names."""
    width, inner, side = config.hidden_size, config.ffn_hidden_size, config.vision.hidden_size
    queries = config.num_attention_heads * config.kv_channels
    fused = queries + 2 * config.multi_query_group_num * config.kv_channels
    wide = config.vision.intermediate_size
    tower = [(side, 3 * side), (side, side), (side, wide), (wide, side)]
    language = [(width, fused), (queries, width), (width, 2 * inner), (inner, width)]
    return (
        dict(zip(TOWER_TARGETS, tower, strict=True)),
        dict(zip(LANGUAGE_TARGETS, language, strict=True)),
    )


def is_autocast(options: EngineOptions) -> bool:
    """Return whether what is trained is fp32 and computed with in bf16: without ZeRO."""
    return options.zero_stage == 0 and options.precision == "bf16"


def norm_width(options: EngineOptions) -> int:
    """Return the size of a channel of LayerNorm's output, which autocast makes fp32, in channels of
    the dtype that is computed with."""
    return FP32 // BF16 if is_autocast(options) else 1


@dataclass(frozen=True)
class Stack:
    """The layers of one tower by their policies, the tokens that go through them, and the sizes of
    one layer."""

    policies: list[Policy]
    tokens: float
    sizes: LayerSizes
    inside_backward: float  # channels

    def __iter__(self) -> Iterator[Policy]:
        return iter(self.policies)

    @property
    def kept(self) -> float:
        """Channels that all layers keep of all tokens."""
        return self.tokens * sum(policy.channels(self.sizes) for policy in self)

    @property
    def inside(self) -> float:
        """Channels that the backward pass of one layer takes beside those that were kept."""
        least = min(policy.channels(self.sizes) for policy in self)
        recomputed = max(self.sizes.saved_by_autograd - least, 0)
        return self.tokens * (recomputed + self.inside_backward)


def stacks_with_backward(
    config: ChatGLMConfig, options: EngineOptions, batch: Batch
) -> list[Stack]:
    """Return the layers of the tower, if it has a backward pass, and of the language model."""
    positions = batch.num_sequences * batch.images_per_sequence * config.vision.num_positions
    towers = policies_of_layers(options.tower, config.vision.num_hidden_layers)
    blocks = policies_of_layers(options.language, config.num_layers)
    tower, language = tower_sizes(config, options), language_sizes(config, options, batch)
    # The compiler fuses what fp8 adds.
    inside = INSIDE_BACKWARD_FP8 if options.fp8 and not options.compile else INSIDE_BACKWARD
    stacks = [
        Stack(towers, positions, tower, inside * config.vision.intermediate_size),
        Stack(blocks, batch.num_sequences * batch.sequence_length, language, inside * 2 * config.ffn_hidden_size),
    ]
    return stacks if trains_tower(options.trained) else stacks[1:]


def is_input_saved(options: EngineOptions, part: str, layer: str) -> bool:
    """Return whether autograd keeps the input of a linear layer: for the gradient of its weight or
    adapter, or because DeepSpeed's own ``F.linear`` keeps it in any case.

    Args:
        part: One of :data:`options.PARTS`.
        layer: Its name in :func:`linear_layers`.
    """
    if part in trained_parts(options.trained):
        return True
    if options.zero_stage == 3 and not options.gathers_whole_layers:
        return not multiplies_in_fp8(options, part, layer)
    has_adapters = part == "language_model" or options.trained == "lora_all"
    return is_lora(options.trained) and has_adapters and layer in options.lora.target_names


def multiplies_in_fp8(options: EngineOptions, part: str, layer: str) -> bool:
    """Return whether a linear layer multiplies in fp8, as :mod:`implementations` has it."""
    return options.fp8 and bf16_reason(part, layer, bool(options.compile)) is None


def tower_sizes(config: ChatGLMConfig, options: EngineOptions) -> LayerSizes:
    """Return the sizes of a tower layer.

    Under autocast the inputs of its norms are fp32, as is the sum that goes from layer to layer.
    """
    side, inner = config.vision.hidden_size, config.vision.intermediate_size
    norm = 1 if options.compile else norm_width(options)
    saved_of = partial(is_input_saved, options, "tower")
    saved = (3 + 1) * side + 2 * norm * side + inner  # q, k, v, attention, norms, GELU
    saved += side * (saved_of("query_key_value") or options.compile is True)
    saved += side * (saved_of("fc1") and not options.compile) + inner * saved_of("fc2")
    return LayerSizes(
        layer_input=norm_width(options) * side,
        attention_output=side,
        narrow_outputs=2 * side,  # dense and fc2
        wide_outputs=3 * side + inner,
        saved_by_autograd=saved,
        elementwise_work=WORK_OF_A_CHANNEL * (4 * side + 2 * inner),
        wide_work=3 * side**2 + side * inner,
        narrow_work=side**2,
        attention_work=2 * config.vision.num_positions * side,
    )


def language_sizes(config: ChatGLMConfig, options: EngineOptions, batch: Batch) -> LayerSizes:
    """Return the sizes of a block of the language model."""
    width, up = config.hidden_size, 2 * config.ffn_hidden_size
    linear = linear_layers(config)[1]
    fused, projected = linear["query_key_value"][1], linear["dense"][0]
    saved_of = partial(is_input_saved, options, "language_model")
    # Trained embeddings are fp32, and so is the sum that goes from block to block.
    is_sum_fp32 = is_autocast(options) and "language_model" in trained_parts(options.trained)
    residual = width * (FP32 // BF16 if is_sum_fp32 else 1)
    # The norms' inputs, the attention's output, and the fused projection, of which v is a part.
    saved = 2 * residual + projected + fused + up + up // 2 * saved_of("dense_4h_to_h")
    if options.compile:
        saved += 2 * width
    else:
        rotated = fused - config.multi_query_group_num * config.kv_channels
        saved += rotated + up // 2  # q and k, and silu(gate)
        saved += width * (saved_of("query_key_value") + saved_of("dense_h_to_4h"))
    sizes = LayerSizes(
        layer_input=residual,
        attention_output=projected,
        narrow_outputs=width + fused + (0 if options.compile else width),
        wide_outputs=up,
        saved_by_autograd=saved,
        elementwise_work=WORK_OF_A_CHANNEL * (4 * width + 2 * fused + 1.5 * up),
        wide_work=width * up,
        narrow_work=width * (projected + fused),
        attention_work=batch.sequence_length * projected,
    )
    if options.trained != "qlora":
        return sizes
    # Policies do not know linear layers of 4 bits.
    again = POLICIES["attention"].work(sizes)
    return replace(
        sizes,
        narrow_outputs=0,
        wide_outputs=0,
        elementwise_work=again,
        wide_work=0,
        narrow_work=0,
    )
