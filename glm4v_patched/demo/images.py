"""Draws the demo's data set: one colored shape an image, and a question about it."""

import random
from pathlib import Path

from PIL import Image, ImageDraw

COLORS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 88, 200),
    "yellow": (240, 210, 30),
    "purple": (148, 60, 189),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTIONS = {
    "Which color is it?": "{color}",
    "Which shape is it?": "{shape}",
    "What do you see?": "a {color} {shape}",
}


def draw_data_set(folder: Path, number: int, seed: int, side: int) -> list[list[dict]]:
    """Draw ``number`` images as PNG files of ``side`` pixels, one conversation about each."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    conversations = []
    for index in range(number):
        color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
        question = rng.choice(list(QUESTIONS))
        path = folder / f"{index:05}.png"
        draw_shape(color, shape, side, rng).save(path)
        answer = QUESTIONS[question].format(color=color, shape=shape)
        conversations.append(
            [
                {"role": "user", "image": str(path), "content": question},
                {"role": "assistant", "content": answer},
            ]
        )
    return conversations


def draw_shape(color: str, shape: str, side: int, rng: random.Random) -> Image.Image:
    """A shape of random size and place on a dark ground."""
    ground = tuple(rng.randint(0, 40) for _ in range(3))
    image = Image.new("RGB", (side, side), ground)
    draw = ImageDraw.Draw(image)
    size = rng.uniform(0.82, 0.92) * side
    left, top = (rng.uniform(0.05, 0.95) * (side - size) for _ in range(2))
    right, bottom = left + size, top + size
    fill = COLORS[color]
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=fill)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=fill)
    elif shape == "triangle":
        draw.polygon([(left + size / 2, top), (left, bottom), (right, bottom)], fill=fill)
    else:
        arm = size / 3
        draw.rectangle((left, top + arm, right, bottom - arm), fill=fill)
        draw.rectangle((left + arm, top, right - arm, bottom), fill=fill)
    return image
