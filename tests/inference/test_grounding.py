"""Boxes and operations of answers are found and compared with those of references."""

import re

import pytest

from glm4v_patched.data.boxes import Box
from glm4v_patched.inference.answers_file import AnswerLine
from glm4v_patched.inference.evaluate import compute_scores, describe_scores
from glm4v_patched.inference.grounding import (
    Operation,
    box_iou,
    center_in_box,
    find_operation,
    operation_arguments,
    operation_name,
)
from glm4v_patched.inference.questions import Question
from glm4v_patched.inference.scoring import METRICS, exact_match

CLICK = "CLICK(box=[[100,200,300,400]], element_type='button', element_info='OK, (now)')"
ANSWER = f"""Status: The page [[0, 0, 999, 999]] is open (in HTTP(S)).
Action: Click the button.
Grounded Operation: {CLICK}
<<一般操作>>"""


def test_an_operation_is_found_behind_its_explanation():
    arguments = {"element_type": "button", "element_info": "OK, (now)"}
    expected = Operation("CLICK", arguments, [Box(100, 200, 300, 400)])
    assert find_operation(ANSWER) == expected
    assert find_operation(f"TYPE(text='x') first, then {CLICK}") == expected


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("TYPE(text='it's, or isn't it')", {"text": "it's, or isn't it"}),
        ("TYPE(text='a, b = c', x=1)", {"text": "a, b = c", "x": "1"}),
        ('TYPE(text="f(x)")', {"text": "f(x)"}),
        ("TYPE(text='two\nlines')", {"text": "two\nlines"}),
        ("TYPE(text='[1, 2]', x='[None]')", {"text": "[1, 2]", "x": "[None]"}),
        ("TYPE( text = 'x' , count = 5 )", {"text": "x", "count": "5"}),
        ("TYPE(element_info=[AXCell])", {"element_info": "[AXCell]"}),
        ("TYPE()", {}),
    ],
)
def test_arguments_may_contain_quotes_commas_parentheses_and_brackets(text, arguments):
    assert find_operation(text) == Operation("TYPE", arguments, [])


@pytest.mark.parametrize("text", ["", "no", "CLICK(box=[[1,2,3,4]]", "click(x=1)", "A b(", "A(b)"])
def test_a_text_without_a_complete_operation_has_none(text):
    assert find_operation(text) is None
    assert operation_name(text, CLICK) == operation_arguments(text, CLICK) == 0
    assert box_iou(text, CLICK) == center_in_box(text, CLICK) == 0


@pytest.mark.parametrize(
    ("answer", "name", "share"),
    [
        (ANSWER, 1, 1),
        (CLICK.replace("button", "link"), 1, 0.5),
        (CLICK.replace(", element_type='button'", ""), 1, 0.5),
        (CLICK.replace("element_type", "extra=1, element_type"), 1, 2 / 3),
        (CLICK.replace("CLICK", "HOVER"), 0, 0),
        (CLICK.replace("100,200", "1,2"), 1, 1),
        (CLICK.replace("'button'", '"button"'), 1, 1),
    ],
)
def test_arguments_are_compared_without_boxes(answer, name, share):
    assert operation_name(answer, CLICK) == name
    assert operation_arguments(answer, CLICK) == pytest.approx(share)


def test_operations_without_arguments_are_compared_by_name():
    assert operation_arguments("END()", "END()") == 1
    assert operation_arguments("END()", "LAUNCH()") == 0


# The reference is 200 x 200: the same; half beside it; a quarter inside; elsewhere.
@pytest.mark.parametrize(
    ("answer", "iou", "center"),
    [
        ("[[100,200,300,400]]", 1, 1),
        ("[[200,200,400,400]]", 1 / 3, 1),
        ("[[150,250,250,350]]", 1 / 4, 1),
        ("[[301,401,500,600]]", 0, 0),
        ("[[205,305,800,900]]", 95 * 95 / (200 * 200 + 595 * 595 - 95 * 95), 0),
        ("[[120,220,160,260]]", 1 / 25, 1),  # inside, without the center of the reference
        ("[[100,200,900,900]]", 1 / 14, 0),  # around it, with another center
        ("no box", 0, 0),
        ("[[300,400,100,200]]", 0, 0),  # edges in the wrong order
        ("the box [100, 200, 300, 400].", 1, 1),
        ('{"bbox_2d": [100, 200, 300, 400]}', 1, 1),
        ("[[100,200,300,400;0,0,10,10]]", 1 / 2, 1 / 2),
        ("[[0,0,10,10],[100,200,300,400]]", 1 / 2, 1 / 2),
    ],
)
def test_a_box_is_compared_by_overlap_and_by_its_center(answer, iou, center):
    reference = "[[100,200,300,400]]"
    assert box_iou(answer, reference) == pytest.approx(iou)
    assert center_in_box(answer, reference) == pytest.approx(center)


def test_each_box_is_paired_once_with_its_best_partner():
    reference = "[[0,0,100,100;200,200,300,300]]"
    for score in (box_iou, center_in_box):
        assert score("[[200,200,300,300;0,0,100,100]]", reference) == 1
        assert score("[[0,0,100,100;0,0,100,100]]", reference) == 1 / 2
        assert score("[[0,0,100,100]]", reference) == 1 / 2


def test_boxes_beside_the_operation_do_not_count():
    assert box_iou(ANSWER, ANSWER) == box_iou(CLICK, ANSWER) == 1
    assert box_iou(ANSWER.replace("[[0, 0", "[[500, 500"), ANSWER) == 1
    assert box_iou("Status: [[100,200,300,400]]", ANSWER) == 0


def test_scores_are_means_over_the_rows_that_they_apply_to():
    """Of four rows, one has an operation with a box, one a box, one an operation without, one
    neither; each is answered rightly but for the box alone, with an IoU of 1/3."""
    rows = [
        (CLICK, CLICK),
        ("[[200,0,400,200]]", "[[100,0,300,200]]"),
        ("END()", "END()"),
        ("a cat", "a cat"),
    ]
    lines = [
        AnswerLine(Question(row, [{"role": "user", "content": "q"}], reference), answer, "stop")
        for row, (answer, reference) in enumerate(rows)
    ]
    scores = compute_scores(lines, METRICS)
    assert scores["exact_match"] == 0.75
    assert scores["box_iou"] == pytest.approx((1 + 1 / 3) / 2, abs=1e-4)
    assert scores["center_in_box"] == scores["operation_name"] == 1
    assert scores["operation_arguments"] == 1 and scores["box_iou_swapped"] is None
    assert re.search(r"^box_iou +0\.6667 +no rows$", describe_scores(scores), re.M)
    assert compute_scores(lines[3:], METRICS).keys() & METRICS.keys() == {"exact_match", "token_f1"}
    own = {"mine": exact_match}  # a metric of the user applies to all rows
    assert compute_scores(lines, own)["mine"] == 0.75


def test_only_answers_to_rows_with_their_own_images_count_as_rows_cut():
    cut = [(swapped, reason) for swapped in (False, True) for reason in ("length", "stop")]
    lines = [
        AnswerLine(Question(row, [], "a", swapped), "a", reason)
        for row, (swapped, reason) in enumerate([*cut, (True, "length")])
    ]
    scores = compute_scores(lines, {})
    assert (scores["rows"], scores["rows_swapped"], scores["rows_cut"]) == (2, 3, 1)
