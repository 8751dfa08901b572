"""The form of a conversation that all of this package reads: a list of messages. Needs no torch.

A message has

- ``role``: system (the first message only), user, assistant or observation (a tool's answer);
- ``content``: its words;
- ``image``, from the user only: the absolute path of one picture, which the model has before the
  words. Several are parts of ``content``, before one part with the words:
  ``[{"type": "image", "image": PATH}, ..., {"type": "text", "text": WORDS}]``;
- ``metadata``, of the assistant only: the name of the tool that it calls, one line. GLM-4's format
  has it after the role;
- ``tools``, of a system message only: a list of functions, described as in OpenAI's API. The words
  may then be empty;
- ``train``, of the assistant only: false for a turn that is context and not learned.

The conversation starts with the system or the user, ends with the assistant, and no turn of it is
empty, for the chat template leaves out what is. The assistant may speak twice in a row where one
message has ``metadata``: words and a tool's call. What is not understood is a fault and never
dropped: there is no other key.

The readers of :mod:`formats` make such messages, with the pictures of each as a list under
``PICTURES``, and :func:`check_messages` checks them.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..terminal_text import listed, shorten

ROLES = ("system", "user", "assistant", "observation")
OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "observation",
    "function": "observation",
    "developer": "system",
}
"""What others call them."""
PICTURES = "pictures"
"""Of a message that is not checked: a list of what shows its pictures."""
KEYS = ("role", "content", PICTURES, "metadata", "tools", "train")

# How other trainers' files write the place of a picture in a text: <image>, <image 1>, [IMG],
# <|image_pad|>, <start_of_image>, <image_soft_token>, <__media__>, &lt;image&gt; and the like. Not
# HTML's <img src=...> and Markdown's ![...](...), which are words. What was matched is not tried in
# another way (++): words of 60,000 blanks would take a minute, "<image" with 40 digits for ever.
PLACE = re.compile(
    r"(?:<|\[|&lt;)\s*+[|_]*(?:(?:begin|start|end)_of_)?(?:image|img|picture|media)"
    r"(?:here|[\s_:-]*+(?:pad|soft|token|placeholder|start|end|\d++))*+"
    r"[|_]*\s*+/?\s*+(?:>|\]|&gt;)"
    r"|<img>[^<]*+</img>",
    re.IGNORECASE,
)
PLACES_AT_THE_ENDS = re.compile(
    r"\A\s*+(?:<image>\s*+)+|(?<!\s)(?<!<image>)(?:\s*+<image>)++\s*+\Z", re.IGNORECASE
)
MOST_KEYS_LISTED = 20
KINDS = {dict: "object", list: "list", str: "text", bool: "truth value", type(None): "null"}

# Pictures may be bytes.
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=lambda value: None)

PathOf = Callable[[Any], str]
"""The absolute path of a picture's file. Raises ValueError."""


def check_messages(messages: Any, path_of: PathOf, to_learn: bool = True) -> list[dict]:
    """The messages in the form that is described above.

    Args:
        messages: A reader's.
        to_learn: Whether they have to end with the assistant. Without, they may also end with a
            question, to be answered.

    Raises:
        ValueError: says which message is wrong, and what to write.
    """
    if not isinstance(messages, list) or not messages:
        least = 2 if to_learn else 1
        raise ValueError(f"messages is {as_words(messages)}; expected a list of at least {least}")
    plain = _has_only_characters(messages)
    checked = []
    for number, message in enumerate(messages, start=1):
        try:
            if not plain:
                _require_characters(message)
            checked.append(_checked_message(message, path_of))
        except ValueError as error:
            raise ValueError(f"message {number} of {len(messages)}: {error}") from None
    _check_turns(checked, to_learn)
    return checked


def pictures_of(messages: Sequence[dict]) -> list[str]:
    """The paths of a conversation's pictures, in their order."""
    found = []
    for message in messages:
        if "image" in message:
            found.append(message["image"])
        if isinstance(message["content"], list):
            found += [part["image"] for part in message["content"] if part["type"] == "image"]
    return found


def replace_pictures(messages: Sequence[dict], new: Callable[[str], Any]) -> list[dict]:
    """A copy of a conversation with others in place of its pictures."""
    replaced = []
    for message in messages:
        if "image" in message:
            message = message | {"image": new(message["image"])}
        if isinstance(message["content"], list):
            parts = [
                part | {"image": new(part["image"])} if part["type"] == "image" else part
                for part in message["content"]
            ]
            message = message | {"content": parts}
        replaced.append(message)
    return replaced


