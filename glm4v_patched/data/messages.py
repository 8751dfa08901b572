"""The form of a conversation that all of this package reads: a list of messages. Needs no torch.

A message has

- ``role``: system (the first message only), user, assistant or observation (a tool's answer);
- ``content``: its words;
- ``image``, from the user only: the absolute path of one image, which the model has before the
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
dropped: there is no other key. :func:`check_messages` makes this form of what files have.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..terminal_text import listed, shorten

ROLES = ("system", "user", "assistant", "observation")
KEYS = ("role", "content", "image", "metadata", "tools", "train")
MARKS = ("train", "loss", "weight")
"""Names for "this turn is learned": ours, ms-swift's, OpenAI's."""
IMAGE_SOURCES = ("image", "url", "path", "base64", "image_url")
AT_PLACE = object()
"""An image of which only the place is known: it is the next one of the row."""
Draft = tuple[dict, list]
"""A message without its images, and these."""

ONE_IMAGE = (
    'write "image": "a.png", one path; several are parts of "content": '
    '{"type": "image", "image": "a.png"}'
)
OF_SHAREGPT = 'write "role" and "content", or name the row\'s list "conversations"'
A_CALL = 'write the tool\'s name as "metadata" and the arguments as "content"'
CURES = {
    **dict.fromkeys(("images", "img", "image_url", "image_path", "picture", "pictures"), ONE_IMAGE),
    **dict.fromkeys(("from", "value"), OF_SHAREGPT),
    **dict.fromkeys(("tool_calls", "function_call"), A_CALL),
    "tool_call_id": "take it out: a message of observation answers the call before it",
}

# How other trainers' files write the place of an image in a text: <image>, <image 1>, [IMG],
# <|image_pad|>, <start_of_image>, <image_soft_token>, <__media__>, &lt;image&gt; and the like. Not
# HTML's <img src=...> and Markdown's ![...](...), which are words. What was matched is not tried in
# another way (++): words of 60,000 blanks would take a minute, "<image" with 40 digits for ever.
IMAGE_PLACEHOLDER_RE = re.compile(
    r"(?:<|\[|&lt;)\s*+[|_]*(?:(?:begin|start|end)_of_)?(?:image|img|picture|media)"
    r"(?:here|[\s_:-]*+(?:pad|soft|token|placeholder|start|end|\d++))*+"
    r"[|_]*\s*+/?\s*+(?:>|\]|&gt;)"
    r"|<img>[^<]*+</img>",
    re.IGNORECASE,
)
A_PATH = re.compile(r"<img>([^<\s][^<]*+)</img>", re.IGNORECASE)  # Qwen-VL's
EDGE_PLACEHOLDERS_RE = re.compile(
    r"\A\s*+(?:<image>\s*+)+|(?<!\s)(?<!<image>)(?:\s*+<image>)++\s*+\Z", re.IGNORECASE
)
SURROGATE = re.compile("[\ud800-\udfff]")
MOST_KEYS_LISTED = 20
ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)
# Of the role before.
MAY_FOLLOW = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "observation"),
    "observation": ("assistant", "observation"),
}


def check_messages(messages: Any, for_training: bool = True, images: list | None = None) -> list[dict]:
    """The messages in the form that is described above, but for their images, which are still as
    they stand in the file.

    Args:
        messages: Of a file: ours, or as in OpenAI's API, TRL, ms-swift and LLaMA-Factory.
        for_training: Whether they have to end with the assistant. Without, they may also end with a
            question, to be answered.
        images: Of the row, for the places ``<image>`` in the messages.

    Raises:
        ValueError: says which message is wrong, and what to write.
    """
    if not isinstance(messages, list) or not messages:
        least = 2 if for_training else 1
        raise ValueError(f"messages is {describe_value(messages)}; expected a list of at least {least}")
    drafts = read_each(messages, "message", _draft)
    _fill_places(drafts, images)
    checked = read_each(drafts, "message", _finished)
    _check_turns(checked, for_training)
    return checked


def read_each(values: Sequence[Any], name: str, read: Callable[[Any], Any], of: str = "") -> list:
    """What ``read`` makes of each; its ``ValueError`` names the value."""
    made = []
    for number, value in enumerate(values, start=1):
        try:
            made.append(read(value))
        except ValueError as error:
            raise ValueError(f"{name} {number} of {len(values)}{of}: {error}") from None
    return made


def images_of(messages: Sequence[dict]) -> list[str]:
    """The paths of a conversation's images, in their order."""
    found = []
    for message in messages:
        if "image" in message:
            found.append(message["image"])
        if isinstance(message["content"], list):
            found += [part["image"] for part in message["content"] if part["type"] == "image"]
    return found


def replace_images(messages: Sequence[dict], new: Callable[[str], Any]) -> list[dict]:
    """A copy of a conversation with others in place of its images."""
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


def drop_train_flags(messages: Sequence[dict]) -> list[dict]:
    """The messages as the processor takes them: without ``train``."""
    return [{k: of for k, of in message.items() if k != "train"} for message in messages]


