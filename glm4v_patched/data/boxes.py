"""Convert the boxes of data sets to ``[[x1,y1,x2,y2]]`` in thousandths of an image's width and
height, as cogagent writes them. Needs no torch.

The model sees each image resized to a square, which does not change coordinates in thousandths.
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
"""Units of a box's numbers, with the width and height of every image in this unit; None for pixels,
in which images differ."""
ORDERS: dict[str, Callable[..., tuple]] = {
    "xyxy": lambda x1, y1, x2, y2: (x1, y1, x2, y2),
    "xywh": lambda x, y, w, h: (x, y, x + w, y + h),
    "cxcywh": lambda x, y, w, h: (x - w / 2, y - h / 2, x + w / 2, y + h / 2),
    "yxyx": lambda y1, x1, y2, x2: (x1, y1, x2, y2),
}
"""Orders of the numbers, with functions that return the left, top, right and bottom edge."""
BOX_FORMATS = tuple(f"{unit}_{order}" for unit in UNITS for order in ORDERS)
# ms-swift's placeholders in a text, with the keys of the row's "objects" whose values replace them.
OBJECT_PLACEHOLDERS = {"<ref-object>": "ref", "<bbox>": "bbox"}
EXIF_ORIENTATION = 0x0112  # an EXIF tag
ROTATED_BY_90 = (5, 6, 7, 8)  # its values for images that are turned to the left or right

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

    def contains_center_of(self, other: "Box") -> bool:
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
    """Convert a box of one of :data:`BOX_FORMATS` to thousandths, at least 1 wide and 1 high.

    An edge may be outside of the image by at most one pixel, or one thousandth for other units. It
    is then moved to the image's edge.

    Args:
        numbers: The four numbers of the box.
        size: Width and height of the upright image, in pixels.

    Raises:
        ValueError: The box exceeds the image, has no area, or has both sides shorter than a pixel
            or thousandth.
    """
    unit, _, order = box_format.partition("_")
    limits = [UNITS[unit] or side for side in size] * 2
    box = Box(*ORDERS[order](*numbers))
    tolerance = 0.001 if unit == "fractions" else 1  # a pixel or a thousandth
    is_inside = all(
        -tolerance <= edge <= limit + tolerance for edge, limit in zip(box, limits, strict=True)
    )
    longer_side = max(box.right - box.left, box.bottom - box.top)
    if not is_inside or longer_side < tolerance or box.area <= 0:
        raise ValueError(
            f"the box {[*numbers]}, read as {box_format}, goes from ({box.left:g}, {box.top:g}) to "
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
    """Return a conversation in which the boxes of all texts are converted to thousandths.

    Each number gets three digits (``[[007,050,120,999]]``), except in texts with JSON keys, because
    JSON allows no leading zeros.

    Args:
        messages: The conversation, with paths of images.
        box_format: Unit and order of the numbers, one of :data:`BOX_FORMATS`.
        objects: ms-swift's ``{"ref": [...], "bbox": [...]}``, whose values replace
            ``<ref-object>`` and ``<bbox>``.
        stated_size: The row's values ``width`` and ``height``, which are compared with the image.

    Raises:
        ValueError: A box does not fit its image, or a placeholder occurs more or less often than
            ``objects`` has values for it.
    """
    replacements = _placeholder_values(messages, objects)
    in_pixels = UNITS[box_format.partition("_")[0]] is None
    paths = images_of(messages)

    def convert_list(match: re.Match) -> str:
        size = _common_size(paths, stated_size) if in_pixels else (1, 1)
        number_format = "" if JSON_KEY_RE.search(match.string) else "03"
        texts = []
        for numbers in _parse_boxes(match):
            box = to_thousandths(numbers, box_format, size)
            texts.append(",".join(f"{edge:{number_format}}" for edge in box))
        return f"[{';'.join(texts)}]"

    def convert_text(text: str) -> str:
        if replacements:
            text = re.sub("|".join(replacements), lambda match: next(replacements[match[0]]), text)
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
    """Return, for each placeholder, an iterator over the texts that replace it."""
    if not isinstance(objects, dict):
        return {}
    replacements = {}
    for placeholder, key in OBJECT_PLACEHOLDERS.items():
        values = box_lists_to_text(objects.get(key) or [])
        num_placeholders = sum(text_of(message).count(placeholder) for message in messages)
        if len(values) != num_placeholders:
            raise ValueError(
                f"the texts have {num_placeholders} {placeholder}, and objects.{key} has "
                f"{len(values)} values; expected equal numbers"
            )
        if invalid := [value for value in values if not isinstance(value, str)]:
            expected = "four numbers" if key == "bbox" else "texts"
            raise ValueError(f"objects.{key} has {invalid[0]!r:.60}; expected {expected}")
        replacements[placeholder] = iter(values)
    return replacements


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
