"""The contact sheet: pictures with question, answer and reference, to be looked at."""

import functools
import math
import os
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..atomic import open_atomically
from ..data.messages import pictures_of, text_of
from .questions import Question, spread
from .scoring import exact_match

COLUMNS, MOST_CELLS = 4, 24
CELL_WIDTH, PICTURES_HEIGHT, MARGIN = 280, 150, 10
WIDTH = COLUMNS * (CELL_WIDTH + MARGIN) - MARGIN
FONT_SIZE, LINE_HEIGHT = 14, 18
MOST_LINES = 4  # of a question, or of an answer
GREY, BLACK, RIGHT, WRONG = (110, 110, 110), (0, 0, 0), (20, 130, 60), (190, 30, 30)


def draw_sheet(
    questions: Sequence[Question],
    answers: Sequence[str],
    path: Path,
    rows: Sequence[int | str] | None = None,
) -> None:
    """Draw up to 24 of the rows: first those whose answer is not the reference, spread evenly.

    Of each: its pictures in their own shape, its row, their files, the question, and the answer in
    green if it is the reference, or else in red with the reference below.
    """
    names = [question.row for question in questions] if rows is None else rows
    pairs = list(zip(questions, answers, names, strict=True))
    right = [pair for pair in pairs if _is_right(*pair[:2])]
    shown = spread([pair for pair in pairs if not _is_right(*pair[:2])], MOST_CELLS)
    shown += spread(right, MOST_CELLS - len(shown))
    title = f"{len(right):,} of {len(pairs):,} answers are the reference"
    if len(shown) < len(pairs):
        title += f"; {len(shown)} rows are shown, those with other answers first"
    head = draw_lines([(title, BLACK)], WIDTH)
    cells = [_cell(question, answer, row) for question, answer, row in shown]
    height = max((cell.height for cell in cells), default=0) + LINE_HEIGHT
    top = head.height + 2 * MARGIN
    size = WIDTH + 2 * MARGIN, top + math.ceil(len(cells) / COLUMNS) * height
    sheet = Image.new("RGB", size, "white")
    sheet.paste(head, (MARGIN, MARGIN))
    for place, cell in enumerate(cells):
        left = MARGIN + place % COLUMNS * (CELL_WIDTH + MARGIN)
        sheet.paste(cell, (left, top + place // COLUMNS * height))
    with open_atomically(path) as file:
        sheet.save(file, "PNG")


def _is_right(question: Question, answer: str) -> bool:
    return bool(exact_match(answer, question.reference or ""))


def _cell(question: Question, answer: str, row: int | str) -> Image.Image:
    pictures = pictures_of(question.prompt)
    named = ", ".join([f"row {row}", *(Path(picture).name for picture in pictures)])
    lines = [(named, GREY), (text_of(question.prompt[-1]), BLACK)]
    if _is_right(question, answer):
        lines.append((answer, RIGHT))
    else:
        lines += [(answer, WRONG), (f"expected: {question.reference or ''}", BLACK)]
    words = draw_lines(lines, CELL_WIDTH)
    top = PICTURES_HEIGHT if pictures else 0
    cell = Image.new("RGB", (CELL_WIDTH, top + words.height), "white")
    cell.paste(words, (0, top))
    # All of the pictures, upright, in boxes of one size.
    columns = math.ceil(math.sqrt(len(pictures)))
    for place, path in enumerate(pictures):
        box = CELL_WIDTH // columns, PICTURES_HEIGHT // math.ceil(len(pictures) / columns)
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture).convert("RGB")
        fitted = ImageOps.contain(upright, (box[0] - 4, box[1] - 4))
        cell.paste(fitted, (place % columns * box[0], place // columns * box[1]))
    return cell


def draw_lines(texts: Sequence[tuple[str, tuple[int, int, int]]], width: int) -> Image.Image:
    """Texts with their colours, in lines as wide as that. Pillow draws a text in one font: here,
    each character is in the first that has it."""
    lines = [(line, colour) for text, colour in texts for line in wrap(text, width)]
    image = Image.new("RGB", (width, LINE_HEIGHT * len(lines)), "white")
    draw = ImageDraw.Draw(image)
    for number, (line, colour) in enumerate(lines):
        left = 0.0
        for font, run in _runs(line):
            # Below the ascender: fonts of one line then stand on one line.
            place = left, number * LINE_HEIGHT + FONT_SIZE
            draw.text(place, run, fill=colour, font=font, anchor="ls")
            left += font.getlength(run)
    return image


def wrap(text: str, width: int) -> list[str]:
    """The first lines of a text; ``U+4E2D`` stands for a character that no font has."""
    text = _drawable(" ".join(text.split()))
    lines: list[str] = []
    while text and len(lines) < MOST_LINES:
        ends = takewhile(lambda end: _length(text[:end]) <= width, range(1, len(text) + 1))  # noqa: B023
        fits = max(ends, default=1)
        # At a blank, if there is one; Chinese and Japanese have none.
        blank = text.rfind(" ", 1, fits + 1) if fits < len(text) else -1
        end = fits if blank < 1 else blank
        lines.append(text[:end])
        text = text[end:].lstrip()
    if text:
        lines[-1] = lines[-1][:-2] + "…"
    return lines


def _drawable(text: str) -> str:
    # Without what is invisible: joiners, marks of direction, variation selectors.
    shown = [c for c in text if unicodedata.category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f"]
    return " ".join("".join(c if _font_of(c) else f" U+{ord(c):04X} " for c in shown).split())


def _runs(text: str) -> Iterator[tuple[Any, str]]:
    """What is drawn in one font."""
    for font, characters in groupby(text, _font_of):
        yield font, "".join(characters)


def _length(text: str) -> float:
    return sum(font.getlength(run) for font, run in _runs(text))


@functools.cache
def _font_of(character: str) -> Any:
    """The first font that has it, or None; each is read when it is needed."""
    for path in _files():
        try:
            if _has(_font(path), character):
                return _font(path)
        except OSError:  # damaged, or pictures in one size; others may have the character
            continue
    return None


@functools.cache
def _font(path: str | None) -> Any:
    if path is None:
        return ImageFont.load_default(FONT_SIZE)
    return ImageFont.truetype(path, FONT_SIZE)


def _has(font: Any, character: str) -> bool:
    if character == " ":
        return True
    drawn, box = font.getmask(character), font.getmask("\U0010ffff")  # which no font has
    # Nothing is drawn of coloured outlines.
    return drawn.getbbox() is not None and (drawn.size, bytes(drawn)) != (box.size, bytes(box))


@functools.cache
def _files() -> list[str] | list[None]:
    """First matplotlib's DejaVu Sans, for Latin, Greek, Cyrillic, Hebrew and Arabic; or Pillow's
    own alone."""
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
