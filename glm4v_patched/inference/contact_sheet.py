"""The contact sheet: a PNG of images with their question, answer and reference, for people."""

import math
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from ..atomic import open_atomically
from ..data.boxes import Box
from ..data.messages import images_of, text_of
from ..terminal_text import listed
from .grounding import box_iou, boxes_to_compare
from .questions import Question, evenly_spaced
from .scoring import exact_match

SHEET_COLUMNS, MAX_CELLS = 4, 24
# In pixels, except DPI. CELL_CHARACTERS is how many monospaced letters fill a cell's width.
CELL_WIDTH, IMAGES_HEIGHT, MARGIN, LINE_HEIGHT, DPI = 280, 150, 10, 18, 100
FONT, FONT_POINTS, CELL_CHARACTERS = "DejaVu Sans Mono", 8, 38  # ships with matplotlib
MAX_LINES = 4  # of a question or an answer
GRAY, BLACK, GREEN, RED = "#6e6e6e", "#000000", "#14823c", "#be1e1e"
MISSING_GLYPH = "\N{WHITE SQUARE}"
ColoredTexts = list[tuple[str, str]]  # texts and their colors


def draw_sheet(
    questions: Sequence[Question],
    answers: Sequence[str],
    path: Path,
    rows: Sequence[int | str] | None = None,
) -> None:
    """Draw up to 24 rows, evenly spaced; rows whose answer is not the reference come first.

    Each cell has the images in their own aspect ratio, the row number, file names, question and
    answer. The answer is green if it equals the reference; otherwise it is red, with the reference
    below it. If a row has one image and its reference has boxes (in thousandths), the reference's
    boxes are drawn in green and the answer's in red. Characters that no installed font has become
    squares, and the sheet's first lines name them.

    Args:
        path: PNG file to write.
        rows: Names of the rows, in place of the questions' row numbers.
    """
    names = [question.row for question in questions] if rows is None else rows
    triples = list(zip(questions, answers, names, strict=True))
    right = [triple for triple in triples if _is_right(*triple[:2])]
    wrong = [triple for triple in triples if not _is_right(*triple[:2])]
    cells = evenly_spaced(wrong, MAX_CELLS)
    cells += evenly_spaced(right, MAX_CELLS - len(cells))
    title = f"{len(right):,} of {len(triples):,} answers equal the reference"
    if len(cells) < len(triples):
        title += f"; {len(cells)} rows are shown, wrong answers first"
    # Drawn in a thread: matplotlib's font parser keeps caught errors, whose tracebacks would keep
    # the frames of our callers alive. In training, these frames hold the model.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_draw_file, title, cells, path).result()


def _is_right(question: Question, answer: str) -> bool:
    return bool(exact_match(answer, question.reference or ""))


def _draw_file(title: str, rows: Sequence[tuple[Question, str, int | str]], path: Path) -> None:
    from matplotlib.figure import Figure

    cells = [cell_lines(*triple) for triple in rows]
    families, missing = find_fonts("".join(text for cell in cells for text, _ in cell))
    boxes = [_boxes_to_draw(question, answer) for question, answer, _ in rows]
    title += "; boxes: green is expected, red is answered" * any(boxes)
    header = wrap([(title, BLACK)], SHEET_COLUMNS * CELL_CHARACTERS)
    if missing:
        codes = listed([f"U+{ord(character):04X}" for character in sorted(missing)])
        hint = (
            f"no installed font has {codes}: install one that does, such as fonts-noto-cjk for "
            "Chinese"
        )
        header += wrap([(hint, RED)], SHEET_COLUMNS * CELL_CHARACTERS)
    cells = [
        wrap([(_drawable(text, missing), color) for text, color in cell], CELL_CHARACTERS)
        for cell in cells
    ]
    has_images = any(images_of(question.prompt) for question, *_ in rows)
    top = MARGIN + len(header) * LINE_HEIGHT + MARGIN
    images_height = IMAGES_HEIGHT if has_images else 0
    cell_height = images_height + (max(map(len, cells), default=0) + 1) * LINE_HEIGHT
    width = SHEET_COLUMNS * (CELL_WIDTH + MARGIN) + MARGIN
    height = top + math.ceil(len(cells) / SHEET_COLUMNS) * cell_height
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    _draw_lines(figure, header, MARGIN, MARGIN, families)
    for index, ((question, *_), cell) in enumerate(zip(rows, cells, strict=True)):
        x = MARGIN + index % SHEET_COLUMNS * (CELL_WIDTH + MARGIN)
        y = top + index // SHEET_COLUMNS * cell_height
        _draw_images(figure, images_of(question.prompt), x, y, boxes[index])
        _draw_lines(figure, cell, x, y + images_height, families)
    with open_atomically(path) as file:
        figure.savefig(file, format="png")


