"""Formats of rows, and how each yields a row's messages and images. Needs no torch.

``data.format`` names the format of a file. If it is not set, the keys of the first row show the
format (:func:`find_format`). Keys that the format does not have are refused. ``data.columns``
describes rows that have none of these formats. :func:`messages.check_messages` checks the result.
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
"""A row's messages, and the images under the row's own key; None if the row has no such key."""
ROW_IMAGE_KEYS = ("images", "image")
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
# What to write instead of a key: of a ShareGPT turn, and of a row.
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
        identifying_keys: Keys that identify the format. Every row must have the first of them.
        optional_keys: Further keys that its rows may have, besides those of images.
        columns: The keys of question, answer, turns, system prompt and history, by role, as in
            ``data.columns``.
    """

    identifying_keys: tuple[str, ...]
    optional_keys: tuple[str, ...] = ()
    columns: Columns = {}

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.identifying_keys, *ROW_IMAGE_KEYS, *self.optional_keys)


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
"""Keys of the_cauldron's turns that are not read."""


def find_format(row: Mapping) -> str | None:
    """Return the name of a row's format, or None.

    A row with all identifying keys of a format has this format. Otherwise it has the format whose
    first identifying key is in the row, if the format has all keys of the row.
    """
    for name, row_format in ROW_FORMATS.items():
        if {*row_format.identifying_keys} <= row.keys():
            return name
    for name, row_format in ROW_FORMATS.items():
        if row_format.identifying_keys[0] in row and row.keys() <= {*row_format.keys}:
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
    """Return the messages and images of a row in the format ``name``.

    Raises:
        ValueError: The row has a key that the format does not have, or the format's first
            identifying key is missing.
    """
    row_format = ROW_FORMATS[name]
    if not row.keys() <= {*row_format.keys}:
        _refuse_other_keys(row, row_format)
    required_key = row_format.identifying_keys[0]
    if required_key not in row:
        raise ValueError(f'the key "{required_key}" is missing')
    image_keys = [key for key in ROW_IMAGE_KEYS if row.get(key) is not None]
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
    columns = dict(row_format.columns)
    # Beside "turns", the roles "question" and "answer" name keys of a turn, not of the row.
    row_roles = ("system",) if "turns" in columns else ("system", "history", "question", "answer")
    for role in row_roles:
        column = columns.get(role)
        if isinstance(column, str) and row.get(column) is None:
            del columns[role]
    return read_columns(row, columns | {"image": image_keys}, IGNORED_TURN_KEYS)


def _refuse_other_keys(row: dict, row_format: RowFormat) -> None:
    """Raise ``ValueError`` for keys that the format does not have, with what to write instead."""
    keys_of_formats = {
        key for any_format in ROW_FORMATS.values() for key in any_format.identifying_keys
    }
    first_key = row_format.identifying_keys[0]
    cure = f'the first row of this file has "{first_key}"; use one file per format'
    cures = ROW_CURES | dict.fromkeys(keys_of_formats, cure)
    if isinstance(row.get("label"), bool):  # a key of KTO's preference data
        cures["label"] = PREFERENCES_CURE
    if all(row.get(key) is None for key in ROW_IMAGE_KEYS):
        cures = dict.fromkeys(filter(IMAGE_KEY_RE.fullmatch, row), IMAGE_KEY_CURE) | cures
    keys = (key for key in row if key not in TOOL_COLUMNS)
    refuse_keys(keys, row_format.keys, "a row", cures, IGNORE_CURE)


def _order_named_images(row: dict, image_key: str) -> dict:
    """Convert named images, as in MiniCPM-V's data, to ``<image>`` and a list.

    There, ``row[image_key]`` is an object such as ``{"<image_00>": "a.png"}``, and the row's text
    contains its keys. In the result, each key in the text is ``<image>``, and the list has the
    images in the order of the text.
    """
    images = row[image_key]
    text = json.dumps({key: value for key, value in row.items() if key != image_key}, default=str)
    occurrences = {text.count(name) for name in images}
    if occurrences not in ({0}, {1}) or not all(map(IMAGE_PLACEHOLDER_RE.fullmatch, images)):
        raise ValueError(
            f"{image_key} is an object with the keys {listed([*map(quoted, images)])}: write "
            '"images": ["a.png", "b.png"], and one <image> per image in the text'
        )
    ordered = [images[name] for name in sorted(images, key=text.find)]
    for name in images:
        text = text.replace(name, "<image>")
    return json.loads(text) | {image_key: ordered}


