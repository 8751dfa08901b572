"""Boxes of data sets become thousandths of the width and height of their image, as it is shown."""

import json
import re
from pathlib import Path

import pytest
from PIL import ExifTags, Image, ImageOps

from glm4v_patched.data.boxes import Box, convert_boxes, find_boxes, to_thousandths
from glm4v_patched.data.rows import DataSource, iter_rows, read_conversations
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from tests.data.samples import turns, write_rows

SIZE = 640, 200
BOX = "[[100,250,500,750]]"  # of the card that card() draws
SWIFT = {
    "messages": turns("<image>Find <ref-object>", "<bbox>"),
    "images": ["card.png"],
    "objects": {"ref": ["the card"], "bbox": [[64, 50, 320, 150]]},
}


@pytest.fixture
def card(tmp_path) -> Path:
    """A white card on black, whose box is (64, 50) to (320, 150) of 640 x 200 pixels."""
    image = Image.new("RGB", SIZE)
    image.paste("white", (64, 50, 320, 150))
    image.save(tmp_path / "card.png")
    return tmp_path / "card.png"


def read(folder: Path, *rows, **fields) -> list:
    """The messages of each row, or its problem."""
    source = DataSource(str(write_rows(folder / "rows.jsonl", *rows)), **fields)
    return [getattr(row, "messages", None) or row.text for row in iter_rows(source)]


@pytest.mark.parametrize(
    ("numbers", "box_format", "box"),
    [
        ((64, 50, 320, 150), "pixels_xyxy", (100, 250, 500, 750)),
        ((64, 50, 256, 100), "pixels_xywh", (100, 250, 500, 750)),
        ((192, 100, 256, 100), "pixels_cxcywh", (100, 250, 500, 750)),
        ((50, 64, 150, 320), "pixels_yxyx", (100, 250, 500, 750)),
        ((0.1, 0.25, 0.5, 0.75), "fractions_xyxy", (100, 250, 500, 750)),
        ((0.3, 0.5, 0.4, 0.5), "fractions_cxcywh", (100, 250, 500, 750)),
        ((100, 250, 500, 750), "thousandths_xyxy", (100, 250, 500, 750)),
        ((250, 100, 750, 500), "thousandths_yxyx", (100, 250, 500, 750)),
        ((0, 0, 640, 200), "pixels_xyxy", (0, 0, 999, 999)),
        ((0, 0, 1, 1), "fractions_xyxy", (0, 0, 999, 999)),
        ((0, 0, 1000, 1000), "thousandths_xyxy", (0, 0, 999, 999)),
        ((63.9, 49.9, 320.2, 150.1), "pixels_xyxy", (100, 250, 500, 750)),
        ((-0.7, 0, 640.4, 200.9), "pixels_xyxy", (0, 0, 999, 999)),  # rounding of annotations
        ((639, 199, 640, 200), "pixels_xyxy", (998, 995, 999, 999)),
    ],
)
def test_a_box_of_each_format_is_the_same_in_thousandths(numbers, box_format, box):
    assert to_thousandths(numbers, box_format, SIZE) == Box(*box)


@pytest.mark.parametrize(
    ("unit", "pixel", "width", "height"),
    [("pixels", 1, *SIZE), ("fractions", 0.001, 1, 1), ("thousandths", 1, 1000, 1000)],
)
@pytest.mark.parametrize("is_tall", [True, False])
def test_a_box_as_thin_as_a_unit_has_an_extent_and_three_digits_at_every_edge(
    unit, pixel, width, height, is_tall
):
    length, other = (width, height) if is_tall else (height, width)
    for start in (-pixel, 0, length / 3, length - pixel, length - pixel / 2, length):
        numbers = (start, 0, start + pixel, other)
        numbers = numbers if is_tall else (0, start, other, start + pixel)
        box = to_thousandths(numbers, f"{unit}_xyxy", SIZE)
        first, last = (box.left, box.right) if is_tall else (box.top, box.bottom)
        assert 0 <= first < last <= 999
        assert abs(first - 1000 * start / length) <= 1000 * pixel / length + 2


