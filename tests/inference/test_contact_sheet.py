"""The sheet of answers: what is on it, and in which fonts."""

from pathlib import Path

import numpy as np
import pytest
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
def fonts_here(tmp_path, monkeypatch):
    """The fonts of the machine are DejaVu Sans, a damaged file, and STIX, which alone has Ⓐ."""
    own = sheet_fonts._files()[0]
    (tmp_path / "damaged.ttf").write_bytes(b"no font")
    others = [str(tmp_path / "damaged.ttf"), own.replace("DejaVuSans", "STIXGeneral")]
    monkeypatch.setattr(sheet_fonts, "_files", lambda: [own, *others])
    kept = sheet_fonts._face, sheet_fonts._face_of
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


def test_right_answers_are_green_others_red_and_pictures_have_their_own_shape(picture, tmp_path):
    rows = [asked(1, "HIL", picture("orange", (300, 100)), picture("blue", (50, 150)))]
    rows.append(asked(2, "一\n二"))
    draw_sheet(rows, ["HIL", "HI\nL"], tmp_path / "sheet.png")
    sheet = Image.open(tmp_path / "sheet.png")
    colours = {colour for _, colour in sheet.getcolors(1 << 20)}
    # Letters have soft edges.
    assert any(green > red + 80 and blue > 20 for red, green, blue in colours)
    assert any(red > green + 80 and blue > 20 for red, green, blue in colours)
    for colour, ratio in (((255, 165, 0), 3), ((0, 0, 255), 1 / 3)):
        box = Image.fromarray((np.asarray(sheet) == colour).all(-1)).getbbox()
        assert (box[2] - box[0]) / (box[3] - box[1]) == pytest.approx(ratio, rel=0.05)


def test_many_rows_are_spread_and_wrong_answers_come_first(picture, tmp_path, written):
    rows = [asked(row, "a") for row in range(100)]
    rows[7] = asked(7, "a", picture("orange"), picture("blue"))
    draw_sheet(rows, ["b" if row in (7, 90) else "a" for row in range(100)], tmp_path / "s.png")
    names = [text for text in written if text.startswith("row ")]
    assert names[0] == "row 7, orange.png, blue.png"
    shown = [int(name[4:].partition(",")[0]) for name in names]
    assert shown[:2] == [7, 90] and len(shown) == MOST_CELLS
    assert shown[2:] == sorted(shown[2:]) and shown[2] < 5 and shown[-1] > 90
    assert written[-1].startswith(f"98 of 100 answers are the reference; {MOST_CELLS} rows")


@pytest.mark.usefixtures("fonts_here")
def test_a_character_is_drawn_in_the_font_that_has_it_or_as_its_code_point():
    fonts = Fonts()
    drawn = fonts.draw_lines([("Ⓐ", BLACK)], 200, 1)
    assert fonts.missing == set() and drawn.getbbox() is not None
    as_code = fonts.draw_lines([("文", BLACK)], 200, 1)
    assert fonts.missing == {"文"}
    assert as_code.tobytes() == Fonts().draw_lines([("U+6587", BLACK)], 200, 1).tobytes()
    assert drawn.tobytes() != Fonts().draw_lines([("U+24B6", BLACK)], 200, 1).tobytes()
    # Long texts are broken where the cell ends.
    for text in ("words " * 100, "A" * 300, "Ⓐ" * 190):
        lines = fonts._wrap(text, 280, 4)
        assert len(lines) == 4 and lines[-1].endswith("…")
        assert all(200 < sheet_fonts._length(line) <= 280 for line in lines)
    # A joiner between characters is none that lacks a font.
    fonts.draw_lines([("Ⓐ\u200dⒶ\ufe0f", BLACK)], 200, 1)
    assert fonts.missing == {"文"}