def text_of(message: dict) -> str:
    """The words of a message."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def without_marks(messages: Sequence[dict]) -> list[dict]:
    """The messages as the processor takes them: without ``train``."""
    return [
        {key: value for key, value in message.items() if key != "train"}
        if "train" in message
        else message
        for message in messages
    ]


def learned_turns(messages: Sequence[dict]) -> list[bool]:
    """Whether each of the assistant's turns is learned."""
    return [message.get("train", True) for message in messages if message["role"] == "assistant"]


def refuse_keys(
    unknown: Iterable[str],
    cures: dict[str, str],
    known: Sequence[str],
    what: str,
    more: str = "",
) -> None:
    """Raise ``ValueError`` for keys that nothing reads, with what to write instead.

    Args:
        more: Another cure, for keys that no one of ``cures`` is for.
    """
    by_cure: dict[str, list[str]] = {}
    for key in unknown:
        if key.lower() in known:
            cure = f'write "{key.lower()}", in small letters'
        else:
            cure = f"{what} has {', '.join(known)}; take out what is not to be learned{more}"
            cure = cures.get(key.lower(), cure)
        by_cure.setdefault(cure, []).append(quoted(key))
    if by_cure:
        raise ValueError(
            "; ".join(
                f"the key {keys[0]} is not read: {cure}"
                if len(keys) == 1
                else f"the keys {listed(keys, MOST_KEYS_LISTED)} are not read: {cure}"
                for cure, keys in by_cure.items()
            )
        )


def _checked_message(message: dict, path_of: PathOf) -> dict:
    assert not message.keys() - set(KEYS), "a reader's"
    pictures = message.get(PICTURES, [])
    message = {key: value for key, value in message.items() if key != PICTURES}
    role, content = _checked_role_and_content(message)
    if "tools" in message:
        if role != "system":
            raise ValueError(f"has tools; expected them in a system message, and this is of {role}")
        _check_tools(message["tools"])
    if "metadata" in message:
        _check_metadata(message["metadata"], role)
    if "train" in message:
        _check_mark(message["train"], role)
        if message["train"]:
            del message["train"]
    if pictures and role != "user":
        raise ValueError(
            f"has an image and the role {role}: only the user shows pictures; give it to the "
            "user's message before"
        )
    words = _without_places(content, role, len(pictures))
    if not words.strip() and not (pictures or "tools" in message):
        empty = "is empty" if not content else f"is {content!r}, which is empty"
        cure = "write the answer" if role == "assistant" else "write what is said"
        raise ValueError(f"the content of {role} {empty}: {cure}, or leave the row out")
    paths = [path_of(picture) for picture in pictures]
    if len(paths) > 1:
        parts: list[dict] = [{"type": "image", "image": path} for path in paths]
        return message | {"content": [*parts, {"type": "text", "text": words}]}
    message["content"] = words
    return message | ({"image": paths[0]} if paths else {})


def _has_only_characters(messages: list[dict]) -> bool:
    """Whether all of a row can be written; of most rows, so that one look suffices."""
    try:
        _require_characters(messages)
    except ValueError:
        return False
    return True


def _require_characters(values: Any) -> None:
    try:
        ENCODER.encode(values).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"holds {ascii(half)}, half of a surrogate pair and no character: write the other half "
            "too, or take it out"
        ) from None


def _checked_role_and_content(message: dict) -> tuple[str, str]:
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f'the key "{key}" is missing')
    role, content = message["role"], message["content"]
    if role not in ROLES:
        known = role.lower() if isinstance(role, str) else ""
        known = known if known in ROLES else OTHER_ROLES.get(known, "")
        cure = f"; write {quoted(known)}" if known else ""
        raise ValueError(f"the role {as_words(role)} is not one of {', '.join(ROLES)}{cure}")
    if not isinstance(content, str):
        raise ValueError(f"content is {as_words(content)}; expected text")
    return role, content


