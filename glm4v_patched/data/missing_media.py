"""Refuse samples whose text refers to content that the model would not get: boxes, videos, sounds,
and images that the sample lacks. Needs no torch.

This module reads texts; :mod:`rows` and :mod:`formats` refuse unknown keys and columns.
"""

import os
import re
from itertools import islice
from typing import NamedTuple

from .columns import IMAGE_SUFFIXES, is_blank_value
from .image_files import ImageFiles
from .messages import images_of, quoted, text_of
from .source import DataSource

MEDIA_KEYS = ("video", "videos", "audio", "audios")  # of a row; data.ignore must not drop them
ONLY_IMAGES_CURE = "the model accepts only images: remove the row"
MAX_NAME_LENGTH, MAX_NAMES = 1024, 8  # limits on words in a text that are looked up as image files
NAME_SEPARATOR_RE = re.compile(r"[\s()<>\"'=]+")
NOTHING_RE = "(?!)"  # matches no text
# Code in Markdown, in which placeholders are ordinary text.
CODE_RE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
# Words of the placeholders below, which are those of ms-swift, LLaMA-Factory and the vocabularies
# of Qwen, InternVL, LLaVA, DeepSeek-VL and others. The patterns must also be valid for re2, which
# Arrow uses.
_VIDEO_WORDS, _AUDIO_WORDS = "video|vid", "audio|speech|sound"
_BOX_WORDS = "b?box|quad|poly|polygon|point|object_ref|ref|det|grounding"
_TOKEN_SUFFIX = r"[ _-]?(?:pad|token|soft_token|patch|placeholder|start|end|here|context|\d{1,6})"


class MediaPlaceholder(NamedTuple):
    """Words that stand for a kind of content (boxes, videos, sounds) in data of other trainers.

    Attributes:
        name: The kind of content, for messages.
        keys: Regular expression for the keys of a row that may contain the content.
        tokens: Regular expression for words that are always placeholders (``<|video_pad|>``).
        tags: Regular expression for words that may be HTML or XML (``<video>``). They are
            placeholders only at the beginning or end of a text, before numbers, or if the row has
            one of ``keys``.
        cure: What to write instead.
    """

    name: str
    keys: str
    tokens: str
    tags: str
    cure: str


MEDIA_PLACEHOLDERS = (
    MediaPlaceholder(
        name="a box or its name",
        keys="objects?|b?box(?:es)?|quads?|ref_objects?",
        tokens=rf"<\|/?(?:\w{{1,8}}_of_)?(?:{_BOX_WORDS})(?:_\w{{1,12}})?\|>|<bbox>|<ref-object>"
        r"|<(?:loc|seg|bin|patch_index)_?\d{1,6}>",
        tags=f"<(?:{_BOX_WORDS})>",
        cure="replace it by what it stands for, a box by numbers such as [[x0, y0, x1, y1]]; for "
        "ms-swift's objects, set data.boxes (docs/grounding.md)",
    ),
    MediaPlaceholder(
        name="a video",
        keys="videos?",
        tokens=rf"<\|/?\w{{0,12}}video\w{{0,12}}\|>"
        rf"|<(?:{_VIDEO_WORDS}){_TOKEN_SUFFIX}>|<\w{{1,8}}_of_(?:{_VIDEO_WORDS})>",
        tags=f"<(?:{_VIDEO_WORDS})>",
        cure=f"{ONLY_IMAGES_CURE}, or show frames of the video as images",
    ),
    MediaPlaceholder(
        name="a sound",
        keys="audios?|sounds?|speech(?:es)?",
        tokens=rf"<\|/?\w{{0,12}}(?:audio|speech)\w{{0,12}}\|>"
        rf"|<(?:{_AUDIO_WORDS}){_TOKEN_SUFFIX}>|<\w{{1,8}}_of_(?:{_AUDIO_WORDS})>",
        tags=f"<(?:{_AUDIO_WORDS})>",
        cure=ONLY_IMAGES_CURE,
    ),
    MediaPlaceholder(
        name="an image",
        keys=NOTHING_RE,
        tokens=r"<\|/?\w{0,12}vision\w{0,12}\|>|</?im_(?:start|patch|end)>|<img_context>"
        "|<start-image>",
        tags="",
        cure='write <image> at the beginning of the text, and the path under "image"',
    ),
    MediaPlaceholder(
        name="missing content", keys=NOTHING_RE, tokens="<cot-process>", tags="", cure="remove it"
    ),
)
# All tokens and tags.
_WORDS_RE = "|".join(
    filter(None, (words for kind in MEDIA_PLACEHOLDERS for words in (kind.tokens, kind.tags)))
)
MEDIA_WORDS_RE = f"{_WORDS_RE}|<(?:bbox_\\d{{1,6}}|region|mask|seg|obj|frame|clip|photo)>"
"""Matches all words that may be placeholders, even if they may also be meant as text."""


