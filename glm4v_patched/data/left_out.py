"""What a row has and its sample would lack: images of columns that ``data.columns`` does not name,
videos and sounds, and what words such as ``<bbox>`` stand for. Needs no torch."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..terminal_text import listed
from .columns import OF_TOOLS, Columns, is_empty
from .columns import named_columns as of_columns
from .messages import pictures_of, quoted, text_of
from .pictures import IMAGE_NAMES, PictureFiles, image_kind, is_image_file
from .source import Source
from .suggestion import as_image, line_of

IN_WORDS = re.compile(
    r"!\[[^\]\n]{0,200}\]\(([^()\s]{1,1024})\)|<img\s[^<>]{0,200}?src=[\"']?([^\"'<>\s]{1,1024})"
)
PLAIN_NAMES = re.compile("image|img|picture|photo|png|jpe?g|webp", re.IGNORECASE)
OF_A_FILE = re.compile("url|uri|src|path|file|file_?name|name|id|data|bytes|base64|content")
LONGEST_NAME, MOST_NAMES = 1024, 8
ORDER = (("embedded", "base64"), ("path",), ("url",))
MEDIA = ("video", "videos", "audio", "audios")
ONLY_IMAGES = "the model sees images alone: leave the row out"


class Kind(NamedTuple):
    """A kind of what words stand for."""

    keys: re.Pattern
    """Of a row, that hold it."""
    cure: str


KINDS = {
    "box": Kind(
        re.compile("objects?|b?box(?:es)?|quads?|ref_objects?"),
        "write what it stands for in its place, a box as numbers such as [[x0, y0, x1, y1]] "
        '(docs/questions.md, "Does it know boxes?")',
    ),
    "video": Kind(re.compile("videos?"), f"{ONLY_IMAGES}, or show frames of the video as images"),
    "audio": Kind(re.compile("audios?|sounds?|speech(?:es)?"), ONLY_IMAGES),
    "image": Kind(
        re.compile("images?"),
        'write <image> at the beginning of the words, and the path under "image"',
    ),
    "other": Kind(re.compile(r"(?!)"), "take it out"),
}
NAMED = {"image": "an image", "box": "a box or its name", "video": "a video", "audio": "a sound"}
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
# Words of ms-swift, LLaMA-Factory and of the vocabularies of Qwen, InternVL, LLaVA, DeepSeek-VL and
# others. re2, which Arrow has, reads them, too.
_OF_VIDEO, _OF_AUDIO = "video|vid", "audio|speech|sound"
_OF_BOX = "b?box|quad|poly|polygon|point|object_ref|ref|det|grounding"
_AFTER = r"[ _-]?(?:pad|token|soft_token|patch|placeholder|start|end|here|context|\d{1,6})"
TOKENS = {
    "image": r"<\|/?\w{0,12}vision\w{0,12}\|>|</?im_(?:start|patch|end)>|<img_context>"
    r"|<start-image>",
    "box": rf"<\|/?(?:\w{{1,8}}_of_)?(?:{_OF_BOX})(?:_\w{{1,12}})?\|>|<bbox>|<ref-object>"
    r"|<(?:loc|seg|bin|patch_index)_?\d{1,6}>",
    "video": rf"<\|/?\w{{0,12}}video\w{{0,12}}\|>"
    rf"|<(?:{_OF_VIDEO}){_AFTER}>|<\w{{1,8}}_of_(?:{_OF_VIDEO})>",
    "audio": rf"<\|/?\w{{0,12}}(?:audio|speech)\w{{0,12}}\|>"
    rf"|<(?:{_OF_AUDIO}){_AFTER}>|<\w{{1,8}}_of_(?:{_OF_AUDIO})>",
    "other": r"<cot-process>",
}
"""Words that nobody writes for anything else."""
TAGS = {"box": f"<(?:{_OF_BOX})>", "video": f"<(?:{_OF_VIDEO})>", "audio": f"<(?:{_OF_AUDIO})>"}
"""Words that HTML and XML have, too."""
_BRACKETED = r"[\[(<\s]{0,8}[\[(<]\s{0,8}-?\d[\d.\s]{0,12}[,)\]]"
# Behind a word it is a type of a program, unless it is closed.
COORDINATES = (
    rf"(?<![\w:])<(?:{_OF_BOX})>{_BRACKETED}|<(?:{_OF_BOX})>{_BRACKETED}[^<]{{0,200}}</"
    r"|<(?:b?box|quad)>\s{0,8}-?\d[\d.\s]{0,12},"
)
_WORDS = re.compile("|".join([*TOKENS.values(), *TAGS.values()]), re.IGNORECASE)
ANY_WORD = f"{_WORDS.pattern}|<(?:bbox_\\d{{1,6}}|region|mask|seg|obj|frame|clip|photo)>"
"""Also words that other data may mean as words."""
_TOKEN = {kind: re.compile(words, re.IGNORECASE) for kind, words in TOKENS.items()}
_TOKEN["box"] = re.compile(f"{TOKENS['box']}|{COORDINATES}", re.IGNORECASE)
_ANY = {kind: re.compile(f"{TOKENS[kind]}|{tag}", re.IGNORECASE) for kind, tag in TAGS.items()}
_AT_AN_END = {
    kind: re.compile(rf"\A\s*(?:{tag})|(?<![\w?:.])(?:{tag})\s*\Z", re.IGNORECASE)
    for kind, tag in TAGS.items()
}
_ALONE = {kind: re.compile(rf"(?:\s|{tag})+", re.IGNORECASE) for kind, tag in TAGS.items()}


def require_nothing_left_out(
    row: dict, messages: list[dict], shown: Sequence[Any], source: Source, files: PictureFiles
) -> None:
    """Raise ``ValueError`` if a row has what the sample made of it lacks.

    Args:
        row: As it stands in the file.
        messages: Of :func:`messages.check_messages`.
        shown: The images of the row as they stand there.
        files: Those that rows of the set may name.
    """
    for number, message in enumerate(messages, start=1):
        if fault := _fault_of_words(text_of(message), message["role"], row):
            raise ValueError(f"message {number} of {len(messages)}: {fault}")
    paths = pictures_of(messages)
    _require_no_files(messages, files, {os.path.normpath(path) for path in paths})
    _require_media(row, source, bool(paths))
    if source.columns:
        lost = [*_lost(row, source, paths, shown, files)]
        if lost:
            raise ValueError(_describe_lost(lost, source.columns, bool(paths)))


def _fault_of_words(text: str, role: str, row: dict) -> str | None:
    """Say which word of a text stands for what the sample does not have."""
    if "&lt;" in text:
        text = text.replace("&lt;", "<").replace("&gt;", ">")
    if not _WORDS.search(text):
        return None
    plain = CODE.sub("`", text)
    for kind, (keys, cure) in KINDS.items():
        has = [key for key in row if keys.fullmatch(key.lower()) and not is_empty(row[key])]
        if kind in TAGS and has and (found := _ANY[kind].search(text)):
            told = f"{quoted(found[0])} stands for what the row has under {quoted(has[0])}, and"
            return f"{told} the sample would not have it: {cure}"
        if found := _TOKEN[kind].search(plain) or _tag_in_place(kind, plain, role):
            what = NAMED.get(kind, "what the sample does not have")
            told = f"{quoted(found[0].strip())} stands for {what} in data of other trainers: {cure}"
            return f"{told}; a word that is meant as text stands in backticks"
    return None


def _tag_in_place(kind: str, text: str, role: str) -> re.Match | None:
    """Find a tag of HTML where no text has one: at an end of a question, or as a whole turn."""
    if kind not in TAGS or "</" in text:
        return None
    return _AT_AN_END[kind].search(text) if role == "user" else _ALONE[kind].fullmatch(text)


def _require_no_files(messages: list[dict], files: PictureFiles, shown: set[str]) -> None:
    """Raise ``ValueError`` if a question names the file of an image that is not shown: as Markdown
    and HTML do, or where none is shown as the end of a line."""
    for text in (text_of(message) for message in messages if message["role"] == "user"):
        lines = (line.strip() for line in text.splitlines())
        ends = (of for line in lines for of in dict.fromkeys((line, line.rpartition(": ")[2])))
        names = [of for of in ends if image_kind(of) == "path" and not shown]
        names += [found[1] or found[2] for found in IN_WORDS.finditer(text)]
        for name in names[:MOST_NAMES]:
            if _files_of(name, files) - shown:
                raise ValueError(
                    f"{quoted(name)} in the words is the file of an image, and the sample would "
                    'not have it: write <image> there, and the path under "image" of the row'
                )


def _require_media(row: dict, source: Source, has_images: bool) -> None:
    """Raise ``ValueError`` for videos and sounds that a format's row has beside its messages, and
    for those of a table's row that would be left without anything to see."""
    for key in MEDIA:
        if is_empty(row.get(key)) or row[key] in (False, 0):
            continue
        what = f"the row has {NAMED[key.rstrip('s')]} under {quoted(key)}"
        if source.columns is None and has_images and key in source.ignore:
            continue
        if source.columns is None:
            raise ValueError(f"{what}, which data.ignore cannot leave out: {ONLY_IMAGES}")
        named = {
            name.partition(".")[0] for of in source.columns.values() for name in of_columns(of)
        }
        if not has_images and key not in {*named, *source.ignore}:
            raise ValueError(
                f"{what}, and the sample would have no image: {ONLY_IMAGES}, or, where the words "
                f"do without it, data.ignore: [{key}]"
            )


