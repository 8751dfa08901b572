"""Find the encoding of a text file, or the command that converts it to UTF-8."""

import codecs
import re
import unicodedata
from contextlib import suppress

from .file_signatures import fill_cure

# Bytes that are not UTF-8, in a text that was decoded with "surrogateescape".
SURROGATE_BYTE_RE = re.compile("[\udc80-\udcff]")
INVALID_BYTE_RE = re.compile("[\0\udc80-\udcff]")  # NUL, too, which no text file contains
NON_ASCII_RE = re.compile(r"[^\0-\x7f]")
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
do not show their encoding for certain. Therefore a message shows a word of the text as decoded from
each encoding."""
EAST_ASIAN = tuple(ENCODINGS)[:5]
MIN_EAST_ASIAN_SCORE = 0.15


def find_encoding(head: bytes) -> str:
    """Return the encoding of a file that begins with ``head``: UTF-16 or UTF-32 if ``head`` is text
    in one of them, else UTF-8."""
    candidates: tuple[str, ...] = ()
    if head[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        candidates = ("utf-32",)
    elif head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        candidates = ("utf-16",)
    elif b"\0" in head:
        candidates = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
    for encoding in candidates:
        text = codecs.getincrementaldecoder(encoding)("replace").decode(head)
        # In the wrong byte order, a line feed is an unassigned character (Cn).
        categories = {unicodedata.category(c) for c in {*text} - {*"\t\r\n"}}
        is_text = "\ufffd" not in text and not categories & {"Cc", "Cn", "Cs"}
        if is_text and ("\n" in text or text[:1] in "[{"):
            return encoding
    return "utf-8-sig"


def find_encoding_problem(text: str, cure: str | None) -> str | None:
    """Return which byte of a decoded text is not UTF-8, or None.

    Args:
        cure: How to convert the file if all of it is in another encoding. It replaces the byte in
            the result.
    """
    match = INVALID_BYTE_RE.search(text)
    if match is None:
        return None
    byte, position = ord(match[0]) & 0xFF, match.start() + 1
    if byte and cure:
        return f"is not UTF-8: {cure}"  # the same text for each row, so that it is listed once
    reason = "which is not UTF-8: save the file as UTF-8" if byte else "which is no text: remove it"
    return f"character {position} is the byte 0x{byte:02x}, {reason}"


def encoding_cure(path: str, suffix: str, head: bytes, unpack: str = "") -> str | None:
    """Return how to convert a file to UTF-8; None if most of its non-ASCII characters are UTF-8.

    The result has the command for the most probable encoding, and the first word that is not ASCII
    as decoded from each possible encoding.

    Args:
        suffix: The suffix of the converted file.
        unpack: For a compressed file, the command that writes its text, with FILE for its name.
    """
    as_utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(head)
    if 2 * len(SURROGATE_BYTE_RE.findall(as_utf8)) <= len(NON_ASCII_RE.findall(as_utf8)):
        return None
    texts = {}
    for encoding in ENCODINGS:
        with suppress(UnicodeDecodeError):
            texts[encoding] = codecs.getincrementaldecoder(encoding)().decode(head)
    scores = {  # the share of frequent characters in those that are not ASCII
        encoding: sum(map(text.count, ENCODINGS[encoding])) / len(NON_ASCII_RE.findall(text))
        for encoding, text in texts.items()
    }
    # In Western text, a byte above 0x7f mostly stands alone; in Russian, many follow each other.
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", head)]
    scores["WINDOWS-1252"] = 1 if 2 * runs.count(1) > len(runs) else scores.get("WINDOWS-1252", 0)
    best = max(scores, key=scores.__getitem__)
    for encoding in EAST_ASIAN:
        if scores.get(encoding, 0) > MIN_EAST_ASIAN_SCORE:
            best = encoding
            break
    if best not in texts:
        return None
    words = {name: re.findall(r"\w*[^\0-\x7f]+\w*", text)[0] for name, text in texts.items()}
    decoded_words = ", ".join(f'"{word[:40]}" in {encoding}' for encoding, word in words.items())
    first_byte = next(byte for byte in head if byte > 0x7F)
    command = f"iconv -f {best} -t UTF-8 FILE > RESULT{suffix}"
    command = fill_cure(f"{unpack} | {command.replace('FILE ', '')}" if unpack else command, path)
    cure = f"convert it from the encoding that is right: {command}"
    return f"its first byte above 0x7f, 0x{first_byte:02x}, is in the word {decoded_words}; {cure}"