@pytest.mark.parametrize(
    ("numbers", "box_format"),
    [
        ((0, 0, 642, 200), "pixels_xyxy"),
        ((0, 0, 640, 202), "pixels_xyxy"),
        ((-2, 0, 640, 200), "pixels_xyxy"),
        ((10, 0, 10, 200), "pixels_xyxy"),
        ((30, 20, 10, 40), "pixels_xyxy"),
        ((600, 0, 42, 10), "pixels_xywh"),
        ((64, 50, 320, 160), "pixels_xywh"),  # corners, not a width and a height
        ((0.1, 0.25, 0.5, 0.75), "pixels_xyxy"),
        ((0.1, 0.25, 0.5, 0.75), "thousandths_xyxy"),
        ((0, 0, 1.01, 1), "fractions_xyxy"),
        ((64, 50, 320, 150), "fractions_xyxy"),
        ((0, 0, 1002, 10), "thousandths_xyxy"),
    ],
)
def test_a_box_of_another_format_or_image_is_refused_with_its_numbers(numbers, box_format):
    with pytest.raises(
        ValueError, match="the box .*, read as .*, goes from .*; expected left < right"
    ) as error:
        to_thousandths(numbers, box_format, SIZE)
    assert f"{[*numbers]}" in str(error.value) and "data.boxes" in str(error.value)


def test_boxes_of_a_text_are_converted_and_all_other_words_stay(card):
    def converted(text: str, box_format: str = "pixels_xyxy") -> str:
        (message,) = convert_boxes(
            [{"role": "user", "image": str(card), "content": text}], box_format
        )
        return message["content"]

    text = "It is [[64, 50, 320, 150]] or [0,0,640,200], not [1, 2], [[1, 2, 3]] nor [1,2,3,4,5]."
    result = f"It is {BOX} or [000,000,999,999], not [1, 2], [[1, 2, 3]] nor [1,2,3,4,5]."
    assert converted(text) == result and converted(result, "thousandths_xyxy") == result
    assert converted("[[64,50,320,150;0,0,64,20]]") == "[[100,250,500,750;000,000,100,100]]"
    answer = {"bbox_2d": [64, 50, 320, 150], "others": [[0, 0, 64, 20], [0, 0, 640, 200]]}
    thousandths = {"bbox_2d": [100, 250, 500, 750], "others": [[0, 0, 100, 100], [0, 0, 999, 999]]}
    assert json.loads(converted(json.dumps(answer))) == thousandths
    assert converted("[" * 100_000 + "1,2," * 100_000)  # at once


@pytest.mark.parametrize(
    "text",
    [
        "[[10,20,30,40;50,60,70,80]]",
        "[[10, 20, 30, 40], [50, 60, 70, 80]]",
        "a [10,20,30,40] b [5e1,60.0,70.,80]",
        "[[010,020,030,040]] [[050,060,070,080]]",
    ],
)
def test_several_boxes_are_found_in_their_order(text):
    assert find_boxes(text) == [Box(10, 20, 30, 40), Box(50, 60, 70, 80)]


def test_rows_of_ms_swift_coco_and_columns_say_the_same(card):
    image = str(card)
    by_objects = [turns("Find the card", BOX, image=image)]
    assert read(card.parent, SWIFT, boxes="pixels_xyxy") == by_objects
    objects = SWIFT["objects"] | {"bbox": [[0.1, 0.25, 0.5, 0.75]], "bbox_type": "norm1"}
    assert read(card.parent, SWIFT | {"objects": objects}, boxes="fractions_xyxy") == by_objects
    row = {"name": "card.png", "what": "the card", "bbox": [64, 50, 256, 100]}
    columns = {"question": "Find {what}", "answer": "bbox", "image": "name"}
    assert read(card.parent, row, boxes="pixels_xywh", columns=columns) == by_objects
    # Rows of object detection on the Hub.
    row = {"image": "card.png", "objects": {"bbox": [[64, 50, 256, 100]], "category": ["card"]}}
    columns = {"question": "Find the {objects.category.0}", "image": "image"}
    columns["answer"] = "objects.bbox.0"
    assert read(card.parent, row, boxes="pixels_xywh", columns=columns) == by_objects
    parts = [{"type": "image", "image": "card.png"}, {"type": "text", "text": "[[0,0,64,20]]?"}]
    ((question, _),) = read(card.parent, turns(parts, "a card"), boxes="pixels_xyxy")
    assert question["content"] == "[[000,000,100,100]]?"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"objects": {"ref": ["a"], "bbox": []}}, "1 <bbox>, and objects.bbox has 0 values"),
        ({"objects": {"bbox": [[1, 2, 9, 9]]}}, "1 <ref-object>, and objects.ref has 0 values"),
        ({"objects": {"ref": ["a"], "bbox": [[1, 2]]}}, "has [1, 2]; expected four numbers"),
        ({"objects": {"ref": [7], "bbox": [[1, 2, 9, 9]]}}, "objects.ref has 7; expected texts"),
        ({"objects": None}, '"<ref-object>" stands for a box'),
        ({"objects": [[1, 2, 9, 9]]}, '"<ref-object>" refers to the row\'s "objects"'),
        ({"images": ["none.png"]}, "none.png cannot be read: does not exist"),
        ({"images": ["rows.jsonl"]}, "rows.jsonl cannot be read: cannot identify"),
        ({"messages": turns("<image>Find <ref-object>", "<box>")}, "0 <bbox>, and objects.bbox"),
    ],
)
def test_a_placeholder_that_stands_for_nothing_is_refused(card, change, expected):
    (problem,) = read(card.parent, SWIFT | change, boxes="pixels_xyxy")
    assert expected in problem


