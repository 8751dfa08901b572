"""The formats of rows: one reader for each, which makes messages of a row. Needs no torch.

A reader takes a row as its file has it and returns messages for :func:`messages.check_messages`.
Which one reads a file is found from the keys of its first row (:func:`find_format`), or named
(``data.format``); keys that it does not know are refused. Rows of all other forms are read by the
names of their columns (``data.columns``).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .columns import (
    OF_TOOLS,
    Columns,
    pictures_of_columns,
    required,
    text_of_column,
    value_of,
)
from .messages import PICTURES, PLACE, as_words, kind_of, refuse_keys

MESSAGE_KEYS = ("role", "content", "image", "metadata", "tools", "train", "loss", "weight")
TURN_KEYS = ("from", "value", "train", "loss", "weight")
ROW_PICTURES = ("images", "image")
MARKS = ("train", "loss", "weight")
"""Names for "this turn is learned": ours, ms-swift's, OpenAI's."""
IMAGE_SOURCES = ("image", "url", "path", "base64", "image_url")
AT_PLACE = object()
"""A picture of which only the place is known: it is the next one of the row."""
ROLES_OF_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "observation": "observation",
    "tool": "observation",
}

ROW_CURES = {
    "conversation": 'write "conversations"',
    "system": 'write it as the first message: {"role": "system", "content": "..."}',
    "tools": 'give them to the system message: {"role": "system", "content": "", "tools": [...]}',
    "chosen": "it is of preferences, which TRL trains on",
    "rejected": "it is of preferences, which TRL trains on",
}
IGNORE_CURE = "; to leave it out of all rows, name it in data.ignore"
ONE_PICTURE = (
    'write "image": "a.png", one path; several are parts of "content": '
    '{"type": "image", "image": "a.png"}'
)
MESSAGE_CURES = {
    "images": ONE_PICTURE,
    "img": ONE_PICTURE,
    "image_url": ONE_PICTURE,
    "image_path": ONE_PICTURE,
    "picture": ONE_PICTURE,
    "pictures": ONE_PICTURE,
    "from": 'write "role": system, user (for human), assistant (for gpt) or observation',
    "value": 'write "content"',
    "text": 'write "content"',
    "tool_calls": 'write the tool\'s name as "metadata" and the arguments as "content"',
    "function_call": 'write the tool\'s name as "metadata" and the arguments as "content"',
    "tool_call_id": "take it out: a message of observation answers the call before it",
}
TURN_CURES = {
    "role": 'write "from", or name the row\'s list "messages"',
    "content": 'write "value", or name the row\'s list "messages"',
    "image": 'write <image> in "value", and the path under "image" of the row',
}
SHAREGPT_ROLE_CURE = "expected system, human, gpt or observation"

ReadRow = Callable[[dict], Any]


def read_messages(row: dict) -> Any:
    """``messages`` of ``role`` and ``content``: ours, and those of OpenAI's API, TRL, ms-swift and
    LLaMA-Factory.

    A message names its picture (``image``), or has parts of ``content``, or the row has ``images``
    for the places ``<image>``.
    """
    if "messages" not in row:
        raise ValueError('the key "messages" is missing; expected {"messages": [...]}')
    return _read_list(row["messages"], _message, _row_pictures(row))


def read_prompt_and_completion(row: dict) -> Any:
    """TRL's ``prompt`` and ``completion``, texts or messages; only the completion is learned."""
    parts = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        if key not in row:
            raise ValueError(f'the key "{key}" is missing; expected "prompt" and "completion"')
        value = row[key]
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        if not isinstance(value, list):
            raise ValueError(f"{key} is {as_words(value)}; expected text, or a list of messages")
        parts.append(value)
    messages = _read_list([*parts[0], *parts[1]], _message, _row_pictures(row))
    for message in messages[: len(parts[0])]:
        if message.get("role") == "assistant":
            message["train"] = False
    return messages


def read_columns(row: dict, columns: Columns) -> Any:
    """A row whose columns are named by ``data.columns``; others are left out."""
    pictures = pictures_of_columns(row, columns.get("image"))
    system = text_of_column(row, columns["system"], "system") if "system" in columns else None
    messages = [{"role": "system", "content": system}] if system else []
    if "turns" in columns:
        messages += _turns_of(required(row, columns["turns"]), columns)
    else:
        before = value_of(row, columns["history"]) if "history" in columns else None
        messages += _turns_of([] if before is None else before, {"turns": columns.get("history")})
        messages += _exchange(*_asked(row, columns))
    return _read_list(messages, _message, pictures)


def _asked(row: dict, columns: Columns) -> tuple[str, str | None]:
    """The question, which may be a picture alone, and the answer, if one is asked for."""
    parts = columns.get("question", [])
    if isinstance(parts, list):
        texts = [text_of_column(row, part, "question") for part in parts]
        question: str | None = "\n".join(filter(None, texts))
    elif (question := text_of_column(row, parts, "question")) is None:
        required(row, parts)
    if "answer" not in columns:
        return question or "", None
    answer = text_of_column(row, columns["answer"], "answer")
    return question or "", required(row, columns["answer"]) if answer is None else answer


