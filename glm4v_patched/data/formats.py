"""Conversations about pictures: reading them from files, a row at a time.

A line of the file is a row: ``{"messages": [...]}``. A message has

- ``role``: system (the first message only), user, assistant or observation (a tool's answer);
- ``content``: its words;
- ``image``, from the user only: one picture, the path of a file, relative to the folder of this
  file. The model has it before the words. ``<image>`` at the beginning or the end of the words is
  taken for the picture's place and removed; anywhere else, it is a fault;
- ``metadata``, of the assistant only: the name of the tool that it calls, one line. GLM-4's format
  has it after the role;
- ``tools``, of a system message only: a list of functions, described as in OpenAI's API. The words
  may then be empty.

The conversation starts with the system or the user, ends with the assistant, and no turn of it is
empty, for the chat template leaves out what is. The assistant may speak twice in a row where one
message has ``metadata``: words and a tool's call. What is not understood is a fault and never
dropped: there is no other key.
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant", "observation")
KEYS = ("role", "content", "image", "metadata", "tools")
MOST_FAULTS_LISTED = 20

# How other trainers' files write the place of a picture in a text: <image>, <image 1>, [IMG],
# <|image_pad|>, <start_of_image>, <image_soft_token>, <__media__>, &lt;image&gt; and the like. Not
# HTML's <img src=...> and Markdown's ![...](...), which are words.
PLACE = re.compile(
    r"(?:<|\[|&lt;)\s*[|_]*(?:(?:begin|start|end)_of_)?(?:image|img|picture|media)"
    r"(?:here|[\s_:-]*(?:pad|soft|token|placeholder|start|end|\d+))*[|_]*\s*/?\s*(?:>|\]|&gt;)"
    r"|<img>[^<]*</img>",
    re.IGNORECASE,
)
PLACE_AT_AN_END = re.compile(r"\A\s*<image>\s*|\s*<image>\s*\Z", re.IGNORECASE)
UNDECODED = re.compile("[\udc80-\udcff]")  # how "surrogateescape" writes bytes
URL = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)

PICTURE_CURE = (
    'give each picture to the message that shows it: {"role": "user", "image": "a.png", "content": '
    '"..."}'
)
ROW_CURES = {
    "image": PICTURE_CURE,
    "images": PICTURE_CURE,
    "conversation": 'write "messages", with "role" and "content" in each',
    "conversations": 'write "messages", with "role" and "content" in each',
    "system": 'write it as the first message: {"role": "system", "content": "..."}',
    "tools": 'give them to the system message: {"role": "system", "content": "", "tools": [...]}',
}
ONE_PICTURE = 'write "image": "a.png", one path'
MESSAGE_CURES = {
    "images": ONE_PICTURE,
    "img": ONE_PICTURE,
    "image_url": ONE_PICTURE,
    "image_path": ONE_PICTURE,
    "picture": ONE_PICTURE,
    "from": 'write "role": system, user (for human), assistant (for gpt) or observation',
    "value": 'write "content"',
    "text": 'write "content"',
    "tool_calls": 'write the tool\'s name as "metadata" and the arguments as "content"',
}
KINDS = {dict: "object", list: "list", str: "text", bool: "truth value", type(None): "null"}
BINARY = {b"PAR1": "Parquet", b"\x1f\x8b": "gzip", b"PK\x03\x04": "a zip archive"}


class Row(NamedTuple):
    """A conversation that can be rendered; its pictures have not been looked for."""

    line: int
    messages: list[dict]

    @property
    def pictures(self) -> list[str]:
        """Their absolute paths."""
        return [message["image"] for message in self.messages if "image" in message]


class Fault(NamedTuple):
    """A line that cannot be used, and why."""

    line: int
    text: str


def read_conversations(path: str | Path) -> list[list[dict]]:
    """Read a file of conversations, of which every row must be usable; image paths become absolute.

    Pictures must be there and are not opened: :mod:`check` decodes them.

    Raises:
        ValueError: lists up to 20 unusable lines; or there is none at all.
    """
    rows: list[Row] = []
    faults: list[Fault] = []
    for row in read_rows(path):
        if isinstance(row, Row):
            lost = next((picture for picture in row.pictures if not os.path.isfile(picture)), None)
            if lost is not None:
                row = Fault(row.line, f"the image {shorten(lost)} does not exist")
        if isinstance(row, Row):
            rows.append(row)
        else:
            faults.append(row)
    if faults:
        raise ValueError(describe_faults(path, faults, len(rows) + len(faults)))
    return [row.messages for row in rows]


def describe_faults(path: str | Path, faults: list[Fault], number: int) -> str:
    """Up to 20 of them with file and line, and how many of ``number`` rows they are."""
    lines = [f"{path}: {len(faults):,} of {number:,} rows cannot be used:"]
    lines += [f"  {path}:{line}: {text}" for line, text in faults[:MOST_FAULTS_LISTED]]
    if len(faults) > MOST_FAULTS_LISTED:
        lines.append(f"  and {len(faults) - MOST_FAULTS_LISTED:,} more")
    return "\n".join(lines)


def read_messages(row: dict) -> Any:
    """The messages of a row in our own format, as they stand."""
    messages = row.get("messages")
    unknown = [key for key in row if key != "messages"]
    if "images" in unknown and isinstance(row["images"], list):
        places = len(PLACE.findall(json.dumps(messages)))
        raise ValueError(
            f'the key "images" is not read (pictures in it: {len(row["images"])}, places for '
            f"pictures in the words: {places}): {PICTURE_CURE}"
        )
    _refuse_keys(unknown, ROW_CURES, ("messages",), "a row")
    if "messages" not in row:
        raise ValueError('the key "messages" is missing; expected {"messages": [...]}')
    return messages


def read_rows(
    path: str | Path,
    read_row: Callable[[dict], Any] = read_messages,
    to_learn: bool = True,
) -> Iterator[Row | Fault]:
    """Each line that is not blank, in order.

    Args:
        read_row: Of some format: makes messages of our form, unchecked, of a row. Raises ValueError
            for keys that it does not understand.
        to_learn: Whether each row has to end with the assistant. Without, it may also end with a
            question, to be answered.

    Raises:
        ValueError: the file cannot be read, is no JSON lines in UTF-8, or has no row.
    """
    path, number = Path(path), 0
    for line, text in _lines(path):
        number += 1
        try:
            yield Row(line, _parse(text, read_row, path.parent, to_learn))
        except ValueError as error:
            yield Fault(line, str(error))
        except RecursionError:
            yield Fault(line, "objects or lists are nested too deeply")
    if not number:
        raise ValueError(f"{path}: 0 conversations; expected at least 1 line")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as file:
            _require_text(path, file.read(4))
        # Bytes that are no UTF-8 become surrogates, which UTF-8 never holds: a fault of their line.
        # Not splitlines(): JSON strings may hold other line separators.
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            is_first = True
            for line, text in enumerate(lines, start=1):
                stripped = text.strip()
                if stripped:
                    if is_first:
                        _require_rows(path, stripped)
                    is_first = False
                    yield line, text
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _require_text(path: Path, head: bytes) -> None:
    kind = None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        kind = "UTF-16 or UTF-32"
    kind = next((kind for magic, kind in BINARY.items() if head.startswith(magic)), kind)
    if kind is not None:
        raise ValueError(f"{path} is {kind}; expected a row of JSON a line, in UTF-8")


def _require_rows(path: Path, first: str) -> None:
    expected = 'expected a row a line: {"messages": [...]}'
    if first.startswith("["):
        raise ValueError(f"{path} is a JSON array; {expected}, with no brackets around")
    if first == "{":
        raise ValueError(f"{path} is one JSON object over several lines; {expected}")


def _parse(text: str, read_row: Callable[[dict], Any], folder: Path, to_learn: bool) -> list[dict]:
    if undecoded := UNDECODED.search(text):
        byte = ord(undecoded[0]) - 0xDC00
        at = undecoded.start() + 1
        raise ValueError(f"character {at} is the byte 0x{byte:02x}, which is no UTF-8")
    try:
        row = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"no JSON ({error.msg}, column {error.colno}): {shorten(text.strip())}"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f'is a {kind_of(row)}; expected {{"messages": [...]}}')
    messages = read_row(row)
    if not isinstance(messages, list) or not messages:
        least = 2 if to_learn else 1
        raise ValueError(f"messages is {_value(messages)}; expected a list of at least {least}")
    checked = []
    for number, message in enumerate(messages, start=1):
        try:
            checked.append(_checked_message(message, folder))
        except ValueError as error:
            raise ValueError(f"message {number} of {len(messages)}: {error}") from None
    _check_turns(checked, to_learn)
    return checked


def _object(pairs: list[tuple[str, Any]]) -> dict:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {_quoted(twice)} stands {keys.count(twice)} times in one object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def _refuse_keys(
    unknown: Iterable[str], cures: dict[str, str], known: tuple[str, ...], what: str
) -> None:
    faults = []
    for key in unknown:
        if key.lower() in known:
            cure = f'write "{key.lower()}", in small letters'
        else:
            cure = f"{what} has {', '.join(known)}; take it out if it is not to be learned"
            cure = cures.get(key.lower(), cure)
        faults.append(f"the key {_quoted(key)} is not read: {cure}")
    if faults:
        raise ValueError("; ".join(faults))


def _checked_message(message: Any, folder: Path) -> dict:
    if not isinstance(message, dict):
        raise ValueError(f'is a {kind_of(message)}; expected {{"role": "user", "content": "..."}}')
    _refuse_keys((key for key in message if key not in KEYS), MESSAGE_CURES, KEYS, "a message")
    try:
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"holds {ascii(half)}, half of a surrogate pair and no character: write the other half "
            "too, or take it out"
        ) from None
    role, content = _checked_role_and_content(message)
    message = dict(message)
    if "tools" in message:
        if role != "system":
            raise ValueError(f"has tools; expected them in a system message, and this is of {role}")
        _check_tools(message["tools"])
    if "metadata" in message:
        _check_metadata(message["metadata"], role)
    if "image" in message:
        message["image"] = _checked_picture(message["image"], role, folder)
    message["content"] = _without_place(content, role, "image" in message)
    if not message["content"].strip() and not ("image" in message or "tools" in message):
        empty = "is empty" if not content else f"is {content!r}, which is empty"
        cure = "write the answer" if role == "assistant" else "write what is said"
        raise ValueError(f"the content of {role} {empty}: {cure}, or leave the row out")
    return message


def _checked_role_and_content(message: dict) -> tuple[str, str]:
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f'the key "{key}" is missing')
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise ValueError(f"the role {_value(role)} is not one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        cure = ""
        if isinstance(content, list):
            cure = ': write its words as "content" and its picture as "image"'
        raise ValueError(f"content is {_value(content)}; expected text{cure}")
    return role, content


def _check_tools(tools: Any) -> None:
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"tools is {_value(tools)}; expected a list of functions")
    for number, tool in enumerate(tools, start=1):
        name = f"tool {number} of {len(tools)}"
        if not isinstance(tool, dict):
            raise ValueError(f"{name} is {_value(tool)}; expected an object")
        if tool.get("type", "function") != "function":
            raise ValueError(f'{name} has the type {_value(tool["type"])}; expected "function"')
        function = tool
        if "function" in tool:
            function = tool["function"]
            _refuse_keys(
                (key for key in tool if key not in ("type", "function")),
                {},
                ("type", "function"),
                f"{name}, which has a function,",
            )
        if not isinstance(function, dict):
            raise ValueError(f"the function of {name} is {_value(function)}; expected an object")
        if not isinstance(function.get("name"), str) or not function["name"].strip():
            raise ValueError(f"{name} has the name {_value(function.get('name'))}; expected text")


def _check_metadata(metadata: Any, role: str) -> None:
    if not isinstance(metadata, str):
        raise ValueError(f"metadata is {_value(metadata)}; expected text")
    if metadata and role != "assistant":
        raise ValueError(
            f"has the metadata {_value(metadata)} and the role {role}: only the assistant calls a "
            "tool by its name; leave it out"
        )
    if "\n" in metadata or "\r" in metadata:
        raise ValueError(f"metadata is {_value(metadata)}; expected one line, the name of a tool")
    if PLACE.search(metadata):
        raise ValueError(f"metadata is {_value(metadata)}; a picture has no place in it")


def _checked_picture(image: Any, role: str, folder: Path) -> str:
    if role != "user":
        raise ValueError(
            f"has an image and the role {role}: only the user shows pictures; give it to the "
            "user's message before"
        )
    if not isinstance(image, str) or not image:
        cure = "; leave the key out where there is no picture" if image in (None, "") else ""
        raise ValueError(f"image is {_value(image)}; expected the path of one picture{cure}")
    if URL.match(image):
        raise ValueError(
            f"image is {_value(image)}; expected a path: save the picture beside the rows"
        )
    if "\0" in image:
        raise ValueError(f"image is {_value(image)}; a path holds no character of code 0")
    return os.path.abspath(folder / image)


def _without_place(content: str, role: str, has_picture: bool) -> str:
    """The words without the place of a picture at their beginning or end."""
    places = PLACE.findall(content)
    if not places:
        return content
    counted = f"places for pictures: {len(places)} ({places[0]}), pictures: {int(has_picture)}"
    if role != "user":
        raise ValueError(f"{counted}: only the user shows pictures; take {places[0]} out")
    if not has_picture:
        raise ValueError(f'{counted}: give the message its picture ("image": "a.png")')
    if len(places) > 1:
        raise ValueError(
            f"{counted}: a message shows one; share the words out among messages, with the "
            "assistant's answer after each"
        )
    found = PLACE_AT_AN_END.search(content)
    if found is None:
        raise ValueError(
            f"{places[0]} cannot be the picture's place: the model has a picture before the words; "
            "write <image> at their beginning, or leave it out"
        )
    return content[: found.start()] + content[found.end() :]


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


def kind_of(value: Any) -> str:
    return KINDS.get(type(value), "number")


def shorten(text: str, most: int = 80) -> str:
    """One line of printable characters, with what is left out of a long text in its middle."""
    shown = text if text.isprintable() else repr(text)[1:-1]
    if len(shown) <= most:
        return shown
    half = (most - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"


def _quoted(text: str) -> str:
    return f'"{shorten(text)}"'


def _value(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {kind_of(value)}" if value else f"an empty {kind_of(value)}"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def write_conversations(
    path: Path, conversations: list[list[dict]], overwrite: bool = False
) -> None:
    """Write conversations as JSONL, with image paths relative to the file.

    Raises:
        ValueError: the file exists and ``overwrite`` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("w" if overwrite else "x", encoding="utf-8")
    except FileExistsError as error:
        raise ValueError(
            f"{path} exists and is not overwritten: move it, or write to another file"
        ) from error
    with file:
        for messages in conversations:
            relative = [
                message | {"image": str(Path(message["image"]).relative_to(path.parent))}
                if "image" in message
                else message
                for message in messages
            ]
            file.write(json.dumps({"messages": relative}, ensure_ascii=False) + "\n")