def cell_lines(question: Question, answer: str, row: int | str) -> ColoredTexts:
    """Return a cell's texts: row and files, question, answer, and a reference that differs."""
    names = [f"row {row}", *(Path(image).name for image in images_of(question.prompt))]
    if _boxes_to_draw(question, answer):
        names.append(f"IoU {box_iou(answer, question.reference or ''):.2f}")
    lines = [(", ".join(names), GRAY), (text_of(question.prompt[-1]), BLACK)]
    if _is_right(question, answer):
        return [*lines, (answer, GREEN)]
    return [*lines, (answer, RED), (f"expected: {question.reference or ''}", BLACK)]


def _boxes_to_draw(question: Question, answer: str) -> list[tuple[Box, str]]:
    """Return the boxes of reference and answer, with colors, if the reference has boxes."""
    reference = question.reference or ""
    expected = [(box, GREEN) for box in boxes_to_compare(reference, reference)]
    # The reference's boxes are drawn last, so that a box that both have is green.
    return expected and [(box, RED) for box in boxes_to_compare(answer, reference)] + expected


def wrap(texts: ColoredTexts, characters: int) -> ColoredTexts:
    """Return up to :data:`MAX_LINES` lines of each text; wide (Chinese) characters count as two."""
    lines = []
    for text, color in texts:
        two_wide = "".join(f"{c}\0" if unicodedata.east_asian_width(c) in "WF" else c for c in text)
        wrapped = textwrap.wrap(two_wide, characters, max_lines=MAX_LINES, placeholder=" …")
        lines += [(line.replace("\0", ""), color) for line in wrapped]
    return lines


def find_fonts(text: str) -> tuple[list[str], set[str]]:
    """Return installed font families that cover the text, and the characters that none has."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    own = FT2Font(findfont(FontProperties(family=FONT))).get_charmap()
    missing = {c for c in text if not c.isspace() and not _is_invisible(c) and ord(c) not in own}
    families = [FONT]
    for font in _installed_fonts() if missing else ():
        if not missing:
            break
        with suppress(RuntimeError, OSError):  # a damaged file or a bitmap font
            charmap = FT2Font(font.fname).get_charmap()
            if covered := {c for c in missing if ord(c) in charmap}:
                families.append(font.name)
                missing -= covered
    return families, missing


def _installed_fonts() -> Iterator[Any]:
    """Yield the fonts in matplotlib's list, then those that were installed after it was made."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    fonts = fontManager.ttflist
    # Skip LastResort, which ships with matplotlib and has only a box for every character.
    usable = (font for font in fonts if "LastResort" not in font.fname)
    yield from sorted(usable, key=lambda font: ("DejaVu" not in font.name, font.name))
    for path in sorted({*findSystemFonts()} - {font.fname for font in fonts}):
        number = len(fonts)
        with suppress(Exception):  # of a damaged file, any kind
            fontManager.addfont(path)
        yield from fonts[number:]


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
    for number, (line, color) in enumerate(lines):
        position = x / width, 1 - (y + number * LINE_HEIGHT) / height
        style = {"family": families, "size": FONT_POINTS, "color": color, "va": "top"}
        figure.text(*position, line, parse_math=False, **style)


def _draw_images(
    figure: Any, paths: Sequence[str], cell_x: int, cell_y: int, boxes: list[tuple[Box, str]]
) -> None:
    """Draw all images of a row in a grid, upright and framed; if there is only one, with boxes."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    halo = withStroke(linewidth=2.5, foreground="white")  # boxes are seen on any background
    width, height = figure.get_size_inches() * DPI
    columns = math.ceil(math.sqrt(len(paths)))
    for index, path in enumerate(paths):
        slot = CELL_WIDTH // columns, IMAGES_HEIGHT // math.ceil(len(paths) / columns)
        size = slot[0] - MARGIN, slot[1] - MARGIN
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        x, y = cell_x + index % columns * slot[0], cell_y + index // columns * slot[1]
        bounds = x / width, 1 - (y + size[1]) / height, size[0] / width, size[1] / height
        axes = figure.add_axes(bounds, anchor="NW", xticks=[], yticks=[])
        thumbnail = ImageOps.contain(upright, size)
        # Coordinates are thousandths, as those of boxes.
        aspect = thumbnail.height / thumbnail.width
        axes.imshow(thumbnail, extent=(0, 1000, 1000, 0), aspect=aspect)
        for box, color in boxes if len(paths) == 1 else ():
            extent = box.right - box.left, box.bottom - box.top
            outline = Rectangle(box[:2], *extent, fill=False, edgecolor=color, linewidth=1.5)
            outline.set_path_effects([halo])
            axes.add_patch(outline)
