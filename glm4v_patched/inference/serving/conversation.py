"""Convert the messages of requests to the form of the model's chat template; needs no torch.

The chat template takes roles in any order, but no empty messages. This module joins consecutive
messages of one role into a turn: the template puts a turn's images before its text, and a turn ends
only where the role changes.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.image_files import decode_data_url
from ...data.messages import EDGE_PLACEHOLDERS_RE, IMAGE_PLACEHOLDER_RE, describe_value
from ...terminal_text import shorten
from .limits import ApiError

API_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_TYPES = ("text", "input_text", "output_text")
IMAGE_TYPES = ("image_url", "image", "input_image")
MESSAGE_SEPARATOR = "\n\n"
"""Text between the texts of joined messages."""
# Keys without effect on an answer: the template shows no names, and images have one size.
IGNORED_MESSAGE_KEYS: tuple[str, ...] = (
    "cache_control",
    "id",
    "name",
    "phase",
    "status",
    "timestamp",
)
IGNORED_PART_KEYS: tuple[str, ...] = ("cache_control", "detail", "id", "max_pixels", "min_pixels")
IGNORED_PART_KEYS += ("prompt_cache_breakpoint",)
# Keys of features that the server does not have. Clients send earlier answers back with these keys,
# whose values are then empty.
NEUTRAL_MESSAGE_VALUES: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("annotations", "audio", "function_call", "reasoning", "reasoning_content", "refusal"), ()
)
NEUTRAL_MESSAGE_VALUES["tool_calls"] = ()
NEUTRAL_PART_VALUES: dict[str, tuple[Any, ...]] = dict.fromkeys(("annotations", "logprobs"), ())
IMAGE_EXAMPLE = '{"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}'
TEXT_EXAMPLE = '{"type": "text", "text": "..."}'


@dataclass
class Turn:
    """Consecutive messages of one role, joined.

    Args:
        key: Key of the first message in the request.
        images: Contents of image files.
    """

    key: str
    role: str
    images: list[bytes]
    texts: list[str]

    def as_message(self) -> dict[str, Any]:
        """Return the turn as a message for the processor."""
        text = MESSAGE_SEPARATOR.join(self.texts)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if len(self.images) == 1:
            message["image"] = self.images[0]
        elif self.images:
            parts = [{"type": "image", "image": image} for image in self.images]
            message["content"] = [*parts, {"type": "text", "text": text}]
        return message


def read_messages(api_messages: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the messages for the processor; consecutive messages of one role are joined.

    Args:
        api_messages: Messages of OpenAI's API, each with its key in the request.

    Raises:
        ApiError: Names the key with the problem.
    """
    turns: list[Turn] = []
    key = ""
    for key, message in api_messages:
        turn = _read_message(key, message)
        if turns and turns[-1].role == turn.role:
            turns[-1].images += turn.images
            turns[-1].texts += turn.texts
        elif turn.images or turn.texts:
            turns.append(turn)
    if not any(turn.role == "user" for turn in turns):
        list_key = key.partition("[")[0]
        raise invalid_key(list_key, "has no message of the user; expected at least one")
    if turns[-1].role == "assistant":
        problem = "is the last message and has the role assistant; expected a message of the user"
        raise invalid_key(turns[-1].key, problem)
    return [turn.as_message() for turn in turns]


def invalid_key(key: str, problem: str, code: str | None = None) -> ApiError:
    """Return the error for a key of the request; its message is the key, then the problem."""
    return ApiError(400, f"{key} {problem}", key, code)


