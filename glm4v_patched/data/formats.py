"""The formats of rows: how the messages of a row, and its images, are found. Needs no torch.

Which format a file has is found from the keys of its first row (:func:`find_format`), or named
(``data.format``); keys that it does not know are refused. Rows of all other forms are read by the
names of their columns (``data.columns``). :func:`messages.check_messages` takes what is found.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..terminal_text import listed
from .columns import (
    OF_TOOLS,
    Columns,
    describe_columns,
    images_of_columns,
    named_columns,
    required,
    text_of_column,
    unnamed_columns,
    value_of,
)
from .image_files import IMAGE_NAMES
from .messages import MARKS, describe_value, quoted, read_each, refuse_keys

Found = tuple[Any, list | None]
"""The messages of a row, and its images; None if it names none."""
ROW_IMAGES = ("images", "image")
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
OF_MESSAGES = 'write "from" and "value", or name the row\'s list "messages"'
TURN_CURES = {
    "role": OF_MESSAGES,
    "content": OF_MESSAGES,
    "image": 'write <image> in "value", and the path under "image" of the row',
}
PREFERENCES = {"chosen", "rejected"}
OF_PREFERENCES = "it is of preferences, which TRL trains on"
BOXES = (
    "write boxes as words, such as [[x0, y0, x1, y1]] in place of <bbox> (docs/questions.md, "
    '"Does it know boxes?")'
)
OTHER_MEDIA = (
    "the model sees images alone: leave the row out; where it is empty in all rows, name it in "
    "data.ignore"
)
ROW_CURES = {
    "conversation": 'write "conversations"',
    "system": 'write it as the first message: {"role": "system", "content": "..."}',
    "tools": 'give them to the system message: {"role": "system", "content": "", "tools": [...]}',
    **dict.fromkeys(PREFERENCES, OF_PREFERENCES),
    **dict.fromkeys(("objects", "bbox", "bboxes", "boxes"), BOXES),
    **dict.fromkeys(("videos", "video", "audios", "audio"), OTHER_MEDIA),
}
OF_IMAGE = 'write the image as "image": "a.png", or several as "images": ["a.png", "b.png"]'

IGNORE_CURE = "; to leave it out of all rows, name it in data.ignore"


class Format(NamedTuple):
    """Keys that tell it, others that its rows may have beside images, and which are what."""

    needs: tuple[str, ...]
    others: tuple[str, ...] = ()
    columns: Columns = {}

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.needs, *ROW_IMAGES, *self.others)


ASIDE = {"system": "system", "history": "history"}
ROW_FORMATS = {
    "messages": Format(("messages",)),
    # ShareGPT's, LLaVA's, LLaMA-Factory's
    "conversations": Format(
        ("conversations",), ("system", "id"), {"turns": "conversations", "system": "system"}
    ),
    # TRL's: texts or messages
    "prompt_completion": Format(("prompt", "completion")),
    # Alpaca's, with LLaMA-Factory's "system" and "history" (pairs of a question and its answer)
    "alpaca": Format(
        ("instruction", "output"),
        ("input", "system", "history"),
        {"question": ["instruction", "input"], "answer": "output"} | ASIDE,
    ),
    # ms-swift's
    "query_response": Format(
        ("query", "response"),
        ("system", "history"),
        {"question": "query", "answer": "response"} | ASIDE,
    ),
    # the_cauldron's
    "texts": Format(("texts",), (), {"turns": "texts", "question": "user", "answer": "assistant"}),
}
BESIDE_TURNS = ("source",)
"""A key of the_cauldron's turns that is left out."""


def find_format(row: Mapping) -> str | None:
    """The format of a row by its keys: of one that has those that tell it, or of which it has
    nothing but keys of it; None if there is none."""
    for name, of in ROW_FORMATS.items():
        if {*of.needs} <= row.keys():
            return name
    known = (n for n, of in ROW_FORMATS.items() if of.needs[0] in row and row.keys() <= {*of.keys})
    return next(known, None)


def describe_unknown(row: dict, keys: Iterable[str]) -> str:
    """Say that a row has keys of no format."""
    names = [key for key in keys if key not in OF_TOOLS]
    if PREFERENCES & {*names}:
        cure = OF_PREFERENCES
    else:
        cure = (
            "say by data.columns which are question, answer and image, and name the others in "
            'data.ignore (docs/data.md, "Columns"; answer, evaluate: --columns, --ignore)'
        )
    return f"its keys are of no format that is known: {describe_columns(row, names)}; {cure}"


