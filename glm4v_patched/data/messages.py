"""The form of a conversation that the whole package uses: a list of messages. Needs no torch.

A message has

- ``role``: system (the first message only), user, assistant or observation (the result of a tool);
- ``content``: its text;
- ``image``, only for the user: the absolute path of one image, which the model sees before the
  text. Several images are parts of ``content``, before one part with the text: ``[{"type": "image",
  "image": PATH}, ..., {"type": "text", "text": TEXT}]``;
- ``metadata``, only for the assistant: the name of the tool that it calls, on one line. GLM-4's
  prompt has this name after the role;
- ``tools``, only for the system: a list of functions, described as in OpenAI's API. The text may
  then be empty;
- ``train``, only for the assistant: false for a turn that is context and not supervised.

A conversation starts with the system or the user and ends with the assistant. No turn is empty,
because the chat template drops empty turns. The assistant may have two successive turns if one of
them has ``metadata``, such as a text and a tool call. A message with any other key is an error; no
key is dropped silently. :func:`check_messages` converts the content of files to this form.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..terminal_text import listed, shorten

MESSAGE_ROLES = ("system", "user", "assistant", "observation")
MESSAGE_KEYS = ("role", "content", "image", "metadata", "tools", "train")
TRAIN_FLAGS = ("train", "loss", "weight")
"""Keys that say whether a turn is supervised: this package's, ms-swift's and OpenAI's."""
IMAGE_SOURCES = ("image", "url", "path", "base64", "image_url")
"""Keys under which a part of ``content`` may have its image."""
QWEN_SIZE_KEYS = ("resized_height", "resized_width", "min_pixels", "max_pixels")
"""Keys of an image's resolution in Qwen-VL's parts. They have no effect: the model has only one
resolution."""
IMAGE_PLACEHOLDER = object()
"""Stands for an image of a message that is one of the row's images. The placeholders take the row's
images in order."""
Draft = tuple[dict, list]
"""A message without its images, and the list of its images."""

# A cure is the part of an error message that says what to write instead.
ONE_IMAGE_CURE = (
    'write "image": "a.png", one path; for several, write parts of "content": '
    '{"type": "image", "image": "a.png"}'
)
SHAREGPT_CURE = 'write "role" and "content", or rename the row\'s list to "conversations"'
TOOL_CALL_CURE = 'write the tool\'s name as "metadata" and the arguments as "content"'
MESSAGE_KEY_CURES = {
    **dict.fromkeys(
        ("images", "img", "image_url", "image_path", "picture", "pictures"), ONE_IMAGE_CURE
    ),
    **dict.fromkeys(("from", "value"), SHAREGPT_CURE),
    **dict.fromkeys(("tool_calls", "function_call"), TOOL_CALL_CURE),
    "tool_call_id": "remove it: an observation message answers the call before it",
}

# Image placeholders in files of other trainers: <image>, <image 1>, [IMG], <|image_pad|>,
# <start_of_image>, <image_soft_token>, <__media__>, &lt;image&gt; and the like. HTML's
# <img src=...> and Markdown's ![...](...) are text. Possessive quantifiers (++, *+) prevent
# backtracking. With backtracking, 60,000 blanks would take a minute, and "<image" followed by 40
# digits would never end.
IMAGE_PLACEHOLDER_RE = re.compile(
    r"(?:<|\[|&lt;)\s*+[|_]*(?:(?:begin|start|end)_of_)?(?:image|img|picture|media)"
    r"(?:here|[\s_:-]*+(?:pad|soft|token|placeholder|start|end|\d++))*+"
    r"[|_]*\s*+/?\s*+(?:>|\]|&gt;)"
    r"|<img>[^<]*+</img>",
    re.IGNORECASE,
)
BRACKET_RE = re.compile(r"[<\[&]")  # the first character of a placeholder; a fast first test
# An image in Qwen-VL's form, with the words that its tokenizer puts before each image.
QWEN_IMAGE_RE = re.compile(r"(?:Picture \d+:\s*)?<img>([^<\s][^<]*+)</img>", re.IGNORECASE)
# The placeholders <image> at the beginning and at the end of a text.
EDGE_PLACEHOLDERS_RE = re.compile(
    r"\A\s*+(?:<image>\s*+)+|(?<!\s)(?<!<image>)(?:\s*+<image>)++\s*+\Z", re.IGNORECASE
)
SURROGATE_RE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair
MAX_KEYS_LISTED = 20
# Turns a message with tools into one text, which is searched for surrogates.
MESSAGE_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str, allow_nan=False)
# Which roles may follow each role; None is the beginning.
NEXT_ROLES = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "observation"),
    "observation": ("assistant", "observation"),
}


