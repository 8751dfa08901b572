"""Messages of requests as the model's chat template takes them; needs no torch.

The template can say every order of roles, and nothing of an empty message. Messages of one role in
a row are joined, since a turn has its images before its words and ends where another role speaks.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.image_files import decode_data_url
from ...data.messages import IMAGE_PLACEHOLDER_RE, EDGE_PLACEHOLDERS_RE, describe_value
from ...terminal_text import shorten
from .limits import ApiError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("text", "input_text", "output_text")
IMAGES = ("image_url", "image", "input_image")
BETWEEN = "\n\n"
"""The texts of two messages that are joined."""
# Keys that change nothing about an answer: the template shows no names, and the model sees images
# in one size.
IGNORED_OF_MESSAGES: tuple[str, ...] = (
    "cache_control",
    "id",
    "name",
    "phase",
    "status",
    "timestamp",
)
IGNORED_OF_PARTS: tuple[str, ...] = ("cache_control", "detail", "id", "max_pixels", "min_pixels")
IGNORED_OF_PARTS += ("prompt_cache_breakpoint",)
# Keys of what the server cannot do, which clients send back empty as they got them.
NEUTRAL_OF_MESSAGES: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("annotations", "audio", "function_call", "reasoning", "reasoning_content", "refusal"), ()
)
NEUTRAL_OF_MESSAGES["tool_calls"] = ()
NEUTRAL_OF_PARTS: dict[str, tuple[Any, ...]] = dict.fromkeys(("annotations", "logprobs"), ())
AN_IMAGE = '{"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}'
A_TEXT = '{"type": "text", "text": "..."}'


@dataclass
class Turn:
    """What one role says.

    Args:
        key: Of the request, where it starts.
    """

    key: str
    role: str
    images: list[bytes]
    texts: list[str]

    def as_message(self) -> dict[str, Any]:
        """Return it in the form that the processor takes."""
        words = BETWEEN.join(self.texts)
        message: dict[str, Any] = {"role": self.role, "content": words}
        if len(self.images) == 1:
            message["image"] = self.images[0]
        elif self.images:
            parts = [{"type": "image", "image": image} for image in self.images]
            message["content"] = [*parts, {"type": "text", "text": words}]
        return message


def read_messages(given: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the turns of a conversation that ends with what is to be answered.

    Args:
        given: Messages of OpenAI's API, each with its key in the request.

    Raises:
        ApiError: names the key that is wrong.
    """
    turns: list[Turn] = []
    key = ""
    for key, message in given:
        turn = _read_message(key, message)
        if turns and turns[-1].role == turn.role:
            turns[-1].images += turn.images
            turns[-1].texts += turn.texts
        elif turn.images or turn.texts:
            turns.append(turn)
    if not any(turn.role == "user" for turn in turns):
        whole = key.partition("[")[0]
        raise invalid(whole, "has no message of the user; expected one, to be answered")
    if turns[-1].role == "assistant":
        told = "is of the assistant, and no message follows; expected a question of the user"
        raise invalid(turns[-1].key, told)
    return [turn.as_message() for turn in turns]


def invalid(key: str, told: str, code: str | None = None) -> ApiError:
    """Return the error about a key of a request."""
    return ApiError(400, f"{key} {told}", key, code)


def drop_neutral(
    given: dict[str, Any],
    ignored: Sequence[str],
    neutral: dict[str, tuple[Any, ...]],
    before: str = "",
) -> dict[str, Any]:
    """Return the keys that may change an answer.

    Args:
        neutral: Values that ask for nothing, of keys for which others are refused; an empty tuple
            is 0, false, or what has nothing in it. So is null, of any key.
        before: What stands before a key where errors name it.
    """
    plain = {k: v for k, v in given.items() if v is not None and k not in ignored}
    for key in neutral.keys() & plain.keys():
        value, values = plain.pop(key), neutral[key]
        # As JSON, where true is not 1.
        same = (value == n and isinstance(value, bool) == isinstance(n, bool) for n in values)
        if not (any(same) if values else not value):
            expected = " or ".join(map(json.dumps, values)) or "nothing"
            told = f"is {describe_value(value)}, which this server cannot do; expected {expected}"
            raise invalid(before + key, told, "unsupported_parameter")
    return plain


