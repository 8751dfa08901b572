"""The contact sheet: a PNG of images with their question, answer and reference, for people."""

import math
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageOps

from ..atomic import open_atomically
from ..data.boxes import Box
from ..data.messages import images_of, text_of
from ..terminal_text import listed
from .grounding import box_iou, boxes_to_compare
from .questions import Question, evenly_spaced
from .scoring import exact_match

SHEET_COLUMNS, MAX_CELLS = 4, 24
# In pixels, except DPI.
CELL_WIDTH, IMAGES_HEIGHT, MARGIN, LINE_HEIGHT, DPI = 280, 150, 10, 18, 100
FONT, FONT_POINTS = "DejaVu Sans Mono", 8  # ships with matplotlib
CELL_CHARACTERS = 38  # of this font in a cell's width
MAX_LINES = 4  # of a question or an answer
GRAY, BLACK, GREEN, RED = "#6e6e6e", "#000000", "#14823c", "#be1e1e"
MISSING_GLYPH = "\N{WHITE SQUARE}"
ColoredTexts = list[tuple[str, str]]  # texts and their colors


class _Row(NamedTuple):
    question: Question
    answer: str
    name: int | str


def draw_sheet(
    questions: Sequence[Question],
    answers: Sequence[str],
    path: Path,
    row_names: Sequence[int | str] | None = None,
) -> None:
    """Draw up to 24 rows, evenly spaced; rows whose answer is not the reference come first.

    Each cell has the images in their own aspect ratio, the row number, file names, question and
    answer. The answer is green if it equals the reference; otherwise it is red, with the reference
    below it. If a row has one image and its reference has boxes (in thousandths), the reference's
    boxes are drawn in green and the answer's in red. A square stands for each character that is in
    no installed font. The sheet's first lines list these characters.

    Args:
        path: PNG file to write.
        row_names: Names to show in place of the questions' row numbers.
    """
    names = [question.row for question in questions] if row_names is None else row_names
    right: list[_Row] = []
    wrong: list[_Row] = []
    for question, answer, name in zip(questions, answers, names, strict=True):
        group = right if _is_right(question, answer) else wrong
        group.append(_Row(question, answer, name))
    selected = evenly_spaced(wrong, MAX_CELLS)
    selected += evenly_spaced(right, MAX_CELLS - len(selected))
    title = f"{len(right):,} of {len(questions):,} answers equal the reference"
    if len(selected) < len(questions):
        title += f"; {len(selected)} rows are shown, wrong answers first"
    # In a thread of its own, because matplotlib's font parser keeps caught exceptions. Their
    # tracebacks would keep our callers' frames alive, which hold the model during training.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_draw_file, title, selected, path).result()


def _is_right(question: Question, answer: str) -> bool:
    return bool(exact_match(answer, question.reference or ""))


def _draw_file(title: str, rows: Sequence[_Row], path: Path) -> None:
    from matplotlib.figure import Figure

    texts = [cell_texts(*row) for row in rows]
    families, missing = find_fonts("".join(text for cell in texts for text, _ in cell))
    boxes = [_boxes_to_draw(row.question, row.answer) for row in rows]
    if any(boxes):
        title += "; boxes: green is expected, red is answered"
    header = wrap([(title, BLACK)], SHEET_COLUMNS * CELL_CHARACTERS)
    if missing:
        codes = listed([f"U+{ord(character):04X}" for character in sorted(missing)])
        advice = (
            f"no installed font has {codes}: install a font that does, such as fonts-noto-cjk for "
            "Chinese"
        )
        header += wrap([(advice, RED)], SHEET_COLUMNS * CELL_CHARACTERS)
    cells = [
        wrap([(_drawable(text, missing), color) for text, color in cell], CELL_CHARACTERS)
        for cell in texts
    ]
    has_images = any(images_of(row.question.prompt) for row in rows)
    top = MARGIN + len(header) * LINE_HEIGHT + MARGIN
    images_height = IMAGES_HEIGHT if has_images else 0
    cell_height = images_height + (max(map(len, cells), default=0) + 1) * LINE_HEIGHT
    width = SHEET_COLUMNS * (CELL_WIDTH + MARGIN) + MARGIN
    height = top + math.ceil(len(cells) / SHEET_COLUMNS) * cell_height
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    _draw_lines(figure, header, MARGIN, MARGIN, families)
    for index, (row, cell) in enumerate(zip(rows, cells, strict=True)):
        x = MARGIN + index % SHEET_COLUMNS * (CELL_WIDTH + MARGIN)
        y = top + index // SHEET_COLUMNS * cell_height
        _draw_images(figure, images_of(row.question.prompt), x, y, boxes[index])
        _draw_lines(figure, cell, x, y + images_height, families)
    with open_atomically(path) as file:
        figure.savefig(file, format="png")


def cell_texts(question: Question, answer: str, row_name: int | str) -> ColoredTexts:
    """Return a cell's texts: row and files, question, answer, and a reference that differs."""
    caption = [f"row {row_name}", *(Path(image).name for image in images_of(question.prompt))]
    if _boxes_to_draw(question, answer):
        caption.append(f"IoU {box_iou(answer, question.reference or ''):.2f}")
    texts = [(", ".join(caption), GRAY), (text_of(question.prompt[-1]), BLACK)]
    if _is_right(question, answer):
        return [*texts, (answer, GREEN)]
    return [*texts, (answer, RED), (f"expected: {question.reference or ''}", BLACK)]