def _exchange(question: Any, answer: Any) -> list[dict]:
    asked = [{"role": "user", "content": question}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


def _turns_of(turns: Any, columns: Columns) -> list[dict]:
    """Turns as messages: of ``role`` or ``from``, pairs, or objects with the named keys."""
    name = columns["turns"]
    if not isinstance(turns, list):
        raise ValueError(f"{name} is {as_words(turns)}; expected a list")
    messages: list[dict] = []
    for number, turn in enumerate(turns, start=1):
        try:
            if isinstance(turn, dict) and "question" in columns:
                messages += _exchange(*_asked(turn, columns))
            elif isinstance(turn, dict):
                messages.append(_turn(turn) if "from" in turn else turn)
            elif isinstance(turn, list) and len(turn) == 2:
                messages += _exchange(*turn)
            else:
                expected = '{"from": "human", "value": "..."} or [question, answer]'
                raise ValueError(f"is {as_words(turn)}; expected {expected}")
        except ValueError as error:
            raise ValueError(f"turn {number} of {len(turns)} of {name}: {error}") from None
    return messages


def _of_columns(**columns: Any) -> ReadRow:
    """Reads rows whose columns have these names; each but the first may be missing."""
    first, *_ = columns.values()
    needed = first if isinstance(first, str) else first[0]
    of_turns = ("question", "answer") if "turns" in columns else ()

    def read(row: dict) -> Any:
        if needed not in row:
            raise ValueError(f'the key "{needed}" is missing')
        there = {
            part: name
            for part, name in columns.items()
            if isinstance(name, list) or part in of_turns or row.get(name) is not None
        }
        _row_pictures(row)  # under one of its names
        return read_columns(row, there | {"image": [*ROW_PICTURES]})

    return read


class Format(NamedTuple):
    """Keys that tell it, others that its rows may have beside pictures, and what reads it."""

    needs: tuple[str, ...]
    others: tuple[str, ...]
    read: ReadRow

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.needs, *ROW_PICTURES, *self.others)


FORMATS = {
    "messages": Format(("messages",), (), read_messages),
    # ShareGPT's, LLaVA's, LLaMA-Factory's
    "conversations": Format(
        ("conversations",), ("system", "id"), _of_columns(turns="conversations", system="system")
    ),
    "prompt_completion": Format(("prompt", "completion"), (), read_prompt_and_completion),
    # Alpaca's, with LLaMA-Factory's "system" and "history" (pairs of a question and its answer)
    "alpaca": Format(
        ("instruction", "output"),
        ("input", "system", "history"),
        _of_columns(
            question=["instruction", "input"], answer="output", system="system", history="history"
        ),
    ),
    # ms-swift's
    "query_response": Format(
        ("query", "response"),
        ("system", "history"),
        _of_columns(question="query", answer="response", system="system", history="history"),
    ),
    # the_cauldron's
    "texts": Format(
        ("texts",), (), _of_columns(turns="texts", question="user", answer="assistant")
    ),
}


def find_format(row: Mapping) -> str | None:
    """The format of a row by its keys: of one that has those that tell it, or of which it has
    nothing but keys of it; None if there is none."""
    for name, of in FORMATS.items():
        if {*of.needs} <= row.keys():
            return name
    known = (n for n, of in FORMATS.items() if of.needs[0] in row and row.keys() <= {*of.keys})
    return next(known, None)


def read_as(name: str, row: dict) -> Any:
    """The messages of a row of a format, which has no key that the format does not have."""
    of = FORMATS[name]
    cures = {key: cure for key, cure in ROW_CURES.items() if key not in of.keys}
    unknown = [key for key in row if key not in of.keys and key not in OF_TOOLS]
    for key in {key for other in FORMATS.values() for key in other.needs}.intersection(unknown):
        cures[key] = (
            f'the first row of this file has "{of.needs[0]}"; write rows of one format, or a file '
            "for each"
        )
    refuse_keys(unknown, cures, of.keys, "a row", IGNORE_CURE)
    return of.read(row)