Lost = tuple[str, Any]
"""A column, and the kind of :func:`image_kind`; None where its name alone tells it."""


def _lost(
    row: dict, source: Source, paths: list[str], shown: Sequence[Any], files: PictureFiles
) -> Iterator[Lost]:
    """Yield the columns with images that are not shown."""
    columns = source.columns or {}
    of_images = {*of_columns(columns.get("image", []))}
    as_text = {
        name
        for part, words in columns.items()
        if part not in ("image", "turns", "history")
        for name in of_columns(words)
    }
    talks = {columns.get("history")} | (
        {columns.get("turns")} if "question" not in columns else set()
    )
    # Beside an image in the table, paths say where it comes from.
    embedded = any(image_kind(of) in ORDER[0] for of in shown)
    left_out = as_text | talks | {*source.ignore}
    for name, value in _leaves(row, left_out):
        if any(of == name or of.startswith(f"{name}.") for of in of_images):
            continue
        kind = image_kind(value)
        is_words = kind == "path" and isinstance(value, str) and " " in value.strip()
        if kind not in ORDER[0] and (paths or kind is None or is_words):
            kind = "path" if not embedded and _files_of(value, files) - {*paths} else None
        if kind or not paths and _is_called_image(name, value):
            yield name, kind


def _is_called_image(name: str, value: Any) -> bool:
    if isinstance(value, (bool, float)) or is_empty(value) or value == "N/A":
        return False
    *outer, last = name.split(".")
    # A word or a small number is a title or a count, and no file; an id may be a number.
    is_word = isinstance(value, str) and not re.search(r"[\d/\\.]", value)
    if PLAIN_NAMES.fullmatch(last) and (isinstance(value, int) or is_word):
        return False
    inside = OF_A_FILE.fullmatch(last) and any(map(IMAGE_NAMES.fullmatch, outer))
    return bool(inside or IMAGE_NAMES.fullmatch(last))


