"""Useful FLOP of a training step, and the FLOP/s that the device reaches in matrix products.

Useful FLOP are those of one forward pass, as many again for the gradients of activations, and as
many again for the gradients of weights. Recomputation (activation checkpointing) does not count. A
multiply-add counts as 2.
"""

from math import prod
from pathlib import Path
from statistics import mean

import torch
from torch.utils.benchmark import Timer

from ..engine.memory_plan import BatchShape, count_projector, linear_layer_shapes
from ..engine.prepare import local_device
from ..models.base import ModelSource
from ..models.loading import load_model_config
from ..patch.config_json import read_json_object, why_not_glm4v
from ..remote.configuration_chatglm import ChatGLMConfig
from .settings import TrainingSettings

# Number of passes over (vision tower, language model): 1 is the forward pass, 2 adds the gradients
# of activations, 3 adds those of weights.
PASSES_PER_STEP = {
    "full": (3, 3),
    "lm": (1, 3),
    "lora_lm": (1, 2),
    "lora_all": (2, 2),
    "qlora": (1, 2),
}


def benchmark_config(config: str | None, model: str | None = None) -> ChatGLMConfig:
    """Return the config of ``--model`` or ``--config``, or of the full-size model.

    The file of ``--config`` may leave out the model type.
    """
    if model is not None:
        return load_model_config(ModelSource(model))
    if config is None:
        return ChatGLMConfig()
    sizes = {"model_type": "chatglm"} | read_json_object(Path(config))
    if reason := why_not_glm4v(sizes):
        raise ValueError(f"--config {config} does not belong to a glm-4v: {reason}")
    return ChatGLMConfig(**sizes)


def benchmark_batch(
    settings: TrainingSettings, config: ChatGLMConfig, processes: int
) -> BatchShape:
    """Return the shape of the batch of each of ``processes`` processes."""
    lengths = [config.vision.num_image_tokens + 2 + text for text in settings.text_lengths()]
    if settings.packed:
        return BatchShape(
            num_sequences=1,
            sequence_length=sum(lengths),
            images_per_sequence=len(lengths),
            processes=processes,
        )
    return BatchShape(num_sequences=len(lengths), sequence_length=lengths[0], processes=processes)


def useful_flop(config: ChatGLMConfig, settings: TrainingSettings) -> float:
    """Return the mean FLOP of one sample in a training step; a sample has one image."""
    vision_passes, language_passes = PASSES_PER_STEP[settings.trained]
    vision = 0.0 if settings.reuse_features else vision_passes * vision_flop(config)
    language = [
        language_flop(config, text, num_supervised(text)) for text in settings.text_lengths()
    ]
    return vision + language_passes * mean(language)


def num_supervised(text_tokens: int) -> int:
    """Return the number of supervised tokens of a sample: the second half of its text."""
    return text_tokens - text_tokens // 2


def vision_flop(config: ChatGLMConfig) -> float:
    """Return the FLOP of one image in a forward pass of vision tower and projector."""
    vision, tokens = config.vision, config.vision.num_positions
    tower_layer, _ = linear_layer_shapes(config)
    attention = 4 * tokens**2 * vision.hidden_size
    linear = 2 * tokens * sum(map(prod, tower_layer.values()))
    layers_flop = vision.num_hidden_layers * (linear + attention)
    # The projector's matrices, without the 5 vectors that count_projector includes.
    projector_weights = count_projector(config) - 5 * config.hidden_size
    return layers_flop + 2 * vision.num_image_tokens * projector_weights


def language_flop(config: ChatGLMConfig, text_tokens: int, supervised_tokens: int) -> float:
    """Return the FLOP of one sample in a forward pass, with logits of supervised tokens only."""
    tokens = config.vision.num_image_tokens + 2 + text_tokens
    _, language_layer = linear_layer_shapes(config)
    # Half of the tower's: a token attends only to itself and to earlier tokens.
    attention = 2 * tokens**2 * config.num_attention_heads * config.kv_channels
    linear = 2 * tokens * sum(map(prod, language_layer.values()))
    layers_flop = config.num_layers * (linear + attention)
    return layers_flop + 2 * supervised_tokens * config.hidden_size * config.padded_vocab_size


def measured_ceiling(side: int, products: int) -> float:
    """Measure the FLOP/s of bf16 matrix products on random data.

    Args:
        side: Rows and columns of the matrices.
        products: Number of timed products. The roofline uses 20, which end before a cool GPU heats
            up.
    """
    a = torch.randn(side, side, device=local_device(), dtype=torch.bfloat16)
    b = torch.randn_like(a)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * side**3 / timer.timeit(products).mean  # timeit warms up first
