"""Pictures in the forms that people have them in: each is read as it is, or by the one line that
its refusal prints, and is the same to the model."""

import json
import os
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from torch.testing import assert_close

from glm4v_patched.data import text_rows
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.messages import pictures_of, text_of
from glm4v_patched.data.rows import Fault, Row, read_rows
from glm4v_patched.data.source import Source, fault_of_path, make_sources
from tests.helpers import data_forms
from tests.helpers.data_forms import FORMS, QUESTION, make, read_by_the_printed_line, turns


@pytest.fixture
def examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return data_forms.draw(tmp_path, 6)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read_as_it_is_or_by_the_line_that_is_printed(
    examples, tmp_path, processor, name
):
    rows, _ = read_by_the_printed_line(*make(name, tmp_path, examples))
    assert {row.messages[-1]["content"] for row in rows} == {of.answer for of in examples}
    assert len(rows) == len(examples)
    # In the order of classes, where these are folders.
    first = next(row for row in rows if row.messages[-1]["content"] == examples[0].answer)
    picture = str(tmp_path / "pictures" / examples[0].picture)
    collator = ConversationCollator(processor)
    expected = collator([turns(QUESTION, examples[0].answer, image=picture)])
    assert_close(collator([first.messages]), expected, rtol=0, atol=0)


def read(path: Path, content: str | bytes | list | None = None, **fields) -> list[Row | Fault]:
    if isinstance(content, list):
        content = "\n".join(map(json.dumps, content))
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (source,) = make_sources([{"path": str(path), **fields}], {})
    return [*read_rows(source)]


def said(row: Row | Fault) -> list[str] | str:
    """The words of a row's messages, or its fault."""
    if isinstance(row, Fault):
        return row.text
    return [message["content"] for message in row.messages]


ROW = {"Question Text": "q?", "a": "b", "n": 7, "json": {"q": ["first", "second"]}, "x.y": {"z": 1}}


OF_TALK = {"turns": "talk", "system": "rules"}
NUMBERED = [{"answer": "yes", "answer_id": 1}, {"answer": "no", "answer_id": 2}]


def test_columns_make_the_words_of_a_row(tmp_path):
    of_turns = OF_TALK | {"question": "ask", "answer": "reply"}
    for row, columns, *expected in (
        ({}, "Question: {Question Text}\nNumber {n:03}.", "Question: q?\nNumber 007.", "b"),
        ({}, "这是什么？", "这是什么？", "b"),
        ({}, "json.q.1", "second", "b"),
        ({}, "x.y.z", "1", "b"),
        ({}, "{{a}} is {a}", "{a} is b", "b"),
        # Of several answers the commonest is learned, of equals the first.
        ({"a": ["cat", "dog", "dog"]}, "Who?", "Who?", "dog"),
        ({"a": ["cat", "dog"]}, "Who?", "Who?", "cat"),
        ({"a": NUMBERED}, "Who?", "Who?", "yes"),
        ({"a": 0.5}, "Who?", "Who?", "0.5"),
        ({"talk": [{"ask": "q", "reply": "a", "by": "me"}], "rules": "s"}, of_turns, *"sqa"),
        ({"talk": [["q", "a"]], "rules": "s"}, OF_TALK, *"sqa"),
    ):
        named = columns if isinstance(columns, dict) else {"question": columns, "answer": "a"}
        (found,) = read(tmp_path / "a.jsonl", [ROW | row], columns=named)
        assert said(found) == expected


def test_columns_that_a_row_lacks_or_that_hold_no_text_are_refused(tmp_path, words):
    refused = [("Question Text", "a"), ("{none}.", "a"), ("json.q", "a"), ("n", "x"), ("n", "true")]
    for question, answer in refused:
        row = ROW | {"x": [["a"]], "true": True}
        (row,) = read(tmp_path / "a.jsonl", [row], columns={"question": question, "answer": answer})
        words(row.text)


