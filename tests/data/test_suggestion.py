"""The line that an error suggests is sure, or there is none: what would be learned by it has the
images of the row, and a question and an answer that are said. Those for the forms of
data_forms.yaml are looked at in test_forms.py."""

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from PIL import Image

from glm4v_patched.data.columns import fault_of_columns
from glm4v_patched.data.messages import text_of
from glm4v_patched.data.rows import Fault, Row, read_rows
from glm4v_patched.data.source import make_sources
from glm4v_patched.data.suggestion import QUESTION, suggest
from tests.helpers.data_forms import png, write_rows


def read(path: Path, **fields: Any) -> list[Row | Fault]:
    (source,) = make_sources([{"path": str(path), **fields}], {})
    return [*read_rows(source)]


def suggested(row: Row | Fault) -> dict | None:
    assert isinstance(row, Fault), row
    found = re.findall(r"'data\.columns=(.*?)'", row.text)
    return yaml.safe_load(found[0]) if found else None


SHOWN = {"image": "a.png"}
ASKED = {"question": "What colour?", "answer": "red"}
COLUMNS = {"question": "question", "answer": "answer", "image": "image"}
CAPTION = {"question": QUESTION, "image": "image"}
LABEL_STUDIO = {
    "id": 0,
    "annotations": [{"id": 0, "result": [{"value": {"text": ["a red card"]}, "from_name": "c"}]}],
    "file_upload": "ab-0.png",
    "data": {"captioning": "/data/upload/1/ab-0.png"},
    "created_at": "2024-05-01T10:00:00Z",
}
BESIDE = {"id": 7, "annotation_id": 9, "created_at": "2024-05-01", "lead_time": 1.5}
COCO = {"file_name": "a.png", "coco_url": "http://x.y/a.jpg", "flickr_url": "http://z/a.jpg"}