def check_messages(
    messages: Any, for_training: bool = True, images: list | None = None
) -> list[dict]:
    """Return messages in the form that the module's docstring describes, except that images are as
    the file has them: relative paths, URLs or bytes.

    Args:
        messages: Messages of a file, in the same form or in that of OpenAI's API, TRL, ms-swift or
            LLaMA-Factory.
        for_training: Whether the last message must be the assistant's; if false, it may also be a
            question to answer.
        images: The row's images, for the placeholders ``<image>`` in the messages.

    Raises:
        ValueError: A message is invalid; the text says which one, and what to write instead.
    """
    if not isinstance(messages, list) or not messages:
        shortest = 2 if for_training else 1
        raise ValueError(
            f"messages is {describe_value(messages)}; expected a list of at least {shortest} "
            f"{'messages' if for_training else 'message'}"
        )
    drafts = read_each(messages, "message", _draft_message)
    _assign_images(drafts, images)
    checked = read_each(drafts, "message", _finish_message)
    _check_turns(checked, for_training)
    return checked


def read_each(
    values: Sequence[Any], name: str, read: Callable[[Any], Any], context: str = ""
) -> list:
    """Return ``read(value)`` for each value.

    A ``ValueError`` gets a prefix of ``name``, the value's number and ``context``, such as "turn 2
    of 3 of conversations".
    """
    results = []
    for number, value in enumerate(values, start=1):
        try:
            results.append(read(value))
        except ValueError as error:
            raise ValueError(f"{name} {number} of {len(values)}{context}: {error}") from None
    return results


def images_of(messages: Sequence[dict]) -> list[str]:
    """Return the image paths of a conversation, in order."""
    images = []
    for message in messages:
        if "image" in message:
            images.append(message["image"])
        if isinstance(message["content"], list):
            images += [part["image"] for part in message["content"] if part["type"] == "image"]
    return images


def replace_images(messages: Sequence[dict], convert: Callable[[str], Any]) -> list[dict]:
    """Return a copy of a conversation with ``convert(image)`` in place of each image."""
    replaced = []
    for message in messages:
        if "image" in message:
            message = message | {"image": convert(message["image"])}
        if isinstance(message["content"], list):
            parts = [
                part | {"image": convert(part["image"])} if part["type"] == "image" else part
                for part in message["content"]
            ]
            message = message | {"content": parts}
        replaced.append(message)
    return replaced


def text_of(message: dict) -> str:
    """Return the text of a message."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def drop_train_flags(messages: Sequence[dict]) -> list[dict]:
    """Return the messages without ``train``, a key that the processor does not accept."""
    return [{k: v for k, v in message.items() if k != "train"} for message in messages]


def supervised_turns(messages: Sequence[dict]) -> list[bool]:
    """Return whether each of the assistant's turns is supervised."""
    return [message.get("train", True) for message in messages if message["role"] == "assistant"]


def refuse_keys(
    keys: Iterable[str],
    known: Sequence[str],
    owner: str,
    cures: dict[str, str] | None = None,
    more: str = "",
) -> None:
    """Raise ``ValueError`` if any of ``keys`` is not in ``known``; the message says what to write.

    Args:
        owner: Words for the object that has the keys, such as "a message".
        cures: What to write instead, by unknown key. The first unknown key in ``cures`` decides. If
            none is in ``cures``, the message lists the known keys.
        more: Text that follows the list of known keys.
    """
    unknown = [key for key in keys if key not in known]
    if unknown:
        default = f"{owner} has {', '.join(known)}; remove keys that are not used{more}"
        cure = next(filter(None, ((cures or {}).get(key) for key in unknown)), default)
        names = listed([*map(quoted, unknown)], MAX_KEYS_LISTED)
        subject = f"the keys {names} are" if len(unknown) > 1 else f"the key {names} is"
        raise ValueError(f"{subject} not read: {cure}")


def _draft_message(message: Any) -> Draft:
    """Check a message of a file, and separate its images from it."""
    if not isinstance(message, dict):
        raise ValueError(
            f'is {describe_value(message)}; expected {{"role": "user", "content": "..."}}'
        )
    refuse_keys(
        (key for key in message if key not in TRAIN_FLAGS),
        MESSAGE_KEYS,
        "a message",
        MESSAGE_KEY_CURES,
    )
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f'the key "{key}" is missing')
    draft = {
        key: message[key] for key in ("role", "content", "metadata", "tools") if key in message
    }
    role, images = message["role"], [message["image"]] if "image" in message else []
    if role not in MESSAGE_ROLES:
        raise ValueError(
            f"the role {describe_value(role)} is not one of {', '.join(MESSAGE_ROLES)}"
        )
    if isinstance(draft["content"], list):
        draft["content"], part_images = _read_parts(draft["content"])
        images += part_images
    if not isinstance(draft["content"], str):
        raise ValueError(f"content is {describe_value(draft['content'])}; expected text")
    if role == "user" and "<" in draft["content"]:
        images += QWEN_IMAGE_RE.findall(draft["content"])
        draft["content"] = QWEN_IMAGE_RE.sub("<image>", draft["content"])
    if "tools" in message:
        _check_tools(message["tools"], role)
    if "metadata" in message:
        _check_metadata(message["metadata"], role)
    return draft | _train_flag(message), images


