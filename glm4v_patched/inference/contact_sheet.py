"""The contact sheet: images with question, answer and reference, to be looked at."""

import math
import textwrap
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from ..atomic import open_atomically
from ..data.messages import images_of, text_of
from ..terminal_text import listed
from .questions import Question, spread
from .scoring import exact_match

COLUMNS, MOST_CELLS = 4, 24
# Pixels. Letters of the font are as wide as each other, and CHARACTERS of them fill a cell.
CELL_WIDTH, IMAGES_HEIGHT, MARGIN, LINE_HEIGHT, DPI = 280, 150, 10, 18, 100
FONT, FONT_POINTS, CHARACTERS = "DejaVu Sans Mono", 8, 38  # matplotlib's own
MOST_LINES = 4  # of a question, or of an answer
GRAY, BLACK, RIGHT, WRONG = "#6e6e6e", "#000000", "#14823c", "#be1e1e"
MISSING = "\N{WHITE SQUARE}"
Lines = list[tuple[str, str]]  # texts and their colors


def draw_sheet(
    questions: Sequence[Question],
    answers: Sequence[str],
    path: Path,
    rows: Sequence[int | str] | None = None,
) -> None:
    """Draw up to 24 of the rows: first those whose answer is not the reference, spread evenly.

    Of each: its images in their own shape, its row, their files, the question, and the answer in
    green if it is the reference, or else in red with the reference below. A character that no
    installed font has is a square, and the first lines say which.
    """
    names = [question.row for question in questions] if rows is None else rows
    triples = list(zip(questions, answers, names, strict=True))
    right = [triple for triple in triples if _is_right(*triple[:2])]
    shown = spread([triple for triple in triples if not _is_right(*triple[:2])], MOST_CELLS)
    shown += spread(right, MOST_CELLS - len(shown))
    title = f"{len(right):,} of {len(triples):,} answers are the reference"
    if len(shown) < len(triples):
        title += f"; {len(shown)} rows are shown, those with other answers first"
    # In a thread: matplotlib's parser of fonts keeps errors that it caught, and with them all that
    # called it: in a training its frames, with the model.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_draw, title, shown, path).result()


def _is_right(question: Question, answer: str) -> bool:
    return bool(exact_match(answer, question.reference or ""))


def _draw(title: str, shown: Sequence[tuple[Question, str, int | str]], path: Path) -> None:
    from matplotlib.figure import Figure

    cells = [lines_of(*triple) for triple in shown]
    families, missing = fonts_for("".join(text for cell in cells for text, _ in cell))
    head = wrap([(title, BLACK)], COLUMNS * CHARACTERS)
    if missing:
        codes = listed([f"U+{ord(character):04X}" for character in sorted(missing)])
        hint = f"no font here has {codes}: install one that does, as fonts-noto-cjk for Chinese"
        head += wrap([(hint, WRONG)], COLUMNS * CHARACTERS)
    cells = [
        wrap([(_without(missing, text), color) for text, color in cell], CHARACTERS)
        for cell in cells
    ]
    has_images = any(images_of(question.prompt) for question, *_ in shown)
    top = MARGIN + len(head) * LINE_HEIGHT + MARGIN
    texts_at = IMAGES_HEIGHT if has_images else 0
    cell_height = texts_at + (max(map(len, cells), default=0) + 1) * LINE_HEIGHT
    width = COLUMNS * (CELL_WIDTH + MARGIN) + MARGIN
    height = top + math.ceil(len(cells) / COLUMNS) * cell_height
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    _write(figure, head, MARGIN, MARGIN, families)
    for place, ((question, *_), cell) in enumerate(zip(shown, cells, strict=True)):
        left = MARGIN + place % COLUMNS * (CELL_WIDTH + MARGIN)
        upper = top + place // COLUMNS * cell_height
        _draw_images(figure, images_of(question.prompt), left, upper)
        _write(figure, cell, left, upper + texts_at, families)
    with open_atomically(path) as file:
        figure.savefig(file, format="png")


def lines_of(question: Question, answer: str, row: int | str) -> Lines:
    """Return what a cell says, a text for each kind of line."""
    files = [Path(image).name for image in images_of(question.prompt)]
    lines = [(", ".join([f"row {row}", *files]), GRAY), (text_of(question.prompt[-1]), BLACK)]
    if _is_right(question, answer):
        return [*lines, (answer, RIGHT)]
    return [*lines, (answer, WRONG), (f"expected: {question.reference or ''}", BLACK)]


def wrap(texts: Lines, characters: int) -> Lines:
    """Return the first lines of each text; a wide character, as Chinese has, counts as two."""
    lines = []
    for text, color in texts:
        padded = "".join(f"{c}\0" if unicodedata.east_asian_width(c) in "WF" else c for c in text)
        wrapped = textwrap.wrap(padded, characters, max_lines=MOST_LINES, placeholder=" …")
        lines += [(line.replace("\0", ""), color) for line in wrapped]
    return lines


def fonts_for(text: str) -> tuple[list[str], set[str]]:
    """Return families of installed fonts that have the characters, and those that none has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager
    from matplotlib.ft2font import FT2Font

    own = FT2Font(findfont(FontProperties(family=FONT))).get_charmap()
    missing = {c for c in text if not c.isspace() and not _is_invisible(c) and ord(c) not in own}
    families = [FONT]
    # Not matplotlib's font that has a box for every character there is.
    others = (font for font in fontManager.ttflist if "LastResort" not in font.fname)
    for font in sorted(others, key=lambda font: ("DejaVu" not in font.name, font.name)):
        if not missing:
            break
        with suppress(RuntimeError, OSError):  # of a damaged file, or of images in one size
            there = FT2Font(font.fname).get_charmap()
            if has := {c for c in missing if ord(c) in there}:
                families.append(font.name)
                missing -= has
    return families, missing


def _is_invisible(character: str) -> bool:
    """Whether it is a joiner, a mark of direction or a variation selector."""
    return unicodedata.category(character) in ("Cf", "Cc") or "\ufe00" <= character <= "\ufe0f"


def _without(missing: set[str], text: str) -> str:
    """Return the text without what is invisible, and with squares for missing characters."""
    visible = (c for c in text if c.isspace() or not _is_invisible(c))
    return "".join(MISSING if c in missing else c for c in visible)


def _write(figure: Any, lines: Lines, left: int, upper: int, families: list[str]) -> None:
    width, height = figure.get_size_inches() * DPI
    for number, (line, color) in enumerate(lines):
        place = left / width, 1 - (upper + number * LINE_HEIGHT) / height
        look = {"family": families, "size": FONT_POINTS, "color": color, "va": "top"}
        figure.text(*place, line, parse_math=False, **look)


def _draw_images(figure: Any, paths: Sequence[str], left: int, upper: int) -> None:
    """Draw all images of a row upright, apart from each other and each in a frame."""
    width, height = figure.get_size_inches() * DPI
    columns = math.ceil(math.sqrt(len(paths)))
    for place, path in enumerate(paths):
        box = CELL_WIDTH // columns, IMAGES_HEIGHT // math.ceil(len(paths) / columns)
        size = box[0] - MARGIN, box[1] - MARGIN
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        x, y = left + place % columns * box[0], upper + place // columns * box[1]
        bounds = x / width, 1 - (y + size[1]) / height, size[0] / width, size[1] / height
        axes = figure.add_axes(bounds, anchor="NW", xticks=[], yticks=[])
        axes.imshow(ImageOps.contain(upright, size))
