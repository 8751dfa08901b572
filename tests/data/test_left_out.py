"""No sample lacks what its row has: images of columns that are not named, videos, sounds, and what
words such as <bbox> stand for."""

import base64
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from glm4v_patched.data.rows import Fault, Row, read_rows
from glm4v_patched.data.source import Source, make_sources
from glm4v_patched.data.stream import Stream
from glm4v_patched.inference.questions import read_questions
from tests.helpers import data_forms
from tests.helpers.data_forms import FORMS, make, png, read_by_the_printed_line, turns, write_rows

COLUMNS = {"question": "q", "answer": "a"}
PLAIN = {"q": "What is it?", "a": "red"}
BASE64 = base64.b64encode(png()).decode()


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("a.png", "b.png", "noext"):
        (tmp_path / name).write_bytes(png())
    return tmp_path


def read(folder: Path, *rows: Any, **fields: Any) -> list[Row | Fault]:
    path = write_rows(folder / "rows.jsonl", *rows)
    (source,) = make_sources([{"path": str(path), **fields}], {})
    return [*read_rows(source)]


def printed(row: Row | Fault) -> dict:
    assert isinstance(row, Fault), row
    (line,) = re.findall(r"'data\.columns=(.*?)'", row.text)
    return yaml.safe_load(line)


LOST: dict[str, tuple[dict, str]] = {
    "a path": ({"image": "a.png"}, "image"),
    "by another name": ({"col": "a.png"}, "col"),
    "a file that is not there": ({"col": "gone/a.JPG"}, "col"),
    "a file without an ending": ({"col": "noext"}, "col"),
    "a list": ({"x": [None, "a.png", "b.png"]}, "x"),
    "as datasets has it": ({"x": {"bytes": None, "path": "a.png"}}, "x"),
    "a data URL": ({"x": f"data:image/png;base64,{BASE64}"}, "x"),
    "base64": ({"x": BASE64}, "x"),
    "inside of an object": ({"meta": {"shown": "a.png"}}, "meta.shown"),
    "an address": ({"x": "https://x.y/a.png?size=1"}, "x"),
    "beside an address": ({"url": "https://x.y/a.png", "col": "a.png"}, "col"),
}


@pytest.mark.parametrize("name", LOST)
def test_an_image_of_a_column_that_is_not_named_is_no_sample_without_one(folder, name):
    more, column = LOST[name]
    (row,) = read(folder, PLAIN | more, columns=COLUMNS)
    kept = printed(row)
    assert f'"{column}"' in row.text and COLUMNS.items() <= kept.items()
    (row,) = read(folder, PLAIN | more, columns=kept, allow_urls=False)
    if name == "an address":
        assert "data.allow_urls" in row.text
    else:
        assert all(
            Path(path).suffix in (".JPG", "") or Path(path).is_file() for path in row.pictures
        )
        assert len(row.pictures) == (2 if name == "a list" else 1)
    # Left out by name, it is meant.
    (row,) = read(folder, PLAIN | more, columns=COLUMNS, ignore=[*more, column])
    assert row == Row(1, turns(*PLAIN.values()))


@pytest.mark.parametrize(
    "more",
    [{"image_id": 7}, {"image": "000123"}, {"images": [[0, 255]]}, {"img_hex": "89504e47"}]
    + [{"image": {"url": "http://x.y/1"}}],
)
def test_what_only_its_name_tells_is_an_image_too(folder, more):
    (row,) = read(folder, PLAIN | more, columns=COLUMNS)
    assert isinstance(row, Fault) and "image" in row.text and "'data.columns" not in row.text
    ignored = re.findall(r"data\.ignore: \[(.*?)\]", row.text)
    assert isinstance(read(folder, PLAIN | more, columns=COLUMNS, ignore=ignored)[0], Row)


@pytest.mark.parametrize(
    "more",
    [{}, {"image": ""}, {"image": None}, {"images": [None, ""]}, {"has_image": True, "n": 5}]
    + [{"image": {"bytes": None, "path": None}}, {"file": "notes.txt", "b": False}],
)
def test_a_row_without_an_image_is_one_of_text(folder, more):
    (row,) = read(folder, PLAIN | more, columns=COLUMNS)
    assert row == Row(1, turns(*PLAIN.values()))