def _train_flag(message: dict) -> dict:
    """Return ``{"train": False}`` if any of :data:`TRAIN_FLAGS` says that the turn is not
    supervised; else an empty dict."""
    flags = [key for key in TRAIN_FLAGS if key in message]
    if len(flags) > 1:
        raise ValueError(f"has {' and '.join(flags)}, which mean the same: keep one of them")
    for key in flags:
        value, is_weight = message[key], key == "weight"
        if value not in (0, 1) or isinstance(value, bool) is is_weight:
            expected = "0 or 1" if is_weight else "true or false"
            raise ValueError(f"{key} is {describe_value(value)}; expected {expected}")
        if message["role"] != "assistant":
            raise ValueError(
                f"has {key} and the role {message['role']}: the model is trained only on the "
                f"assistant's turns; remove {key}"
            )
    return {} if all(message[key] for key in flags) else {"train": False}


def _check_tools(tools: Any, role: str) -> None:
    if role != "system":
        raise ValueError(f"has tools, and the role {role}; move them to the system message")
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"tools is {describe_value(tools)}; expected a list of functions")
    for number, tool in enumerate(tools, start=1):
        # A tool is {"type": "function", "function": FUNCTION}, or only FUNCTION.
        wrapper = tool if isinstance(tool, dict) else {}
        function = wrapper.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        extra_keys = wrapper.keys() - {"type", "function"} if "function" in wrapper else ()
        is_function = isinstance(name, str) and name.strip() and not extra_keys
        if not is_function or wrapper.get("type", "function") != "function":
            raise ValueError(
                f"tool {number} of {len(tools)} is {shorten(json.dumps(tool, default=str))}; "
                'expected {"type": "function", "function": {"name": "...", ...}}'
            )


def _check_metadata(metadata: Any, role: str) -> None:
    is_one_line = isinstance(metadata, str) and not re.search(r"[\r\n]", metadata)
    is_misplaced = bool(metadata) and role != "assistant"
    if not is_one_line or IMAGE_PLACEHOLDER_RE.search(metadata) or is_misplaced:
        raise ValueError(
            f"metadata is {describe_value(metadata)}, in a message of {role}; expected the name of "
            "the tool that the assistant calls, on one line"
        )


def _read_parts(parts: list) -> tuple[str, list]:
    """Return the text and the images of a list of parts, which is OpenAI's form of a content."""
    texts, images, order = [], [], ""  # order: such as "iit" for two images and a text
    for value in read_each(parts, "part", _read_content_part):
        if isinstance(value, list):
            images += value
            order += "i"
        else:
            texts.append(value)
            order += "t" if value.strip() else ""
    if re.search("ti+t", order):
        raise ValueError(
            "an image is between two texts: the model sees all images of a message before its "
            "text; write the images first"
        )
    return "".join(texts), images


def _read_content_part(part: Any) -> str | list:
    """Return the text of a part, or a list with its image. (The image itself may be a string.)"""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        refuse_keys(part, ("type", "text"), "a part")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"text is {describe_value(part.get('text'))}; expected text")
        return part["text"]
    if kind not in ("image", "image_url"):
        raise ValueError(f"has the type {describe_value(kind)}; expected text or image")
    refuse_keys(part, ("type", *IMAGE_SOURCES, *QWEN_SIZE_KEYS), "a part")
    keys = [key for key in IMAGE_SOURCES if part.get(key) is not None]
    if len(keys) > 1:
        raise ValueError(f"has its image under {' and '.join(keys)}: keep one of them")
    image = part[keys[0]] if keys else IMAGE_PLACEHOLDER
    if isinstance(image, dict) and "url" in image:
        # OpenAI's "detail" is a resolution. It has no effect: the model has only one.
        refuse_keys(image, ("url", "detail"), "an image_url")
        image = image["url"]
    elif keys == ["base64"] and isinstance(image, str) and not image.startswith("data:"):
        image = f"data:image;base64,{image}"
    return [image]


