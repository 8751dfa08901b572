"""Estimate the activations that transformer layers save from forward to backward.

The estimates are computed from a config alone, in channels per token.
``tests/engine/test_memory_plan.py`` compares them with what autograd saves and with measured peaks.
"""

from dataclasses import dataclass, replace
from functools import partial

from ..remote.configuration_chatglm import ChatGLMConfig
from .activation_policies import POLICIES, LayerSizes, Policy, policies_of_layers
from .fp8 import why_not_fp8
from .options import (
    LANGUAGE_TARGETS,
    TOWER_TARGETS,
    EngineOptions,
    is_lora,
    trained_parts,
    trains_tower,
)

BF16_BYTES, FP32_BYTES = 2, 4
# Gradients that exist at once in a layer's backward pass, in multiples of the layer's widest
# activation: the gradient of that activation, and that of the activation function's input. In eager
# fp8, the gradient also exists in fp32, once unscaled and once scaled.
LIVE_GRADIENTS, LIVE_GRADIENTS_EAGER_FP8 = 1.5, 3.5
# Multiply-adds that a GPU does while it reads or writes one bf16 element. On an H200, training
# reaches 700 TFLOP/s (350e12 multiply-adds) and 4 TB/s (2e12 elements). With this number, the time
# of element-wise operations is expressed in multiply-adds.
MACS_PER_MOVED_ELEMENT = 175


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The batch of one process in a step.

    Attributes:
        sequence_length: Positions of the longest sequence, with images expanded.
        processes: Processes of the step, each with a batch of this size.
        accumulates_gradients: Whether gradients of earlier micro-batches exist while this one is
            computed.
    """

    num_sequences: int
    sequence_length: int
    images_per_sequence: float = 1.0
    processes: int = 1
    accumulates_gradients: bool = False


def linear_layer_shapes(config: ChatGLMConfig) -> tuple[dict[str, tuple[int, int]], ...]:
    """Return the numbers of input and output channels of each linear layer, by its name.

    Returns:
        Two dictionaries: for a tower layer, and for a block of the language model.
    """
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    tower_hidden, tower_ffn = config.vision.hidden_size, config.vision.intermediate_size
    query = config.num_attention_heads * config.kv_channels
    qkv = query + 2 * config.multi_query_group_num * config.kv_channels
    tower = [
        (tower_hidden, 3 * tower_hidden),
        (tower_hidden, tower_hidden),
        (tower_hidden, tower_ffn),
        (tower_ffn, tower_hidden),
    ]
    language = [(hidden, qkv), (query, hidden), (hidden, 2 * ffn), (ffn, hidden)]
    return (
        dict(zip(TOWER_TARGETS, tower, strict=True)),
        dict(zip(LANGUAGE_TARGETS, language, strict=True)),
    )


def uses_autocast(options: EngineOptions) -> bool:
    """Return whether training runs under autocast, with trained weights in fp32.

    It does in bf16 without ZeRO.
    """
    return options.zero_stage == 0 and options.precision != "fp32"


def norm_dtype_factor(options: EngineOptions) -> int:
    """Return how much larger elements of a norm's output are: 2 under autocast (fp32), else 1."""
    return FP32_BYTES // BF16_BYTES if uses_autocast(options) else 1


@dataclass(frozen=True)
class LayerStack:
    """The transformer layers of one part of the model, and the tokens that pass through them.

    Attributes:
        policies: The policy of each layer.
        tokens: Number of tokens of one batch.
        sizes: Sizes of one layer.
        gradient_channels: Channels per token of the gradients that exist at once in a layer's
            backward pass.
    """

    policies: list[Policy]
    tokens: float
    sizes: LayerSizes
    gradient_channels: float

    @property
    def saved_elements(self) -> float:
        """Elements that all layers save for all tokens."""
        return self.tokens * sum(policy.saved_channels(self.sizes) for policy in self.policies)

    @property
    def layer_backward_elements(self) -> float:
        """Elements that the backward pass of one layer needs beside the saved ones."""
        saved = min(policy.saved_channels(self.sizes) for policy in self.policies)
        recomputed = max(self.sizes.saved_by_autograd - saved, 0)
        return self.tokens * (recomputed + self.gradient_channels)


def stacks_with_backward(
    config: ChatGLMConfig, options: EngineOptions, batch: BatchShape
) -> list[LayerStack]:
    """Return the stacks of layers that have a backward pass.

    The last one is the language model. The tower precedes it if gradients flow through the tower.
    """
    tower_tokens = batch.num_sequences * batch.images_per_sequence * config.vision.num_positions
    tower_policies = policies_of_layers(options.tower, config.vision.num_hidden_layers)
    block_policies = policies_of_layers(options.language, config.num_layers)
    tower, language = tower_sizes(config, options), language_sizes(config, options, batch)
    # The compiler fuses the steps that fp8 adds.
    is_eager_fp8 = options.fp8 and not options.compile
    factor = LIVE_GRADIENTS_EAGER_FP8 if is_eager_fp8 else LIVE_GRADIENTS
    tokens = batch.num_sequences * batch.sequence_length
    stacks = [
        LayerStack(tower_policies, tower_tokens, tower, factor * config.vision.intermediate_size),
        LayerStack(block_policies, tokens, language, factor * 2 * config.ffn_hidden_size),
    ]
    return stacks if trains_tower(options.trained) else stacks[1:]


