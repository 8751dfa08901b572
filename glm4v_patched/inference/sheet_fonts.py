"""Text of any script in a picture, in the fonts of this machine that have its characters.

Pillow draws a text in one font; which font has which character, it does not say.
"""

import functools
import os
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIZE, LINE_HEIGHT = 14, 18

Colour = tuple[int, int, int]


class Face:
    """A font, and the characters that it has."""

    def __init__(self, path: str | None):
        self.font: Any
        if path is None:  # Pillow's own
            self.characters = frozenset([*map(chr, range(0x20, 0x7F)), "…"])
            self.font = ImageFont.load_default(SIZE)
            return
        from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

        with TTFont(path, fontNumber=0, lazy=True) as file:
            self.characters = frozenset(map(chr, file.getBestCmap() or ()))
        self.font = ImageFont.truetype(path, SIZE)

    def has(self, character: str) -> bool:
        """Also False where Pillow draws nothing, as it does of coloured outlines."""
        if character not in self.characters:
            return False
        return character.isspace() or self.font.getmask(character).getbbox() is not None


class Fonts:
    """``missing`` has the characters, drawn so far, that no font has: ``U+4E2D`` stands for each.

    The first font is matplotlib's DejaVu Sans, for Latin, Greek, Cyrillic, Hebrew and Arabic.
    """

    def __init__(self) -> None:
        self.missing: set[str] = set()

    def draw_lines(self, texts: Sequence[tuple[str, Colour]], width: int, most: int) -> Image.Image:
        """Texts with their colours, each broken into lines as wide as that, of which it has so many
        at most."""
        lines = [(line, colour) for text, colour in texts for line in self._wrap(text, width, most)]
        image = Image.new("RGB", (width, LINE_HEIGHT * len(lines)), "white")
        draw = ImageDraw.Draw(image)
        for number, (line, colour) in enumerate(lines):
            left = 0.0
            for face, run in _runs(line):
                # Below the ascender: fonts of one line then stand on one line.
                place = left, number * LINE_HEIGHT + SIZE
                draw.text(place, run, fill=colour, font=face.font, anchor="ls")
                left += face.font.getlength(run)
        return image

    def _wrap(self, text: str, width: int, most: int) -> list[str]:
        text = self._drawable(" ".join(text.split()))
        lines: list[str] = []
        while text and len(lines) < most:
            ends = takewhile(lambda end: _length(text[:end]) <= width, range(1, len(text) + 1))  # noqa: B023
            fits = max(ends, default=1)
            # At a blank, if there is one; Chinese and Japanese have none.
            end = text.rfind(" ", 1, fits + 1) if fits < len(text) else fits
            end = fits if end < 1 else end
            lines.append(text[:end])
            text = text[end:].lstrip()
        if text:
            lines[-1] = lines[-1][:-2] + "…"
        return lines

    def _drawable(self, text: str) -> str:
        """Without what is invisible: joiners, marks of direction, variation selectors."""
        shown = [each for each in text if unicodedata.category(each) != "Cf"]
        shown = [each for each in shown if not "\ufe00" <= each <= "\ufe0f"]
        lost = {each for each in shown if _face_of(each) is None}
        self.missing |= lost
        parts = (f" U+{ord(each):04X} " if each in lost else each for each in shown)
        return " ".join("".join(parts).split())


def _length(text: str) -> float:
    return sum(face.font.getlength(run) for face, run in _runs(text))


def _runs(text: str) -> Iterator[tuple[Any, str]]:
    """What is drawn in one font."""
    for face, run in groupby(text, _face_of):
        yield face, "".join(run)


@functools.cache
def _face_of(character: str) -> Face | None:
    return next((face for face in _faces() if face.has(character)), None)


def _faces() -> Iterator[Face]:
    """In the order in which they are asked, each read when it is needed."""
    return (face for path in _files() if (face := _face(path)) is not None)


@functools.cache
def _files() -> list[str] | list[None]:
    try:
        from matplotlib import font_manager, get_data_path
    except ImportError:
        return [None]
    own = os.path.join(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")

    def order(path: str) -> tuple:
        name = Path(path).stem
        return "Regular" not in name, "Sans" not in name, path

    # One that has a box for each character there is would be the answer to all questions.
    found = (path for path in font_manager.findSystemFonts() if "LastResort" not in path)
    return [own, *sorted(found, key=order)]


@functools.cache
def _face(path: str | None) -> Face | None:
    try:
        return Face(path)
    except Exception:  # a damaged font may raise anything, and others may have the character
        return None