def learned_turns(messages: Sequence[dict]) -> list[bool]:
    """Whether each of the assistant's turns is learned."""
    return [message.get("train", True) for message in messages if message["role"] == "assistant"]


def refuse_keys(
    given: Iterable[str],
    known: Sequence[str],
    what: str,
    cures: dict[str, str] | None = None,
    more: str = "",
) -> None:
    """Raise ``ValueError`` for keys that nothing reads, with what to write instead.

    Args:
        cures: For some of them; of several keys, the first that has one is told it.
        more: Another cure, for those that have none.
    """
    unknown = [key for key in given if key not in known]
    if unknown:
        cure = f"{what} has {', '.join(known)}; take out what is not to be learned{more}"
        found = ((cures or {}).get(key) for key in unknown)
        keys = listed([*map(quoted, unknown)], MOST_KEYS_LISTED)
        told = f"the keys {keys} are" if len(unknown) > 1 else f"the key {keys} is"
        raise ValueError(f"{told} not read: {next(filter(None, found), cure)}")


def _draft(message: Any) -> Draft:
    if not isinstance(message, dict):
        raise ValueError(f'is {describe_value(message)}; expected {{"role": "user", "content": "..."}}')
    refuse_keys((key for key in message if key not in MARKS), KEYS, "a message", CURES)
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f'the key "{key}" is missing')
    made = {key: message[key] for key in ("role", "content", "metadata", "tools") if key in message}
    role, images = message["role"], [message["image"]] if "image" in message else []
    if role not in ROLES:
        raise ValueError(f"the role {describe_value(role)} is not one of {', '.join(ROLES)}")
    if isinstance(made["content"], list):
        made["content"], shown = _read_parts(made["content"])
        images += shown
    if not isinstance(made["content"], str):
        raise ValueError(f"content is {describe_value(made['content'])}; expected text")
    if "tools" in message:
        _check_tools(message["tools"], role)
    if "metadata" in message:
        _check_metadata(message["metadata"], role)
    return made | _mark(message), images


def _mark(message: dict) -> dict:
    """Whether the turn is learned, under our name; nothing if it is."""
    given = [key for key in MARKS if key in message]
    if len(given) > 1:
        raise ValueError(f"has {' and '.join(given)}, which say the same: give one of them")
    for key in given:
        is_number = key == "weight"  # 0 or 1, as OpenAI has it
        if isinstance(message[key], bool) is is_number or message[key] not in (0, 1):
            expected = "0 or 1" if is_number else "true or false"
            raise ValueError(f"{key} is {describe_value(message[key])}; expected {expected}")
        if message["role"] != "assistant":
            raise ValueError(
                f"has {key} and the role {message['role']}: only the assistant's turns are "
                "learned; leave it out"
            )
    return {} if all(message[key] for key in given) else {"train": False}


def _check_tools(tools: Any, role: str) -> None:
    if role != "system":
        raise ValueError(f"has tools; expected them in a system message, and this is of {role}")
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"tools is {describe_value(tools)}; expected a list of functions")
    for number, tool in enumerate(tools, start=1):
        described = tool if isinstance(tool, dict) else {}
        function = described.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        others = described.keys() - {"type", "function"} if "function" in described else ()
        is_one = isinstance(name, str) and name.strip() and not others
        if not is_one or described.get("type", "function") != "function":
            raise ValueError(
                f"tool {number} of {len(tools)} is {shorten(json.dumps(tool, default=str))}; "
                'expected {"type": "function", "function": {"name": "...", ...}}'
            )


def _check_metadata(metadata: Any, role: str) -> None:
    is_line = isinstance(metadata, str) and not re.search(r"[\r\n]", metadata)
    if not is_line or IMAGE_PLACEHOLDER_RE.search(metadata) or (metadata and role != "assistant"):
        raise ValueError(
            f"metadata is {describe_value(metadata)}, of {role}; expected the name of the tool that the "
            "assistant calls, one line"
        )


def _read_parts(parts: list) -> tuple[str, list]:
    """The words and the images of parts, as OpenAI's API has them."""
    read = read_each(parts, "part", _read_part)
    words = [part for part in read if isinstance(part, str)]
    order = "".join(
        "w" if isinstance(part, str) else "p"
        for part in read
        if not isinstance(part, str) or part.strip()
    )
    if re.search("wp+w", order):
        raise ValueError(
            "an image stands between words: the model has all images of a message before its "
            "words; write them first"
        )
    return "".join(words), [part[0] for part in read if not isinstance(part, str)]


