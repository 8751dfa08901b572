"""Scores of boxes, and of operations such as ``CLICK(box=[[x1,y1,x2,y2]])``. Needs no torch."""

import re
from collections.abc import Callable
from typing import NamedTuple

from ..data.boxes import Box, find_boxes

OPERATION_NAME_RE = re.compile(r"\b([A-Z][A-Z_]*)\(")
# One argument of an operation, such as box=[[1,2,3,4]] or text='it's here'. A quote ends a value
# only before the next argument or the closing parenthesis, because values may contain apostrophes.
ARGUMENT_RE = re.compile(
    r"\s*(\w+)\s*=\s*('.*?'|\".*?\"|\[[^()]*?\]|[^,()\[\]'\"]*?)\s*(?:,(?=\s*\w+\s*=)|(?=\)))",
    re.DOTALL,
)


class Operation(NamedTuple):
    """An operation in cogagent's form: its name, its arguments except boxes, and its boxes."""

    name: str
    arguments: dict[str, str]
    boxes: list[Box]


def find_operation(text: str) -> Operation | None:
    """Return the last complete operation of a text, because explanations come before it."""
    for match in reversed([*OPERATION_NAME_RE.finditer(text)]):
        operation = Operation(match[1], {}, [])
        position = match.end()
        while argument := ARGUMENT_RE.match(text, position):
            key, value = argument.groups()
            if value.startswith("[") and (boxes := find_boxes(value)):
                operation.boxes.extend(boxes)
            else:
                operation.arguments[key] = value.strip("'\"")
            position = argument.end()
        if text[position:].lstrip().startswith(")"):
            return operation
    return None


def boxes_to_compare(text: str, reference: str) -> list[Box]:
    """Return the boxes of a text's operation if the reference has one; otherwise all boxes."""
    if find_operation(reference):
        operation = find_operation(text)
        return operation.boxes if operation else []
    return find_boxes(text)


def box_iou(answer: str, reference: str) -> float:
    """Return the mean intersection over union of boxes, as paired by :func:`_mean_over_pairs`."""
    return _mean_over_pairs(answer, reference, Box.iou)


def center_in_box(answer: str, reference: str) -> float:
    """Return the share of boxes whose center, where a click would go, is in the expected box."""
    return _mean_over_pairs(
        answer,
        reference,
        lambda box, expected: float(box.area > 0 and expected.contains_center_of(box)),
    )


def _mean_over_pairs(answer: str, reference: str, score: Callable[[Box, Box], float]) -> float:
    """Pair boxes of the answer and the reference greedily by score, and return the mean score.

    The pair with the highest score is formed first. A box belongs to at most one pair, and a box
    without a partner scores 0.
    """
    answered, expected = (boxes_to_compare(text, reference) for text in (answer, reference))
    pairs = [(score(a, b), i, j) for i, a in enumerate(answered) for j, b in enumerate(expected)]
    total = 0.0
    unpaired_answered, unpaired_expected = {*range(len(answered))}, {*range(len(expected))}
    for value, i, j in sorted(pairs, reverse=True):
        if i in unpaired_answered and j in unpaired_expected:
            total += value
            unpaired_answered.remove(i)
            unpaired_expected.remove(j)
    return total / max(len(answered), len(expected), 1)


def operation_name(answer: str, reference: str) -> float:
    """Return 1 if the operations of both texts have the same name, otherwise 0."""
    return float(_operations_of_same_name(answer, reference) is not None)


def operation_arguments(answer: str, reference: str) -> float:
    """Return the share of equal arguments of both texts' operations.

    It is 0 if a text has no operation or the names differ, and 1 if neither operation has
    arguments. Boxes are not compared. An argument that only one operation has counts as different.
    """
    if (operations := _operations_of_same_name(answer, reference)) is None:
        return 0.0
    first, second = (operation.arguments for operation in operations)
    keys = first.keys() | second.keys()
    return sum(first.get(key) == second.get(key) for key in keys) / len(keys) if keys else 1.0


def _operations_of_same_name(answer: str, reference: str) -> tuple[Operation, Operation] | None:
    first, second = find_operation(answer), find_operation(reference)
    return (first, second) if first and second and first.name == second.name else None


BOX_METRICS = {"box_iou": box_iou, "center_in_box": center_in_box}
OPERATION_METRICS = {"operation_name": operation_name, "operation_arguments": operation_arguments}


def metric_applies(name: str, reference: str) -> bool:
    """Return whether a metric applies to a reference.

    Scores of boxes apply only to references with boxes, those of operations only to operations.
    """
    if name in BOX_METRICS:
        return bool(boxes_to_compare(reference, reference))
    return name not in OPERATION_METRICS or find_operation(reference) is not None