def is_input_saved(options: EngineOptions, part: str, layer: str) -> bool:
    """Return whether autograd saves the input of a linear layer.

    Autograd needs the input for the gradient of a trained weight or adapter. If ZeRO-3 does not
    gather whole layers, DeepSpeed replaces ``F.linear`` by a function that always saves the input.
    Layers in fp8 do not call it.

    Args:
        part: One of :data:`options.MODEL_PARTS`.
        layer: The layer's name in :func:`linear_layer_shapes`.
    """
    if part in trained_parts(options.trained):
        return True
    if options.zero_stage == 3 and not options.gathers_whole_layers:
        return not multiplies_in_fp8(options, part, layer)
    has_adapters = part == "language_model" or options.trained == "lora_all"
    return is_lora(options.trained) and has_adapters and layer in options.lora.target_names


def multiplies_in_fp8(options: EngineOptions, part: str, layer: str) -> bool:
    """Return whether a linear layer multiplies in fp8, as :mod:`implementations` decides it."""
    return options.fp8 and why_not_fp8(part, layer, bool(options.compile)) is None


def tower_sizes(config: ChatGLMConfig, options: EngineOptions) -> LayerSizes:
    """Return the sizes of a tower layer.

    Under autocast, the saved inputs of the layer's norms and the residual stream are fp32.
    """
    hidden, ffn = config.vision.hidden_size, config.vision.intermediate_size
    norm_factor = 1 if options.compile else norm_dtype_factor(options)
    saves_input = partial(is_input_saved, options, "tower")
    # q, k, v and the output of attention; the inputs of both norms; the input of GELU.
    saved = (3 + 1) * hidden + 2 * norm_factor * hidden + ffn
    saved += hidden * (saves_input("query_key_value") or options.compile is True)
    saved += hidden * (saves_input("fc1") and not options.compile) + ffn * saves_input("fc2")
    return LayerSizes(
        layer_input=norm_dtype_factor(options) * hidden,
        attention_output=hidden,
        narrow_outputs=2 * hidden,  # dense and fc2
        wide_outputs=3 * hidden + ffn,
        saved_by_autograd=saved,
        elementwise_macs=MACS_PER_MOVED_ELEMENT * (4 * hidden + 2 * ffn),
        wide_macs=3 * hidden**2 + hidden * ffn,
        narrow_macs=hidden**2,
        attention_macs=2 * config.vision.num_positions * hidden,
    )


def language_sizes(config: ChatGLMConfig, options: EngineOptions, batch: BatchShape) -> LayerSizes:
    """Return the sizes of a block of the language model."""
    hidden, gate_up = config.hidden_size, 2 * config.ffn_hidden_size
    shapes = linear_layer_shapes(config)[1]
    qkv, attention_output = shapes["query_key_value"][1], shapes["dense"][0]
    saves_input = partial(is_input_saved, options, "language_model")
    # Trained embeddings are fp32, which makes the residual stream fp32.
    has_fp32_residual = uses_autocast(options) and "language_model" in trained_parts(
        options.trained
    )
    residual = hidden * (FP32_BYTES // BF16_BYTES if has_fp32_residual else 1)
    # Autograd saves the inputs of both norms, the outputs of attention and of query_key_value (of
    # which v is a view), and in the MLP the first layer's output and the second layer's input.
    saved = 2 * residual + attention_output + qkv + gate_up
    saved += gate_up // 2 * saves_input("dense_4h_to_h")
    if options.compile:
        saved += 2 * hidden
    else:
        rotated = qkv - config.multi_query_group_num * config.kv_channels
        saved += rotated + gate_up // 2  # q and k, and silu(gate)
        saved += hidden * (saves_input("query_key_value") + saves_input("dense_h_to_4h"))
    sizes = LayerSizes(
        layer_input=residual,
        attention_output=attention_output,
        narrow_outputs=hidden + qkv + (0 if options.compile else hidden),
        wide_outputs=gate_up,
        saved_by_autograd=saved,
        elementwise_macs=MACS_PER_MOVED_ELEMENT * (4 * hidden + 2 * qkv + 1.5 * gate_up),
        wide_macs=hidden * gate_up,
        narrow_macs=hidden * (attention_output + qkv),
        attention_macs=batch.sequence_length * attention_output,
    )
    if options.trained != "qlora":
        return sizes
    # Selective policies do not recognize 4-bit linear layers and save none of their outputs. So
    # "linear" and "selective" have the effect of "attention".
    recomputed = POLICIES["attention"].recomputed_macs(sizes)
    return replace(
        sizes,
        narrow_outputs=0,
        wide_outputs=0,
        elementwise_macs=recomputed,
        wide_macs=0,
        narrow_macs=0,
    )
