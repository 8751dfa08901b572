"""Formats of rows, and how each yields a row's messages and images. Needs no torch.

``data.format`` names the format of a file, or the keys of its first row show it
(:func:`find_format`); keys that the format does not have are refused. Rows of other forms are read
by the names of their columns (``data.columns``). :func:`messages.check_messages` checks the result.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..terminal_text import listed
from .columns import (
    TOOL_COLUMNS,
    Columns,
    column_text,
    column_value,
    describe_columns,
    find_unmapped_columns,
    images_of_columns,
    named_columns,
    require_column,
)
from .image_files import IMAGE_KEY_RE
from .messages import (
    IMAGE_PLACEHOLDER_RE,
    TRAIN_FLAGS,
    describe_value,
    quoted,
    read_each,
    refuse_keys,
)

MessagesAndImages = tuple[Any, list | None]
"""A row's messages, and the images beside them in the row; None if the row has no such key."""
ROW_IMAGES = ("images", "image")  # keys of a row's images
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "observation": "observation",
    "tool": "observation",
}
MESSAGES_CURE = 'write "from" and "value", or rename the row\'s list to "messages"'
TURN_CURES = {
    "role": MESSAGES_CURE,
    "content": MESSAGES_CURE,
    "image": 'write <image> in "value", and the path under the row\'s key "image"',
}
PREFERENCE_KEYS = {"chosen", "rejected", "rejected_response", "rejected_messages", "kto_tag"}
PREFERENCE_KEYS |= {"rejected_images", "preferred_output", "non_preferred_output"}
PREFERENCES_CURE = "this is preference data, which TRL trains on (docs/frameworks.md)"
BOXES_CURE = "set data.boxes, which says how boxes are read (docs/grounding.md)"
OTHER_MEDIA_CURE = (
    "the model accepts only images: remove the row; if the key is empty in all rows, add it to "
    "data.ignore"
)
ROW_CURES = {
    "conversation": 'rename it to "conversations"',
    "system": 'write it as the first message: {"role": "system", "content": "..."}',
    "tools": 'put them into the system message: {"role": "system", "content": "", "tools": [...]}',
    **dict.fromkeys(PREFERENCE_KEYS, PREFERENCES_CURE),
    **dict.fromkeys(("objects", "bbox", "bboxes", "boxes"), BOXES_CURE),
    **dict.fromkeys(("videos", "video", "audios", "audio"), OTHER_MEDIA_CURE),
}
IMAGE_KEY_CURE = 'write "image": "a.png" for one image, "images": ["a.png", "b.png"] for several'

IGNORE_CURE = "; to drop it from all rows, add it to data.ignore"


class RowFormat(NamedTuple):
    """A format of rows.

    Attributes:
        needs: Keys that identify the format.
        others: Further keys that its rows may have, besides those of images.
        columns: The keys that are question, answer, turns, system prompt and history, by role.
    """

    needs: tuple[str, ...]
    others: tuple[str, ...] = ()
    columns: Columns = {}

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.needs, *ROW_IMAGES, *self.others)


SYSTEM_AND_HISTORY = {"system": "system", "history": "history"}
ROW_FORMATS = {
    "messages": RowFormat(("messages",)),
    # ShareGPT's, LLaVA's, LLaMA-Factory's
    "conversations": RowFormat(
        ("conversations",), ("system", "id"), {"turns": "conversations", "system": "system"}
    ),
    # TRL's: texts or messages
    "prompt_completion": RowFormat(("prompt", "completion")),
    # Alpaca's, with LLaMA-Factory's "system" and "history" (pairs of a question and its answer)
    "alpaca": RowFormat(
        ("instruction", "output"),
        ("input", "system", "history"),
        {"question": ["instruction", "input"], "answer": "output"} | SYSTEM_AND_HISTORY,
    ),
    # ms-swift's
    "query_response": RowFormat(
        ("query", "response"),
        ("system", "history"),
        {"question": "query", "answer": "response"} | SYSTEM_AND_HISTORY,
    ),
    # the_cauldron's
    "texts": RowFormat(
        ("texts",), (), {"turns": "texts", "question": "user", "answer": "assistant"}
    ),
}
IGNORED_TURN_KEYS = ("source",)
"""A key of the_cauldron's turns that is not read."""