def _check_tools(tools: Any) -> None:
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"tools is {as_words(tools)}; expected a list of functions")
    for number, tool in enumerate(tools, start=1):
        name = f"tool {number} of {len(tools)}"
        if not isinstance(tool, dict):
            raise ValueError(f"{name} is {as_words(tool)}; expected an object")
        if tool.get("type", "function") != "function":
            raise ValueError(f'{name} has the type {as_words(tool["type"])}; expected "function"')
        function = tool
        if "function" in tool:
            function = tool["function"]
            refuse_keys(
                (key for key in tool if key not in ("type", "function")),
                {},
                ("type", "function"),
                f"{name}, which has a function,",
            )
        if not isinstance(function, dict):
            raise ValueError(f"the function of {name} is {as_words(function)}; expected an object")
        if not isinstance(function.get("name"), str) or not function["name"].strip():
            raise ValueError(f"{name} has the name {as_words(function.get('name'))}; expected text")


def _check_metadata(metadata: Any, role: str) -> None:
    if not isinstance(metadata, str):
        raise ValueError(f"metadata is {as_words(metadata)}; expected text")
    if metadata and role != "assistant":
        raise ValueError(
            f"has the metadata {as_words(metadata)} and the role {role}: only the assistant calls "
            "a tool by its name; leave it out"
        )
    if "\n" in metadata or "\r" in metadata:
        raise ValueError(f"metadata is {as_words(metadata)}; expected one line, the name of a tool")
    if PLACE.search(metadata):
        raise ValueError(f"metadata is {as_words(metadata)}; a picture has no place in it")


def _check_mark(train: Any, role: str) -> None:
    if type(train) is not bool:
        raise ValueError(f"train is {as_words(train)}; expected true or false")
    if role != "assistant":
        raise ValueError(
            f"has train and the role {role}: only the assistant's turns are learned; leave it out"
        )


def _without_places(content: str, role: str, pictures: int) -> str:
    """The words without the places of pictures at their beginning or end."""
    places = PLACE.findall(content)
    if not places:
        return content
    counted = f"places for pictures: {len(places)} ({places[0]}), pictures: {pictures}"
    if role != "user":
        raise ValueError(f"{counted}: only the user shows pictures; take {places[0]} out")
    if not pictures:
        raise ValueError(f'{counted}: give the message its picture ("image": "a.png")')
    if len(places) != pictures:
        raise ValueError(f"{counted}: write one place for each picture, or none")
    words = PLACES_AT_THE_ENDS.sub("", content)
    left = PLACE.search(words)
    if left is not None:
        raise ValueError(
            f"{left[0]} cannot be the picture's place: the model has a picture before the words; "
            "write <image> at their beginning, or leave it out"
        )
    return words


def _check_turns(messages: list[dict], to_learn: bool) -> None:
    roles = [message["role"] for message in messages]
    if roles == ["system"] and not to_learn:
        raise ValueError("is a message of system alone; expected a question of the user after it")
    if roles[-1] != "assistant" and to_learn:
        raise ValueError(
            f"ends with a message of {roles[-1]}; expected one of the assistant, to be learned"
        )
    expected = {
        None: ("system", "user"),
        "system": ("user",),
        "user": ("assistant",),
        "assistant": ("user", "observation"),
        "observation": ("assistant", "observation"),
    }
    for at, (before, role) in enumerate(zip([None, *roles], roles, strict=False)):
        calls = any(message.get("metadata") for message in messages[max(at - 1, 0) : at + 1])
        if role in expected[before] or (before == role == "assistant" and calls):
            continue
        place = "at the beginning" if before is None else f"after one of {before}"
        cure = "; join the two" if before == role else ""
        raise ValueError(
            f"message {at + 1} of {len(roles)} is of {role}, {place}: expected one of "
            f"{' or '.join(expected[before])}{cure}"
        )
    if to_learn and not any(learned_turns(messages)):
        raise ValueError(
            f"has train: false in each of its {len(learned_turns(messages))} turns of the "
            "assistant: nothing of it would be learned; leave the row out"
        )


def kind_of(value: Any) -> str:
    return KINDS.get(type(value), "number")


def quoted(text: str) -> str:
    return f'"{shorten(text)}"'


def as_words(value: Any) -> str:
    """A value for a message."""
    if isinstance(value, (dict, list)):
        kind = kind_of(value)
        return f"{'an' if kind == 'object' else 'a'} {kind}" if value else f"an empty {kind}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return quoted(value) if isinstance(value, str) else json.dumps(value, default=str)
