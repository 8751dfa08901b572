"""No sample lacks what its row has: columns and keys are named, or the row is refused; and so are
words such as <bbox>, which stand for what is not there."""

import re
from pathlib import Path
from typing import Any

import pytest

from glm4v_patched.data.rows import ConversationRow, RowProblem, iter_rows
from glm4v_patched.data.source import DataSource, make_sources
from glm4v_patched.data.stream import StreamDataset
from glm4v_patched.inference.questions import read_questions
from tests.data import forms
from tests.data.forms import make, read_form
from tests.data.samples import png, turns, write_rows

COLUMNS = {"question": "q", "answer": "a"}
PLAIN = {"q": "What is it?", "a": "red"}


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png())
    return tmp_path


def read(folder: Path, *rows: Any, **fields: Any) -> list[ConversationRow | RowProblem]:
    path = write_rows(folder / "rows.jsonl", *rows)
    (source,) = make_sources([{"path": str(path), **fields}], {})
    return [*iter_rows(source)]


@pytest.mark.parametrize(
    ("more", "column", "look"),
    [
        ({"image": "a.png"}, "image", '"a.png"'),
        ({"x": [None, "a.png"]}, "x", "a list"),
        ({"x": {"bytes": None, "path": "a.png"}}, "x", '"a.png"'),
        ({"meta": {"shown": "a.png"}}, "meta", "an object"),
        ({"q": {"text": "q", "image": "a.png"}}, "q.image", '"a.png"'),
        ({"image_id": 7, "n": 0}, "image_id", "7"),
        ({"x.y": False}, "x.y", "false"),
        ({"x": "long " * 9999}, "x", '"long long'),
    ],
)
def test_each_column_is_named_or_ignored_or_the_row_is_refused(folder, more, column, look):
    columns = COLUMNS | ({"question": "q.text"} if "q" in more else {})
    problem, again = read(folder, PLAIN | more, PLAIN | more, columns=columns)
    assert f'"{column}" ({look}' in problem.text and "data.ignore" in problem.text
    assert len(problem.text) < 500 and problem.text == again.text
    ignored = {"q": ["q.image"]}.get(next(iter(more)), [*more])
    (problem,) = read(folder, PLAIN | more, columns=columns, ignore=ignored)
    assert isinstance(problem, ConversationRow)


@pytest.mark.parametrize(
    "more",
    [{}, {"image": ""}, {"image": None}, {"images": [None, ""]}, {"__key__": "7", "Unnamed: 0": 5}]
    + [{"image": {"bytes": None, "path": None}}],
)
def test_what_is_empty_or_of_a_tool_needs_no_name(folder, more):
    (row,) = read(folder, PLAIN | more, columns=COLUMNS)
    assert row == ConversationRow(1, turns(*PLAIN.values()))
    (row,) = read(folder, PLAIN | more, columns=COLUMNS | {"image": "image"})
    assert row == ConversationRow(1, turns(*PLAIN.values()))


def test_a_row_that_differs_from_the_first_ones_is_refused(folder):
    rows = [PLAIN, PLAIN | {"image": "a.png"}, PLAIN | {"image": "a.png", "second": "b.png"}]
    plain, lost, both = read(folder, *rows, columns=COLUMNS)
    assert (
        isinstance(plain, ConversationRow)
        and '"image" ("a.png")' in lost.text
        and "second" in both.text
    )
    first, with_image, lost = read(folder, *rows, columns=COLUMNS | {"image": "image"})
    assert (first.images, with_image.images) == ([], [str(folder / "a.png")])
    assert '"second" ("b.png")' in lost.text


def test_keys_of_turns_are_named_too(folder):
    of_turns = {"turns": "talk", "question": "q", "answer": "a"}
    row = {"talk": [PLAIN | {"image": "a.png", "n": None}]}
    (result,) = read(folder, row, columns=of_turns)
    assert 'turn 1 of 1 of talk: the key "image" is not read' in result.text
    assert isinstance(read(folder, row, columns=of_turns, ignore=["image"])[0], ConversationRow)
    cauldron = {"texts": [{"user": "q", "assistant": "a", "source": "mine"}]}
    assert isinstance(read(folder, cauldron)[0], ConversationRow)
    cauldron["texts"][0]["image"] = "a.png"
    assert 'the key "image" is not read' in read(folder, cauldron)[0].text
    (result,) = read(folder, {"talk": turns(), "images": ["a.png"]}, columns={"turns": "talk"})
    assert '"images" (a list)' in result.text