def _read_message(key: str, given: dict[str, Any]) -> Turn:
    message = drop_neutral(given, IGNORED_OF_MESSAGES, NEUTRAL_OF_MESSAGES, f"{key}.")
    if (kind := message.pop("type", "message")) != "message":
        raise invalid(f"{key}.type", f'is {describe_value(kind)}; expected "message"')
    said = message.pop("role", None)
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise invalid(
            f"{key}.role", f"is {describe_value(said)}; expected one of {', '.join(ROLES)}"
        )
    content = message.pop("content", "" if role == "assistant" else None)
    _refuse_keys(message, f"{key}.", ("role", "content"))
    where = f"{key}.content"
    if isinstance(content, str):
        content = [content]
    elif isinstance(content, list):
        content = [_read_part(f"{where}[{at}]", part) for at, part in enumerate(content)]
    else:
        raise invalid(where, f"is {describe_value(content)}; expected text or a list of parts")
    return Turn(key, role, *_read_content(where, role, content))


def _read_content(key: str, role: str, content: list[str | bytes]) -> tuple[list, list[str]]:
    """Return the images of a message, and its text in a list, which is empty without one."""
    images = [part for part in content if isinstance(part, bytes)]
    words = "".join(part for part in content if isinstance(part, str))
    if images and role != "user":
        raise invalid(key, f"has an image and the role {role}: send images as the user")
    shown = [isinstance(part, bytes) for part in content if isinstance(part, bytes) or part.strip()]
    if True in shown and shown != sorted(shown, reverse=True) and shown != sorted(shown):
        told = "has an image between texts: the model has all images of a message before its text; "
        raise invalid(key, f"{told}send them first")
    if role == "user":
        words = _without_places(key, words, len(images))
        if not words.strip() and not images:
            raise invalid(key, "is empty; expected text or an image")
    return images, [words] if words.strip() else []


def _without_places(key: str, words: str, images: int) -> str:
    """Return a text without the places of its images (``<image>``), as the model was trained."""
    if len(IMAGE_PLACEHOLDER_RE.findall(words)) == images:
        words = EDGE_PLACEHOLDERS_RE.sub("", words)
    if left := IMAGE_PLACEHOLDER_RE.search(words):
        told = f"has {left[0]} in its text and {images} images: an image is a part of its own, "
        raise invalid(key, f"{told}{AN_IMAGE}, before the text; take {left[0]} out")
    return words


def _read_part(key: str, given: Any) -> str | bytes:
    """Return a text, or the file of an image."""
    if not isinstance(given, dict):
        raise invalid(key, f"is {describe_value(given)}; expected {A_TEXT} or {AN_IMAGE}")
    part = drop_neutral(given, IGNORED_OF_PARTS, NEUTRAL_OF_PARTS, f"{key}.")
    kind = part.pop("type", None)
    if kind in TEXTS:
        text = part.pop("text", None)
        if not isinstance(text, str):
            raise invalid(f"{key}.text", f"is {describe_value(text)}; expected text")
        _refuse_keys(part, f"{key}.", ("type", "text"))
        return text
    if kind not in IMAGES:
        raise invalid(f"{key}.type", f"is {describe_value(kind)}; expected {A_TEXT} or {AN_IMAGE}")
    name, url = next(iter(part.items()), ("", None))
    # No other key: what stands there, the guard has not looked at.
    if len(part) != 1 or name not in ("image_url", "image"):
        told = f"is an image with the keys {', '.join(part) or 'type alone'}"
        raise invalid(key, f"{told}; expected {AN_IMAGE}")
    if isinstance(url, dict):
        url = drop_neutral(url, IGNORED_OF_PARTS, {})
        url = url["url"] if [*url] == ["url"] else None
    if not isinstance(url, str):
        raise invalid(f"{key}.{name}", f"is {describe_value(part[name])}; expected {AN_IMAGE}")
    return decode_data_url(url)  # which the guard has read before


def _refuse_keys(left: dict[str, Any], before: str, known: Sequence[str]) -> None:
    for key in left:
        raise invalid(before + shorten(key), f"is not read; expected {' and '.join(known)}")