def _assign_images(drafts: list[Draft], images: list | None) -> None:
    """Assign the row's images, in order, to the placeholders in its messages; if there are no
    placeholders, assign all of them to the first user message."""
    user_drafts = [draft for draft in drafts if draft[0]["role"] == "user"]
    if images is not None:
        for message, message_images in user_drafts:
            if not message_images:
                num_in_text = len(IMAGE_PLACEHOLDER_RE.findall(message["content"]))
                message_images += [IMAGE_PLACEHOLDER] * num_in_text
    row_images = images or []
    if user_drafts and not any(message_images for _, message_images in drafts):
        user_drafts[0][1].extend(row_images)
        return
    num_placeholders = sum(
        image is IMAGE_PLACEHOLDER for _, message_images in drafts for image in message_images
    )
    if num_placeholders != len(row_images):
        raise ValueError(
            f"the row has {len(row_images)} images, but its messages have {num_placeholders} image "
            "placeholders (<image>); write one <image> for each image, at the beginning of the "
            'user\'s message that shows it, or put it into that message: "image": "a.png"'
        )
    remaining = iter(row_images)
    for _, message_images in drafts:
        message_images[:] = [
            next(remaining) if image is IMAGE_PLACEHOLDER else image for image in message_images
        ]


def _finish_message(draft: Draft) -> dict:
    """Return a message with its images, and its text without image placeholders."""
    message, images = draft
    role = message["role"]
    if images and role != "user":
        raise ValueError(
            f"has an image and the role {role}: only user messages have images; move it to the "
            "user's message before this one"
        )
    text = _strip_image_placeholders(message["content"], role, len(images))
    if not text.strip() and not (images or "tools" in message):
        raise ValueError(
            f"the content of {role} is {describe_value(text)}, which is empty: write its text, or "
            "remove the row"
        )
    message = message | {"content": text}
    # Image paths are not searched: Python represents their bytes that are not UTF-8 by surrogates.
    searched = MESSAGE_ENCODER.encode(message) if "tools" in message else text
    if surrogate := SURROGATE_RE.search(searched + message.get("metadata", "")):
        raise ValueError(
            f"contains {ascii(surrogate[0])}, half of a surrogate pair and not a character: add "
            "the other half, or remove it"
        )
    if len(images) > 1:
        parts: list[dict] = [{"type": "image", "image": image} for image in images]
        message["content"] = [*parts, {"type": "text", "text": text}]
    elif images:
        message["image"] = images[0]
    return message


def _strip_image_placeholders(content: str, role: str, num_images: int) -> str:
    """Return the text without the image placeholders at its beginning or end."""
    placeholders = IMAGE_PLACEHOLDER_RE.findall(content) if BRACKET_RE.search(content) else []
    if not placeholders:
        return content
    counts = f"image placeholders: {len(placeholders)} ({placeholders[0]}), images: {num_images}"
    if role != "user":
        raise ValueError(f"{counts}: only user messages have images; remove {placeholders[0]}")
    if len(placeholders) != num_images:
        raise ValueError(f'{counts}: give the message one image for each ("image": "a.png")')
    text = EDGE_PLACEHOLDERS_RE.sub("", content)
    inner = IMAGE_PLACEHOLDER_RE.search(text)
    if inner is not None:
        raise ValueError(
            f"{inner[0]} is in the middle of the text, but the model sees an image before the "
            "text; write <image> at the beginning, or remove it"
        )
    return text


def _check_turns(messages: list[dict], for_training: bool) -> None:
    roles = [message["role"] for message in messages]
    if roles == ["system"] and not for_training:
        raise ValueError("contains only a system message; add a question of the user")
    if roles[-1] != "assistant" and for_training:
        raise ValueError(
            f"ends with a message of {roles[-1]}; expected one of the assistant, to train on"
        )
    for index, (previous, role) in enumerate(zip([None, *roles], roles, strict=False)):
        has_tool_call = any(  # this message or the previous one
            message.get("metadata") for message in messages[max(index - 1, 0) : index + 1]
        )
        if role in NEXT_ROLES[previous] or (previous == role == "assistant" and has_tool_call):
            continue
        where = "at the beginning" if previous is None else f"after {previous}"
        cure = "; join the two messages" if previous == role else ""
        raise ValueError(
            f"message {index + 1} of {len(roles)} has the role {role}, {where}; expected "
            f"{' or '.join(NEXT_ROLES[previous])}{cure}"
        )
    supervised = supervised_turns(messages)
    if for_training and not any(supervised):
        raise ValueError(
            f"has train: false in each of its {len(supervised)} turns of the assistant, so that no "
            "token is supervised; remove the row"
        )


def quoted(text: str) -> str:
    return f'"{shorten(text)}"'


def describe_value(value: Any) -> str:
    """Return a value as text for a message."""
    if isinstance(value, (dict, list)):
        kind = "object" if isinstance(value, dict) else "list"
        return f"{'an' if kind == 'object' else 'a'} {kind}" if value else f"an empty {kind}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return quoted(value) if isinstance(value, str) else json.dumps(value, default=str)