def test_of_several_images_none_is_left_out(folder):
    shown = COLUMNS | {"image": "one"}
    first = {"one": "a.png"}
    for more, is_lost in (
        ({"two": "b.png"}, True),
        ({"two": ["a.png", "b.png"]}, True),
        ({"two": BASE64}, True),
        ({"two": "./a.png"}, False),  # the same file
        ({"two": "gone.png"}, False),  # where it came from
        ({"two": None}, False),
    ):
        (row,) = read(folder, PLAIN | first | more, columns=shown)
        assert isinstance(row, Fault) is is_lost, more
        if is_lost:
            columns = printed(row)
            assert columns["image"][0] == "one" and "two" in columns["image"][1]
            (kept,) = read(folder, PLAIN | first | more, columns=columns)
            assert len(kept.pictures) > 1
            (kept,) = read(folder, PLAIN | first | more, columns=shown, ignore=["two"])
            assert len(kept.pictures) == 1
    # Bytes that are shown come from a file that may lie beside them.
    embedded = {"one": f"data:image/png;base64,{BASE64}", "two": "b.png"}
    (row,) = read(folder, PLAIN | embedded, columns=shown)
    assert len(row.pictures) == 1
    # The image that is named, this row has not.
    _, row = read(folder, PLAIN | first, PLAIN | {"one": None, "two": "b.png"}, columns=shown)
    assert printed(row)["image"] == ["one", "two"]


def test_images_inside_of_turns_are_not_left_out(folder):
    of_turns = {"turns": "talk", "question": "q", "answer": "a"}
    (row,) = read(folder, {"talk": [PLAIN | {"image": "a.png"}]}, columns=of_turns)
    assert '"talk.0.image" holds an image' in row.text
    talk = {"talk": turns("q", "a"), "images": ["a.png"]}
    (row,) = read(folder, talk, columns={"turns": "talk"})
    assert printed(row) == {"turns": "talk", "image": "images"}
    # Those of messages are the messages' own.
    (row,) = read(folder, {"talk": turns("q", "a", image="a.png")}, columns={"turns": "talk"})
    assert row.pictures == [str(folder / "a.png")]


@pytest.mark.parametrize(
    "words",
    ["a.png", "What is it?\n a.png", "![it](a.png) What?", "What is <img alt='' src='a.png'>?"],
)
def test_a_question_that_names_a_file_of_an_image_is_no_sample_without_one(folder, words):
    for row in (
        {"messages": turns(words)},
        {"instruction": "What is it?", "input": words, "output": "a"},
    ):
        (found,) = read(folder, row)
        assert isinstance(found, Fault) and '"a.png" in the words is the file' in found.text
    (found,) = read(folder, PLAIN | {"q": words}, columns=COLUMNS)
    assert isinstance(found, Fault)
    # Of a file that is not there, and in an answer, it is a word; beside an image, too, unless it
    # is written as another one.
    for row in (turns(words.replace("a.png", "logo.png")), turns("q", words)):
        assert isinstance(read(folder, {"messages": row})[0], Row)
    for shown, is_lost in (("b.png", words[0] == "!" or "<img" in words), ("a.png", False)):
        (found,) = read(folder, {"messages": turns(words, image=shown)})
        assert isinstance(found, Fault if is_lost else Row)


WITH_COLUMNS = [name for name in FORMS if name not in ("hf download, JSON", "LLaVA")]