def read_as(name: str, row: dict) -> Found:
    """The messages of a row of a format, which has no key that the format does not have.

    Raises:
        ValueError: it has, or lacks one.
    """
    of = ROW_FORMATS[name]
    others = {key for other in ROW_FORMATS.values() for key in other.needs}
    cure = f'the first row of this file has "{of.needs[0]}"; write a file for each format'
    cures = ROW_CURES | dict.fromkeys(others, cure)
    if all(row.get(key) is None for key in ROW_IMAGES):
        cures = dict.fromkeys(filter(IMAGE_NAMES.fullmatch, row), OF_IMAGE) | cures
    refuse_keys((k for k in row if k not in OF_TOOLS), of.keys, "a row", cures, IGNORE_CURE)
    if of.needs[0] not in row:
        raise ValueError(f'the key "{of.needs[0]}" is missing')
    given = [key for key in ROW_IMAGES if row.get(key) is not None]
    if len(given) > 1:
        raise ValueError('has its images under "images" and "image": give one of them')
    images = row[given[0]] if given else None
    if isinstance(images, dict) and not images.keys() <= {"bytes", "path"}:
        raise ValueError(
            f"{given[0]} is an object with the keys {listed([*map(quoted, images)])}: write "
            '"images": ["a.png", "b.png"], and <image> once for each in the words'
        )
    if given and not isinstance(images, list):
        images = [images]
    if name == "messages":
        return row["messages"], images
    if name == "prompt_completion":
        return _prompt_and_completion(row), images
    there = {
        part: column
        for part, column in of.columns.items()
        if "turns" in of.columns or isinstance(column, list) or row.get(column) is not None
    }
    if row.get("system") is None:
        there.pop("system", None)
    return read_columns(row, there | {"image": given}, BESIDE_TURNS)


def _prompt_and_completion(row: dict) -> list:
    """Of which only the completion is learned."""
    parts = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(key)
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        if not isinstance(value, list):
            raise ValueError(f"{key} is {describe_value(value)}; expected text, or a list of messages")
        parts.append(value)
    prompt, completion = parts
    spoken = [
        {key: of for key, of in message.items() if key not in MARKS} | {"train": False}
        if isinstance(message, dict) and message.get("role") == "assistant"
        else message
        for message in prompt
    ]
    return [*spoken, *completion]


def read_columns(row: dict, columns: Columns, ignored: Sequence[str] = ()) -> Found:
    """A row whose columns are named by ``data.columns``.

    Args:
        ignored: Keys of turns that are left out.
    """
    system = text_of_column(row, columns["system"]) if "system" in columns else None
    messages = [{"role": "system", "content": system}] if system else []
    if "turns" in columns:
        turns = required(row, columns["turns"])
        messages += _turns_of(turns, columns["turns"], columns, ignored)
    else:
        before = value_of(row, columns["history"]) if "history" in columns else None
        if before is not None:
            messages += _turns_of(before, columns["history"])
        messages += _asked(row, columns)
    return messages, images_of_columns(row, columns.get("image"))


def _asked(row: dict, columns: Columns) -> list[dict]:
    """The question, which may be an image alone, and the answer, if one is asked for."""
    parts = columns.get("question", [])
    if isinstance(parts, list):
        texts = [text_of_column(row, part) for part in parts]
        question: str | None = "\n".join(filter(None, texts))
    elif (question := text_of_column(row, parts)) is None:
        required(row, parts)
    if "answer" not in columns:
        return _exchange(question)
    answer = text_of_column(row, columns["answer"])
    return _exchange(question, required(row, columns["answer"]) if answer is None else answer)


def _exchange(question: Any, *answer: Any) -> list[dict]:
    asked = {"role": "user", "content": question}
    return [asked, *({"role": "assistant", "content": of} for of in answer)]


def _turns_of(
    turns: Any, name: str, columns: Columns | None = None, ignored: Sequence[str] = ()
) -> list[dict]:
    """Turns as messages: of ``role`` or ``from``, pairs, or objects with the keys that ``columns``
    names."""
    if not isinstance(turns, list):
        raise ValueError(f"{name} is {describe_value(turns)}; expected a list")
    parts = [columns[part] for part in ("question", "answer") if part in columns] if columns else []
    named = {key for words in parts for key in named_columns(words)}

    def read(turn: Any) -> list[dict]:
        if isinstance(turn, dict) and columns and "question" in columns:
            others = unnamed_columns(turn, {*named, *ignored})
            refuse_keys(others, sorted(named), "a turn", more=IGNORE_CURE)
            return _asked(turn, columns)
        if isinstance(turn, dict):
            return [_turn(turn) if "from" in turn else turn]
        if isinstance(turn, list) and len(turn) == 2:
            return _exchange(*(turn if turn[1] is not None else turn[:1]))
        expected = '{"from": "human", "value": "..."} or [question, answer]'
        raise ValueError(f"is {describe_value(turn)}; expected {expected}")

    return sum(read_each(turns, "turn", read, f" of {name}"), [])


def _turn(turn: dict) -> dict:
    refuse_keys((k for k in turn if k not in MARKS), ("from", "value"), "a turn", TURN_CURES)
    if "value" not in turn:
        raise ValueError('the key "value" is missing')
    who = turn["from"]
    if not isinstance(who, str) or who not in ROLES_OF_SHAREGPT:
        raise ValueError(f'"from" is {describe_value(who)}; expected system, human, gpt or observation')
    message = {"role": ROLES_OF_SHAREGPT[who], "content": turn["value"]}
    return message | {key: turn[key] for key in MARKS if key in turn}
