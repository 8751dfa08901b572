"""The demo's data set: images of one colored shape, with a question about each."""

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
    """Draw images and return a conversation about each.

    Args:
        folder: Where the PNG files are written.
        number: The number of images.
        seed: Seed of colors, shapes and questions.
        side: Width and height of the images, in pixels.
    """
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
    """Draw a shape of random size and position on a dark background."""
    background = tuple(rng.randint(0, 40) for _ in range(3))
    image = Image.new("RGB", (side, side), background)
    draw = ImageDraw.Draw(image)
    size = rng.uniform(0.82, 0.92) * side
    x0, y0 = (rng.uniform(0.05, 0.95) * (side - size) for _ in range(2))
    x1, y1 = x0 + size, y0 + size
    fill = COLORS[color]
    if shape == "circle":
        draw.ellipse((x0, y0, x1, y1), fill=fill)
    elif shape == "square":
        draw.rectangle((x0, y0, x1, y1), fill=fill)
    elif shape == "triangle":
        draw.polygon([(x0 + size / 2, y0), (x0, y1), (x1, y1)], fill=fill)
    else:
        arm = size / 3
        draw.rectangle((x0, y0 + arm, x1, y1 - arm), fill=fill)
        draw.rectangle((x0 + arm, y0, x1 - arm, y1), fill=fill)
    return image