def test_pictures_of_a_row_without_a_place_stand_before_its_first_users_words(examples, tmp_path):
    names = [f"pictures/{example.picture}" for example in examples[:3]]
    row = {"system": "s", "before": [["q", "a"]], "question": "r", "answer": "b"}
    columns = {name: name for name in ("system", "question", "answer")} | {"history": "before"}
    absolute = [str(tmp_path / name) for name in names]
    for given, image, folder in [
        ({"a": names[0], "b": None, "c": names[1:]}, ["a", "b", "c"], {}),
        ({"n": [Path(name).name for name in names]}, "n", {"image_folder": "pictures"}),
    ]:
        asked = {"columns": columns | {"image": image}, **folder}
        (found,) = read(tmp_path / "a.jsonl", [row | given], **asked)
        assert [text_of(message) for message in found.messages] == ["s", "q", "a", "r", "b"]
        assert found.pictures == pictures_of(found.messages[1:2]) == absolute
    # With places they stand there.
    marked = row | {"question": "<image>r", "n": names[0]}
    (found,) = read(tmp_path / "a.jsonl", [marked], columns=columns | {"image": "{n}"})
    assert found.messages[3]["image"] == absolute[0] and "image" not in found.messages[1]


def test_a_column_that_no_row_has_is_refused_and_one_that_a_row_lacks_is_not(
    tmp_path, examples, words
):
    picture = f"pictures/{examples[0].picture}"
    rows = [{"q": "x", "a": "y"}, {"q": "x", "a": "y", "img": picture}]
    columns = {"question": "q", "answer": "a", "image": "img"}
    found = [row.pictures for row in read(tmp_path / "a.jsonl", rows, columns=columns)]
    assert found == [[], [str(tmp_path / picture)]]
    with words.refused(ValueError, '"imag"', '"q", "a", "img"'):
        read(tmp_path / "a.jsonl", rows, columns=columns | {"image": "imag"})
    with pytest.raises(ValueError, match='no row has "img"'):
        read(tmp_path / "a.jsonl", rows, columns=columns, ignore=["img"])


def test_columns_that_cannot_be_are_refused(words):
    answers = {"question": "a", "answer": ["b"]}
    for columns in (
        *({"qestion": "a"}, {"answer": "a"}, {"question": 5}, {"question": "{a:>9999999999}"}),
        *(answers, {"turns": "a", "history": "b"}, []),
    ):
        with words.refused(ValueError, "set 1 of 1: columns "):
            make_sources([{"path": "a.jsonl", "columns": columns}], {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('\ufeffq;a\r\n"x;\r\ny";1e5\r\n\r\n007;NA\r\n', [(2, "x;\r\ny 1e5"), (5, "007 NA")]),
        ('q,a\n"say ""hi""",b\n', [(2, 'say "hi" b')]),
        ("q,a\nx,b,c\ny,d\n", [(2, "has 3 cells, and the first line 2"), (3, "y d")]),
        ('q,a\n"x" y,b\nz,c\n', [(2, "no CSV (',' expected after '\"'): a quote"), (3, "z c")]),
        ('q,a\nx,b\n"y,c\nz,d', [(2, "x b"), (3, "no CSV (unexpected end of data)")]),
        (b"q,a\n\xc4\xe3,b\n", [(2, "character 1 is the byte 0xc4, which is no UTF-8")]),
    ],
    ids=range(6),
)
def test_a_cell_is_the_text_that_stands_in_it(tmp_path, text, expected):
    rows = read(tmp_path / "a.csv", text, columns={"question": "q", "answer": "a"})
    assert [row.line for row in rows] == [line for line, _ in expected]
    for row, (_, words) in zip(rows, expected, strict=True):
        found = said(row)
        assert (found if isinstance(found, str) else " ".join(found)).startswith(words)


def test_cells_of_tsv_are_parted_by_tabs_whatever_their_names_hold(tmp_path):
    columns = {"question": "q", "answer": "{a,b,c}"}
    (row,) = read(tmp_path / "a.tsv", "q\ta,b,c\nx,y\tz\n", columns=columns)
    assert said(row) == ["x,y", "z"]


LIMIT = 2**20