@pytest.mark.parametrize(
    "words",
    ["a.png", "What is it?\n a.png", "![it](a.png) What?", "What is <img alt='' src='a.png'>?"]
    + ["Image: my cat.PNG", "Which? ./a.png"],
)
def test_a_question_that_names_a_file_of_an_image_is_no_sample_without_one(folder, words):
    (folder / "my cat.PNG").write_bytes(png())
    name = "my cat.PNG" if "cat" in words else "a.png"
    for row in (
        {"messages": turns(words)},
        {"messages": turns(words, image="b.png")},
        {"instruction": "What is it?", "input": words, "output": "a"},
    ):
        (problem,) = read(folder, row)
        assert (
            isinstance(problem, RowProblem)
            and f'{name}" in the text is an image file' in problem.text
        )
    (problem,) = read(folder, PLAIN | {"q": words}, columns=COLUMNS)
    assert isinstance(problem, RowProblem)
    # Of a file that is not there, in an answer, and of the image that is shown, it is a word.
    for row in (
        turns(words.replace(name, "logo.png")),
        turns("q", words),
        turns(words, image=name),
    ):
        assert isinstance(read(folder, {"messages": row})[0], ConversationRow)


@pytest.mark.parametrize("name", ["Parquet", "CSV", "one folder per class", "WebDataset"])
def test_no_form_loses_its_images_by_columns_without_them(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    examples = forms.draw(tmp_path, 6)
    path, fields = make(name, tmp_path, examples)
    image = fields["columns"]["image"]
    columns = {part: column for part, column in fields["columns"].items() if part != "image"}
    fields = fields | {"columns": columns}
    lost = read_form(path, fields)
    assert len(lost) == len(examples)
    assert all(isinstance(row, RowProblem) and f'"{image}" (' in row.text for row in lost)
    # Also as it is streamed, and asked.
    source = make_sources([{"path": str(path), **fields}], {})[0]
    assert f'"{image}" (' in next(iter(StreamDataset([source], 1, buffer_size=1))).problem
    with pytest.raises(ValueError, match=rf'rows cannot be used:\n.*"{image}" \('):
        read_questions(source)


def test_a_key_of_images_that_no_format_has_is_to_be_written_as_one_that_it_has(folder):
    for key in ("img", "image_path", "picture", "Image", "image_file", "jpg", "图片", "image_ids"):
        (row,) = read(folder, {"messages": turns(), key: "a.png"})
        assert f'"{key}" is not read: write "image": "a.png" for one image' in row.text
        assert "ignore" not in row.text
    (row,) = read(folder, {"messages": turns("<image>q"), "image": {"<image_0>": "a", "<1>": "b"}})
    assert 'the keys "<image_0>", "<1>": write "images": ["a.png", "b.png"]' in row.text


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
    (result,) = read(folder, row | more, ignore=[*more])
    assert re.search(r"grounding\.md|only images|<image>|remove it", result.text)
    if name in ("ms-swift's boxes", "Qwen's box", "a sound", "Qwen's image"):
        words(result.text)
    # By columns, and as a question.
    columns = COLUMNS | ({"image": "image"} if row["images"] else {})
    named = {"q": question, "a": answer, "image": row["images"]}
    (result,) = read(folder, named | more, columns=columns, ignore=[*more])
    assert "message" in result.text
    path = write_rows(folder / "asked.jsonl", row | more)
    with pytest.raises(ValueError, match="asked.jsonl:1: "):
        read_questions(DataSource(str(path), ignore=tuple(more)))


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
    assert row == ConversationRow(1, turns(question, answer))


def test_a_video_or_sound_cannot_be_left_out_of_a_sample_that_needs_it(folder):
    for key, value in (("videos", ["a.mp4"]), ("audio", {"bytes": None, "path": "a.wav"})):
        row = {"messages": turns(), key: value}
        (result,) = read(folder, row)
        assert "the model accepts only images" in result.text
        (result,) = read(folder, row, ignore=[key])
        assert f'"{key}", which data.ignore must not drop' in result.text
    for empty in ([], None, "", [None], False):
        (result,) = read(folder, {"messages": turns(), "videos": empty}, ignore=["videos"])
        assert isinstance(result, ConversationRow)
    # Frames of it are shown, and no word refers to it.
    row = {"messages": turns(image="a.png"), "video": "a.mp4"}
    assert isinstance(read(folder, row, ignore=["video"])[0], ConversationRow)
    # Boxes that no word refers to.
    more = {"objects": {"bbox": [[1, 2, 3, 4]]}}
    assert isinstance(
        read(folder, {"messages": turns()} | more, ignore=["objects"])[0], ConversationRow
    )