def test_without_data_boxes_the_cure_is_to_set_it(card):
    (problem,) = read(card.parent, SWIFT)
    assert '"objects" is not read: set data.boxes' in problem
    for fields in ({}, {"boxes": "pixels_xyxy"}):
        (problem,) = read(card.parent, SWIFT, ignore=("objects",), **fields)
        assert "set data.boxes" in problem


@pytest.mark.parametrize("orientation", range(1, 9), ids="EXIF orientation {}".format)
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_box_lies_where_the_model_sees_the_card(card, orientation, suffix):
    """The file's pixels are rotated or mirrored, and its EXIF entry says how to show them. The box
    is that of the upright image; the model sees it as a square."""
    upright = Image.open(card)
    stored = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    pixels = upright.transpose(stored[orientation]) if orientation in stored else upright
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = card.parent / f"turned.{suffix}"
    pixels.save(path, exif=exif, quality=95)
    assert ImageOps.exif_transpose(Image.open(path)).size == SIZE
    ((_, answer),) = read(card.parent, SWIFT | {"images": [path.name]}, boxes="pixels_xyxy")
    (box,) = find_boxes(answer["content"])
    seen = ChatGLMImageProcessor(size=224, patch_size=14)([Image.open(path)])["pixel_values"][0]
    is_card = (seen.mean(0) > 0).nonzero() * 1000 / 224
    (top, left), (bottom, right) = is_card.amin(0), is_card.amax(0)
    seen_edges = left, top, right, bottom
    assert [float(edge) for edge in seen_edges] == pytest.approx([*box], abs=2 * 1000 / 224)


def test_boxes_of_another_size_or_rotation_than_the_image_are_refused(card):
    row = SWIFT | {"width": 1280, "height": 400}
    (problem,) = read(card.parent, row, boxes="pixels_xyxy", ignore=("width", "height"))
    assert re.search("row says 1280 x 400 pixels, and its image has 640 x 200, upright", problem)
    row = SWIFT | {"width": 640, "height": 200}
    (messages,) = read(card.parent, row, boxes="pixels_xyxy", ignore=("width", "height"))
    assert messages[1]["content"] == BOX


def test_pixels_need_one_size_and_other_units_none(card):
    Image.new("RGB", (8, 8)).save(card.parent / "small.png")
    row = {"query": "[[0.1,0.25,0.5,0.75]]?", "response": "x", "images": ["card.png", "small.png"]}
    ((question, _),) = read(card.parent, row, boxes="fractions_xyxy")
    assert question["content"][-1]["text"] == f"{BOX}?"
    (problem,) = read(card.parent, row | {"query": "[[1,1,5,5]]"}, boxes="pixels_xyxy")
    assert "the sample has 2 images of 2 sizes" in problem
    row = {"query": "[[1,1,5,5]]", "response": "x"}
    assert "0 images of 0 sizes" in read(card.parent, row, boxes="pixels_xyxy")[0]
    same = {"query": "[[64,50,320,150]]", "response": "x", "images": ["card.png", "card.png"]}
    ((question, _),) = read(card.parent, same, boxes="pixels_xyxy")
    assert question["content"][-1]["text"] == BOX


def test_an_unknown_format_is_refused_with_those_that_there_are(card):
    from glm4v_patched.data.source import make_sources

    with pytest.raises(ValueError, match='boxes is "xyxy"; expected pixels_xyxy, pixels_xywh'):
        make_sources([{"path": str(card), "boxes": "xyxy"}], {})
    path = write_rows(card.parent / "rows.jsonl", SWIFT)
    (source,) = make_sources(str(path), {"boxes": "pixels_xyxy"})
    assert read_conversations(source)[0][1]["content"] == BOX
