"""Boxes in texts and rows, converted to thousandths of the image's width and height.

glm-4v sees every image resized to a square. Thousandths of width and height do not depend on the
shape of the image, and cogagent writes them, as ``[[x1,y1,x2,y2]]`` with three digits per number.
Needs no torch.
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
"""Units of the numbers of a box, and the width and height of an image in each."""
ORDERS: dict[str, Callable[..., tuple]] = {
    "xyxy": lambda x1, y1, x2, y2: (x1, y1, x2, y2),
    "xywh": lambda x, y, width, height: (x, y, x + width, y + height),
    "cxcywh": lambda x, y, width, height: (
        (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    ),
    "yxyx": lambda y1, x1, y2, x2: (x1, y1, x2, y2),
}
"""Conversions from each order of the numbers to left, top, right and bottom."""
BOX_FORMATS = tuple(f"{unit}_{order}" for unit in UNITS for order in ORDERS)
SWIFT_TYPES = {"real": "pixels_xyxy", "norm1": "fractions_xyxy"}  # of ms-swift's objects.bbox_type
REF, BBOX = "<ref-object>", "<bbox>"  # ms-swift's placeholders
MAX_NUMBER = 999  # the largest number of three digits
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
        corners = *map(max, self[:2], other[:2]), *map(min, self[2:], other[2:])
        intersection = Box(*corners).area
        return intersection / (self.area + other.area - intersection) if intersection else 0.0


def find_boxes(text: str) -> list[Box]:
    """Return the boxes of a text in their order, with the numbers of the text."""
    return [box for match in BOXES_RE.finditer(text) for box in _parse_boxes(match)]


def to_thousandths(numbers: Sequence[float], box_format: str, size: tuple[int, int]) -> Box:
    """Convert the four numbers of a data set's box.

    Args:
        box_format: One of :data:`BOX_FORMATS`.
        size: Width and height of the image in pixels, after rotation by its EXIF orientation.

    Returns:
        The box in thousandths, at least 1 wide and high. An edge that exceeds the image by at most
        one pixel, or one thousandth for units other than pixels, is moved to the image's edge.

    Raises:
        ValueError: The box has no area, or exceeds the image.
    """
    unit, _, order = box_format.partition("_")
    limits = [UNITS[unit] or side for side in size]
    box = Box(*ORDERS[order](*numbers))
    scaled = [edge / limit for edge, limit in zip(box, limits * 2, strict=True)]
    slack = [1 / side if unit == "pixels" else 0.001 for side in size] * 2
    is_inside = all(-s <= edge <= 1 + s for edge, s in zip(scaled, slack, strict=True))
    if not (is_inside and scaled[0] < scaled[2] and scaled[1] < scaled[3]):
        stated = ", ".join(f"{number:g}" for number in numbers)
        raise ValueError(
            f"the box [{stated}], as {box_format}, goes from ({box.left:g}, {box.top:g}) to "
            f"({box.right:g}, {box.bottom:g}); expected left < right and top < bottom, inside of "
            f"the image, which is {limits[0]} wide and {limits[1]} high: correct the box, or "
            "data.boxes (answer, evaluate: --boxes)"
        )
    left, top = (min(max(round(1000 * edge), 0), MAX_NUMBER - 1) for edge in scaled[:2])
    right, bottom = (min(round(1000 * edge), MAX_NUMBER) for edge in scaled[2:])
    return Box(left, top, max(right, left + 1), max(bottom, top + 1))


def format_box(box: Box) -> str:
    """Return a box in thousandths as the model writes it, such as ``[[012,034,567,890]]``."""
    return f"[[{','.join(f'{number:03}' for number in box)}]]"


def convert_boxes(
    messages: list[dict],
    box_format: str,
    objects: Any = None,
    stated_size: tuple[Any, Any] = (None, None),
) -> list[dict]:
    """Return a conversation whose boxes are in thousandths.

    Lists of four numbers in the texts are converted. In a text with JSON keys they stay valid JSON;
    elsewhere each number gets three digits.

    Args:
        messages: The conversation, with paths of images.
        box_format: Unit and order of the numbers, one of :data:`BOX_FORMATS`.
        objects: ms-swift's ``{"ref": [...], "bbox": [...]}``, which replaces ``<ref-object>`` and
            ``<bbox>`` in the texts; None to leave these words alone.
        stated_size: Width and height of the image according to the row, if it has them.

    Raises:
        ValueError: A box does not fit its image, or the numbers of placeholders and objects differ.
    """
    paths = images_of(messages)

    def convert(numbers: Sequence[float], image: int | None = None) -> Box:
        in_pixels = box_format.startswith("pixels")
        size = _image_size(paths, image, stated_size) if in_pixels else (1, 1)
        return to_thousandths(numbers, box_format, size)

    texts = [text_of(message) for message in messages]
    replacements = _values_of_objects(objects, texts, box_format, convert)

    def convert_text(text: str) -> str:
        is_json = JSON_KEY_RE.search(text) is not None

        def write(box: Box) -> str:
            return ",".join(f"{number}" if is_json else f"{number:03}" for number in box)

        def convert_list(match: re.Match) -> str:
            return f"[{';'.join(write(convert(box)) for box in _parse_boxes(match))}]"

        text = BOXES_RE.sub(convert_list, text)
        for word, values in replacements.items():
            while word in text:
                value = next(values)
                if isinstance(value, Box):
                    value = f"[{write(value)}]" if is_json else f"[[{write(value)}]]"
                text = text.replace(word, value, 1)
        return text

    return read_each(messages, "message", lambda message: _replace_text(message, convert_text))


def spell_boxes(value: Any) -> Any:
    """Return a row's value in which lists of four numbers are texts such as ``[[1, 2, 3, 4]]``."""
    if isinstance(value, dict):
        return {key: spell_boxes(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    return f"[{value}]" if _is_box(value) else [*map(spell_boxes, value)]


def _parse_boxes(match: re.Match) -> list[Box]:
    return [Box(*map(float, part.split(","))) for part in match[1].split(";")]


def _is_box(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(type(number) in (int, float) and math.isfinite(number) for number in value)
    )


def _values_of_objects(
    objects: Any, texts: Sequence[str], box_format: str, convert: Callable[..., Box]
) -> dict[str, Iterator[Any]]:
    """Return the values that replace ms-swift's placeholders, by placeholder."""
    if objects is None:
        return {}
    if not isinstance(objects, dict):
        raise ValueError(f'objects is {objects!r:.60}; expected {{"ref": [...], "bbox": [...]}}')
    names, boxes = objects.get("ref") or [], objects.get("bbox") or []
    images = objects.get("image_id") or [None] * len(boxes)
    own_format = SWIFT_TYPES.get(objects.get("bbox_type") or "", box_format)
    if own_format != box_format:
        raise ValueError(
            f"objects.bbox_type means {own_format}, and data.boxes is {box_format}: set data.boxes "
            f"to {own_format} for this data set"
        )
    for word, key, values in (
        (REF, "ref", names),
        (BBOX, "bbox", boxes),
        (BBOX, "image_id", images),
    ):
        number = sum(text.count(word) for text in texts)
        if len(values) != number:
            raise ValueError(
                f"the texts have {number} {word}, and objects.{key} has {len(values)} values; "
                "expected equal numbers"
            )
    if wrong := next((box for box in boxes if not _is_box(box)), None):
        raise ValueError(f"objects.bbox has {wrong!r:.60}; expected four numbers per box")
    return {REF: iter(names), BBOX: map(convert, boxes, images)}


def _image_size(
    paths: list[str], image: int | None, stated_size: tuple[Any, Any]
) -> tuple[int, int]:
    """Return the upright size of the image that a box refers to, by its index if it is known."""
    sizes = {upright_size(path) for path in (paths if image is None else paths[image : image + 1])}
    if len(sizes) != 1:
        raise ValueError(
            f"a box in pixels needs to know its image, and the sample has {len(paths)} images of "
            f"{len(sizes)} sizes: see docs/grounding.md"
        )
    (size,) = sizes
    if len(paths) == 1 and None not in stated_size and stated_size != size:
        raise ValueError(
            f"the row says {stated_size[0]} x {stated_size[1]} pixels, and its image has {size[0]} "
            f"x {size[1]}, upright: its boxes are for another size or rotation; see "
            "docs/grounding.md"
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


def _replace_text(message: dict, convert: Callable[[str], str]) -> dict:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": convert(content)}
    parts = [p | {"text": convert(p["text"])} if p["type"] == "text" else p for p in content]
    return message | {"content": parts}
