"""Scores of answers with boxes, or with operations such as ``CLICK(box=[[x1,y1,x2,y2]])``.

Needs no torch. Boxes of an answer and its reference must have the same unit.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..data.boxes import Box, find_boxes

OPERATION_NAME_RE = re.compile(r"\b([A-Z][A-Z_]*)\(")
# A quote ends a value only before the next argument or the closing parenthesis, because values may
# contain apostrophes.
ARGUMENT_RE = re.compile(
    r"\s*(\w+)\s*=\s*('.*?'|\".*?\"|\[[^()]*?\]|[^,()\[\]'\"]*?)\s*(?:,(?=\s*\w+\s*=)|(?=\)))",
    re.DOTALL,
)


class Operation(NamedTuple):
    """An operation in cogagent's form, with the texts of its arguments except boxes."""

    name: str
    arguments: dict[str, str]
    boxes: list[Box]


def find_operation(text: str) -> Operation | None:
    """Return the last complete operation of a text; explanations come before it."""
    for name in reversed([*OPERATION_NAME_RE.finditer(text)]):
        arguments, boxes, position = {}, [], name.end()
        while argument := ARGUMENT_RE.match(text, position):
            key, value = argument.groups()
            if argument_boxes := find_boxes(value) if value.startswith("[") else []:
                boxes += argument_boxes
            else:
                arguments[key] = value.strip("'\"")
            position = argument.end()
        if text[position:].lstrip().startswith(")"):
            return Operation(name[1], arguments, boxes)
    return None


def box_iou(answer: str, reference: str) -> float:
    """Return the mean intersection over union of the boxes, in pairs.

    Each box belongs to at most one pair; the pairs with the largest values come first. A box
    without a partner counts as 0. If the reference has an operation, its boxes alone count.
    """
    return _mean_over_pairs(answer, reference, Box.iou)


def center_in_box(answer: str, reference: str) -> float:
    """Return the share of boxes of the reference that contain the center of an answered box, which
    is where a click would go.

    Boxes are paired as by :func:`box_iou`.
    """
    return _mean_over_pairs(
        answer, reference, lambda box, expected: float(box.area > 0 and expected.has_center_of(box))
    )


def operation_name(answer: str, reference: str) -> float:
    """Return 1 if the operations of both texts have the same name, otherwise 0."""
    answered, expected = find_operation(answer), find_operation(reference)
    return float(bool(answered and expected and answered.name == expected.name))


def operation_arguments(answer: str, reference: str) -> float:
    """Return the share of equal arguments, except boxes, of operations of the same name.

    Arguments that only one of them has count as different. Without arguments, the result is that
    of :func:`operation_name`.
    """
    answered, expected = find_operation(answer), find_operation(reference)
    if not (answered and expected and answered.name == expected.name):
        return 0.0
    keys = answered.arguments.keys() | expected.arguments.keys()
    num_equal = sum(answered.arguments.get(key) == expected.arguments.get(key) for key in keys)
    return num_equal / len(keys) if keys else 1.0


def boxes_to_compare(text: str, reference: str) -> Sequence[Box]:
    """Return the boxes of a text's operation if the reference has one; otherwise all boxes."""
    if find_operation(reference):
        operation = find_operation(text)
        return operation.boxes if operation else []
    return find_boxes(text)


def _mean_over_pairs(answer: str, reference: str, score: Callable[[Box, Box], float]) -> float:
    boxes, expected = (boxes_to_compare(text, reference) for text in (answer, reference))
    values = {
        (i, j): score(box, other) for i, box in enumerate(boxes) for j, other in enumerate(expected)
    }
    total, used = 0.0, set()
    for (i, j), value in sorted(values.items(), key=lambda item: -item[1]):
        if not used & {("answer", i), ("reference", j)}:
            total += value
            used |= {("answer", i), ("reference", j)}
    return total / max(len(boxes), len(expected), 1)


BOX_METRICS = {"box_iou": box_iou, "center_in_box": center_in_box}
OPERATION_METRICS = {"operation_name": operation_name, "operation_arguments": operation_arguments}


def metric_applies(name: str, reference: str) -> bool:
    """Return whether a metric is computed for a reference; all others apply to every reference."""
    if name in BOX_METRICS:
        return bool(boxes_to_compare(reference, reference))
    return name not in OPERATION_METRICS or find_operation(reference) is not None
