"""The demo's data sets: images of one colored shape, with a question about each."""

import random
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

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


class Task(NamedTuple):
    """A task that the demo trains.

    Args:
        answers: The answer to each question; both are format strings.
        score: Returns the score of an answer and its reference.
    """

    answers: dict[str, str]
    score_name: str
    score: Metric


TASKS = {
    "shapes": Task(QUESTIONS, "accuracy", exact_match),
    "boxes": Task(BOX_QUESTIONS, "iou", box_iou),
}
GRID_UNITS = 8
"""Units per side of the grid on which shapes of the task "boxes" lie, so that a few hundred steps
suffice to learn to point."""


def draw_data_set(
    folder: Path, num_images: int, seed: int, side: int, task: str = "shapes"
) -> list[list[dict]]:
    """Draw images and return a conversation about each.

    Args:
        folder: Where the PNG files are written.
        num_images: The number of images and conversations.
        seed: Seed of colors, shapes and questions.
        side: Width and height of the images, in pixels.
        task: A key of :data:`TASKS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng, answers = random.Random(seed), TASKS[task].answers
    conversations = []
    for index in range(num_images):
        color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
        question = rng.choice(list(answers))
        path = folder / f"{index:05}.png"
        image, box = draw_shape(color, shape, side, rng, GRID_UNITS if task == "boxes" else None)
        image.save(path)
        words = {"color": color, "shape": shape, "box": f"[{[*box]}]"}
        answer = answers[question].format(**words)
        conversations.append(
            [
                {"role": "user", "image": str(path), "content": question.format(**words)},
                {"role": "assistant", "content": answer},
            ]
        )
    return conversations


def draw_shape(
    color: str, shape: str, side: int, rng: random.Random, grid_units: int | None = None
) -> tuple[Image.Image, tuple[float, ...]]:
    """Draw a shape of random size and position on a dark background; return its box in pixels, too.

    Without ``grid_units`` the shape nearly fills the image.
    """
    background = tuple(rng.randint(0, 40) for _ in range(3))
    image = Image.new("RGB", (side, side), background)
    draw = ImageDraw.Draw(image)
    if grid_units is None:
        size = rng.uniform(0.82, 0.92) * side
        x0, y0 = (rng.uniform(0.05, 0.95) * (side - size) for _ in range(2))
    else:
        unit, num_units = side // grid_units, rng.randint(3, 5)
        size = unit * num_units
        x0, y0 = (unit * rng.randint(0, grid_units - num_units) for _ in range(2))
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
    return image, (x0, y0, x1, y1)
