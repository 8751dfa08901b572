"""What a ``config.json`` holds and is of; needs no transformers."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_FLOAT32 = 3.4028234663852886e38
"""Of float32 and, but for rounding, of bfloat16."""
# In bytes. Of empty lists, one MiB of JSON takes 22 MiB of memory.
MAX_JSON_BYTES, MAX_LARGE_JSON_BYTES = 16 * 2**20, 64 * 2**20
LARGE_JSON_FILES = {"tokenizer.json", "model.safetensors.index.json", "training.json"}
MAX_JSON_DEPTH = 64
"""Levels of nested values: those who read them after us do so by functions that call themselves."""


def why_not_glm4v(config: Mapping[str, Any]) -> str | None:
    """Return why a config is not that of a glm-4v, in words that go after "it is none: "; ``None``
    if it is one. chatglm2, chatglm3 and the text models of GLM-4 have its model type, and
    cogagent-9b has its vision part, too."""
    if (model_type := config.get("model_type")) != "chatglm":
        return f"model_type is {model_type!r:.60}, expected 'chatglm'"
    if not isinstance(vision := config.get("vision_config"), Mapping):
        return (
            f"vision_config is {vision!r:.60}, expected an object (chatglm2, chatglm3 and the text "
            "models of GLM-4 have none)"
        )
    # As the model's own config compares it.
    if (original_rope := config.get("original_rope", True)) not in (True,):
        return (
            f"original_rope is {original_rope!r:.60}, expected true or no such field (cogagent-9b "
            "has false: it rotates other channels, which is not supported)"
        )
    return None


def is_glm4v(config: Mapping[str, Any]) -> bool:
    return why_not_glm4v(config) is None


def read_json_object(path: Path) -> dict:
    """The object that a JSON file holds. Raises ``ValueError`` if there is none."""
    return parse_json_object(read_bytes_within_limit(path), str(path))


def read_bytes_within_limit(path: Path) -> bytes:
    """What a file of settings or of text holds. Raises ``ValueError`` if it cannot be read, or is
    larger than any that is meant to be one."""
    if path.exists() and not path.is_file():  # the end of a pipe would be waited for
        raise ValueError(f"{path} cannot be read: it is no file")
    most = MAX_LARGE_JSON_BYTES if path.name in LARGE_JSON_FILES else MAX_JSON_BYTES
    with _json_errors(path), path.open("rb") as file:
        content = file.read(most + 1)
        size = path.stat().st_size
    if len(content) > most:
        raise ValueError(f"{path} has {size:,} bytes; expected at most {most:,}")
    return content


@contextmanager
def _json_errors(name: object) -> Iterator[None]:
    """Name what cannot be read, or is no JSON, in a ``ValueError``."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None


def find_nonfinite_number(values: Any) -> str | None:
    """Return ``key is value`` of the first number among nested values that is NaN, infinite or
    beyond float32; JSON has such as ``NaN``, ``Infinity`` and ``1e999``."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, (dict, list)):
            if found := find_nonfinite_number(value):
                return f"{key}.{found}"
        elif isinstance(value, (int, float)) and not abs(value) <= MAX_FLOAT32:
            shown = value if isinstance(value, float) else f"of {value.bit_length()} bits"
            return f"{key} is {shown}"
    return None


def parse_json_object(content: bytes, name: str) -> dict:
    """As :func:`read_json_object`, of what was read."""
    with _json_errors(name):
        values = json.loads(content, object_pairs_hook=_reject_repeated_keys)
    if not isinstance(values, dict):
        raise ValueError(f"{name} holds a {type(values).__name__}; expected an object")
    level: list[Any] = [values]
    for _ in range(MAX_JSON_DEPTH):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    if level:
        raise ValueError(f"{name} nests more than {MAX_JSON_DEPTH} values in each other; expected fewer")
    return values


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in values if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r:.60} is there twice; expected it once")
    return values