def _boxes_to_draw(question: Question, answer: str) -> list[tuple[Box, str]]:
    """Return the boxes of reference and answer, with colors, if the reference has boxes."""
    reference = question.reference or ""
    expected = [(box, GREEN) for box in boxes_to_compare(reference, reference)]
    if not expected:
        return []
    answered = [(box, RED) for box in boxes_to_compare(answer, reference)]
    return answered + expected  # the expected ones are drawn last, so a box in both is green


def wrap(texts: ColoredTexts, characters: int) -> ColoredTexts:
    """Return up to :data:`MAX_LINES` lines of each text; wide (Chinese) characters count as two."""
    lines = []
    for text, color in texts:
        # A "\0" after each wide character, because textwrap counts characters.
        padded = "".join(f"{c}\0" if unicodedata.east_asian_width(c) in "WF" else c for c in text)
        wrapped = textwrap.wrap(padded, characters, max_lines=MAX_LINES, placeholder=" …")
        lines += [(line.replace("\0", ""), color) for line in wrapped]
    return lines


def find_fonts(text: str) -> tuple[list[str], set[str]]:
    """Return installed font families that cover the text, and the characters that none has."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    default_charmap = FT2Font(findfont(FontProperties(family=FONT))).get_charmap()
    visible = {c for c in text if not c.isspace() and not _is_invisible(c)}
    missing = {c for c in visible if ord(c) not in default_charmap}
    families = [FONT]
    if not missing:
        return families, missing
    for font in _installed_fonts():
        with suppress(RuntimeError, OSError):  # a damaged file or a bitmap font
            charmap = FT2Font(font.fname).get_charmap()
            if added := {c for c in missing if ord(c) in charmap}:
                families.append(font.name)
                missing -= added
        if not missing:
            break
    return families, missing


def _installed_fonts() -> Iterator[Any]:
    """Yield the fonts in matplotlib's list, then fonts that were installed after it was made."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    fonts = fontManager.ttflist
    # Skip LastResort, which ships with matplotlib and has only a box for every character.
    usable = (font for font in fonts if "LastResort" not in font.fname)
    # The fonts of the family DejaVu come first.
    yield from sorted(usable, key=lambda font: ("DejaVu" not in font.name, font.name))
    for path in sorted({*findSystemFonts()} - {font.fname for font in fonts}):
        num_fonts = len(fonts)
        with suppress(Exception):  # a damaged file may raise any exception
            fontManager.addfont(path)
        yield from fonts[num_fonts:]


def _is_invisible(character: str) -> bool:
    """Return whether a character is a control or format character, or a variation selector."""
    return unicodedata.category(character) in ("Cf", "Cc") or "\ufe00" <= character <= "\ufe0f"


def _drawable(text: str, missing: set[str]) -> str:
    """Return the text without invisible characters, and with squares for missing ones."""
    text = "".join(" " if c.isspace() else c for c in text)  # some control characters are spaces
    visible = (c for c in text if not _is_invisible(c))
    return "".join(MISSING_GLYPH if c in missing else c for c in visible)


def _draw_lines(figure: Any, lines: ColoredTexts, x: int, y: int, families: list[str]) -> None:
    width, height = figure.get_size_inches() * DPI
    for index, (line, color) in enumerate(lines):
        position = x / width, 1 - (y + index * LINE_HEIGHT) / height
        style = {"family": families, "size": FONT_POINTS, "color": color, "va": "top"}
        figure.text(*position, line, parse_math=False, **style)


def _draw_images(
    figure: Any, paths: Sequence[str], cell_x: int, cell_y: int, boxes: list[tuple[Box, str]]
) -> None:
    """Draw all images of a row in a grid, upright and framed; if there is only one, with boxes."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    halo = withStroke(linewidth=2.5, foreground="white")  # makes boxes visible on any background
    width, height = figure.get_size_inches() * DPI
    if len(paths) > 1:
        boxes = []
    columns = math.ceil(math.sqrt(len(paths)))
    for index, path in enumerate(paths):
        slot_width = CELL_WIDTH // columns
        slot_height = IMAGES_HEIGHT // math.ceil(len(paths) / columns)
        size = slot_width - MARGIN, slot_height - MARGIN
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        x = cell_x + index % columns * slot_width
        y = cell_y + index // columns * slot_height
        bounds = x / width, 1 - (y + size[1]) / height, size[0] / width, size[1] / height
        axes = figure.add_axes(bounds, anchor="NW", xticks=[], yticks=[])
        thumbnail = ImageOps.contain(upright, size)
        # The axes' coordinates are thousandths, as the boxes' are.
        aspect = thumbnail.height / thumbnail.width
        axes.imshow(thumbnail, extent=(0, 1000, 1000, 0), aspect=aspect)
        for box, color in boxes:
            extent = box.right - box.left, box.bottom - box.top
            outline = Rectangle(box[:2], *extent, fill=False, edgecolor=color, linewidth=1.5)
            outline.set_path_effects([halo])
            axes.add_patch(outline)