def drop_neutral_keys(
    values: dict[str, Any],
    ignored: Sequence[str],
    neutral: dict[str, tuple[Any, ...]],
    prefix: str = "",
) -> dict[str, Any]:
    """Return the keys that may change an answer, with their values.

    Keys with the value null are always dropped.

    Args:
        ignored: Keys that are dropped, whatever their value.
        neutral: Values that are no-ops, by key. A key with such a value is dropped; a key with any
            other value is refused. An empty tuple stands for 0, false and empty values.
        prefix: Text before the keys in error messages.

    Raises:
        ApiError: A value requests something that the server cannot do.
    """
    relevant = {k: v for k, v in values.items() if v is not None and k not in ignored}
    for key in neutral.keys() & relevant.keys():
        value, allowed = relevant.pop(key), neutral[key]
        # Compared as in JSON, where true is not 1.
        matches = (value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
        is_neutral = any(matches) if allowed else not value
        if not is_neutral:
            expected = " or ".join(map(json.dumps, allowed)) or "no value"
            problem = (
                f"is {describe_value(value)}, which this server does not support; "
                f"expected {expected}"
            )
            raise invalid_key(prefix + key, problem, "unsupported_parameter")
    return relevant


def _read_message(key: str, message: dict[str, Any]) -> Turn:
    message = drop_neutral_keys(message, IGNORED_MESSAGE_KEYS, NEUTRAL_MESSAGE_VALUES, f"{key}.")
    if (kind := message.pop("type", "message")) != "message":
        raise invalid_key(f"{key}.type", f'is {describe_value(kind)}; expected "message"')
    api_role = message.pop("role", None)
    role = API_ROLES.get(api_role) if isinstance(api_role, str) else None
    if role is None:
        roles = ", ".join(API_ROLES)
        raise invalid_key(f"{key}.role", f"is {describe_value(api_role)}; expected one of {roles}")
    content = message.pop("content", "" if role == "assistant" else None)
    _refuse_keys(message, f"{key}.", ("role", "content"))
    content_key = f"{key}.content"
    if isinstance(content, str):
        content = [content]
    elif isinstance(content, list):
        content = [
            _parse_content_part(f"{content_key}[{index}]", part)
            for index, part in enumerate(content)
        ]
    else:
        raise invalid_key(
            content_key, f"is {describe_value(content)}; expected text or a list of parts"
        )
    return Turn(key, role, *_read_content(content_key, role, content))


def _read_content(key: str, role: str, content: list[str | bytes]) -> tuple[list, list[str]]:
    """Return a message's images and texts.

    All texts are joined to one. If it is empty, the list of texts is empty.
    """
    images = [part for part in content if isinstance(part, bytes)]
    text = "".join(part for part in content if isinstance(part, str))
    if images and role != "user":
        problem = f"has an image, but its role is {role}: send images with the role user"
        raise invalid_key(key, problem)
    # One flag for each part, in order, without empty texts. Either all images must come before the
    # text, or all after it.
    is_image = [
        isinstance(part, bytes) for part in content if isinstance(part, bytes) or part.strip()
    ]
    if images and is_image not in (sorted(is_image), sorted(is_image, reverse=True)):
        problem = "has an image between texts, but the model sees all images before the text"
        raise invalid_key(key, f"{problem}: send the images first")
    if role == "user":
        text = _strip_placeholders(key, text, len(images))
        if not text.strip() and not images:
            raise invalid_key(key, "is empty; expected text or an image")
    return images, [text] if text.strip() else []


def _strip_placeholders(key: str, text: str, num_images: int) -> str:
    """Return a text without image placeholders (``<image>``), as in training."""
    if len(IMAGE_PLACEHOLDER_RE.findall(text)) == num_images:
        text = EDGE_PLACEHOLDERS_RE.sub("", text)
    if match := IMAGE_PLACEHOLDER_RE.search(text):
        problem = f"has {match[0]} in its text and {num_images} images"
        advice = f"remove {match[0]}, and send each image as a part before the text"
        raise invalid_key(key, f"{problem}: {advice}: {IMAGE_EXAMPLE}")
    return text


def _parse_content_part(key: str, part: Any) -> str | bytes:
    """Return a text or an image file."""
    if not isinstance(part, dict):
        raise invalid_key(
            key, f"is {describe_value(part)}; expected {TEXT_EXAMPLE} or {IMAGE_EXAMPLE}"
        )
    part = drop_neutral_keys(part, IGNORED_PART_KEYS, NEUTRAL_PART_VALUES, f"{key}.")
    kind = part.pop("type", None)
    if kind in TEXT_TYPES:
        text = part.pop("text", None)
        if not isinstance(text, str):
            raise invalid_key(f"{key}.text", f"is {describe_value(text)}; expected text")
        _refuse_keys(part, f"{key}.", ("type", "text"))
        return text
    if kind not in IMAGE_TYPES:
        raise invalid_key(
            f"{key}.type", f"is {describe_value(kind)}; expected {TEXT_EXAMPLE} or {IMAGE_EXAMPLE}"
        )
    name, url = next(iter(part.items()), ("", None))
    # The guard has checked images under these keys only.
    if len(part) != 1 or name not in ("image_url", "image"):
        keys = f"the keys {', '.join(part)}" if part else "no image_url"
        raise invalid_key(key, f"is an image with {keys}; expected {IMAGE_EXAMPLE}")
    if isinstance(url, dict):
        url = drop_neutral_keys(url, IGNORED_PART_KEYS, {})
        url = url["url"] if [*url] == ["url"] else None
    if not isinstance(url, str):
        raise invalid_key(
            f"{key}.{name}", f"is {describe_value(part[name])}; expected {IMAGE_EXAMPLE}"
        )
    return decode_data_url(url)  # the guard has replaced other URLs


def _refuse_keys(keys: Iterable[str], prefix: str, known: Sequence[str]) -> None:
    """Raise ``ApiError`` for the first of ``keys``, if there are any."""
    for key in keys:
        problem = f"is not supported; expected only {' and '.join(known)}"
        raise invalid_key(prefix + shorten(key), problem)
