"""Boxes of data sets, converted to ``[[x1,y1,x2,y2]]`` in thousandths of an image's width and
height, as cogagent writes them. Needs no torch.

The model sees each image resized to a square. Thousandths are the same in the image and the square.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from PIL import Image

from ..terminal_text import shorten
from .messages import images_of, read_each, text_of

UNITS = {"pixels": None, "fractions": 1, "thousandths": 1000}
"""Units of a box's numbers, and the width and height of every image in this unit."""
ORDERS: dict[str, Callable[..., tuple]] = {
    "xyxy": lambda x1, y1, x2, y2: (x1, y1, x2, y2),
    "xywh": lambda x, y, w, h: (x, y, x + w, y + h),
    "cxcywh": lambda x, y, w, h: (x - w / 2, y - h / 2, x + w / 2, y + h / 2),
    "yxyx": lambda y1, x1, y2, x2: (x1, y1, x2, y2),
}
"""Orders of the numbers, as functions that return left, top, right and bottom edge."""
BOX_FORMATS = tuple(f"{unit}_{order}" for unit in UNITS for order in ORDERS)
PLACEHOLDERS = {"<ref-object>": "ref", "<bbox>": "bbox"}  # ms-swift's, with the keys of "objects"
EXIF_ORIENTATION, ROTATED_BY_90 = 0x0112, (5, 6, 7, 8)

_NUMBER = r"-?\d++(?:\.\d*+)?(?:e[-+]?\d++)?"
_FOUR_NUMBERS = rf"\s*+{_NUMBER}(?:\s*+,\s*+{_NUMBER}){{3}}\s*+"
BOXES_RE = re.compile(rf"\[({_FOUR_NUMBERS}(?:;{_FOUR_NUMBERS})*+)\]", re.IGNORECASE)
"""Matches [1,2,3,4] and [1,2,3,4;5,6,7,8], also inside of further brackets."""
JSON_KEY_RE = re.compile(r'"\s*:')


