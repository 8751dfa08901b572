"""Encodings of text files: those that are read, and the command that converts from others."""

import codecs
import re
import unicodedata
from contextlib import suppress

from .file_signatures import fill_cure

SURROGATE_BYTE_RE = re.compile("[\udc80-\udcff]")  # bytes decoded with "surrogateescape"
INVALID_BYTE_RE = re.compile("[\0\udc80-\udcff]")  # these, and NUL, which no text file contains
ENCODINGS = {
    "GB18030": "的一是不了在有人我他这中大来上个到说们为什么图片问题答案颜色，。？！",
    "BIG5": "的一是不了在有人我他這中大來上個到說們為什麼圖片問題答案顏色，。？！",
    "SHIFT_JIS": "のにはをたがでてとしれさるいもなかうすこ、。",
    "EUC-JP": "のにはをたがでてとしれさるいもなかうすこ、。",
    "EUC-KR": "이다는에가고의을를한지하어나아로기사니까습은무슨색그림떤엇",
    "WINDOWS-1252": "éèàçêâîôûùäöüßñáíóúãõå’“”–€",
    "WINDOWS-1251": "оеаинтсрвлкмдпуяызьбгчйхжшюцщэфъё",
}
"""Names of encodings that Python and iconv know, with frequent characters of their languages.
Nothing in a file tells encodings apart for certain, so a message shows how a text reads in each."""
EAST_ASIAN = tuple(ENCODINGS)[:5]


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


def encoding_cure(path: str, suffix: str, head: bytes, unpack: str = "") -> str | None:
    """Return how the first word of a text that is not ASCII reads in each encoding that it may
    have, and the command that converts the file; None if most of it is UTF-8.

    Args:
        unpack: The command that writes the text of a compressed file, with FILE for its name.
    """
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(head)
    if 2 * len(SURROGATE_BYTE_RE.findall(text)) <= len(re.findall(r"[^\0-\x7f]", text)):
        return None
    texts = {}
    for encoding in ENCODINGS:
        with suppress(UnicodeDecodeError):
            texts[encoding] = codecs.getincrementaldecoder(encoding)().decode(head)
    share = {
        encoding: sum(map(text.count, ENCODINGS[encoding])) / len(re.findall(r"[^\0-\x7f]", text))
        for encoding, text in texts.items()
    }
    # Letters with accents are single bytes between letters; in Russian, several are in a row.
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", head)]
    share["WINDOWS-1252"] = 1 if 2 * runs.count(1) > len(runs) else share.get("WINDOWS-1252", 0)
    best = next(
        (e for e in EAST_ASIAN if share.get(e, 0) > 0.15), max(share, key=share.__getitem__)
    )
    if best not in texts:
        return None
    words = {e: re.findall(r"\w*[^\0-\x7f]+\w*", text)[0] for e, text in texts.items()}
    readings = ", ".join(f'"{word[:40]}" in {encoding}' for encoding, word in words.items())
    first = next(byte for byte in head if byte > 0x7F)
    command = f"iconv -f {best} -t UTF-8 FILE > RESULT{suffix}"
    command = fill_cure(f"{unpack} | {command.replace('FILE ', '')}" if unpack else command, path)
    cure = f"convert it from the encoding that is right: {command}"
    return f"its first byte above 0x7f, 0x{first:02x}, is in the word {readings}; {cure}"