def _row_pictures(row: dict) -> list | None:
    """The pictures of the row, for the places in its words; None if it names none."""
    given = [key for key in ROW_PICTURES if row.get(key) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError('has its pictures under "images" and "image": give one of them')
    pictures = row[given[0]]
    return pictures if isinstance(pictures, list) else [pictures]


def _read_list(messages: Any, read: Callable[[dict], dict], pictures: list | None) -> Any:
    if not isinstance(messages, list):
        return messages  # which is reported
    read_ones = []
    for number, message in enumerate(messages, start=1):
        try:
            read_ones.append(read(message))
        except ValueError as error:
            raise ValueError(f"message {number} of {len(messages)}: {error}") from None
    _fill_places(read_ones, pictures)
    return read_ones


def _message(message: Any) -> dict:
    if not isinstance(message, dict):
        raise ValueError(f'is a {kind_of(message)}; expected {{"role": "user", "content": "..."}}')
    unknown = (key for key in message if key not in MESSAGE_KEYS)
    refuse_keys(unknown, MESSAGE_CURES, MESSAGE_KEYS[:6], "a message")
    made = {key: message[key] for key in MESSAGE_KEYS if key in message and key not in MARKS}
    made |= _mark(message)
    pictures = []
    if "image" in made:
        pictures.append(made.pop("image"))
    if isinstance(made.get("content"), list):
        made["content"], shown = _read_parts(made["content"])
        pictures += shown
    return made | ({PICTURES: pictures} if pictures else {})


def _turn(turn: dict) -> dict:
    unknown = (key for key in turn if key not in TURN_KEYS)
    refuse_keys(unknown, TURN_CURES, TURN_KEYS[:3], "a turn")
    if "value" not in turn:
        raise ValueError('the key "value" is missing')
    who = turn["from"]
    if not isinstance(who, str) or who not in ROLES_OF_SHAREGPT:
        raise ValueError(f'"from" is {as_words(who)}; {SHAREGPT_ROLE_CURE}')
    return {"role": ROLES_OF_SHAREGPT[who], "content": turn["value"]} | _mark(turn)


def _mark(message: dict) -> dict:
    """Whether the turn is learned, under our name."""
    given = [key for key in MARKS if key in message]
    if len(given) > 1:
        raise ValueError(f"has {' and '.join(given)}, which say the same: give one of them")
    if not given:
        return {}
    value = message[given[0]]
    if given[0] == "weight":
        if isinstance(value, bool) or value not in (0, 1):
            raise ValueError(f"weight is {as_words(value)}; expected 0 or 1")
        value = bool(value)
    return {"train": value}


def _read_parts(parts: list) -> tuple[str, list]:
    """The words and the pictures of a content of parts.

    Raises:
        ValueError: a picture stands between words, where the model would not have it.
    """
    words: list[str] = []
    pictures: list[Any] = []
    for number, part in enumerate(parts, start=1):
        name = f"part {number} of {len(parts)}"
        if not isinstance(part, dict):
            raise ValueError(f"{name} is {as_words(part)}; expected an object with a type")
        kind = part.get("type")
        if kind == "text":
            refuse_keys((k for k in part if k not in ("type", "text")), {}, ("type", "text"), name)
            if not isinstance(part.get("text"), str):
                raise ValueError(f"the text of {name} is {as_words(part.get('text'))}")
            words.append(part["text"])
        elif kind in ("image", "image_url"):
            pictures.append(_picture_of_part(part, name))
        else:
            raise ValueError(f"{name} has the type {as_words(kind)}; expected text or image")
    if _stands_between(parts):
        raise ValueError(
            "a picture stands between words: the model has all pictures of a message before its "
            "words; write them first"
        )
    return "".join(words), pictures


def _stands_between(parts: list[dict]) -> bool:
    said = [at for at, part in enumerate(parts) if part.get("text", "").strip()]
    return bool(said) and any(part["type"] != "text" for part in parts[said[0] : said[-1]])


def _picture_of_part(part: dict, name: str) -> Any:
    known = ("type", *IMAGE_SOURCES)
    refuse_keys((key for key in part if key not in known), {}, known, name)
    given = [key for key in IMAGE_SOURCES if part.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f"{name} has its picture under {' and '.join(given)}: give one of them")
    if not given:
        return AT_PLACE
    picture = part[given[0]]
    if isinstance(picture, dict) and "url" in picture:
        # OpenAI's "detail" asks for a resolution; the model has but one.
        others = (key for key in picture if key not in ("url", "detail"))
        refuse_keys(others, {}, ("url", "detail"), f"the image_url of {name}")
        return picture["url"]
    if given[0] == "base64" and isinstance(picture, str) and not picture.startswith("data:"):
        return f"data:image;base64,{picture}"
    return picture


def _fill_places(messages: list[dict], pictures: list | None) -> None:
    """Give the pictures of a row to the messages that have places for them, in their order."""
    wanted = []
    for message in messages:
        shown = message.get(PICTURES, [])
        places = sum(picture is AT_PLACE for picture in shown)
        content = message.get("content")
        if not shown and pictures is not None and message.get("role") == "user":
            places = len(PLACE.findall(content)) if isinstance(content, str) else 0
        wanted.append(places)
    there = 0 if pictures is None else len(pictures)
    first = next((n for n, of in enumerate(messages) if of.get("role") == "user"), None)
    if first is not None and not any(wanted) and not any(PICTURES in of for of in messages):
        wanted[first] = there  # the model has all pictures of a message before its words
    if sum(wanted) != there:
        raise ValueError(
            f"pictures of the row: {there}, places for them (<image>) in its messages: "
            f"{sum(wanted)}; write one <image> for each picture, at the beginning of the user's "
            'message that shows it, or give it to that message: "image": "a.png"'
        )
    left = iter(pictures or ())
    for message, places in zip(messages, wanted, strict=True):
        shown = message.get(PICTURES, [AT_PLACE] * places)
        if shown:
            message[PICTURES] = [next(left) if one is AT_PLACE else one for one in shown]
