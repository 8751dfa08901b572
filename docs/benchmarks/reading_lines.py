"""Draw lines of made-up text as small images, for :mod:`reading_task`. Imports no torch.

A line is a word of alternating random consonants and vowels, and may end in a number, so it cannot
be guessed. The fonts are the twelve text faces of DejaVu, which matplotlib includes.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

OBLIQUE = ("", "-Bold", "-Oblique", "-BoldOblique")
FACES = {
    "DejaVuSans": OBLIQUE,
    "DejaVuSansMono": OBLIQUE,
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
}
DIGITS = "0123456789"
QUESTION = "Read."
# In pixels.
SIZES_OF_FONTS = 22, 30
MARGINS = 3, 10
DOWN = 8
ROWS_A_TASK = 500
# There are too few shorter lines: many of them occur several times.
SHORTEST_HELD_OUT = 5
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Script:
    """The letters of words; those of ``last`` may end a word."""

    consonants: str
    vowels: str
    last: str

    @property
    def characters(self) -> str:
        return "".join(dict.fromkeys(self.consonants + self.vowels + self.last + DIGITS))


SCRIPTS = {
    "latin": Script("bcdfghjklmnpqrstvwxz", "aeiouy", "nrst"),
    "greek": Script("βγδζθκλμνξπρστφχψ", "αεηιουω", "νς"),
}


@dataclass(frozen=True)
class Share:
    """A part of a data set: ``rows`` lines of ``shortest`` to ``longest`` characters."""

    rows: int
    script: str
    shortest: int
    longest: int
    plain: float = 0.0
    """Share of the lines that are drawn without noise, see :func:`draw_line`."""
    held_out: bool = False
    """Whether :func:`is_held_out` is true for its lines, or false."""


def make_text(script: Script, length: int, rng: random.Random) -> str:
    """Return a word of ``length`` characters; from 4 on, one in six ends in a number."""
    if length == 1:
        return rng.choice(script.characters)
    digits = rng.randint(1, 3) if length >= 4 and rng.random() < 1 / 6 else 0
    begin = rng.randrange(2)
    word = [
        rng.choice(script.vowels if index % 2 else script.consonants)
        for index in range(begin, begin + length - digits)
    ]
    if length >= 3 and not digits and rng.random() < 0.3:
        word[-1] = rng.choice(script.last)
    return "".join([*word, *rng.choices(DIGITS, k=digits)])


def is_held_out(text: str) -> bool:
    """Return whether a line is reserved for the evaluation."""
    digest = hashlib.sha256(text.encode()).digest()
    return (
        len(text) >= SHORTEST_HELD_OUT and int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0
    )


@cache
def font_files() -> tuple[str, ...]:
    from matplotlib import get_data_path

    folder = Path(get_data_path(), "fonts", "ttf")
    return tuple(str(folder / f"{name}{face}.ttf") for name in FACES for face in FACES[name])


@cache
def font(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


def draw_line(text: str, side: int, rng: random.Random, plain: bool = False) -> Image.Image:
    """Draw a line on a gray square of ``side`` pixels, at a random position near the middle left.

    Args:
        plain: Draw black on white, without blur and noise.
    """
    file = rng.choice(font_files())
    margin = rng.uniform(*MARGINS)
    size = int(rng.uniform(*SIZES_OF_FONTS))
    while font(file, size).getbbox(text)[2] > side - margin - MARGINS[0]:
        size -= 1
    face = font(file, size)
    background, ink = 255, 0
    if not plain:
        dark, bright = rng.randint(0, 80), rng.randint(175, 255)
        background, ink = (bright, dark) if rng.random() < 0.8 else (dark, bright)
    image = Image.new("L", (side, side), background)
    height = side / 2 + rng.uniform(-DOWN, DOWN)
    ImageDraw.Draw(image).text((margin, height), text, font=face, fill=ink, anchor="lm")
    if plain:
        return image
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.7)))
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0, 10), (side, side))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def draw_rows(share: Share, seed: int, folder: Path, side: int) -> list[dict]:
    """Draw a share as JPEG files in ``folder``, and return its conversations."""
    rng, rows = random.Random(seed), []
    for number in range(share.rows):
        while True:
            length = rng.randint(share.shortest, share.longest)
            text = make_text(SCRIPTS[share.script], length, rng)
            if is_held_out(text) == share.held_out:
                break
        name = f"{folder.name}/{seed}-{number}.jpg"
        image = draw_line(text, side, rng, plain=rng.random() < share.plain)
        image.save(folder.parent / name, quality=85)
        user = {"role": "user", "image": name, "content": QUESTION}
        rows.append({"messages": [user, {"role": "assistant", "content": text}]})
    return rows


def draw_set(file: Path, shares: Sequence[Share], seed: int, side: int, processes: int) -> int:
    """Write a data set of shuffled shares: a JSONL file, and a folder of images beside it.

    Returns:
        The number of rows.

    Raises:
        ValueError: a held-out share has lines that are too short.
    """
    folder = file.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    tasks = []
    for share in shares:
        if share.held_out and share.shortest < SHORTEST_HELD_OUT:
            raise ValueError(
                f"lines of {share.shortest} characters cannot be held out; expected at least "
                f"{SHORTEST_HELD_OUT}"
            )
        for start in range(0, share.rows, ROWS_A_TASK):
            number = min(ROWS_A_TASK, share.rows - start)
            tasks.append(Share(**vars(share) | {"rows": number}))
    seeds = [seed * 10**6 + index for index in range(len(tasks))]
    rest = [folder] * len(tasks), [side] * len(tasks)
    if processes == 1:
        rows = [row for share_rows in map(draw_rows, tasks, seeds, *rest) for row in share_rows]
    else:
        # Spawned, because this process may have threads.
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            results = pool.map(draw_rows, tasks, seeds, *rest)
            rows = [row for share_rows in results for row in share_rows]
    random.Random(seed).shuffle(rows)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8")  # written last: if it exists, so do all images
    return len(rows)
