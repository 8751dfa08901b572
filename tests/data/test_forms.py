"""Images in the forms that people have them in: each is the same to the model."""

import json
import os
import re
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
import yaml
from PIL import Image
from torch.testing import assert_close

from glm4v_patched.cli import main
from glm4v_patched.data import text_rows
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.columns import named_columns
from glm4v_patched.data.messages import images_of, text_of
from glm4v_patched.data.rows import ConversationRow, RowProblem, iter_rows, read_conversations
from glm4v_patched.data.source import find_path_problem, make_sources
from tests.data import forms
from tests.data.forms import FORMS, QUESTION, make, read_form
from tests.data.samples import png, turns


@pytest.fixture
def examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return forms.draw(tmp_path, 6)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_the_same_to_the_model(examples, tmp_path, processor, name):
    rows = read_form(*make(name, tmp_path, examples))
    assert {row.messages[-1]["content"] for row in rows} == {example.answer for example in examples}
    assert len(rows) == len(examples)
    # In the order of classes, where these are folders.
    first = next(row for row in rows if row.messages[-1]["content"] == examples[0].answer)
    image = str(tmp_path / "images" / examples[0].image)
    collator = ConversationCollator(processor)
    expected = collator([turns(QUESTION, examples[0].answer, image=image)])
    assert_close(collator([first.messages]), expected, rtol=0, atol=0)


def read(
    path: Path, content: str | bytes | list | None = None, **fields
) -> list[ConversationRow | RowProblem]:
    if isinstance(content, list):
        content = "\n".join(map(json.dumps, content))
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (source,) = make_sources([{"path": str(path), **fields}], {})
    return [*iter_rows(source)]


def said(row: ConversationRow | RowProblem) -> list[str] | str:
    """The words of a row's messages, or its fault."""
    if isinstance(row, RowProblem):
        return row.text
    return [message["content"] for message in row.messages]


ROW = {"Question Text": "q?", "a": "b", "n": 7, "json": {"q": ["first", "second"]}, "x.y": {"z": 1}}


OF_TALK = {"turns": "talk", "system": "rules"}


def read_named(folder: Path, row: dict, columns: dict) -> list[ConversationRow | RowProblem]:
    """A row by columns, all others of which are left out."""
    named = [
        *columns.values(),
        *(name for value in columns.values() for name in named_columns(value)),
    ]
    ignore = [key for key in row if not any(f"{name}.".startswith(f"{key}.") for name in named)]
    return read(folder / "a.jsonl", [row], columns=columns, ignore=[*ignore, "by"])


def test_columns_make_the_words_of_a_row(tmp_path):
    of_turns = OF_TALK | {"question": "ask", "answer": "reply"}
    for row, columns, *expected in (
        ({}, "Question: {Question Text}\nNumber {n:03}.", "Question: q?\nNumber 007.", "b"),
        ({}, "这是什么？", "这是什么？", "b"),
        ({}, "json.q.1", "second", "b"),
        ({}, "x.y.z", "1", "b"),
        ({}, "{{a}} is {a}", "{a} is b", "b"),
        ({"a": 0.5}, "Who?", "Who?", "0.5"),
        (
            {"all": [{"answer": "yes"}]},
            {"question": "Who?", "answer": "all.0.answer"},
            "Who?",
            "yes",
        ),
        ({"talk": [{"ask": "q", "reply": "a", "by": "me"}], "rules": "s"}, of_turns, *"sqa"),
        ({"talk": [["q", "a"]], "rules": "s"}, OF_TALK, *"sqa"),
    ):
        named = columns if isinstance(columns, dict) else {"question": columns, "answer": "a"}
        (result,) = read_named(tmp_path, ROW | row, named)
        assert said(result) == expected


def test_zero_and_false_are_values_of_a_column_and_no_empty_cells(tmp_path):
    (result,) = read_named(tmp_path, {"n": 0, "m": 0.0}, {"question": "n", "answer": "m"})
    assert said(result) == ["0", "0.0"]
    columns = {"question": "q", "answer": "a"}
    for value, is_empty in ((0, False), (0.0, False), (False, False), (None, True), ("", True)):
        (result,) = read(tmp_path / "a.jsonl", [{"q": "q", "a": "b", "x": value}], columns=columns)
        assert isinstance(result, ConversationRow) is is_empty, value


