"""Size-limited reading of untrusted JSON files, and detection of a glm-4v by its config.

This module imports neither torch nor transformers.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_FLOAT32 = 3.4028234663852886e38
"""The largest finite float32; the largest bfloat16 is about the same."""
# In bytes. One MiB of JSON that consists of empty lists takes 22 MiB of memory once parsed.
MAX_JSON_BYTES, MAX_LARGE_JSON_BYTES = 16 * 2**20, 64 * 2**20
LARGE_JSON_FILES = {"tokenizer.json", "model.safetensors.index.json", "training.json"}
MAX_JSON_DEPTH = 64
"""Limit on nesting, because other libraries process the values recursively."""


def why_not_glm4v(config: Mapping[str, Any]) -> str | None:
    """Return why a config is not that of a glm-4v or cogagent-9b, or ``None`` if it is.

    chatglm2, chatglm3 and the text models of GLM-4 have the model type "chatglm", too, but no
    vision_config.
    """
    if (model_type := config.get("model_type")) != "chatglm":
        return f"model_type is {model_type!r:.60}, expected 'chatglm'"
    if not isinstance(vision := config.get("vision_config"), Mapping):
        return (
            f"vision_config is {vision!r:.60}, expected an object (chatglm2, chatglm3 and the text "
            "models of GLM-4 have none)"
        )
    return None


def is_glm4v(config: Mapping[str, Any]) -> bool:
    """Return whether a config belongs to a glm-4v or a cogagent-9b."""
    return why_not_glm4v(config) is None


def read_json_object(path: Path) -> dict:
    """Read a JSON file that contains an object.

    Raises:
        ValueError: the file cannot be read, is too large or nested too deeply, or has no object.
    """
    return parse_json_object(read_bytes_within_limit(path), str(path))


def read_bytes_within_limit(path: Path) -> bytes:
    """Read a file of at most 16 MiB (64 MiB for ``LARGE_JSON_FILES``).

    Raises:
        ValueError: the file cannot be read, is not a regular file, or is larger than the limit.
    """
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise ValueError(f"{path} cannot be read: it is not a regular file")
    limit = MAX_LARGE_JSON_BYTES if path.name in LARGE_JSON_FILES else MAX_JSON_BYTES
    with _json_errors(path), path.open("rb") as file:
        content = file.read(limit + 1)
        size = path.stat().st_size
    if len(content) > limit:
        raise ValueError(f"{path} has {size:,} bytes; expected at most {limit:,}")
    return content


@contextmanager
def _json_errors(name: object) -> Iterator[None]:
    """Turn errors of reading and parsing into a ``ValueError`` with the file's name."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None


def find_nonfinite_number(values: Any) -> str | None:
    """Return ``key is value`` for the first nested number that is NaN, infinite or above float32.

    Python's JSON parser accepts ``NaN``, ``Infinity`` and ``1e999``.
    """
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, (dict, list)):
            if nested := find_nonfinite_number(value):
                return f"{key}.{nested}"
        elif isinstance(value, (int, float)) and not abs(value) <= MAX_FLOAT32:
            text = value if isinstance(value, float) else f"of {value.bit_length()} bits"
            return f"{key} is {text}"
    return None


def parse_json_object(content: bytes, name: str) -> dict:
    """Parse bytes as :func:`read_json_object` parses a file; error messages have ``name``."""
    with _json_errors(name):
        values = json.loads(content, object_pairs_hook=_reject_repeated_keys)
    if not isinstance(values, dict):
        raise ValueError(f"{name} holds a {type(values).__name__}; expected an object")
    containers: list[Any] = [values]
    for _ in range(MAX_JSON_DEPTH):  # replace all containers by those directly inside them
        contents = (x.values() if isinstance(x, dict) else x for x in containers)
        containers = [x for items in contents for x in items if isinstance(x, (dict, list))]
    if containers:
        raise ValueError(f"{name} nests more than {MAX_JSON_DEPTH} levels deep; expected fewer")
    return values


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict:
    """Build an object from its items; raise ``ValueError`` if a key is repeated."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in values if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r:.60} is there twice; expected it once")
    return values
