"""Compares the sizes that a config names with the shapes of the weights, before a model is built.

Only shapes are read, so that a config of others costs nothing: of absurd sizes the model would be
built first, and compared then.
"""

import re
from collections.abc import Mapping
from typing import Any

LANGUAGE, TOWER = "transformer.encoder.layers", "transformer.vision.transformer.layers"
PATCHES = "transformer.vision.patch_embedding"
STACKS = {"num_layers": LANGUAGE, "vision_config.num_hidden_layers": TOWER}
# The weight, and which of its sides has the size.
SIDES = {
    "padded_vocab_size": ("transformer.embedding.word_embeddings.weight", 0),
    "hidden_size": ("transformer.embedding.word_embeddings.weight", 1),
    "ffn_hidden_size": (f"{LANGUAGE}.0.mlp.dense_4h_to_h.weight", 1),
    "num_attention_heads * kv_channels": (f"{LANGUAGE}.0.self_attention.dense.weight", 1),
    "(num_attention_heads + 2 * multi_query_group_num) * kv_channels": (
        f"{LANGUAGE}.0.self_attention.query_key_value.weight",
        0,
    ),
    "vision_config.hidden_size": (f"{PATCHES}.proj.weight", 0),
    "vision_config.in_channels": (f"{PATCHES}.proj.weight", 1),
    "vision_config.patch_size": (f"{PATCHES}.proj.weight", 2),
    "vision_config.num_positions": (f"{PATCHES}.position_embedding.weight", 0),
    "vision_config.intermediate_size": (f"{TOWER}.0.mlp.fc1.weight", 0),
}
FLOATS = {"F64", "F32", "F16", "BF16"}


def require_sizes(model: str, config: Any, there: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for sizes of a config that its weights contradict, with both numbers.

    Args:
        config: A ``ChatGLMConfig``.
        there: The shapes of the weights by name, with ``sides`` and ``dtype``; of ``None`` the name
            counts. A weight that is absent, or quantized, is compared with nothing.
    """
    said = _sizes(config)
    told = []
    for key, stack in STACKS.items():
        numbers = [int(found[1]) for name in there if (found := _layer_of(stack).match(name))]
        if numbers and said[key] != (number := max(numbers) + 1):
            told.append(f"{key} is {said[key]:,}, and the weights have {number:,} {stack}")
    for key, (name, side) in SIDES.items():
        shape = there.get(name) or there.get(name.removeprefix("transformer."))
        if shape is None or shape.dtype not in FLOATS or len(shape.sides) <= side:
            continue
        if said[key] != shape.sides[side]:
            told.append(f"{key} is {said[key]:,}, and {name} is {[*shape.sides]}")
    if told:
        raise ValueError(
            f"{model}: its config.json is not that of its weights: {'; '.join(told)}; expected the "
            "config.json that was saved with them, and all of their files"
        )


def _layer_of(stack: str) -> re.Pattern[str]:
    """What names of the weights of a layer match, also those of the decoder's own class."""
    inner = stack.removeprefix("transformer.")
    return re.compile(rf"(?:transformer\.)?{re.escape(inner)}\.(\d{{1,9}})\.")


def _sizes(config: Any) -> dict[str, int]:
    heads, channels = config.num_attention_heads, config.kv_channels
    sizes = {f"vision_config.{name}": value for name, value in vars(config.vision).items()}
    rows = (heads + 2 * config.multi_query_group_num) * channels
    return sizes | {
        "num_layers": config.num_layers,
        "padded_vocab_size": config.padded_vocab_size,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads * kv_channels": heads * channels,
        "(num_attention_heads + 2 * multi_query_group_num) * kv_channels": rows,
    }