@pytest.mark.parametrize("name", WITH_COLUMNS)
def test_no_form_loses_its_images_by_a_line_without_them(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    examples = data_forms.draw(tmp_path, 6)
    path, fields = make(name, tmp_path, examples)
    rows, line = read_by_the_printed_line(path, fields)
    columns = fields.get("columns") or (yaml.safe_load(line) if line else None)
    if columns is None:  # of a format, whose keys are all read
        assert all(row.pictures for row in rows)
        return
    without = {part: of for part, of in columns.items() if part != "image"}
    sources = make_sources([{"path": str(path), **fields, "columns": without}], {})
    lost = [row for source in sources for row in read_rows(source)]
    assert len(lost) == len(examples) and all(isinstance(row, Fault) for row in lost)
    if name != "VQA v2":  # whose rows have the number of an image, and no name
        given = fields | {"columns": printed(lost[0])}
        assert read_by_the_printed_line(path, given)[0] == rows
    # Also as it is streamed, and asked.
    for source in sources[:1]:
        assert "image" in next(iter(Stream([source], 1, buffer=1))).fault
        with pytest.raises(ValueError, match=r"rows cannot be used:\n.*image"):
            read_questions(source)


def test_bytes_that_are_no_image_may_be_left_out(folder):
    table = datasets.Dataset.from_list([PLAIN | {"sound": b"RIFF\0\0\0\0WAVE"}])
    table.to_parquet(folder / "a.parquet")
    (row,) = read_rows(Source(str(folder / "a.parquet"), columns=COLUMNS))
    assert row == Row(1, turns(*PLAIN.values()))


def test_a_set_for_evaluation_loses_no_image(folder, check):
    a = write_rows(folder / "a.jsonl", PLAIN)
    b = write_rows(folder / "b.jsonl", PLAIN | {"image": "a.png"})
    mine, other = (Source(str(path), columns=COLUMNS) for path in (a, b))
    with pytest.raises(ValueError, match=r'b\.jsonl:1: the column "image" holds an image'):
        check(mine, evaluate=[other])
    with pytest.raises(ValueError, match=r'b\.jsonl:1: the column "image" holds an image'):
        check(other, first=1)


def test_a_key_of_images_that_no_format_has_is_to_be_written_as_one_that_it_has(folder):
    for key in ("img", "image_path", "picture", "Image", "image_file", "jpg", "图片", "image_ids"):
        (row,) = read(folder, {"messages": turns(), key: "a.png"})
        assert f'"{key}" is not read: write the image as "image": "a.png"' in row.text
        assert "ignore" not in row.text
    (row,) = read(folder, {"messages": turns(), "shown": "a.png"})  # told by its value
    assert 'write the image as "image": "a.png"' in row.text
    (row,) = read(folder, {"messages": turns("<image>q"), "image": {"<image_0>": "a", "<1>": "b"}})
    assert 'the keys "<image_0>", "<1>": write "images": ["a.png", "b.png"]' in row.text
    talk = [{"from": "user", "value": "Picture 1: <img>a.png</img>\nq"}]
    (row,) = read(folder, {"conversations": talk})
    assert 'write <image> there, and "image": "a.png" in the row' in row.text
    for where in ("file:///x/a%20b.png", "FILE:///x/a%20b.png"):
        (row,) = read(folder, {"messages": turns(image=where)})
        assert 'write the path: "/x/a b.png"' in row.text


def test_a_column_that_no_row_has_is_a_mistake_and_an_empty_one_is_none(folder):
    named = COLUMNS | {"image": "image"}
    for row in (PLAIN, PLAIN | {"image": None}):
        with pytest.raises(ValueError, match='no row has "image"'):
            read(folder, *[row] * 2, columns=named)
    for value in ("", [], [None], {"bytes": None, "path": None}):
        rows = read(folder, *[PLAIN | {"image": value}] * 2, columns=named)
        assert [len(row.pictures) for row in rows] == [0, 0]
        rows = read(folder, PLAIN | {"image": value}, PLAIN | {"image": "a.png"}, columns=named)
        assert [len(row.pictures) for row in rows] == [0, 1]


@pytest.mark.parametrize(
    "more",
    [
        {"title": "How to convert a.jpg to b.png"},
        {"picture": "Inception"},
        {"png": 3},
        {"image": "N/A"},
        {"meta": {"image": {"width": 3}}},
        {"image_size": 7, "url": "http://x.y/1"},
    ],
)
def test_what_names_no_image_is_left_out_as_ever(folder, more):
    assert read(folder, PLAIN | more, columns=COLUMNS) == [Row(1, turns(*PLAIN.values()))]


def test_images_inside_of_objects_are_not_lost_beside_one_that_is_shown(folder):
    shown = PLAIN | {"image": "a.png"}
    for more in (
        {"meta": {"second": {"bytes": None, "path": "b.png"}, "x": 1}},
        {"frames": [{"image": "b.png", "t": 1}]},
    ):
        (found,) = read(folder, shown | more, columns=COLUMNS | {"image": "image"})
        assert isinstance(found, Fault) and "the sample would not have it" in found.text


# Words, what the row has beside them, and what of it the message names.
STAND_FOR_OTHERS: dict[str, tuple[Any, ...]] = {
    "ms-swift's boxes": ("<image>Find <ref-object>", "<bbox>", {"objects": {"bbox": [[1, 2]]}}),
    "a box without a key": ("q", "It is at <bbox>.", {}),
    "a box in backticks, and its key": ("q", "`<bbox>`", {"objects": {"bbox": [[1, 2]]}}),
    "InternVL's box": ("<ref>cat</ref>?", "<ref>cat</ref><box>[[1, 2, 30, 40]]</box>", {}),
    "Qwen-VL's box": ("q", "<box>(1,2),(3,4)</box>", {}),
    "Qwen's box": ("q", "<|box_start|>(1,2),(3,4)<|box_end|>", {}),
    "Qwen's reference": ("Find <|object_ref_start|>cat<|object_ref_end|>", "a", {}),
    "DeepSeek's": ("q", "<|ref|>cat<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>", {}),
    "a box alone": ("q", "<quad>", {}),
    "PaliGemma's": ("q", "<loc0123><loc0001> cat", {}),
    "a video": ("<video>q", "a", {}),
    "a video behind an image": ("<image><video>\nq", "a", {}),
    "a video at the end": ("What happens?\n<video>", "a", {}),
    "a video in the middle, and its key": ("In <video> who is it?", "a", {"videos": ["a.mp4"]}),
    "Qwen's video": ("See <|vision_start|><|video_pad|><|vision_end|> there", "a", {}),
    "a sound": ("<audio>q", "a", {}),
    "two sounds": ("<audio><audio>q", "a", {}),
    "Qwen's sound": ("Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nq", "a", {}),
    "Phi's sound": ("q <|audio_1|>", "a", {}),
    "Gemma's": ("q <start_of_audio>", "a", {}),
    "InternVL's image": ("<img><IMG_CONTEXT></img>q", "a", {}),
    "LLaVA's image": ("<im_start><im_patch><im_end>q", "a", {}),
    "Qwen's image": ("<|vision_start|> q", "a", {}),
    "of GLM-4": ("q <|begin_of_video|>", "a", {}),
    "of a reward": ("q", "step 1 <cot-process>", {}),
}


@pytest.mark.parametrize("name", STAND_FOR_OTHERS)
def test_a_word_that_stands_for_what_is_not_there_is_refused(folder, name, words):
    question, answer, more = STAND_FOR_OTHERS[name]
    row = {"messages": turns(question, answer), "images": ["a.png"] * ("<image>" in question)}
    (found,) = read(folder, row | more, ignore=[*more])
    assert re.search(r"boxes\?|images alone|<image>|take it out", found.text)
    if name in ("ms-swift's boxes", "Qwen's box", "a sound", "Qwen's image"):
        words(found.text)
    # By columns, and as a question.
    columns = COLUMNS | ({"image": "image"} if row["images"] else {})
    named = {"q": question, "a": answer, "image": row["images"]}
    (found,) = read(folder, named | more, columns=columns)
    assert isinstance(found, Fault)
    path = write_rows(folder / "asked.jsonl", row | more)
    with pytest.raises(ValueError, match="asked.jsonl:1: "):
        read_questions(Source(str(path), ignore=tuple(more)))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How do I embed a film?", "Write `<video>`, or ```html\n<video>\n<audio>\n``` there."),
        ("`<video>` does not play, why?", "Use <audio> or <video controls> instead, not <object>."),
        ("<video>\n<source src='a.mp4'>\n</video> Why is it black?", "The codec."),
        ("In XML, is <box>red</box> valid?", "<box>red</box> is."),
        ("What is <ref> in a wiki?", "A source: <ref>Smith, 2020</ref>."),
        ("x < 3 and y > [[1, 2]]", "[[10, 20, 300, 400]]"),
        ("Is <point>3</point> the score?", "<point>3</point>"),
        ("Sort a std::vector<Point>", "std::make_unique<Box>(10, 20); new List<Point>(5)"),
        ("What does it return? List<Video>", "<kml><Point>1.5, 2</Point></kml>"),
        ("What is the group in (?<ref>", "A name."),
        ("What does `<|vision_start|>` do?", "`<|vision_start|>` begins an image, `<bbox>` a box."),
    ],
)
def test_a_word_of_a_text_stays(folder, question, answer):
    (row,) = read(folder, {"messages": turns(question, answer)})
    assert row == Row(1, turns(question, answer))


