"""Encodings of text files: those that are read, and the command that converts from others."""

import codecs
import re
import unicodedata
from contextlib import suppress

from .file_signatures import fill_cure

# Bytes decoded with "surrogateescape", and NUL, which no text file contains.
INVALID_BYTE_RE = re.compile("[\0\udc80-\udcff]")
ENCODINGS = ("GB18030", "BIG5", "SHIFT_JIS", "EUC-KR", "WINDOWS-1252", "WINDOWS-1251")
"""Names of encodings that Python and iconv know. Nothing in a file tells them apart for certain, so
a message shows how a text reads in each of them."""


def find_encoding(head: bytes) -> str:
    """Return the encoding of a text that begins with ``head``: UTF-16 or UTF-32 if it is text in
    one of them, else UTF-8. In the wrong order of bytes, a line feed is not a character."""
    wide: tuple[str, ...] = ()
    if head[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        wide = ("utf-32",)
    elif head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        wide = ("utf-16",)
    elif b"\0" in head:
        wide = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
    for encoding in wide:
        text = codecs.getincrementaldecoder(encoding)("replace").decode(head)
        categories = {unicodedata.category(c) for c in {*text} - {*"\t\r\n"}}
        is_text = "\ufffd" not in text and not categories & {"Cc", "Cn", "Cs"}
        if is_text and ("\n" in text or text[:1] in "[{"):
            return encoding
    return "utf-8-sig"


def find_encoding_problem(text: str, cure: str | None) -> str | None:
    """Return what in a decoded text is not UTF-8, or None. ``cure`` is that of the whole file, if
    none of it is UTF-8."""
    match = INVALID_BYTE_RE.search(text)
    if match is None:
        return None
    byte, position = ord(match[0]) & 0xFF, match.start() + 1
    if byte and cure:
        return f"is not UTF-8: {cure}"  # the same words for each row, so that they are listed once
    reason = "which is not UTF-8: save the file as UTF-8" if byte else "which is no text: remove it"
    return f"character {position} is the byte 0x{byte:02x}, {reason}"


def encoding_cure(path: str, suffix: str, head: bytes) -> str | None:
    """Return how the first word of a text that is not ASCII reads in each encoding that it may
    have, and the command that converts the file; None if most of it is UTF-8."""
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(head)
    if 2 * len(INVALID_BYTE_RE.findall(text)) <= len(re.findall(r"[^\0-\x7f]", text)):
        return None
    words = {}
    for encoding in ENCODINGS:
        with suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(encoding)().decode(head)
            words[encoding] = re.findall(r"\w*[^\0-\x7f]+\w*", text)[0]
    # Letters with accents are single bytes between letters; other scripts have several in a row.
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", head)]
    best = "WINDOWS-1252" if 2 * runs.count(1) > len(runs) else next(iter(words), "")
    if best not in words:
        return None
    readings = ", ".join(f'"{word[:40]}" in {encoding}' for encoding, word in words.items())
    command = fill_cure(f"iconv -f {best} -t UTF-8 FILE > RESULT{suffix}", path)
    return f"it has the word {readings}; convert it from the encoding that is right: {command}"
