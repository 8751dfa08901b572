"""The demo's data sets: images of one colored shape, with a question about each."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

from ..data.boxes import Box, format_box, to_thousandths
from ..inference.grounding import box_iou
from ..inference.scoring import Metric, exact_match

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
BOX_QUESTIONS = {"Where is it?": "{box}", "Where is the {shape}?": "{box}"}
# Shapes of the task "boxes" lie on a grid of this many units per side, so that a few hundred steps
# suffice to learn their boxes.
GRID_UNITS = 8


def place_anywhere(side: int, rng: random.Random) -> Box:
    """Return the place of a shape that nearly fills an image, in pixels."""
    size = rng.uniform(0.82, 0.92) * side
    left, top = (rng.uniform(0.05, 0.95) * (side - size) for _ in range(2))
    return Box(left, top, left + size, top + size)


def place_on_grid(side: int, rng: random.Random) -> Box:
    """Return the place of a shape on a grid, in pixels."""
    unit, size = side // GRID_UNITS, rng.randint(3, 5)
    left, top = (unit * rng.randint(0, GRID_UNITS - size) for _ in range(2))
    return Box(left, top, left + unit * size, top + unit * size)


class Task(NamedTuple):
    """A data set of the demo and the score of its answers.

    Attributes:
        questions: The answer to each question, as templates.
        place: Chooses the place of a shape from the image's side and a random generator.
        score: Name of the mean of the metric.
        metric: Compares an answer with the right one.
    """

    questions: dict[str, str]
    place: Callable[[int, random.Random], Box]
    score: str
    metric: Metric


TASKS = {
    "shapes": Task(QUESTIONS, place_anywhere, "accuracy", exact_match),
    "boxes": Task(BOX_QUESTIONS, place_on_grid, "iou", box_iou),
}


def draw_data_set(
    folder: Path, number: int, seed: int, side: int, task: Task = TASKS["shapes"]
) -> list[list[dict]]:
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
        question = rng.choice(list(task.questions))
        path = folder / f"{index:05}.png"
        image, place = draw_shape(color, shape, side, task.place, rng)
        image.save(path)
        box = format_box(to_thousandths(place, "pixels_xyxy", image.size))
        words = {"color": color, "shape": shape, "box": box}
        answer = task.questions[question].format(**words)
        conversations.append(
            [
                {"role": "user", "image": str(path), "content": question.format(**words)},
                {"role": "assistant", "content": answer},
            ]
        )
    return conversations


def draw_shape(
    color: str, shape: str, side: int, place: Callable[..., Box], rng: random.Random
) -> tuple[Image.Image, Box]:
    """Draw a shape of random size and position on a dark background, and return its place, too."""
    background = tuple(rng.randint(0, 40) for _ in range(3))
    image = Image.new("RGB", (side, side), background)
    draw = ImageDraw.Draw(image)
    x0, y0, x1, y1 = box = place(side, rng)
    size = x1 - x0
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
    return image, box
