"""The formats of rows: one reader for each, which makes messages of a row. Needs no torch.

A reader takes a row as its file has it, refuses keys that it does not know, and returns messages
for :func:`messages.check_messages`. Which one reads a file is found from the keys of its first row
(:func:`find_format`), or named (``data.format``).
"""

from collections.abc import Callable, Mapping
from typing import Any

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
OF_OTHER_FORMATS = (
    "caption",
    "label",
    "text",
    "input",
    "output",
    "query",
    "response",
    "question",
    "answer",
)
ROW_CURES |= dict.fromkeys(
    OF_OTHER_FORMATS,
    'write {"messages": [{"role": "user", "image": "a.png", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]}',
)
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
    _refuse_row_keys(row, ("messages", *ROW_PICTURES))
    if "messages" not in row:
        raise ValueError('the key "messages" is missing; expected {"messages": [...]}')
    return _read_list(row["messages"], _message, _row_pictures(row))


def read_sharegpt(row: dict) -> Any:
    """``conversations`` of ``from`` and ``value``: ShareGPT's, LLaVA's, LLaMA-Factory's."""
    _refuse_row_keys(row, ("conversations", *ROW_PICTURES, "system", "id"))
    if "conversations" not in row:
        raise ValueError('the key "conversations" is missing; expected {"conversations": [...]}')
    messages = _read_list(row["conversations"], _turn, _row_pictures(row))
    system = row.get("system")
    if system in (None, "") or not isinstance(messages, list):
        return messages
    if messages and messages[0].get("role") == "system":
        raise ValueError('has "system" and a turn of the system, too: write one of them')
    return [{"role": "system", "content": system}, *messages]


def read_prompt_and_completion(row: dict) -> Any:
    """TRL's ``prompt`` and ``completion``, texts or messages; only the completion is learned."""
    _refuse_row_keys(row, ("prompt", "completion", *ROW_PICTURES))
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


def read_alpaca(row: dict) -> Any:
    """Alpaca's ``instruction``, ``input`` and ``output``, with LLaMA-Factory's ``system`` and
    ``history`` (pairs of a question and its answer)."""
    _refuse_row_keys(row, ("instruction", "input", "output", "system", "history", *ROW_PICTURES))
    if "instruction" not in row:
        raise ValueError('the key "instruction" is missing; expected "instruction" and "output"')
    # Which files made from tables have as null where a row has none.
    optional = ("input", "system", "history")
    row = {key: value for key, value in row.items() if value is not None or key not in optional}
    for key in ("instruction", "input", "output", "system"):
        if not isinstance(row.get(key, ""), str):
            raise ValueError(f"{key} is {as_words(row[key])}; expected text")
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for question, answer in _history(row.get("history", [])):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    words = [row["instruction"], row.get("input", "")]
    messages.append({"role": "user", "content": "\n".join(filter(None, words))})
    if "output" in row:  # else it is a question, to be answered
        messages.append({"role": "assistant", "content": row["output"]})
    return _read_list(messages, _message, _row_pictures(row))


def _history(turns: Any) -> list:
    if not isinstance(turns, list):
        raise ValueError(f"history is {as_words(turns)}; expected a list")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, list) or len(turn) != 2:
            told = f"turn {number} of {len(turns)} of history is {as_words(turn)}"
            raise ValueError(f"{told}; expected [question, answer]")
    return turns


FORMATS: dict[str, tuple[str, ReadRow]] = {
    "messages": ("messages", read_messages),
    "conversations": ("conversations", read_sharegpt),
    "prompt_completion": ("prompt", read_prompt_and_completion),
    "alpaca": ("instruction", read_alpaca),
}
"""The key that tells a format, and what reads it."""


def find_format(row: Mapping) -> str:
    """The format of a row by its keys; "messages" if no key tells."""
    return next((name for name, (key, _) in FORMATS.items() if key in row), "messages")


def _refuse_row_keys(row: dict, known: tuple[str, ...]) -> None:
    extra = OF_OTHER_FORMATS if known[0] in row else ()
    cures = {key: cure for key, cure in ROW_CURES.items() if key not in (*known, *extra)}
    unknown = [key for key in row if key not in known]
    others = [key for key, _ in FORMATS.values() if key in unknown and key != known[0]]
    cures |= {
        key: f'the first row of this file has "{known[0]}"; write rows of one format, or a file '
        "for each"
        for key in others
    }
    refuse_keys(unknown, cures, known, "a row", IGNORE_CURE)


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


def _turn(turn: Any) -> dict:
    if not isinstance(turn, dict):
        raise ValueError(f'is a {kind_of(turn)}; expected {{"from": "human", "value": "..."}}')
    unknown = (key for key in turn if key not in TURN_KEYS)
    refuse_keys(unknown, TURN_CURES, TURN_KEYS[:3], "a turn")
    for key in ("from", "value"):
        if key not in turn:
            raise ValueError(f'the key "{key}" is missing')
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