def _files_of(value: Any, files: PictureFiles) -> set[str]:
    """Return the files that are named by a value, and begin as images do."""
    found = set()
    for name in (value if isinstance(value, list) else [value])[:MOST_NAMES]:
        name = name.get("path") if isinstance(name, dict) else name
        # A name with blanks and without an image's ending is looked for nowhere: most are texts.
        if isinstance(name, str) and (image_kind(name) == "path" or " " not in name[:LONGEST_NAME]):
            path = os.path.normpath(os.path.join(files.folder, name))
            if len(name) < LONGEST_NAME and files.may_name(path) and is_image_file(path):
                found.add(path)
    return found


def _leaves(value: Any, without: set, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a row by their names, and those inside of objects."""
    inside: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, of in inside:
        called = f"{name}.{key}" if name else str(key)
        if called in without or called in OF_TOOLS:
            continue
        first = of[0] if isinstance(of, list) and of else of
        if isinstance(first, dict) and not first.keys() <= {"bytes", "path"}:
            yield from _leaves(of, without, called)
        else:
            yield called, of


def _describe_lost(lost: list[Lost], columns: Columns, has_images: bool) -> str:
    names = listed([quoted(name) for name, _ in lost])
    likely = next(filter(None, ([of for of in lost if of[1] in kinds] for kinds in ORDER)), [])
    verb = "holds" if likely else "names"
    told = f"the column {names} {verb} an image" if len(lost) == 1 else f"{names} hold images"
    told += (
        ", and the sample would not have it" if has_images else ", and the sample would have none"
    )
    if likely:
        given = columns.get("image", [])
        images = [given] if isinstance(given, str) else [*given]
        images += [as_image(name, kind) for name, kind in likely]
        kept = {**columns, "image": images[0] if len(images) == 1 else images}
        cure = f"keep it by '{line_of(kept)}' (answer, evaluate: --columns)"
    else:
        cure = f'if it tells the file, name that, as image: "photos/{{{lost[0][0]}}}.jpg"'
    ignored = ", ".join(name for name, _ in lost)
    return f"{told}: {cure}, or leave it out by data.ignore: [{ignored}] (--ignore)"
