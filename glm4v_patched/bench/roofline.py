"""The sizes of a measurement, the useful work of a sample, and what the device could do of it.

Useful is what training needs without computing anything twice: a forward pass, once more for the
gradients of activations, once more for those of weights. A multiply-add counts as 2.
"""

from math import prod
from pathlib import Path
from statistics import mean

import torch
from torch.utils.benchmark import Timer

from ..engine.memory_plan import Batch, count_projection, linear_layer_shapes
from ..engine.prepare import local_device
from ..models.base import ModelSource
from ..models.loading import load_model_config
from ..patch.config_json import read_json_object, why_not_glm4v
from ..remote.configuration_chatglm import ChatGLMConfig
from .settings import TrainingSettings

# Passes over (vision tower, language model): forward, and what flows back through it.
PASSES_PER_STEP = {"full": (3, 3), "lm": (1, 3), "lora_lm": (1, 2), "lora_all": (2, 2), "qlora": (1, 2)}


def config_of(settings: TrainingSettings) -> ChatGLMConfig:
    """That of ``--model``, or the real size, unless a file says otherwise, which need not say what
    it is of."""
    if settings.model is not None:
        return load_model_config(ModelSource(settings.model))
    if settings.config is None:
        return ChatGLMConfig()
    sizes = {"model_type": "chatglm"} | read_json_object(Path(settings.config))
    if reason := why_not_glm4v(sizes):
        raise ValueError(f"--config {settings.config} is not a glm-4v's: {reason}")
    return ChatGLMConfig(**sizes)


def benchmark_batch(settings: TrainingSettings, config: ChatGLMConfig, processes: int) -> Batch:
    """Of one of so many processes."""
    lengths = [config.vision.num_image_tokens + 2 + text for text in settings.text_lengths()]
    rows, of_row, images = len(lengths), lengths[0], 1
    if settings.packed:
        rows, of_row, images = 1, sum(lengths), len(lengths)
    return Batch(num_sequences=rows, sequence_length=of_row, images_per_sequence=images, processes=processes)


def useful_flop(config: ChatGLMConfig, settings: TrainingSettings) -> float:
    """Floating-point operations of one training step, a sample of one image and some text."""
    tower_passes, language_passes = PASSES_PER_STEP[settings.trained]
    tower = 0.0 if settings.reuse_features else tower_passes * vision_flop(config)
    rows = [language_flop(config, text, num_supervised(text)) for text in settings.text_lengths()]
    return tower + language_passes * mean(rows)


def num_supervised(text_tokens: int) -> int:
    """Of a sample's text, how much is learned: its second half."""
    return text_tokens - text_tokens // 2


def vision_flop(config: ChatGLMConfig) -> float:
    """One image forward, through the adapter."""
    vision = config.vision
    tokens, (layer, _) = vision.num_positions, linear_layer_shapes(config)
    attention = 4 * tokens**2 * vision.hidden_size
    layers = vision.num_hidden_layers * (2 * tokens * sum(map(prod, layer.values())) + attention)
    adapter_weights = count_projection(config) - 5 * config.hidden_size  # without biases and norms
    return layers + 2 * vision.num_image_tokens * adapter_weights


def language_flop(config: ChatGLMConfig, text_tokens: int, num_supervised: int) -> float:
    """One row forward; the output layer only where a token is learned."""
    positions, (_, layer) = config.vision.num_image_tokens + 2 + text_tokens, linear_layer_shapes(config)
    causal = 2 * positions**2 * config.num_attention_heads * config.kv_channels
    layers = config.num_layers * (2 * positions * sum(map(prod, layer.values())) + causal)
    return layers + 2 * num_supervised * config.hidden_size * config.padded_vocab_size


def measured_ceiling(side: int, products: int) -> float:
    """FLOP/s of bf16 matrix products of this side, one after the other, on random data.

    The roofline is that of 20, which are over before a GPU that has rested gets hot.
    """
    left = torch.randn(side, side, device=local_device(), dtype=torch.bfloat16)
    right = torch.randn_like(left)
    names = {"left": left, "right": right}
    timer = Timer("left @ right", globals=names, num_threads=torch.get_num_threads())
    return 2 * side**3 / timer.timeit(products).mean  # some to warm up come first