def _read_part(part: Any) -> str | list:
    """Words, or a list of one image."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        refuse_keys(part, ("type", "text"), "a part")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"text is {describe_value(part.get('text'))}; expected text")
        return part["text"]
    if kind not in ("image", "image_url"):
        raise ValueError(f"has the type {describe_value(kind)}; expected text or image")
    refuse_keys(part, ("type", *IMAGE_SOURCES), "a part")
    given = [key for key in IMAGE_SOURCES if part.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f"has its image under {' and '.join(given)}: give one of them")
    image = part[given[0]] if given else AT_PLACE
    if isinstance(image, dict) and "url" in image:
        # OpenAI's "detail" asks for a resolution; the model has but one.
        refuse_keys(image, ("url", "detail"), "an image_url")
        image = image["url"]
    elif given == ["base64"] and isinstance(image, str) and not image.startswith("data:"):
        image = f"data:image;base64,{image}"
    return [image]


def _fill_places(drafts: list[Draft], images: list | None) -> None:
    """Give the images of a row to the messages that have places for them, in their order."""
    asked = [draft for draft in drafts if draft[0]["role"] == "user"]
    for message, shown in asked if images is not None else ():
        if not shown:
            shown += [AT_PLACE] * len(IMAGE_PLACEHOLDER_RE.findall(message["content"]))
    there = images or []
    if asked and not any(shown for _, shown in drafts):
        asked[0][1].extend(there)  # the model has all images of a message before its words
        return
    places = sum(image is AT_PLACE for _, shown in drafts for image in shown)
    named = next(filter(None, (A_PATH.search(draft["content"]) for draft, _ in asked)), None)
    if named is not None:
        raise ValueError(
            f'{named[0]} names an image in the words: write <image> there, and "image": '
            f"{quoted(named[1])} in the row"
        )
    if places != len(there):
        raise ValueError(
            f"images of the row: {len(there)}, places for them (<image>) in its messages: "
            f"{places}; write one <image> for each image, at the beginning of the user's message "
            'that shows it, or give it to that message: "image": "a.png"'
        )
    left = iter(there)
    for _, shown in drafts:
        shown[:] = [next(left) if image is AT_PLACE else image for image in shown]


def _finished(draft: Draft) -> dict:
    """A message with its images, and words without the places for them."""
    message, images = draft
    role = message["role"]
    if images and role != "user":
        raise ValueError(
            f"has an image and the role {role}: only the user shows images; give it to the "
            "user's message before"
        )
    words = _without_places(message["content"], role, len(images))
    if not words.strip() and not (images or "tools" in message):
        raise ValueError(
            f"the content of {role} is {describe_value(words)}, which is empty: write what is said, or "
            "leave the row out"
        )
    message = message | {"content": words}
    # Not of paths, which a file system may have in other bytes.
    if half := SURROGATE.search(ENCODER.encode(message)):
        raise ValueError(
            f"holds {ascii(half[0])}, half of a surrogate pair and no character: write the other "
            "half too, or take it out"
        )
    if len(images) > 1:
        parts: list[dict] = [{"type": "image", "image": image} for image in images]
        message["content"] = [*parts, {"type": "text", "text": words}]
    elif images:
        message["image"] = images[0]
    return message


def _without_places(content: str, role: str, images: int) -> str:
    """The words without the places of images at their beginning or end."""
    places = IMAGE_PLACEHOLDER_RE.findall(content)
    if not places:
        return content
    counted = f"places for images: {len(places)} ({places[0]}), images: {images}"
    if role != "user":
        raise ValueError(f"{counted}: only the user shows images; take {places[0]} out")
    if len(places) != images:
        raise ValueError(f'{counted}: give the message as many images ("image": "a.png")')
    words = EDGE_PLACEHOLDERS_RE.sub("", content)
    left = IMAGE_PLACEHOLDER_RE.search(words)
    if left is not None:
        raise ValueError(
            f"{left[0]} cannot be the image's place: the model has an image before the words; "
            "write <image> at their beginning, or leave it out"
        )
    return words


def _check_turns(messages: list[dict], for_training: bool) -> None:
    roles = [message["role"] for message in messages]
    if roles == ["system"] and not for_training:
        raise ValueError("is a message of system alone; expected a question of the user after it")
    if roles[-1] != "assistant" and for_training:
        raise ValueError(
            f"ends with a message of {roles[-1]}; expected one of the assistant, to be learned"
        )
    for at, (before, role) in enumerate(zip([None, *roles], roles, strict=False)):
        calls = any(message.get("metadata") for message in messages[max(at - 1, 0) : at + 1])
        if role in MAY_FOLLOW[before] or (before == role == "assistant" and calls):
            continue
        place = "at the beginning" if before is None else f"after one of {before}"
        cure = "; join the two" if before == role else ""
        raise ValueError(
            f"message {at + 1} of {len(roles)} is of {role}, {place}: expected one of "
            f"{' or '.join(MAY_FOLLOW[before])}{cure}"
        )
    learned = learned_turns(messages)
    if for_training and not any(learned):
        raise ValueError(
            f"has train: false in each of its {len(learned)} turns of the assistant: nothing of it "
            "would be learned; leave the row out"
        )


def quoted(text: str) -> str:
    return f'"{shorten(text)}"'


def describe_value(value: Any) -> str:
    """A value for a message."""
    if isinstance(value, (dict, list)):
        kind = "object" if isinstance(value, dict) else "list"
        return f"{'an' if kind == 'object' else 'a'} {kind}" if value else f"an empty {kind}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return quoted(value) if isinstance(value, str) else json.dumps(value, default=str)