def test_columns_that_a_row_lacks_or_that_hold_no_text_are_refused(tmp_path, words):
    refused = [
        ("Question Text", "a"),
        ("{none}.", "a"),
        ("json.q", "a"),
        ("n", "x"),
        ("n", "all"),
        ("n", "true"),
    ]
    errors = []
    for question, answer in refused:
        row = ROW | {"x": [["a"]], "true": True, "all": ["cat", "dog"]}
        (row,) = read_named(tmp_path, row, {"question": question, "answer": answer})
        errors.append(row.text)
    words("\n".join(errors))


def test_images_of_a_row_without_a_place_stand_before_its_first_users_words(examples, tmp_path):
    names = [f"images/{example.image}" for example in examples[:3]]
    row = {"system": "s", "before": [["q", "a"]], "question": "r", "answer": "b"}
    columns = {name: name for name in ("system", "question", "answer")} | {"history": "before"}
    absolute = [str(tmp_path / name) for name in names]
    for more_columns, image, folder in [
        ({"a": names[0], "b": None, "c": names[1:]}, ["a", "b", "c"], {}),
        ({"n": [Path(name).name for name in names]}, "n", {"image_folder": "images"}),
    ]:
        fields = {"columns": columns | {"image": image}, **folder}
        (result,) = read(tmp_path / "a.jsonl", [row | more_columns], **fields)
        assert [text_of(message) for message in result.messages] == ["s", "q", "a", "r", "b"]
        assert result.images == images_of(result.messages[1:2]) == absolute
    # With places they stand there.
    marked = row | {"question": "<image>r", "n": names[0]}
    (result,) = read(tmp_path / "a.jsonl", [marked], columns=columns | {"image": "{n}"})
    assert result.messages[3]["image"] == absolute[0] and "image" not in result.messages[1]


def test_a_column_that_a_row_lacks_is_no_fault_and_one_that_is_named_twice_is(tmp_path, examples):
    image = f"images/{examples[0].image}"
    rows = [{"q": "x", "a": "y"}, {"q": "x", "a": "y", "img": image}]
    columns = {"question": "q", "answer": "a", "image": "img"}
    images = [row.images for row in read(tmp_path / "a.jsonl", rows, columns=columns)]
    assert images == [[], [str(tmp_path / image)]]
    for name in ("img", "img.path"):
        with pytest.raises(ValueError, match=f'"{name}" is in both columns and ignore'):
            read(tmp_path / "a.jsonl", rows, columns=columns | {"image": name}, ignore=[name])


@pytest.mark.parametrize("mapped", ["img_path", "im"])
def test_an_unmapped_column_is_refused_beside_a_mapped_one_of_a_similar_name(tmp_path, mapped):
    columns = {"question": "q", "answer": "a", "image": mapped}
    row = {"q": "x", "a": "y", "img": "images/a.png"}
    (result,) = read(tmp_path / "a.jsonl", [row], columns=columns)
    assert isinstance(result, RowProblem) and '"img" ("images/a.png")' in result.text


def test_columns_that_cannot_be_are_refused(words, capsys):
    answers, errors = {"question": "a", "answer": ["b"]}, []
    for columns in (
        *({"qestion": "a"}, {"answer": "a"}, {"question": 5}, {"question": "{a:>9999999999}"}),
        *(answers, {"turns": "a", "history": "b"}, []),
    ):
        with pytest.raises(ValueError, match="set 1 of 1: columns ") as refused:
            make_sources([{"path": "a.jsonl", "columns": columns}], {})
        errors.append(str(refused.value))
    words("\n".join(errors))
    assert main(["answer", "m", "--data", "a.jsonl", "--out", "b", "--columns", "[" * 1000]) == 1
    assert "not valid YAML: maximum recursion depth" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('\ufeffq;a\r\n"x;\r\ny";1e5\r\n\r\n007;NA\r\n', [(2, "x;\r\ny 1e5"), (5, "007 NA")]),
        ('q,a\n"say ""hi""",b\n', [(2, 'say "hi" b')]),
        ("q,a\nx,b,c\ny,d\n", [(2, "has 3 cells, but the first line names 2 columns"), (3, "y d")]),
        ('q,a\n"x" y,b\nz,c\n', [(2, "not CSV (',' expected after '\"'): inside"), (3, "z c")]),
        ('q,a\nx,b\n"y,c\nz,d', [(2, "x b"), (3, "not CSV (unexpected end of data)")]),
        ('sep=|\r\nq|a\r\n"x,|\r\ny"|b;\r\nz|c\r\n', [(3, "x,|\r\ny b;"), (5, "z c")]),
        ('"x,y,z";q;a\n;what;b\n', [(2, "what b")]),  # commas in the name of an empty column
        (
            b"q,a\n\xc4\xe3,b\n",
            [(2, 'is not UTF-8: its first byte above 0x7f, 0xc4, is in the word "你" in')],
        ),
    ],
    ids=range(8),
)
def test_a_cell_is_the_text_that_stands_in_it(tmp_path, text, expected):
    rows = read(tmp_path / "a.csv", text, columns={"question": "q", "answer": "a"})
    assert [row.line for row in rows] == [line for line, _ in expected]
    for row, (_, words) in zip(rows, expected, strict=True):
        actual = said(row)
        assert (actual if isinstance(actual, str) else " ".join(actual)).startswith(words)


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
    for limit in ("MAX_ROW_CHARACTERS", "MAX_DOCUMENT_CHARACTERS"):
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