def find_format(row: Mapping) -> str | None:
    """Return the format whose identifying keys the row has. If there is none, return the format
    that has all keys of the row, and whose first identifying key is among them, or None."""
    for name, row_format in ROW_FORMATS.items():
        if {*row_format.needs} <= row.keys():
            return name
    for name, row_format in ROW_FORMATS.items():
        if row_format.needs[0] in row and row.keys() <= {*row_format.keys}:
            return name
    return None


def describe_unknown_format(row: dict, keys: Iterable[str]) -> str:
    """Return a message for a row whose keys match no format."""
    names = [key for key in keys if key not in TOOL_COLUMNS]
    if PREFERENCE_KEYS & {*names}:
        cure = PREFERENCES_CURE
    elif {"question_id", "image_id"} <= {*names}:
        cure = "join questions and answers first, as docs/data.md shows for VQA"
    else:
        cure = (
            "set data.columns to say which are question, answer and image, and list the others in "
            'data.ignore (docs/data.md, "Columns"; answer, evaluate: --columns, --ignore)'
        )
    return f"its keys match no known format: {describe_columns(row, names)}; {cure}"


def read_row_as(name: str, row: dict) -> MessagesAndImages:
    """Return the messages and images of a row of a format.

    Raises:
        ValueError: The row has a key that the format does not have, or a required key is missing.
    """
    row_format = ROW_FORMATS[name]
    if not row.keys() <= {*row_format.keys}:
        _refuse_other_keys(row, row_format)
    if row_format.needs[0] not in row:
        raise ValueError(f'the key "{row_format.needs[0]}" is missing')
    image_keys = [key for key in ROW_IMAGES if row.get(key) is not None]
    if len(image_keys) > 1:
        raise ValueError('has both "images" and "image": keep one of them')
    images = row[image_keys[0]] if image_keys else None
    if isinstance(images, dict) and not images.keys() <= {"bytes", "path"}:
        row = _order_named_images(row, image_keys[0])
        images = row[image_keys[0]]
    if image_keys and not isinstance(images, list):
        images = [images]
    if name == "messages":
        return row["messages"], images
    if name == "prompt_completion":
        return _prompt_and_completion(row), images
    present = {
        role: column
        for role, column in row_format.columns.items()
        if "turns" in row_format.columns or isinstance(column, list) or row.get(column) is not None
    }
    if row.get("system") is None:
        present.pop("system", None)
    return read_columns(row, present | {"image": image_keys}, IGNORED_TURN_KEYS)


def _refuse_other_keys(row: dict, row_format: RowFormat) -> None:
    other_needs = {key for other_format in ROW_FORMATS.values() for key in other_format.needs}
    cure = f'the first row of this file has "{row_format.needs[0]}"; use one file per format'
    cures = ROW_CURES | dict.fromkeys(other_needs, cure)
    if isinstance(row.get("label"), bool):  # KTO's
        cures["label"] = PREFERENCES_CURE
    if all(row.get(key) is None for key in ROW_IMAGES):
        cures = dict.fromkeys(filter(IMAGE_KEY_RE.fullmatch, row), IMAGE_KEY_CURE) | cures
    keys = (key for key in row if key not in TOOL_COLUMNS)
    refuse_keys(keys, row_format.keys, "a row", cures, IGNORE_CURE)


def _order_named_images(row: dict, name: str) -> dict:
    """Return a row with ``<image>`` for each name of an image in its text, and with a list of the
    images in this order. MiniCPM-V names images so: ``{"<image_00>": "a.png"}``."""
    images = row[name]
    text = json.dumps({key: value for key, value in row.items() if key != name}, default=str)
    times = {text.count(key) for key in images}
    if times not in ({0}, {1}) or not all(map(IMAGE_PLACEHOLDER_RE.fullmatch, images)):
        raise ValueError(
            f"{name} is an object with the keys {listed([*map(quoted, images)])}: write "
            '"images": ["a.png", "b.png"], and one <image> per image in the text'
        )
    ordered = [images[key] for key in sorted(images, key=text.find)]
    for key in images:
        text = text.replace(key, "<image>")
    return json.loads(text) | {name: ordered}