@pytest.mark.parametrize(
    ("name", "start", "filler"),
    [
        ("a.jsonl", '{"messages": "', "x"),
        ("a.json", '[{"messages": "', "x"),
        ("a.json", '{"data": [{"q": "', "x"),
        ("a.csv", 'q,a\n"', '","\n'),
    ],
)
def test_a_row_that_unpacks_without_end_is_refused(tmp_path, monkeypatch, name, start, filler):
    for limit in ("MOST_CHARACTERS", "MOST_OF_DOCUMENT"):
        monkeypatch.setattr(text_rows, limit, LIMIT)
    path = tmp_path / f"{name}.zst"
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(start.encode())
        for _ in range(40):
            file.write(filler.encode() * (LIMIT // len(filler)))
    assert path.stat().st_size < LIMIT
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match="134,217,728 characters or more|has over 1,048,576 char"
        ):
            raise ValueError([row.text for row in read(path)])
        assert tracemalloc.get_traced_memory()[1] < 24 * LIMIT
    finally:
        tracemalloc.stop()


def test_a_packed_file_that_is_cut_is_refused_and_one_of_several_parts_is_read(tmp_path):
    path = tmp_path / "a.jsonl"  # told by its bytes, whatever it is called
    for kind in ("gzip", "bz2", "zstd"):
        with pyarrow.output_stream(str(path), compression=kind) as file:
            for at in range(1000):
                file.write(f'{{"prompt": "{at}?", "completion": "a"}}\n'.encode())
        part = path.read_bytes()
        assert len(read(path, part + part)) == 2000
        with pytest.raises(ValueError, match=r"a\.jsonl cannot be read: "):
            read(path, part + part[: len(part) // 2])


def test_an_archive_whose_files_are_larger_than_it_is_refused(tmp_path):
    large, shard = tmp_path / "1.txt", tmp_path / "shards" / "train-0.tar"
    large.write_bytes(b"a")
    os.truncate(large, 2**30)
    subprocess.run(["tar", "-Scf", "a.tar", "1.txt"], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "a.tar").stat().st_size < 2**20
    os.truncate(large, 9)
    shard.parent.mkdir()
    with tarfile.open(shard, "w") as archive:
        archive.add(large, "1.txt.gz")
    for path, told in (
        (tmp_path / "a.tar", "1.txt is sparse"),
        (shard, "1.txt.gz is sparse or compressed"),
    ):
        with pytest.raises(ValueError, match=told):
            read(path)


def test_a_pattern_is_a_set_for_each_of_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows-b.jsonl", "rows-a.jsonl", "x[1].jsonl"):
        (tmp_path / name).write_text('{"prompt": "q", "completion": "a"}\n')
    sources = make_sources([{"path": "rows-*.jsonl", "weight": 2.0}], {"max_samples": 5})
    assert [Path(source.path).name for source in sources] == ["rows-a.jsonl", "rows-b.jsonl"]
    assert {(source.weight, source.max_samples) for source in sources} == {(2.0, 5)}
    assert [source.path for source in make_sources("x[1].jsonl", {})] == [f"{tmp_path}/x[1].jsonl"]
    given = {"path": "rows-a.jsonl", "format": "alpaca", "annotations": "a.json"}
    (source,) = make_sources([given], {"columns": {"question": "q"}})
    assert (source.columns, source.annotations) == (None, f"{tmp_path}/a.json")
    (tmp_path / "rows-c.jsonl").touch()
    assert fault_of_path("rows-*.jsonl") == "rows-c.jsonl: it is empty"
    assert fault_of_path("no-*.jsonl") == "there is no such file"


def test_max_samples_are_the_first_rows_and_no_more_is_read(tmp_path):
    lines = [json.dumps({"prompt": f"{at}?", "completion": "a"}) for at in range(5)]
    text = "\n".join([lines[0], "5", *lines[1:]])
    rows = read(tmp_path / "a.jsonl", text, max_samples=3)
    assert [row.line for row in rows] == [1, 2, 3] and isinstance(rows[1], Fault)
    assert len(read(tmp_path / "a.json", f"[{', '.join(lines)}, broken", max_samples=5)) == 5


@pytest.mark.parametrize("name", ["a folder a class", "imagefolder, metadata.csv", "Parquet"])
def test_a_path_is_no_pattern(examples, tmp_path, name):
    made, fields = make(name, tmp_path, examples)
    path = made.rename(tmp_path / f"ü a{{b,c}}!#[1]*{made.suffix}")
    rows, _ = read_by_the_printed_line(path, fields)
    assert {len(row.pictures) for row in rows} == {1} and len(rows) == len(examples)
    if path.is_dir():
        pictures = [Path(row.pictures[0]) for row in rows]
        assert all(path in picture.parents and picture.is_file() for picture in pictures)


def test_a_question_without_its_annotation_is_a_fault(examples, tmp_path):
    path, _ = make("VQA v2", tmp_path, examples)
    annotations = tmp_path / "annotations.json"
    whole = json.loads(annotations.read_text())
    annotations.write_text(json.dumps(whole | {"annotations": whole["annotations"][:1]}))
    image = "pictures/COCO_train2014_{image_id:012}.jpg"
    columns = {"question": "question", "answer": "answers", "image": image}
    rows = read(path, columns=columns, annotations=str(annotations))
    assert said(rows[0]) == [QUESTION, examples[0].answer]
    assert "question_id is 1, and no row of" in rows[1].text
    annotations.write_text('[{"a": 1}]')
    with pytest.raises(ValueError, match="annotations.json, row 1: has no question_id"):
        read(path, columns=columns, annotations=str(annotations))


def test_a_row_of_coco_is_an_annotation_with_its_picture_and_category(tmp_path):
    whole = {
        "images": [{"id": 1, "file_name": "a.png"}],
        "annotations": [{"id": 7, "image_id": 1, "category_id": 3}],
        "categories": [{"id": 3, "name": "cat"}],
    }
    columns = {"question": "{id}?", "answer": "category", "image": "file_name"}
    (row,) = read(tmp_path / "a.json", json.dumps(whole), columns=columns)
    assert said(row) == ["7?", "cat"] and row.pictures == [str(tmp_path / "a.png")]


def test_sets_of_llama_factory_are_read_or_refused(tmp_path):
    columns = {"prompt": "q", "query": "more", "response": "a"}
    (tmp_path / "x.json").write_text('[{"q": "q", "more": "r", "a": "b"}, {"q": "none"}]')
    only = {"file_name": "x.json", "columns": columns, "num_samples": 1}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"only": only}))
    assert [said(row) for row in read_rows(Source(str(tmp_path)))] == [["q\nr", "b"]]
    for info, named in (
        ({"a": {}, "b": {}}, "a, b: name one"),
        ({"a": {"ranking": True}}, "TRL"),
        (
            {"a": {"hf_hub_url": "x/y", "subset": "z"}},
            r'no file_name \(hf_hub_url: "x/y", .*Hub is',
        ),
        ({"a": {"file_name": "x.json", "columns": {"videos": "v"}}}, "videos"),
        (5, "dataset_info.json: is 5; expected"),
        ({"a": 5}, "a is 5; expected"),
        ({"a": only | {"folder": "x"}}, 'the key "folder" is not read'),
        ({"a": only | {"file_name": ["x.json"]}}, "file_name is a list; expected text"),
        ({"a": only | {"formatting": "odd"}}, 'formatting is "odd"; expected alpaca or'),
        ({"a": only | {"split": "test"}}, 'split is "test"; expected train'),
        ({"a": only | {"num_samples": -1}}, "num_samples is -1; expected a whole number"),
        ({"a": only | {"columns": {"prompt": 5}}}, "columns question is 5; expected"),
        ({"a": only | {"columns": {"images": {}}}}, "columns image is an empty object"),
        ({"a": only | {"formatting": "sharegpt", "tags": ["x"]}}, "tags is a list"),
    ):
        (tmp_path / "dataset_info.json").write_text(json.dumps(info))
        with pytest.raises(ValueError, match=named):
            [*read_rows(Source(str(tmp_path)))]
    for text, named in (
        ('{"a": {"file_name": "y"}, "a": {"file_name": "x.json"}}', 'key "a" stands 2 times'),
        ('{"a":' * 100_000, "nested too deeply"),
    ):
        (tmp_path / "dataset_info.json").write_text(text)
        with pytest.raises(ValueError, match=f"dataset_info.json: .*{named}"):
            [*read_rows(Source(str(tmp_path)))]
