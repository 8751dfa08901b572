"""Recognize files that are neither rows nor images, and say how to convert them."""

import os
import re
import shlex
import sys

from ..terminal_text import pip_install

# Bytes of the start and of the end of a file in which its kind is searched. The end is needed for
# zip archives, which have the names of their files there.
SIGNATURE_HEAD_BYTES, SIGNATURE_TAIL_BYTES = 2**12, 2**16
# Cures: what to do with a file, often a command.
_PYTHON_COMMAND = 'python -c "import sys, %s" FILE RESULT'
_EXCEL_TO_CSV = "pip install pandas python-calamine && " + _PYTHON_COMMAND % (
    "pandas; pandas.read_excel(sys.argv[1], sheet_name=0, dtype=str, keep_default_na=False, "
    "engine='calamine').to_csv(sys.argv[2] + '.csv', index=False)"
)
_PAGES_TO_PNG = "pip install pymupdf && " + _PYTHON_COMMAND % (
    "pymupdf; [p.get_pixmap(dpi=150).save(sys.argv[2] + f'-{p.number + 1}.png') for p in "
    "pymupdf.open(sys.argv[1])]"
)
RAW_CURE = "pip install rawpy && " + _PYTHON_COMMAND % (
    "rawpy, PIL.Image as I; I.fromarray(rawpy.imread(sys.argv[1]).postprocess())"
    ".save(sys.argv[2] + '.png')"
)
LONG_TEXT_CURE = _PYTHON_COMMAND % (
    "PIL.Image as I, PIL.PngImagePlugin as P; P.MAX_TEXT_CHUNK = P.MAX_TEXT_MEMORY = 2**30; "
    "I.open(sys.argv[1]).save(sys.argv[2] + '.png')"
)
_INSTALL_HEIF = "pip install pillow-heif (if that is installed, the file is damaged)"
_SQLITE_TO_JSON = 'sqlite3 -json FILE "select * from $(sqlite3 FILE .tables)" > RESULT.json'
_FIRST_FRAME = (
    "the model accepts only images; the first frame: ffmpeg -i FILE -frames:v 1 RESULT.png"
)
_SAVE_IN_FORMAT = "save it as Parquet (rows) or PNG (an image) where you made it"
_COPY_AGAIN = "copy or download it again"
SIGNATURES = {
    rb"version https://git-lfs\.": ("a pointer of Git LFS, not the file", "git -C FOLDER lfs pull"),
    rb"\0\x05\x16[\0\x07]": ("macOS's notes on another file", "find FOLDER -name '._*' -delete"),
    rb"\0+\Z": ("only zero bytes", _COPY_AGAIN),
    rb"(?i)\s*<(!doctype html|html|head|body)": ("a web page", _COPY_AGAIN),
    rb"(?i)\s*<([?!].{,4000}?<)?svg\b": ("an SVG drawing", _PAGES_TO_PNG),
    rb"(?i)\s*<(!doctype|\?xml|error)": ("XML, such as a server's error", _COPY_AGAIN),
    rb".{,1000}?%PDF-": ("a PDF", _PAGES_TO_PNG),
    rb".{128}DICM": ("a DICOM file", "dcmj2pnm +on +Wm FILE RESULT.png"),
    rb".{4}ftyp(hei[cmsx]|hev[cmsx]|mif[12]|msf1)": ("HEIC or HEIF", _INSTALL_HEIF),
    rb".{4}ftypavi[fs]": ("AVIF", "pip install -U pillow (if that is new, the file is damaged)"),
    rb"\xff\x0a|\0\0\0\x0cJXL ": ("JPEG XL", "djxl FILE RESULT.png"),
    rb".{4}ftypcrx |FUJIFILM|II(RO|RS|U\0)|MMOR|FOVb": ("a RAW photo", RAW_CURE),
    rb".{4}(ftyp|moov|mdat|wide)|\x1aE\xdf\xa3|RIFF.{4}AVI |\0\0\x01\xba": (
        "a video",
        _FIRST_FRAME,
    ),
    rb"PK\x03\x04.*(xl/|opendocument\.spread)": ("a workbook (Excel, Calc)", _EXCEL_TO_CSV),
    rb"\xd0\xcf\x11\xe0": ("an Office file, old or with a password", _EXCEL_TO_CSV),
    rb"PK\x03\x04.*(word/|ppt/|opendocument)|\{\\rtf": ("a document", "save its table as CSV"),
    rb"PK\x03\x04|PK\x05\x06": ("a zip archive", "unzip FILE -d RESULT"),
    rb"7z\xbc\xaf|Rar!": ("a 7z or RAR archive", "7z x FILE -oRESULT"),
    rb".{257}ustar": ("a tar archive", "mkdir RESULT && tar -xf FILE -C RESULT"),
    rb"\x1f\x8b": ("compressed with gzip", "gzip -dc FILE > RESULT"),
    rb"\x80[\x02-\x05]": ("a Python pickle, which can run code", _SAVE_IN_FORMAT),
    rb"SQLite format 3": ("an SQLite database", _SQLITE_TO_JSON),
    rb"\x93NUMPY|\x89HDF|MATLAB 5|Obj\x01|ORC": ("a file of arrays or tables", _SAVE_IN_FORMAT),
}
"""Kinds of files: the pattern of their first and last bytes, and their name and cure. The first
pattern that matches decides. In a cure, FILE stands for the path of the file, RESULT for the path
of the result without its suffix, and FOLDER for the folder of the file."""


def find_signature(first: bytes, last: bytes) -> tuple[str, str] | None:
    """Return the name and the cure of a file's kind, by its first and last bytes, or None."""
    head = first[:SIGNATURE_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf")
    content = head + last[-SIGNATURE_TAIL_BYTES:]
    for pattern, kind in SIGNATURES.items():
        if re.match(pattern, content, re.DOTALL):
            return kind
    return None


def fill_cure(cure: str, path: str) -> str:
    """Return a cure for the file at ``path``, with its words in capitals replaced by paths that are
    quoted for a shell."""
    stem, folder = os.path.splitext(path)[0], os.path.dirname(path) or "."
    paths = {"FILE": path, "RESULT": f"{stem}_converted", "FOLDER": folder}
    replacements = {word: shlex.quote(value) for word, value in paths.items()}
    replacements |= {"pip install": pip_install(), "python": shlex.quote(sys.executable)}
    words_re = "FILE|RESULT|FOLDER|pip install|python(?= -c)"
    return re.sub(words_re, lambda match: replacements[match[0]], cure)