def _prompt_and_completion(row: dict) -> list:
    """Return the messages of a TRL row. Only the completion is supervised."""
    prompt_and_completion = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(key)
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        if not isinstance(value, list):
            raise ValueError(
                f"{key} is {describe_value(value)}; expected text, or a list of messages"
            )
        prompt_and_completion.append(value)
    prompt, completion = prompt_and_completion
    unsupervised_prompt = [
        {k: v for k, v in message.items() if k not in TRAIN_FLAGS} | {"train": False}
        if isinstance(message, dict) and message.get("role") == "assistant"
        else message
        for message in prompt
    ]
    return [*unsupervised_prompt, *completion]


def read_columns(row: dict, columns: Columns, ignored: Sequence[str] = ()) -> MessagesAndImages:
    """Return the messages and images of a row as ``columns`` describes it (``data.columns``).

    Args:
        ignored: Keys of turns that are not read.
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
    """Return the user's message and, if there is a column for the answer, the assistant's.

    If the question is a list of columns that the row lacks, its text is empty, which is allowed in
    a message with an image.
    """
    question_columns = columns.get("question", [])
    if isinstance(question_columns, list):
        texts = [column_text(row, column) for column in question_columns]
        question: str | None = "\n".join(filter(None, texts))
    elif (question := column_text(row, question_columns)) is None:
        require_column(row, question_columns)
    if "answer" not in columns:
        return _messages_of_pair(question)
    answer = column_text(row, columns["answer"])
    if answer is None:
        answer = require_column(row, columns["answer"])
    return _messages_of_pair(question, answer)


def _messages_of_pair(question: Any, answer: Any = None) -> list[dict]:
    user = {"role": "user", "content": question}
    return [user] if answer is None else [user, {"role": "assistant", "content": answer}]


def _turns_of(
    turns: Any, name: str, columns: Columns | None = None, ignored: Sequence[str] = ()
) -> list[dict]:
    """Convert turns to messages.

    A turn is a message with ``role`` or ``from``, a pair [question, answer], or an object whose
    question and answer are under the keys that ``columns`` names.
    """
    if not isinstance(turns, list):
        raise ValueError(f"{name} is {describe_value(turns)}; expected a list")
    columns = columns or {}
    roles = [role for role in ("question", "answer") if role in columns]
    turn_keys = {key for role in roles for key in named_columns(columns[role])}

    def read_turn(turn: Any) -> list[dict]:
        if isinstance(turn, dict) and "question" in columns:
            unmapped = find_unmapped_columns(turn, {*turn_keys, *ignored})
            refuse_keys(unmapped, sorted(turn_keys), "a turn", more=IGNORE_CURE)
            return _question_and_answer(turn, columns)
        if isinstance(turn, dict):
            return [_message_of_turn(turn) if "from" in turn else turn]
        if isinstance(turn, list) and len(turn) == 2:
            return _messages_of_pair(*turn)
        expected = '{"from": "human", "value": "..."} or [question, answer]'
        raise ValueError(f"is {describe_value(turn)}; expected {expected}")

    return sum(read_each(turns, "turn", read_turn, f" of {name}"), [])


def _message_of_turn(turn: dict) -> dict:
    """Convert a turn of ShareGPT's format to a message."""
    keys = (key for key in turn if key not in TRAIN_FLAGS)
    refuse_keys(keys, ("from", "value"), "a turn", TURN_CURES)
    if "value" not in turn:
        raise ValueError('the key "value" is missing')
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(
            f'"from" is {describe_value(speaker)}; expected system, human, gpt or observation'
        )
    message = {"role": SHAREGPT_ROLES[speaker], "content": turn["value"]}
    return message | {key: turn[key] for key in TRAIN_FLAGS if key in turn}