def test_files_of_an_archive_are_of_a_row_by_their_names_up_to_the_first_dot(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("1.q.txt", "1.a.v2.txt", "x/1.q.txt", "x/1.a.v2.txt"):
            (tmp_path / "text").write_text(name)
            archive.add(tmp_path / "text", name)
    columns = {"question": "q.txt", "answer": "a.v2.txt"}
    rows = [said(row) for row in read(tmp_path / "a.tar", columns=columns)]
    assert rows == [["1.q.txt", "1.a.v2.txt"], ["x/1.q.txt", "x/1.a.v2.txt"]]


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
    for path, message in (
        (tmp_path / "a.tar", "1.txt is sparse"),
        (shard, "1.txt.gz is sparse or compressed"),
    ):
        with pytest.raises(ValueError, match=message):
            read(path)


def test_a_pattern_is_a_set_for_each_of_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows-b.jsonl", "rows-a.jsonl", "x[1].jsonl"):
        (tmp_path / name).write_text('{"prompt": "q", "completion": "a"}\n')
    sources = make_sources([{"path": "rows-*.jsonl", "weight": 2.0}], {"max_samples": 5})
    assert [Path(source.path).name for source in sources] == ["rows-a.jsonl", "rows-b.jsonl"]
    assert {(source.weight, source.max_samples) for source in sources} == {(2.0, 5)}
    assert [source.path for source in make_sources("x[1].jsonl", {})] == [f"{tmp_path}/x[1].jsonl"]
    entry = {"path": "rows-a.jsonl", "format": "alpaca"}
    (source,) = make_sources([entry], {"columns": {"question": "q"}, "image_folder": "a"})
    assert (source.columns, source.image_folder) == (None, f"{tmp_path}/a")
    (tmp_path / "rows-c.jsonl").touch()
    assert find_path_problem("rows-*.jsonl") == "rows-c.jsonl: it is empty"
    assert find_path_problem("no-*.jsonl") == "there is no such file"


def test_max_samples_are_the_first_rows_and_no_more_is_read(tmp_path):
    lines = [json.dumps({"prompt": f"{at}?", "completion": "a"}) for at in range(5)]
    text = "\n".join([lines[0], "5", *lines[1:]])
    rows = read(tmp_path / "a.jsonl", text, max_samples=3)
    assert [row.line for row in rows] == [1, 2, 3] and isinstance(rows[1], RowProblem)
    assert len(read(tmp_path / "a.json", f"[{', '.join(lines)}, broken", max_samples=5)) == 5


@pytest.mark.parametrize("name", ["one folder per class", "imagefolder, metadata.csv", "Parquet"])
def test_a_path_is_no_pattern(examples, tmp_path, name):
    original, fields = make(name, tmp_path, examples)
    path = original.rename(tmp_path / f"ü a{{b,c}}!#[1]*{original.suffix}")
    rows = read_form(path, fields)
    assert {len(row.images) for row in rows} == {1} and len(rows) == len(examples)
    if path.is_dir():
        images = [Path(row.images[0]) for row in rows]
        assert all(path in image.parents and image.is_file() for image in images)


def test_a_folder_of_llama_factory_is_refused_and_a_file_of_it_is_read(tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    (tmp_path / "mine.json").write_text('[{"q": "q", "more": "r", "a": "b"}]')
    with pytest.raises(
        ValueError, match="a folder of LLaMA-Factory.* the file of one of its data sets"
    ):
        read(tmp_path, subset="mine")
    columns = {"question": ["q", "more"], "answer": "a"}
    (row,) = read(tmp_path / "mine.json", columns=columns)
    assert said(row) == ["q\nr", "b"]


UNKNOWN: dict[str, dict] = {
    "in a table": {"img": {"bytes": "x" * 100, "path": None}, "text": "a card", "label": 3, "": 0},
    "objects": {"data": {"captioning": "/data/1/ab.png"}, "created_at": "2024-05-01", "tags": []},
    "preferences": {"prompt": "q", "chosen": "a", "rejected": "b", "image": "a.png"},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_columns_of_no_format_are_shown_with_their_values(tmp_path, name, words):
    first, second = read(tmp_path / "a.jsonl", [UNKNOWN[name]] * 2)
    words(first.text)
    assert second.text == first.text


# A file, its text, and what of it the message names.
NO_ROWS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "another separator": ("a.csv", "image|question|answer\na.png|q|b\n", ('"|"', "1isep=|")),
    "of a script": ("a.csv", "图片，问题，答案\na.png，q，b\n", ('"，"',)),
    "no names": ("a.csv", "a.png,What?,red\nb.png,What?,blue\n", ('"a.png" is a value', "names")),
    "no names, in TSV": ("a.tsv", "What?\tred\tb.PNG\n", ('"b.PNG" is a value',)),
    "no names, a number": ("a.csv", "1,What?,red\n2,What?,blue\n", ('"1" is a value',)),
    "no names, a date": ("a.csv", "2024-05-01,What?\nx,y\n", ('"2024-05-01" is a value',)),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_a_csv_whose_cells_or_names_would_be_others_is_refused_with_its_cure(tmp_path, name):
    file, text, named = NO_ROWS[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError) as refused:
        read(tmp_path / file)
    assert all(part in str(refused.value) for part in (f"{file}:1: ", *named))


@pytest.mark.parametrize(
    "text",
    [
        '{"image": {"0": "a"}, "answer": {"0": "b", "1": "c"}}',
        '{"0": {"image": "a", "answer": "b"}, "1": {"image": "c", "answer": "d"}}',
        '{"columns": ["q"], "index": [0], "data": [["x"], ["y"]]}',
        '{\n "image": {\n  "7": "a"},\n "answer": {"7": "b"}}',
        '{"mine": {"root": "pics/", "annotation": "a.jsonl", "repeat_time": 1}}',
    ],
)
def test_a_table_or_a_description_of_sets_is_no_row(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    for fields in (
        {},
        {"columns": {"question": "image.0", "answer": "answer.0"}},
        {"columns": {"question": "What?", "answer": "0.answer"}},
        {"columns": {"question": "mine.root", "answer": "mine.annotation"}},
    ):
        with pytest.raises(ValueError, match=r"a\.json"):
            read_conversations(make_sources([{"path": str(tmp_path / "a.json"), **fields}], {})[0])


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
    assert [(len(row.images), row.messages[1]["content"]) for row in rows] == [
        (1, "a red card")
    ] * 2


def test_a_folder_of_what_is_no_row_is_refused(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a line\n")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png())
    with pytest.raises(ValueError, match=r"is a folder of text files .*, not a data set"):
        read(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    (tmp_path / "images" / "b.png").write_bytes(png())
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png"}')
    with pytest.raises(ValueError, match=r"has rows.jsonl beside its images"):
        read(tmp_path)


def test_an_archive_whose_images_change_their_kind_is_refused(tmp_path):
    rows = [{ending: png(), "txt": b"a"} for ending in ["png"] * 6 + ["jpg"] * 2]
    path = in_tar(tmp_path / "a.tar", rows)
    results = read(path, columns={"question": "What?", "answer": "txt", "image": "png"})
    assert [isinstance(row, ConversationRow) for row in results] == [True] * 6 + [False] * 2
    assert "jpg" in results[6].text


@pytest.mark.parametrize(
    ("text", "question", "answer"),
    [
        (",0,1\n0,q,b\n", "{0}", "{1}"),
        ("question,0\nq,b\n", "question", "{0}"),
        ('"What\nis it?",answer\nq,b\n', "{What\nis it?}", "answer"),
        ("Is it red?,2nd answer\nq,b\n", "{Is it red?}", "{2nd answer}"),
        ("question\nq | b\n", "question", None),
    ],
)
def test_names_that_pandas_and_forms_give_are_names(tmp_path, text, question, answer):
    (tmp_path / "a.csv").write_text(text)
    columns = {"question": question} | ({"answer": answer} if answer else {})
    (source,) = make_sources([{"path": str(tmp_path / "a.csv"), "columns": columns}], {})
    [row] = iter_rows(source, for_training=False)
    assert said(row) == (["q", "b"] if answer else ["q | b"])