def test_a_video_or_sound_cannot_be_left_out_of_a_sample_that_needs_it(folder):
    for key, value in (("videos", ["a.mp4"]), ("audio", {"bytes": None, "path": "a.wav"})):
        row = {"messages": turns(), key: value}
        (found,) = read(folder, row)
        assert "the model sees images alone" in found.text
        (found,) = read(folder, row, ignore=[key])
        assert f'"{key}", which data.ignore cannot leave out' in found.text
        (found,) = read(folder, PLAIN | {key: value}, columns=COLUMNS)
        assert "the sample would have no image" in found.text
        # An image is enough, or the user's word.
        shown = PLAIN | {key: value, "image": "a.png"}
        (found,) = read(folder, shown, columns=COLUMNS | {"image": "image"})
        assert isinstance(found, Row)
        assert isinstance(read(folder, PLAIN | {key: value}, columns=COLUMNS, ignore=[key])[0], Row)
    for empty in ([], None, "", [None], False):
        (found,) = read(folder, {"messages": turns(), "videos": empty}, ignore=["videos"])
        assert isinstance(found, Row)
    # Frames of it are shown, and no word refers to it.
    row = {"messages": turns(image="a.png"), "video": "a.mp4"}
    assert isinstance(read(folder, row, ignore=["video"])[0], Row)
    # Boxes that no word refers to.
    more = {"objects": {"bbox": [[1, 2, 3, 4]]}}
    assert isinstance(read(folder, {"messages": turns()} | more, ignore=["objects"])[0], Row)