def _compile_certain_pattern(kind: MediaPlaceholder) -> re.Pattern:
    """Return the pattern of words that are placeholders in any row: all tokens, and tags in three
    positions. A tag directly after a word is not matched, because it is a type in code
    (``List<video>``), nor a tag after ``?``, because it names a group of a regular expression."""
    positions = (
        rf"\A\s*{kind.tags}(?![\s\S]*</)",  # at the beginning, without a closing tag
        rf"(?<![\w?:.]){kind.tags}\s*\Z",  # at the end
        rf"(?<![\w?:]){kind.tags}\s*(?:[\[(][\[(\s]*-?\d|-?\d+\s*,)",  # before numbers
    )
    return re.compile("|".join([kind.tokens, *(positions if kind.tags else ())]), re.IGNORECASE)


_CERTAIN_PATTERNS = {kind: _compile_certain_pattern(kind) for kind in MEDIA_PLACEHOLDERS}


def require_no_missing_media(
    row: dict, messages: list[dict], source: DataSource, image_files: ImageFiles
) -> None:
    """Raise ``ValueError`` if a row refers to content that its sample lacks.

    Args:
        row: The row as stored in the file.
        messages: The sample, from :func:`messages.check_messages`, with paths of images.
        image_files: Says which files the row may name.
    """
    sample_images = {os.path.normpath(path) for path in images_of(messages)}
    for number, message in enumerate(messages, start=1):
        text = text_of(message)
        problem = _find_placeholder_problem(text, row)
        if problem is None and message["role"] == "user":
            problem = _find_file_name_problem(text, image_files, sample_images)
        if problem is not None:
            raise ValueError(f"message {number} of {len(messages)}: {problem}")
    if source.columns is None and not sample_images:
        for key in MEDIA_KEYS:
            if key in source.ignore and row.get(key) and not is_blank_value(row[key]):
                raise ValueError(
                    f"the row has {quoted(key)}, which data.ignore must not drop: "
                    f"{ONLY_IMAGES_CURE}"
                )


def _find_placeholder_problem(text: str, row: dict) -> str | None:
    """Return which word of a text stands for content that the sample lacks, or None."""
    if "&lt;" in text:
        text = text.replace("&lt;", "<").replace("&gt;", ">")
    if "<" not in text or not re.search(_WORDS_RE, text, re.IGNORECASE):
        return None
    without_code = CODE_RE.sub("`", text)
    for kind, certain_pattern in _CERTAIN_PATTERNS.items():
        words_re = f"{kind.tokens}|{kind.tags}" if kind.tags else kind.tokens
        for key in row:
            if not re.fullmatch(kind.keys, key.lower()):
                continue
            match = re.search(words_re, text, re.IGNORECASE)
            if match and not is_blank_value(row[key]):
                return (
                    f"{quoted(match[0])} refers to the row's {quoted(key)}, which the model would "
                    f"not get: {kind.cure}"
                )
        if match := certain_pattern.search(without_code):
            return (
                f"{quoted(match[0].strip())} stands for {kind.name} in data of other trainers: "
                f"{kind.cure}; if it is meant as text, put it in backticks"
            )
    return None


def _find_file_name_problem(
    text: str, image_files: ImageFiles, sample_images: set[str]
) -> str | None:
    """Return which word of a question is an image file that the sample lacks, or None."""
    lowered = text.lower()
    if not any(suffix in lowered for suffix in IMAGE_SUFFIXES):
        return None
    words = (word for line in text.splitlines() for word in _possible_names(line))
    names = (word for word in words if word.lower().endswith(IMAGE_SUFFIXES))
    for name in islice(names, MAX_NAMES):
        path = os.path.normpath(os.path.join(image_files.folder, name))
        if path in sample_images or len(name) > MAX_NAME_LENGTH or not image_files.may_name(path):
            continue
        if os.path.isfile(path):
            return (
                f"{quoted(name)} in the text is an image file, which the model would not get: "
                'write <image> there, and the path under the row\'s key "image"'
            )
    return None


def _possible_names(line: str) -> list[str]:
    """Return the texts in a line that may be names of files: each word, and all that follows the
    last ": ", because a name may contain blanks."""
    return [line.rpartition(": ")[2].strip(), *NAME_SEPARATOR_RE.split(line)]