# A row, and what is suggested for it: None, where something has to be guessed.
ROWS: dict[str, tuple[dict, dict | None]] = {
    "names of the parts": (SHOWN | ASKED, COLUMNS),
    "in Chinese": (
        {"图片": "a.png", "问题": "什么颜色？", "答案": "红"},
        {"question": "问题", "answer": "答案", "image": "图片"},
    ),
    "a blank in a name": (
        {"Question Text": "q", "Answer": "s"},
        {"question": "{Question Text}", "answer": "Answer"},
    ),
    "text only": (ASKED, {"question": "question", "answer": "answer"}),
    "an image that this row has not": (ASKED | {"image": ""}, COLUMNS),
    "an object": (
        {"meta.json": ASKED},
        {"question": "meta.json.question", "answer": "meta.json.answer"},
    ),
    "VQA v2's answers": (
        SHOWN | {"question": "q", "answers": [{"answer": "a"}], "multiple_choice_answer": "a"},
        COLUMNS | {"answer": "multiple_choice_answer"},
    ),
    "several answers": (
        SHOWN | {"question": "q", "answers": ["a", "b"]},
        COLUMNS | {"answer": "answers"},
    ),
    "a caption": (SHOWN | {"caption": "a red card"} | BESIDE, CAPTION | {"answer": "caption"}),
    "one text beside an image": (SHOWN | {"words": "a card"}, CAPTION | {"answer": "words"}),
    "COCO": (
        COCO | {"caption": "a card"} | BESIDE,
        {"question": QUESTION, "answer": "caption", "image": "file_name"},
    ),
    "base64": (
        {"image": "iVBORw0KGgo" + "A" * 80} | ASKED,
        COLUMNS | {"image": "data:image/png;base64,{image}"},
    ),
    "turns": (
        SHOWN | {"dialog": [{"question": "q", "answer": "a", "id": 1}]},
        {"turns": "dialog", "question": "question", "answer": "answer", "image": "image"},
    ),
    "pairs": (SHOWN | {"talk": [["q", "a"]]}, {"turns": "talk", "image": "image"}),
    "history and system": (
        ASKED | {"history": [["q", "a"]], "system": "Be short."},
        {"question": "question", "answer": "answer", "system": "system", "history": "history"},
    ),
    # Dates, paths, ids, numbers, and equal columns
    "Label Studio": (LABEL_STUDIO, None),
    "a date": (SHOWN | {"created_at": "2024"}, None),
    "a date of a day": (SHOWN | {"text": "2024-05-01 10:00"}, None),
    "a class of a number": (SHOWN | {"label": 3}, None),
    "a class of a number, in a CSV": (SHOWN | {"label": "3"}, None),
    "an id": (SHOWN | {"text": "3f2504e0-4f89-11d3-9a0c-0305e82c3301"}, None),
    "a digest": (SHOWN | {"text": "d41d8cd98f00b204e9800998ecf8427e"}, None),
    "a path": (SHOWN | {"text": "data/0001.txt"}, None),
    "a path as the answer": (ASKED | SHOWN | {"answer": "b.png"}, None),
    "the question as the caption": (SHOWN | {"text": "Which animal is it?"}, None),
    "equal columns": (SHOWN | {"question": "a card", "answer": "a card"}, None),
    "equal captions": (
        SHOWN | {"txt": "a card", "json": {"caption": "a card", "url": "http://x.y/1"}},
        CAPTION | {"answer": "txt"},
    ),
    "two captions": (SHOWN | {"txt": "a card", "json": {"caption": "another card"}}, None),
    "names that say nothing": ({"text_a": "q", "text_b": "s"}, None),
    "two images": (ASKED | {"image_1": "a.png", "image_2": "b.png"}, None),
    "an image by its number": (ASKED | {"image_id": 9, "question_id": 1}, None),
    "choices": (SHOWN | ASKED | {"choices": ["red", "blue"], "answer": 0}, None),
    "a question in two parts": ({"instruction": "q", "input": "r", "response": "a"}, None),
    "preferences": ({"prompt": "q", "chosen": "a", "rejected": "b"} | SHOWN, None),
    "columns of a table": ({"image": ["a.png", "b.png"], "question": ["q", "r"]}, None),
    "no answer": (SHOWN | {"question": "q"}, None),
    "two questions": (SHOWN | ASKED | {"prompt": "Answer: {question}"}, None),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_line_is_suggested_only_where_it_is_sure(tmp_path, name):
    row, expected = ROWS[name]
    (fault,) = read(write_rows(tmp_path / "a.jsonl", row))
    assert suggested(fault) == expected
    assert "COLUMN" not in fault.text and fault_of_columns(expected or COLUMNS) is None
    if name == "preferences":
        assert "TRL" in fault.text


def is_said(text: str) -> bool:
    """Whether a text may be a question or an answer: no path, date or id."""
    return not re.fullmatch(r"\S*[/.]\S*\.?\w{3}|\d{4}(-\d\d)*.*|[\da-f-]{16,}|\d{5,}", text)


def look_at(path: Path, number: int, has_images: bool = True, **fields: Any) -> None:
    """What would be learned of a set by the line that is suggested for it, if one is."""
    first = read(path, **fields)[0]
    if isinstance(first, Row) or (columns := suggested(first)) is None:
        return
    rows = read(path, **fields, columns=columns)
    assert len(rows) == number, "a set is not one row, and no row of it is lost"
    for row in rows:
        assert isinstance(row, Row), row
        question, answer = (text_of(message) for message in row.messages[-2:])
        assert question != answer and is_said(question) and is_said(answer)
        assert bool(row.pictures) is has_images


def in_tar(path: Path, rows: list[dict[str, bytes]]) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(rows):
            for ending, content in row.items():
                file = folder / f"{number:05}.{ending}"
                file.write_bytes(content)
                archive.add(file, file.name)
    return path


def test_what_is_suggested_for_files_of_other_tools_keeps_their_images(tmp_path):
    words = [f"a coloured card {number} of many" for number in "abc"]
    # img2dataset's, whose .txt is the caption of .json
    of_json = [
        {"caption": of, "url": "http://x.y/1.jpg", "key": "00000", "width": 8} for of in words
    ]
    rows = [
        {"jpg": png(), "txt": of.encode(), "json": json.dumps(more).encode()}
        for of, more in zip(words, of_json, strict=True)
    ]
    look_at(in_tar(tmp_path / "img2dataset.tar", rows), 3)
    assert suggested(read(tmp_path / "img2dataset.tar")[0])["answer"] == "txt"
    look_at(in_tar(tmp_path / "cls.tar", [{"png": png(), "cls": b"3"}] * 3), 3)
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png())
    small = [{"image": "a.png", "caption": of, "annotator": 1, **BESIDE} for of in words]
    for name, content in (("min.json", small), ("full.json", [LABEL_STUDIO] * 3)):
        (tmp_path / name).write_text(json.dumps(content))
        look_at(tmp_path / name, 3)
    embedded = [{"image": {"bytes": png(), "path": "a.png"}, "file_name": "a.png", **ASKED}] * 3
    datasets.Dataset.from_list(embedded).to_parquet(tmp_path / "a.parquet")
    look_at(tmp_path / "a.parquet", 3)
    assert suggested(read(tmp_path / "a.parquet")[0]) == COLUMNS
    for name, text in (
        ("label.csv", "path,label\na.png,0\nb.png,1\n"),
        ("caption.csv", "filename,caption\na.png,a red card\nb.png,a green card\n"),
        ("dates.csv", "image,date,count\na.png,2024-01-01,1\nb.png,2024-01-02,2\n"),
    ):
        (tmp_path / name).write_text(text)
        look_at(tmp_path / name, 2)