def _prompt_and_completion(row: dict) -> list:
    """Return the messages of a TRL row; only the completion is supervised."""
    sides = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(key)
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        if not isinstance(value, list):
            raise ValueError(
                f"{key} is {describe_value(value)}; expected text, or a list of messages"
            )
        sides.append(value)
    prompt, completion = sides
    unsupervised_prompt = [
        {k: v for k, v in message.items() if k not in TRAIN_FLAGS} | {"train": False}
        if isinstance(message, dict) and message.get("role") == "assistant"
        else message
        for message in prompt
    ]
    return [*unsupervised_prompt, *completion]


def read_columns(row: dict, columns: Columns, ignored: Sequence[str] = ()) -> MessagesAndImages:
    """Return the messages and images of a row by the names of its columns (``data.columns``).

    Args:
        ignored: Keys of turns that are left out.
    """
    system = column_text(row, columns["system"]) if "system" in columns else None
    messages = [{"role": "system", "content": system}] if system else []
    if "turns" in columns:
        turns = require_column(row, columns["turns"])
        messages += _turns_of(turns, columns["turns"], columns, ignored)
    else:
        history_turns = column_value(row, columns["history"]) if "history" in columns else None
        if history_turns is not None:
            messages += _turns_of(history_turns, columns["history"])
        messages += _question_and_answer(row, columns)
    return messages, images_of_columns(row, columns.get("image"))


def _question_and_answer(row: dict, columns: Columns) -> list[dict]:
    """Return the user's message, whose text may be empty if it has an image, and the answer if
    there is a column for it."""
    question_columns = columns.get("question", [])
    if isinstance(question_columns, list):
        texts = [column_text(row, column) for column in question_columns]
        question: str | None = "\n".join(filter(None, texts))
    elif (question := column_text(row, question_columns)) is None:
        require_column(row, question_columns)
    if "answer" not in columns:
        return _exchange(question)
    answer = column_text(row, columns["answer"])
    return _exchange(question, require_column(row, columns["answer"]) if answer is None else answer)


def _exchange(question: Any, *answer: Any) -> list[dict]:
    user = {"role": "user", "content": question}
    return [user, *({"role": "assistant", "content": text} for text in answer)]


def _turns_of(
    turns: Any, name: str, columns: Columns | None = None, ignored: Sequence[str] = ()
) -> list[dict]:
    """Convert turns to messages: ``role``/``from`` messages, [question, answer] pairs, or objects
    with the keys named by ``columns``."""
    if not isinstance(turns, list):
        raise ValueError(f"{name} is {describe_value(turns)}; expected a list")
    roles = [role for role in ("question", "answer") if columns and role in columns]
    named = {key for role in roles for key in named_columns((columns or {})[role])}

    def read_turn(turn: Any) -> list[dict]:
        if isinstance(turn, dict) and columns and "question" in columns:
            unmapped = find_unmapped_columns(turn, {*named, *ignored})
            refuse_keys(unmapped, sorted(named), "a turn", more=IGNORE_CURE)
            return _question_and_answer(turn, columns)
        if isinstance(turn, dict):
            return [_message_of_turn(turn) if "from" in turn else turn]
        if isinstance(turn, list) and len(turn) == 2:
            return _exchange(*(turn if turn[1] is not None else turn[:1]))
        expected = '{"from": "human", "value": "..."} or [question, answer]'
        raise ValueError(f"is {describe_value(turn)}; expected {expected}")

    return sum(read_each(turns, "turn", read_turn, f" of {name}"), [])


def _message_of_turn(turn: dict) -> dict:
    refuse_keys((k for k in turn if k not in TRAIN_FLAGS), ("from", "value"), "a turn", TURN_CURES)
    if "value" not in turn:
        raise ValueError('the key "value" is missing')
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(
            f'"from" is {describe_value(speaker)}; expected system, human, gpt or observation'
        )
    message = {"role": SHAREGPT_ROLES[speaker], "content": turn["value"]}
    return message | {key: turn[key] for key in TRAIN_FLAGS if key in turn}
