"""Find the encoding of a text file, or the command that converts it to UTF-8."""

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
"""Names of encodings that Python and iconv know, with frequent characters of their languages. Bytes
do not show their encoding for certain, so a message shows how a text reads in each encoding."""
EAST_ASIAN = tuple(ENCODINGS)[:5]


def find_encoding(head: bytes) -> str:
    """Return the encoding of a file that begins with ``head``: UTF-16 or UTF-32 if the bytes are
    text in one of them, else UTF-8."""
    wide: tuple[str, ...] = ()
    if head[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        wide = ("utf-32",)
    elif head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        wide = ("utf-16",)
    elif b"\0" in head:
        wide = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
    for encoding in wide:
        text = codecs.getincrementaldecoder(encoding)("replace").decode(head)
        # In the wrong byte order, a line feed is an unassigned character (Cn).
        categories = {unicodedata.category(c) for c in {*text} - {*"\t\r\n"}}
        is_text = "\ufffd" not in text and not categories & {"Cc", "Cn", "Cs"}
        if is_text and ("\n" in text or text[:1] in "[{"):
            return encoding
    return "utf-8-sig"


def find_encoding_problem(text: str, cure: str | None) -> str | None:
    """Return which byte of a decoded text is not UTF-8, or None. If the complete file is in another
    encoding, return ``cure`` instead, which says how to convert it."""
    match = INVALID_BYTE_RE.search(text)
    if match is None:
        return None
    byte, position = ord(match[0]) & 0xFF, match.start() + 1
    if byte and cure:
        return f"is not UTF-8: {cure}"  # the same text for each row, so that it is listed once
    reason = "which is not UTF-8: save the file as UTF-8" if byte else "which is no text: remove it"
    return f"character {position} is the byte 0x{byte:02x}, {reason}"


def encoding_cure(path: str, suffix: str, head: bytes, unpack: str = "") -> str | None:
    """Return the command that converts a file to UTF-8, and how its first word that is not ASCII
    reads in each possible encoding; None if most of the text is UTF-8.

    Args:
        unpack: For a compressed file, the command that writes its text, with FILE for its name.
    """
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(head)
    if 2 * len(SURROGATE_BYTE_RE.findall(text)) <= len(re.findall(r"[^\0-\x7f]", text)):
        return None
    texts = {}
    for encoding in ENCODINGS:
        with suppress(UnicodeDecodeError):
            texts[encoding] = codecs.getincrementaldecoder(encoding)().decode(head)
    scores = {  # the share of frequent characters
        encoding: sum(map(text.count, ENCODINGS[encoding])) / len(re.findall(r"[^\0-\x7f]", text))
        for encoding, text in texts.items()
    }
    # In Western text, a byte above 0x7f mostly stands alone; in Russian, many follow each other.
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", head)]
    scores["WINDOWS-1252"] = 1 if 2 * runs.count(1) > len(runs) else scores.get("WINDOWS-1252", 0)
    best = next(
        (e for e in EAST_ASIAN if scores.get(e, 0) > 0.15), max(scores, key=scores.__getitem__)
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
