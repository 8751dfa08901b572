"""Refuse a sample whose words stand for what it does not have: boxes, videos, sounds, and images
that are not shown. Keys and columns that nothing reads are refused where rows are read (:mod:`rows`
and :mod:`formats`). Needs no torch."""

import os
import re
from itertools import islice
from typing import NamedTuple

from .columns import IMAGE_FILES, is_empty
from .image_files import ImageFiles
from .messages import images_of, quoted, text_of
from .source import DataSource

MEDIA = ("video", "videos", "audio", "audios")
ONLY_IMAGES = "the model sees images alone: leave the row out"
LONGEST_NAME, MOST_NAMES = 1024, 8
BETWEEN_NAMES = re.compile(r"[\s()<>\"'=]+")
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
# Words of ms-swift, LLaMA-Factory and of the vocabularies of Qwen, InternVL, LLaVA, DeepSeek-VL and
# others. re2, which Arrow has, reads them, too.
_OF_VIDEO, _OF_AUDIO = "video|vid", "audio|speech|sound"
_OF_BOX = "b?box|quad|poly|polygon|point|object_ref|ref|det|grounding"
_AFTER = r"[ _-]?(?:pad|token|soft_token|patch|placeholder|start|end|here|context|\d{1,6})"


class Placeholder(NamedTuple):
    """What stands for something in the words of other trainers' data."""

    name: str
    keys: str
    """Of a row, those that hold what it stands for; a regular expression, as the others."""
    tokens: str
    """Words that nobody writes for anything else."""
    tags: str
    """Words that HTML and XML have, too: placeholders at an end of a text, or beside a key."""
    cure: str


PLACEHOLDERS = (
    Placeholder(
        "a box or its name",
        "objects?|b?box(?:es)?|quads?|ref_objects?",
        rf"<\|/?(?:\w{{1,8}}_of_)?(?:{_OF_BOX})(?:_\w{{1,12}})?\|>|<bbox>|<ref-object>"
        r"|<(?:loc|seg|bin|patch_index)_?\d{1,6}>",
        f"<(?:{_OF_BOX})>",
        "write what it stands for in its place, a box as numbers such as [[x0, y0, x1, y1]] "
        '(docs/questions.md, "Does it know boxes?")',
    ),
    Placeholder(
        "a video",
        "videos?",
        rf"<\|/?\w{{0,12}}video\w{{0,12}}\|>"
        rf"|<(?:{_OF_VIDEO}){_AFTER}>|<\w{{1,8}}_of_(?:{_OF_VIDEO})>",
        f"<(?:{_OF_VIDEO})>",
        f"{ONLY_IMAGES}, or show frames of the video as images",
    ),
    Placeholder(
        "a sound",
        "audios?|sounds?|speech(?:es)?",
        rf"<\|/?\w{{0,12}}(?:audio|speech)\w{{0,12}}\|>"
        rf"|<(?:{_OF_AUDIO}){_AFTER}>|<\w{{1,8}}_of_(?:{_OF_AUDIO})>",
        f"<(?:{_OF_AUDIO})>",
        ONLY_IMAGES,
    ),
    Placeholder(
        "an image",
        "(?!)",
        r"<\|/?\w{0,12}vision\w{0,12}\|>|</?im_(?:start|patch|end)>|<img_context>|<start-image>",
        "",
        'write <image> at the beginning of the words, and the path under "image"',
    ),
    Placeholder("what the sample does not have", "(?!)", "<cot-process>", "", "take it out"),
)
_WORDS = "|".join(filter(None, (words for of in PLACEHOLDERS for words in (of.tokens, of.tags))))
ANY_WORD = f"{_WORDS}|<(?:bbox_\\d{{1,6}}|region|mask|seg|obj|frame|clip|photo)>"
"""Also words that other data may mean as words."""


def _sure(of: Placeholder) -> re.Pattern:
    """Return what is a placeholder in any row: tokens; and tags that begin a text and are not
    closed, that end one, or that have numbers after them. Behind a word or a ``?`` a tag is a type
    or a group of a program."""
    places = (
        rf"\A\s*{of.tags}(?![\s\S]*</)",
        rf"(?<![\w?:.]){of.tags}\s*\Z",
        rf"(?<![\w?:]){of.tags}\s*(?:[\[(][\[(\s]*-?\d|-?\d+\s*,)",
    )
    return re.compile("|".join([of.tokens, *(places if of.tags else ())]), re.IGNORECASE)


_SURE = {of: _sure(of) for of in PLACEHOLDERS}


def require_nothing_left_out(
    row: dict, messages: list[dict], source: DataSource, files: ImageFiles
) -> None:
    """Raise ``ValueError`` if a row has what the sample made of it lacks.

    Args:
        row: As it stands in the file.
        messages: Of :func:`messages.check_messages`.
        files: Those that rows of the set may name.
    """
    shown = {os.path.normpath(path) for path in images_of(messages)}
    for number, message in enumerate(messages, start=1):
        text = text_of(message)
        fault = _fault_of_words(text, row)
        if fault is None and message["role"] == "user":
            fault = _fault_of_files(text, files, shown)
        if fault is not None:
            raise ValueError(f"message {number} of {len(messages)}: {fault}")
    if source.columns is None and not shown:
        for key in MEDIA:
            if key in source.ignore and row.get(key) and not is_empty(row[key]):
                raise ValueError(
                    f"the row has {quoted(key)}, which data.ignore cannot leave out: {ONLY_IMAGES}"
                )


def _fault_of_words(text: str, row: dict) -> str | None:
    """Say which word of a text stands for what the sample does not have."""
    if "&lt;" in text:
        text = text.replace("&lt;", "<").replace("&gt;", ">")
    if not re.search(_WORDS, text, re.IGNORECASE):
        return None
    plain = CODE.sub("`", text)
    for of, sure in _SURE.items():
        words = f"{of.tokens}|{of.tags}" if of.tags else of.tokens
        for key in row:
            found = re.fullmatch(of.keys, key.lower()) and re.search(words, text, re.IGNORECASE)
            if found and not is_empty(row[key]):
                return (
                    f"{quoted(found[0])} stands for what the row has under {quoted(key)}, and the "
                    f"sample would not have it: {of.cure}"
                )
        if found := sure.search(plain):
            return (
                f"{quoted(found[0].strip())} stands for {of.name} in data of other trainers: "
                f"{of.cure}; a word that is meant as text stands in backticks"
            )
    return None


def _fault_of_files(text: str, files: ImageFiles, shown: set[str]) -> str | None:
    """Say which word of a question is the file of an image that is not shown."""
    names = (name for line in text.splitlines() for name in _names_of(line))
    for name in islice((name for name in names if name.lower().endswith(IMAGE_FILES)), MOST_NAMES):
        path = os.path.normpath(os.path.join(files.folder, name))
        is_known = path in shown or len(name) > LONGEST_NAME or not files.may_name(path)
        if not is_known and os.path.isfile(path):
            return (
                f"{quoted(name)} in the words is the file of an image, and the sample would not "
                'have it: write <image> there, and the path under "image" of the row'
            )
    return None


def _names_of(line: str) -> list[str]:
    """Return what may be the name of a file in a line: its end, which may have blanks, and each
    word."""
    return [line.rpartition(": ")[2].strip(), *BETWEEN_NAMES.split(line)]