class Box(NamedTuple):
    """The edges of a box."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def area(self) -> float:
        return max(0.0, self.right - self.left) * max(0.0, self.bottom - self.top)

    def has_center_of(self, other: "Box") -> bool:
        x, y = (other.left + other.right) / 2, (other.top + other.bottom) / 2
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def iou(self, other: "Box") -> float:
        """Return the intersection over union; 0 for boxes without area."""
        common = Box(*map(max, self[:2], other[:2]), *map(min, self[2:], other[2:])).area
        return common / (self.area + other.area - common) if common else 0.0


def find_boxes(text: str) -> list[Box]:
    """Return all boxes of a text, in order."""
    return [box for match in BOXES_RE.finditer(text) for box in _parse_boxes(match)]


def to_thousandths(numbers: Sequence[float], box_format: str, size: tuple[int, int]) -> Box:
    """Convert four numbers, one of :data:`BOX_FORMATS`, to a box at least 1 wide and high.

    Edges may exceed the image by a pixel (for other units than pixels, by a thousandth).

    Args:
        size: Width and height of the image in pixels, upright.

    Raises:
        ValueError: The box exceeds the image, or is empty, or smaller than a pixel or thousandth.
    """
    unit, _, order = box_format.partition("_")
    limits = [UNITS[unit] or side for side in size] * 2
    box = Box(*ORDERS[order](*numbers))
    slack = 0.001 if unit == "fractions" else 1
    is_inside = all(
        -slack <= edge <= limit + slack for edge, limit in zip(box, limits, strict=True)
    )
    is_large = max(box.right - box.left, box.bottom - box.top) >= slack and box.area > 0
    if not (is_inside and is_large):
        raise ValueError(
            f"the box {[*numbers]} is, as {box_format}, ({box.left:g}, {box.top:g}) to "
            f"({box.right:g}, {box.bottom:g}); expected left < right and top < bottom in an image "
            f"of {limits[0]} x {limits[1]}: correct the box or data.boxes (answer, evaluate: "
            "--boxes)"
        )
    edges = [round(1000 * edge / limit) for edge, limit in zip(box, limits, strict=True)]
    left, top = (min(max(edge, 0), 998) for edge in edges[:2])
    right, bottom = (min(edge, 999) for edge in edges[2:])  # a number has at most three digits
    return Box(left, top, max(right, left + 1), max(bottom, top + 1))


def convert_boxes(
    messages: list[dict],
    box_format: str,
    objects: Any = None,
    stated_size: tuple[Any, Any] = (None, None),
) -> list[dict]:
    """Return a conversation with lists of four numbers converted to boxes in thousandths.

    Each number gets three digits, except in texts with JSON keys: JSON allows no leading zeros.

    Args:
        messages: The conversation, with paths of images.
        box_format: Unit and order of the numbers, one of :data:`BOX_FORMATS`.
        objects: ms-swift's ``{"ref": [...], "bbox": [...]}``, whose values replace
            ``<ref-object>`` and ``<bbox>``.
        stated_size: Width and height of the image according to the row, if it has them.

    Raises:
        ValueError: A box does not fit its image, or the numbers of values and placeholders differ.
    """
    values = _placeholder_values(messages, objects)
    in_pixels = UNITS[box_format.partition("_")[0]] is None
    paths = images_of(messages)

    def convert_list(match: re.Match) -> str:
        size = _common_size(paths, stated_size) if in_pixels else (1, 1)
        digits = "" if JSON_KEY_RE.search(match.string) else "03"
        boxes = (to_thousandths(box, box_format, size) for box in _parse_boxes(match))
        return f"[{';'.join(','.join(f'{n:{digits}}' for n in box) for box in boxes)}]"

    def convert_text(text: str) -> str:
        if values:
            text = re.sub("|".join(values), lambda match: next(values[match[0]]), text)
        return BOXES_RE.sub(convert_list, text)

    def convert_message(message: dict) -> dict:
        content = message["content"]
        if isinstance(content, str):
            return message | {"content": convert_text(content)}
        parts = [
            part | {"text": convert_text(part["text"])} if part["type"] == "text" else part
            for part in content
        ]
        return message | {"content": parts}

    return read_each(messages, "message", convert_message)


def box_lists_to_text(value: Any) -> Any:
    """Return a row's value with each list of four numbers replaced by text: ``[[1, 2, 3, 4]]``."""
    if isinstance(value, dict):
        return {key: box_lists_to_text(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    is_box = len(value) == 4 and all(
        type(number) in (int, float) and math.isfinite(number) for number in value
    )
    return f"[{value}]" if is_box else [*map(box_lists_to_text, value)]


def _parse_boxes(match: re.Match) -> list[Box]:
    return [Box(*map(float, part.split(","))) for part in match[1].split(";")]


def _placeholder_values(messages: list[dict], objects: Any) -> dict[str, Iterator[str]]:
    """Return the texts that replace each placeholder, in order."""
    if not isinstance(objects, dict):
        return {}
    iterators = {}
    for word, key in PLACEHOLDERS.items():
        values = box_lists_to_text(objects.get(key) or [])
        num_words = sum(text_of(message).count(word) for message in messages)
        if len(values) != num_words:
            raise ValueError(
                f"the texts have {num_words} {word}, and objects.{key} has {len(values)} values; "
                "expected equal numbers"
            )
        if not_texts := [value for value in values if not isinstance(value, str)]:
            expected = "four numbers" if key == "bbox" else "texts"
            raise ValueError(f"objects.{key} has {not_texts[0]!r:.60}; expected {expected}")
        iterators[word] = iter(values)
    return iterators


def _common_size(paths: list[str], stated_size: tuple[Any, Any]) -> tuple[int, int]:
    """Return the size in pixels that all images of a sample have."""
    sizes = {upright_size(path) for path in paths}
    if len(sizes) != 1:
        raise ValueError(
            f"a box in pixels needs its image's size, and the sample has {len(paths)} images of "
            f"{len(sizes)} sizes: write fractions or thousandths (docs/grounding.md)"
        )
    (size,) = sizes
    if None not in stated_size and stated_size != size:
        raise ValueError(
            f"the row says {stated_size[0]} x {stated_size[1]} pixels, and its image has {size[0]} "
            f"x {size[1]}, upright: its boxes belong to an image of another size or rotation "
            "(docs/grounding.md)"
        )
    return size


@lru_cache(4096)
def upright_size(path: str) -> tuple[int, int]:
    """Return width and height of an image file after rotation by its EXIF orientation.

    Raises:
        ValueError: The file cannot be read as an image.
    """
    try:
        if not os.path.isfile(path):  # opening a pipe would block
            raise ValueError("is not a file" if os.path.exists(path) else "does not exist")
        with Image.open(path) as image:
            width, height = image.size
            is_rotated = image.getexif().get(EXIF_ORIENTATION) in ROTATED_BY_90
    except Exception as error:  # Pillow's readers raise any kind
        raise ValueError(f"the image {shorten(path)} cannot be read: {error}") from None
    return (height, width) if is_rotated else (width, height)
