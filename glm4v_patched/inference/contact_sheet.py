"""The contact sheet: pictures with question, answer and reference, to be looked at."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageOps

from ..atomic import open_atomically
from ..data.messages import pictures_of, text_of
from .questions import Question
from .scoring import exact_match

CELL_WIDTH, PICTURE_SIDE, TEXT_HEIGHT, MARGIN = 180, 112, 56, 8
COLUMNS, MOST_CELLS, CHARACTERS = 6, 24, 28
RIGHT, WRONG = (20, 130, 60), (190, 30, 30)


def draw_sheet(questions: Sequence[Question], answers: Sequence[str], path: Path) -> None:
    """Draw up to 24 of the rows, spread evenly: the first picture, the question, the answer in
    green if it is the reference, and else in red with the reference below.

    Characters that Pillow's own font lacks are drawn as boxes.
    """
    step = max(len(questions) / MOST_CELLS, 1)
    chosen = [int(number * step) for number in range(min(len(questions), MOST_CELLS))]
    rows = -(-len(chosen) // COLUMNS)
    height = PICTURE_SIDE + TEXT_HEIGHT + 2 * MARGIN
    sheet = Image.new("RGB", (COLUMNS * CELL_WIDTH, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for place, number in enumerate(chosen):
        left = place % COLUMNS * CELL_WIDTH + MARGIN
        top = place // COLUMNS * height + MARGIN
        _paste_picture(sheet, questions[number], (left, top))
        is_right, lines = _lines(questions[number], answers[number])
        for line, text in enumerate(lines):
            colour = "black" if line == 0 else RIGHT if is_right else WRONG
            draw.text((left, top + PICTURE_SIDE + 4 + 16 * line), text, fill=colour)
    with open_atomically(path) as file:
        sheet.save(file, "PNG")


def _paste_picture(sheet: Image.Image, question: Question, place: tuple[int, int]) -> None:
    if pictures := pictures_of(question.prompt):
        with Image.open(pictures[0]) as picture:
            upright = ImageOps.exif_transpose(picture).convert("RGB")
            sheet.paste(upright.resize((PICTURE_SIDE, PICTURE_SIDE)), place)


def _lines(question: Question, answer: str) -> tuple[bool, list[str]]:
    reference = question.reference or ""
    is_right = bool(exact_match(answer, reference))
    lines = [text_of(question.prompt[-1]), answer]
    lines += [] if is_right else [f"expected: {reference}"]
    return is_right, [" ".join(line.split())[:CHARACTERS] for line in lines]