def test_a_line_keeps_images_that_the_first_row_has_not(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"image": of, **ASKED} for of in (None, {"bytes": png(), "path": None})]
    table = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "a.csv").write_text("image,question,answer\n,What?,red\na.png,What?,red\n")
    for name in ("a.parquet", "saved", "a.csv"):
        first, second = read(tmp_path / name)
        assert suggested(first) == suggested(second) == COLUMNS
        shown = read(tmp_path / name, columns=COLUMNS)
        assert [len(row.pictures) for row in shown] == [0, 1]
        plain, lost = read(tmp_path / name, columns={"question": "question", "answer": "answer"})
        assert not plain.pictures and suggested(lost) == COLUMNS
    # Of an empty column whose name says nothing, nothing is known.
    (tmp_path / "a.csv").write_text("x,question,answer\n,What?,red\na.png,What?,red\n")
    first, second = read(tmp_path / "a.csv")
    assert suggested(first) is None and suggested(second) == COLUMNS | {"image": "x"}


# A file, its text, and what of it the message names.
NO_ROWS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "another separator": ("a.csv", "image|question|answer\na.png|q|b\n", ('"|"', "sep='|'")),
    "of a script": ("a.csv", "图片，问题，答案\na.png，q，b\n", ('"，"',)),
    "commas in TSV": ("a.tsv", "image,question\na.png,q\n", ('","',)),
    "a separator without names": ("a.csv", "a.png|What?|red\nb.png|What?|blue\n", ('"|"',)),
    "no names": ("a.csv", "a.png,What?,red\nb.png,What?,blue\n", ('"a.png" is a cell', "names")),
    "no names, in TSV": ("a.tsv", "What?\tred\tb.PNG\n", ('"b.PNG" is a cell',)),
    "no names, an address": ("a.csv", "What?,http://x.y/a.jpg\n", ("a.jpg",)),
    "no names, a number": ("a.csv", "1,What?,red\n2,What?,blue\n", ('"1" is a cell',)),
    "no names, a date": ("a.csv", "2024-05-01,What?\nx,y\n", ('"2024-05-01" is a cell',)),
    "Excel's line": ("a.csv", "sep=;\nimage;question\na.png;q\n", ('"sep=" is a line',)),
    "columns": ("a.json", '{"image": {"0": "a"}, "answer": {"0": "b"}}', ('"columns"',)),
    "index": ("a.json", '{"0": {"image": "a"}, "1": {"image": "b"}}', ('"index"',)),
    "split": ("a.json", '{"columns": ["q"], "index": [0], "data": [["x"]]}', ('"split"',)),
    "of lines": ("a.json", '{\n "image": {\n  "7": "a"},\n "b": {"7": "b"}}', ('"columns"',)),
    "InternVL": (
        "meta.json",
        '{\n "mine": {"root": "pics/", "annotation": "a.jsonl", "repeat_time": 1}}',
        ("{path: a.jsonl, image_folder: pics/}",),
    ),
    "LLaMA-Factory": ("a.json", '{"mine": {"file_name": "a.json"}}', ("subset: mine",)),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_a_file_whose_rows_would_be_others_is_refused_with_its_cure(tmp_path, name, words):
    file, text, named = NO_ROWS[name]
    (tmp_path / file).write_text(text)
    with words.refused(ValueError, file, *named):
        read(tmp_path / file)
    with pytest.raises(ValueError, match=file):
        read(tmp_path / file, columns={"question": "question.0", "answer": "image.0"})


