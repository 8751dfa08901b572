"""The contact sheet: pictures with question, answer and reference, to be looked at."""

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps

from ..atomic import open_atomically
from ..data.messages import pictures_of, text_of
from .questions import Question, spread
from .scoring import exact_match
from .sheet_fonts import LINE_HEIGHT, Fonts

COLUMNS, MOST_CELLS = 4, 24
CELL_WIDTH, PICTURES_HEIGHT, MARGIN = 280, 150, 10
WIDTH = COLUMNS * (CELL_WIDTH + MARGIN) - MARGIN
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
    green if it is the reference, or else in red with the reference below. A character that no font
    of this machine has is written as its code point (:class:`sheet_fonts.Fonts`).
    """
    names = [question.row for question in questions] if rows is None else rows
    pairs = list(zip(questions, answers, names, strict=True))
    right = [pair for pair in pairs if _is_right(*pair[:2])]
    shown = spread([pair for pair in pairs if not _is_right(*pair[:2])], MOST_CELLS)
    shown += spread(right, MOST_CELLS - len(shown))
    fonts = Fonts()
    cells = [_cell(question, answer, row, fonts) for question, answer, row in shown]
    title = f"{len(right):,} of {len(pairs):,} answers are the reference"
    if len(shown) < len(pairs):
        title += f"; {len(shown)} rows are shown, those with other answers first"
    if fonts.missing:
        title += f"; {len(fonts.missing):,} characters are in no font here: install Noto Sans"
    _side_by_side(cells, fonts.draw_lines([(title, BLACK)], WIDTH, MOST_LINES), path)


def _is_right(question: Question, answer: str) -> bool:
    return bool(exact_match(answer, question.reference or ""))


def _cell(question: Question, answer: str, row: int | str, fonts: Fonts) -> Image.Image:
    pictures = pictures_of(question.prompt)
    named = ", ".join([f"row {row}", *(Path(picture).name for picture in pictures)])
    lines = [(named, GREY), (text_of(question.prompt[-1]), BLACK)]
    if _is_right(question, answer):
        lines.append((answer, RIGHT))
    else:
        lines += [(answer, WRONG), (f"expected: {question.reference or ''}", BLACK)]
    words = fonts.draw_lines(lines, CELL_WIDTH, MOST_LINES)
    top = PICTURES_HEIGHT if pictures else 0
    cell = Image.new("RGB", (CELL_WIDTH, top + words.height), "white")
    _paste_pictures(cell, pictures)
    cell.paste(words, (0, top))
    return cell


def _paste_pictures(cell: Image.Image, pictures: Sequence[str]) -> None:
    """All of them, upright, in boxes of one size."""
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / max(columns, 1))
    for place, path in enumerate(pictures):
        box = CELL_WIDTH // columns, PICTURES_HEIGHT // rows
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture).convert("RGB")
        fitted = ImageOps.contain(upright, (box[0] - 4, box[1] - 4))
        cell.paste(fitted, (place % columns * box[0], place // columns * box[1]))


def _side_by_side(cells: Sequence[Image.Image], title: Image.Image, path: Path) -> None:
    rows = [cells[start : start + COLUMNS] for start in range(0, len(cells), COLUMNS)]
    heights = [max(cell.height for cell in row) + LINE_HEIGHT for row in rows]
    size = WIDTH + 2 * MARGIN, title.height + sum(heights) + 3 * MARGIN
    sheet = Image.new("RGB", size, "white")
    sheet.paste(title, (MARGIN, MARGIN))
    top = title.height + 2 * MARGIN
    for row, height in zip(rows, heights, strict=True):
        for column, cell in enumerate(row):
            sheet.paste(cell, (MARGIN + column * (CELL_WIDTH + MARGIN), top))
        top += height
    with open_atomically(path) as file:
        sheet.save(file, "PNG")
