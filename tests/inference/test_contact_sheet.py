"""The sheet of answers: what is on it, and in which fonts."""

import sys
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

from glm4v_patched.inference import sheet_fonts
from glm4v_patched.inference.contact_sheet import MOST_CELLS, draw_sheet
from glm4v_patched.inference.questions import Question
from glm4v_patched.inference.sheet_fonts import Fonts

BLACK = (0, 0, 0)


def asked(row: int, reference: str, *pictures: Path) -> Question:
    parts = [{"type": "image", "image": str(picture)} for picture in pictures]
    return Question(
        row, [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}], reference
    )


@pytest.fixture
def picture(tmp_path):
    def paint(colour: str, size: tuple[int, int] = (8, 8)) -> Path:
        Image.new("RGB", size, colour).save(tmp_path / f"{colour}.png")
        return tmp_path / f"{colour}.png"

    return paint


@pytest.fixture
def written(monkeypatch) -> list[str]:
    """What is written on a sheet, in order."""
    texts: list[str] = []
    draw = Fonts.draw_lines

    def record(self, lines, *rest):
        texts.extend(text for text, _ in lines)
        return draw(self, lines, *rest)

    monkeypatch.setattr(Fonts, "draw_lines", record)
    return texts


@pytest.fixture
def font_with(tmp_path, monkeypatch):
    """The fonts of the machine are DejaVu Sans, a damaged file, and one with these characters."""

    def install(characters: str) -> None:
        pen = TTGlyphPen(None)
        for place in ((100, 0), (100, 700), (800, 700), (800, 0)):
            (pen.lineTo if place != (100, 0) else pen.moveTo)(place)
        pen.closePath()
        square, names = pen.glyph(), [f"u{ord(character):X}" for character in characters]
        builder = FontBuilder(1000)
        builder.setupGlyphOrder([".notdef", *names])
        builder.setupCharacterMap(dict(zip(map(ord, characters), names, strict=True)))
        builder.setupGlyf({name: square for name in (".notdef", *names)})
        builder.setupHorizontalMetrics({name: (1000, 100) for name in (".notdef", *names)})
        builder.setupHorizontalHeader(ascent=800, descent=-200)
        builder.setupNameTable({"familyName": "Squares"})
        builder.setupOS2()
        builder.setupPost()
        builder.save(tmp_path / "squares.ttf")
        (tmp_path / "damaged.ttf").write_bytes(b"no font")
        own = sheet_fonts._files()[0]
        found = [own, str(tmp_path / "damaged.ttf"), str(tmp_path / "squares.ttf")]
        monkeypatch.setattr(sheet_fonts, "_files", lambda: found)
        sheet_fonts._face.cache_clear()
        sheet_fonts._face_of.cache_clear()

    yield install
    sheet_fonts._face.cache_clear()
    sheet_fonts._face_of.cache_clear()


def box_of(path: Path, colour: tuple[int, int, int]) -> tuple[int, int, int, int] | None:
    return Image.fromarray((np.asarray(Image.open(path)) == colour).all(-1)).getbbox()


def test_right_answers_are_green_and_others_are_red(picture, tmp_path):
    rows = [asked(1, "HIL", picture("orange")), asked(2, "一\n二")]
    draw_sheet(rows, ["HIL", "HI\nL"], tmp_path / "sheet.png")
    colours = {colour for _, colour in Image.open(tmp_path / "sheet.png").getcolors(1 << 20)}
    # Letters have soft edges.
    assert any(green > red + 80 for red, green, _ in colours)
    assert any(red > green + 80 and blue > 20 for red, green, blue in colours)


def test_all_pictures_of_a_question_are_shown_in_their_own_shape(picture, tmp_path):
    rows = [asked(1, "a", picture("orange", (300, 100)), picture("blue", (50, 150)))]
    draw_sheet(rows, ["a"], tmp_path / "sheet.png")
    for colour, ratio in (((255, 165, 0), 3), ((0, 0, 255), 1 / 3)):
        left, top, right, bottom = box_of(tmp_path / "sheet.png", colour)
        assert (right - left) / (bottom - top) == pytest.approx(ratio, rel=0.05)


def test_rows_and_files_are_named_and_wrong_answers_come_first(picture, tmp_path, written):
    rows = [asked(row, "a", picture("orange"), picture("blue")) for row in (1, 2, 3)]
    draw_sheet(rows, ["a", "b", "a"], tmp_path / "sheet.png")
    names = [text for text in written if text.startswith("row")]
    assert names == [f"row {row}, orange.png, blue.png" for row in (2, 1, 3)]
    assert "2 of 3 answers are the reference" in written


def test_many_rows_are_spread_and_say_how_many_there_are(tmp_path, written):
    rows = [asked(row, "a") for row in range(100)]
    draw_sheet(rows, ["b" if row in (7, 90) else "a" for row in range(100)], tmp_path / "s.png")
    shown = [int(text[4:]) for text in written if text.startswith("row ")]
    assert shown[:2] == [7, 90] and len(shown) == MOST_CELLS
    assert shown[2:] == sorted(shown[2:]) and shown[2] < 5 and shown[-1] > 90
    assert f"; {MOST_CELLS} rows are shown" in written[-1]


def test_a_character_is_drawn_in_the_font_that_has_it_or_as_its_code_point(font_with):
    font_with("中")
    fonts = Fonts()
    drawn = fonts.draw_lines([("中", BLACK)], 200, 1)
    assert fonts.missing == set() and drawn.getbbox() is not None
    as_code = fonts.draw_lines([("文", BLACK)], 200, 1)
    assert fonts.missing == {"文"}
    assert as_code.tobytes() == Fonts().draw_lines([("U+6587", BLACK)], 200, 1).tobytes()
    assert drawn.tobytes() != Fonts().draw_lines([("U+4E2D", BLACK)], 200, 1).tobytes()
    # A joiner between characters is none that lacks a font.
    fonts.draw_lines([("中\u200d中\ufe0f", BLACK)], 200, 1)
    assert fonts.missing == {"文"}


def test_without_matplotlib_there_is_pillows_own_font(monkeypatch):
    for name in ("_files", "_face_of", "_pillows_own"):
        getattr(sheet_fonts, name).cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fonts = Fonts()
    try:
        assert fonts.draw_lines([("words é", BLACK)], 200, 2).size == (200, 18)
    finally:
        for name in ("_files", "_face_of"):
            getattr(sheet_fonts, name).cache_clear()
    assert fonts.missing == {"é"}


@pytest.mark.parametrize("text", ["words " * 100, "A" * 300, "中" * 90])
def test_long_texts_are_broken_where_the_cell_ends(font_with, text):
    font_with("中…")
    lines = Fonts()._wrap(text, 280, 4)
    assert len(lines) == 4 and lines[-1].endswith("…")
    assert all(sheet_fonts._length(line) <= 280 for line in lines)
    assert all(sheet_fonts._length(line) > 200 for line in lines)