def test_a_file_of_one_column_or_of_names_that_are_words_is_read(tmp_path):
    path = tmp_path / "a.csv"
    for text, columns in (
        ("question\nWhat | or which?\n", {"question": "question"}),
        ("Question (Text)\nWhat?\n", {"question": "{Question (Text)}"}),
        ("Is it red?,2nd answer\nno,yes\n", {"question": "{Is it red?}", "answer": "{2nd answer}"}),
        ("0,1\nWhat?,red\n", {"question": "{0}", "answer": "{1}"}),
    ):
        path.write_text(text)
        (source,) = make_sources([{"path": str(path), "columns": columns}], {})
        assert isinstance(next(iter(read_rows(source, to_learn=False))), Row), text


@pytest.mark.parametrize("images", [2, 3])  # the more frequent kind is read
@pytest.mark.parametrize("ending", ["txt", "json"])
def test_images_with_texts_beside_them_are_read_by_the_printed_archive(tmp_path, images, ending):
    folder = tmp_path / "kohya's"
    (folder / "10_cards").mkdir(parents=True)
    for number in range(images):
        Image.new("RGB", (8, 8)).save(folder / "10_cards" / f"{number}.png")
    for number in range(2):
        text = "a red card" if ending == "txt" else json.dumps({"answer": "a red card"})
        (folder / "10_cards" / f"{number}.{ending}").write_text(text)
    with pytest.raises(ValueError, match=rf"has 0.png and 0.{ending}") as refused:
        read(folder)
    command, columns = re.findall(r"(tar .*) \(data\.columns=(.*)\)", str(refused.value))[0]
    if images == 3:  # of which one has no text
        (folder / "10_cards" / "2.png").unlink()
    subprocess.run(command, shell=True, check=True, timeout=60)
    rows = read(tmp_path / "kohya's.tar", columns=yaml.safe_load(columns))
    assert [(len(row.pictures), row.messages[1]["content"]) for row in rows] == [
        (1, "a red card")
    ] * 2


def test_a_folder_of_what_is_no_row_is_refused(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a line\n")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png())
    with pytest.raises(ValueError, match=r"is a folder of text .*, and no set"):
        read(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    (tmp_path / "images" / "b.png").write_bytes(png())
    (tmp_path / "rows.jsonl").write_text(json.dumps(ASKED | SHOWN))
    with pytest.raises(ValueError, match=r"has rows.jsonl beside its images"):
        read(tmp_path)


def test_an_archive_whose_images_change_their_kind_is_refused(tmp_path):
    rows = [{ending: png(), "txt": b"a"} for ending in ["png"] * 6 + ["jpg"] * 2]
    path = in_tar(tmp_path / "a.tar", rows)
    found = read(path, columns={"question": "What?", "answer": "txt", "image": "png"})
    assert [isinstance(row, Row) for row in found] == [True] * 6 + [False] * 2
    assert "jpg" in found[6].text


@pytest.mark.parametrize(
    ("text", "asked", "answer"),
    [
        (",0,1\n0,q,b\n", "{0}", "{1}"),
        ("question,0\nq,b\n", "question", "{0}"),
        ('"What\nis it?",answer\nq,b\n', "{What\nis it?}", "answer"),
    ],
)
def test_names_that_pandas_and_forms_give_are_names(tmp_path, text, asked, answer):
    (tmp_path / "a.csv").write_text(text)
    [row] = read(tmp_path / "a.csv", columns={"question": asked, "answer": answer})
    assert [message["content"] for message in row.messages] == ["q", "b"]


@pytest.mark.parametrize(
    "more", ["answer_choices", "option_a", "candidates", "document", "choice1"]
)
def test_a_question_that_needs_another_column_is_not_suggested(more):
    row = {"question": "Which?", "answer": "B"}
    assert suggest(row) is not None and suggest(row | {more: "x"}) is None
