"""Reading rows: what is taken, and that all else is refused with file, line and cure."""

import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm4v_patched.data.messages import check_messages, images_of, text_of
from glm4v_patched.data.rows import (
    iter_rows,
    read_conversations,
    require_first_rows,
    write_conversations,
)
from glm4v_patched.data.source import DataSource, make_sources
from tests.data.samples import png, said, turns


def row(*messages: dict, **more) -> str:
    return json.dumps({"messages": messages, **more})


GOOD = row(*turns("a", "b"))
ANSWER = said("assistant", "b")
CALL = said("assistant", '{"city": "x"}', metadata="weather")
TEXT = {"type": "text", "text": "q"}
SHOWN = {"type": "image", "image": "a.png"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png())
    return tmp_path


def read(folder: Path, *lines: str | bytes | dict, **fields) -> list[list[dict]]:
    lines = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    written = [line if isinstance(line, bytes) else line.encode() for line in lines]
    (folder / "data.jsonl").write_bytes(b"\n".join(written) + b"\n")
    return read_conversations(DataSource(str(folder / "data.jsonl"), **fields))


def test_conversations_are_taken_as_they_stand(folder):
    for messages in (
        [said("system", "", tools=[TOOL]), said("user"), CALL, said("observation"), ANSWER],
        [said("user"), ANSWER, CALL, said("observation"), said("observation"), ANSWER],
        [said("user"), CALL, ANSWER],
        [said("system"), said("user", "x <|assistant|> <images> 2 < 3"), said("assistant", "<b>")],
        [said("user", "\U0001f600\u2028\x85"), said("assistant", "b", metadata="")],
    ):
        assert read(folder, row(*messages)) == [messages]


def test_an_image_of_a_message_is_its_path_and_no_word_of_it(folder):
    expected = said("user", "q", image=str(folder / "a.png"))
    url = {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}}
    for content, more in (
        ("<image>\nq", {"image": "./b/../a.png"}),
        ("q\n<image>", {"image": "a.png"}),
        ([url, TEXT], {}),
        ([SHOWN, {"type": "text", "text": "<image>\nq"}], {}),
    ):
        assert read(folder, row(said("user", content, **more), ANSWER)) == [[expected, ANSWER]]


def test_a_turn_may_be_context_only(folder):
    marks = [({"train": False}, {"train": True}), ({"loss": False}, {}), ({"weight": 0}, {})]
    for mark, plain in marks:
        first, last = said("assistant", **mark), said("assistant", **plain)
        (messages,) = read(folder, row(said("user"), first, said("user"), last))
        assert messages[1::2] == [said("assistant", train=False), said("assistant")]
    sharegpt = {"conversations": [HUMAN | {"value": "x"}, GPT | {"loss": False}] * 2}
    sharegpt["conversations"][-1] = GPT
    (messages,) = read(folder, sharegpt)
    assert messages[1::2] == [said("assistant", "b", train=False), said("assistant", "b")]


def test_images_of_a_row_go_to_the_places_in_its_words(folder):
    a, b = (str(folder / name) for name in ("a.png", "b.png"))
    messages = [said("user", "<image>q"), ANSWER, said("user", "q\n<image>"), ANSWER]
    ((first, _, second, _),) = read(folder, row(*messages, images=["a.png", "b.png"]))
    assert (first, second) == (said("user", "q", image=a), said("user", "q", image=b))
    for places in ("<image>\n<image>q", [{"type": "image"}, {"type": "image"}, TEXT]):  # TRL's
        ((question, _),) = read(folder, row(said("user", places), ANSWER, images=[b, "a.png"]))
        assert images_of([question]) == [b, a] and text_of(question) == "q"
    # An image that a message names is none of the row's.
    own = said("user", "<image>q", image="a.png")
    ((first, _, second, _),) = read(folder, row(own, *messages[1:], images=["b.png"]))
    assert (first["image"], second["image"]) == (a, b)
    # White space before and between images parts nothing.
    white = {"type": "text", "text": "\n"}
    ((question, _),) = read(folder, row(said("user", [white, SHOWN, white, SHOWN, TEXT]), ANSWER))
    assert images_of([question]) == [a, a] and text_of(question).strip() == "q"
    # Without a place they stand before the first words of the user.
    ((first, _, second, _),) = read(folder, row(*turns() * 2, images=["a.png"]))
    assert first == said("user", "q", image=a) and "image" not in second


HUMAN, GPT = {"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "b"}
ALPACA = {"instruction": "<image>q", "input": "more", "output": "b", "images": ["a.png"]}
PLAIN = {"instruction": "q", "output": "b"}
SHAREGPT = {"conversations": [HUMAN | {"value": "q"}, GPT]}


def test_rows_of_other_trainers_are_read(folder):
    """In words, ! is the message's image."""
    for line, words in (
        ({"id": "7", "conversations": [HUMAN, GPT], "image": "a.png", "system": "s"}, "s q! b"),
        ({"system": "", "conversations": [{"from": "user", "value": "q"}, GPT]}, "q b"),
        ({"prompt": "<image>q", "completion": "b", "image": "a.png"}, "q! b"),
        (ALPACA | {"history": [["old", "c"]], "system": "s"}, "s old c q\nmore! b"),
        (PLAIN | dict.fromkeys(["input", "system", "history", "images"]), "q b"),
        ({"query": "q", "response": "b", "history": [["old", "c"]]}, "old c q b"),
        ({"texts": [{"user": "q", "assistant": "b"}], "images": ["a.png"]}, "q! b"),
        (SHAREGPT | {"image": ""}, "q b"),  # as LLaVA's rows of text have it
        (PLAIN | {"images": [None]}, "q b"),
    ):
        (messages,) = read(folder, line)
        texts = [text_of(message) + "!" * len(images_of([message])) for message in messages]
        assert " ".join(texts) == words
    (folder / "data.jsonl").write_text('{"instruction": "q"}')
    (question_row,) = iter_rows(folder / "data.jsonl", for_training=False)  # to be answered
    assert question_row.messages == [said("user", "q")]


def test_only_a_completion_is_learned(folder):
    before = [said("user", "a"), said("assistant", "x"), said("user", "q")]
    (messages,) = read(folder, {"prompt": before, "completion": [ANSWER]})
    before[1]["loss"] = True  # of their trainer's, which learns completions only
    assert read(folder, {"prompt": before, "completion": [ANSWER]}) == [messages]
    assert messages == [before[0], said("assistant", "x", train=False), before[2], ANSWER]


def test_a_format_may_be_named_and_keys_left_out(folder, words):
    line = row(*turns(), id=5, source="x")
    with words.refused(ValueError, '"id", "source"', "data.ignore"):
        read(folder, line)
    assert read(folder, line, ignore=("id", "source")) == [turns()]
    with words.refused(ValueError, '"messages"', '"conversations"'):
        read(folder, line, format="conversations", ignore=("id", "source"))
    for other in ("messages", "conversations", "prompt"):  # which tells no format then
        other_row = PLAIN | {other: "of another trainer"}
        assert read(folder, other_row, ignore=(other,)) == [turns("q", "b")]


# What stands in the second of three rows, and what of it the message names.
REFUSED: dict[str, tuple[str | bytes | dict, str]] = {
    "a mark": (row(said("user"), said("assistant", train=1)), "1"),
    "a weight": (row(said("user"), said("assistant", weight=0.5)), "0.5"),
    "place in metadata": (row(said("user"), said("assistant", metadata="<image>")), "<image>"),
    "tools that are none": (row(said("system", tools=[TOOL, {"type": "code"}]), *turns()), ""),
    # Keys
    "images of the row and of a message": (
        row(*turns(image="a.png"), images=["b"]),
        "1 images, but",
    ),
    "capitals": ({"Messages": []}, "has messages"),
    "another format": ({"conversations": [HUMAN]}, 'has "messages"'),
    "images under two names": (row(*turns(), image="a", images=["a"]), '"images" and "image"'),
    "a place in the answer": (row(*turns(answer="<image>"), images=["a.png"]), "message 2 of 2"),
    "more places than images": (row(*turns("<image><image>q"), images=["a.png"]), "have 2 image"),
    "60,000 keys": (json.loads(GOOD) | {f"k{n}": 1 for n in range(60_000)}, "59,980 more"),
    "img": (row(*turns(img="a.png")), '"img"'),
    "from": (row({"from": "human", "value": "q"}, ANSWER), 'write "role"'),
    # Values
    "role": (row(said("teacher"), ANSWER), '"teacher"'),
    "content null": (row(*turns(None)), "null"),
    "a video": (row(*turns([{"type": "video"}])), "1 of 1"),
    "train of text": (row(said("user"), said("assistant", train="no")), '"no"'),
    "nothing to train": (row(said("user"), said("assistant", train=False)), "1 turns"),
    "train of a user": (row(*turns(train=True)), "user"),
    "two marks": (row(said("user"), said("assistant", train=False, loss=False)), "train and loss"),
    "a part of two images": (row(*turns([{"type": "image", "image": "a", "url": "b"}])), "1 of"),
    "a part without text": (row(*turns([{"type": "text", "text": None}])), "1 of 2"),
    "message of text": ({"messages": ["hello"]}, "message 1 of 1"),
    # Images
    "lost": (row(*turns(image="no.png")), "no.png"),
    "image 5": (row(*turns(image=5)), "image is"),
    "URL": (row(*turns(image="https://x.y/a.png")), "data.allow_urls"),
    "no base64": (row(*turns(image="data:image/png;base64,@")), "base64"),
    "NUL": (row(*turns(image="a\0.png")), "null character"),
    "of the assistant": (row(said("user"), said("assistant", image="a.png")), "role assistant"),
    # Places of images
    "place in the middle": (row(*turns("is <image> red?", image="a.png")), "<image>"),
    "place of the system": (row(said("system", "<image>"), *turns()), "remove <image>"),
    # Turns
    "white answer": (row(said("user"), said("assistant", " \n")), "\\n"),
    "user last": (row(*turns(), said("user")), "user"),
    "assistant twice, after a call": (row(said("user"), CALL, ANSWER, ANSWER), "4 of 4"),
    "tools of a user": (row(*turns(tools=[TOOL])), "user"),
    "tools of no list": (row(said("system", tools={}), *turns()), ""),
    "a tool of text": (row(said("system", tools=["weather"]), *turns()), ""),
    "metadata of two lines": (row(said("user"), said("assistant", metadata="a\nb")), "one line"),
    "a tool with no name": (row(said("system", tools=[{"name": " "}]), *turns()), "1 of 1"),
    "metadata of a user": (row(*turns(metadata="f")), '"f"'),
    # JSON
    "of Python": ("{'messages': []}", "json.dumps"),
    "comma": (GOOD + ",", "comma"),
    "deep": ('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested"),
    "a key twice": ('{"messages": [], ' + GOOD[1:], '"messages" occurs 2 times'),
    "half a character": (row(*turns("a\ud83d")), "\\ud83d"),
    "no UTF-8": (GOOD.replace('"a"', '"\xe9"').encode("latin-1"), "0xe9"),
}


def problem_of_second(folder: Path, *lines: Any) -> str:
    """What is wrong with the second row, of which alone something is."""
    with pytest.raises(ValueError) as refused:
        read(folder, *lines)
    start, _, fault = str(refused.value).partition(f"\n  {folder}/data.jsonl:2: ")
    assert start.endswith(f"data.jsonl: 1 of {len(lines)} rows cannot be used:"), refused.value
    return fault


def test_a_row_is_refused_with_file_line_and_cure(folder, words):
    problems = {}
    for name, (line, named) in REFUSED.items():
        problems[name] = problem_of_second(folder, GOOD, line, GOOD)
        assert named in problems[name], name
    words("\n".join(f"{name}: {fault}" for name, fault in problems.items()))


def test_rows_of_other_trainers_that_are_not_understood_are_refused(folder, words):
    problems = []
    for good, changed, named in (
        (PLAIN, {"output": ["b", {}]}, ""),
        (PLAIN, {"history": [["a"]]}, ""),
        (PLAIN, {"mood": "good"}, ""),
        (SHAREGPT, {"conversations": [{"from": "robot", "value": "x"}, GPT]}, "1 of 2"),
        (SHAREGPT, {"conversations": ["hello", GPT]}, "1 of 2"),
        (SHAREGPT, {"conversations": [{"from": "human"}, GPT]}, "1 of 2"),
        (SHAREGPT, {"conversations": 5}, ""),
        ({"prompt": "q", "completion": "b"}, {"completion": 5}, "completion is 5"),
    ):
        problems.append(problem_of_second(folder, good, good | changed))
        assert named in problems[-1]
    words("\n".join(problems))


def test_a_place_of_another_trainer_is_no_word(folder):
    for mark in ("<|image_1|>", "<ImageHere>", "[IMG]", "&lt;image&gt;"):
        with pytest.raises(ValueError, match=re.escape(mark[:5]) + ".*, images: 0"):
            read(folder, row(*turns(mark + "q")))


def test_what_no_rows_can_be_read_from_is_named(tmp_path, words):
    long = '{"data": [' + '{"a": 1}, ' * 9000
    errors = []
    for name, content, named in (
        ("no.jsonl", None, "no such file"),
        ("", None, "this folder contains no data set"),
        ("a.jsonl", f"\n[\n{GOOD}\n{GOOD}]", ":4: "),
        ("a.jsonl", json.dumps(json.loads(GOOD), indent=2), "over several lines"),
        ("a.jsonl", b"\xff\xfe" + GOOD.encode("utf-16-le") + b"\r\n", "damaged UTF-16"),
        ("a.jsonl", b"\xff\xd8\xff\xe0\x00\x10JFIF", "name the folder of an image"),
        ("a.jsonl", f'{{"rows": [\n{GOOD}], "more": [{GOOD}]}}', '"more", "rows"'),
        ("a.jsonl", b"PAR1\0\0", "cannot be read"),
        ("a.jsonl", "\n \n", "contains 0 rows"),
        ("a.json", "[]", "contains 0 rows"),
        ("a.json", '[\n{"messages": 5},\n\n{]\n\n', "a.json:4: row 2"),
        ("a.json", '[{"messages": 5}\n', "a.json:2: "),
        ("a.json", '[{"messages": 5}] 7', "has ended, but"),
        ("a.json", "[" * 100_000, "nested"),
        ("a.json", f"[{GOOD}, NaN, {GOOD}]", "a.json, row 2: "),
        ("a.json", f"[{GOOD}, [{'9' * 5000}.5, {'9' * 5000}]]", "a.json, row 2: "),
        ("a.json", '{"data": [{"a": 1}], "data": []}', '"data" occurs 2 times'),
        ("a.json", long + '{"a": 1}]} x', "has ended, but"),
        ("a.json", long + "[[", "row 9001"),
        ("a.json", '{"images": [{"id": 1}], "annotations": [{"id": 1}]}', "docs/data.md shows"),
        ("a.json", b"PK\x03\x04\0\0", "unzip"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=re.escape(path.name)) as refused:
            read_conversations(path)
        errors.append(str(refused.value))
        assert named in errors[-1]
    words("\n".join(errors))


def test_what_is_no_file_is_not_waited_for(tmp_path, words):
    os.mkfifo(tmp_path / "made")
    path = tmp_path / "a.jsonl"
    path.symlink_to("made")
    for read_them in (read_conversations, lambda path: require_first_rows([DataSource(str(path))])):
        with words.refused(ValueError, "a.jsonl", "a pipe"):
            read_them(path)


def test_a_line_that_never_ends_is_not_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("glm4v_patched.data.text_rows.MAX_ROW_CHARACTERS", 1000)
    path = tmp_path / "a.jsonl"
    for end in ("\n", ""):
        path.write_text(f"{GOOD}\n{'x' * 999}\n{'x' * 5000}\n{GOOD}\n{'x' * 1000}{end}")
        results = [(item.line, getattr(item, "text", "")[:12]) for item in iter_rows(path)]
        long, short = "has 134,217,", "not JSON (Ex"
        assert results == [(1, ""), (2, short), (3, long), (4, ""), (5, long)]


def test_what_is_wrong_is_told_once_with_all_rows_and_up_to_20_faults(tmp_path):
    human = [row(*[said("human"), ANSWER] * n) for n in (1, 2, 3)]
    often = [line for n in range(20) for line in ("[]", f'{{"k{n}": 1}}')]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([GOOD, *["5"] * 23, GOOD, "6", *human, *often, often[-1]]))
    with pytest.raises(ValueError) as refused:
        read_conversations(path)
    first, *lines, last = str(refused.value).splitlines()
    assert first == f"{path}: 68 of 70 rows cannot be used:" and last == "  and 7 more"
    assert lines[0].endswith("; also 3, 4, 5, 6, 7, 8, 9, 10 and 14 more") and len(lines) == 20
    (tmp_path / "a.json").write_text(f"[{GOOD}, 5, 5]")
    with pytest.raises(ValueError, match=r"a\.json, row 2: is 5; expected .*; also 3$"):
        read_conversations(tmp_path / "a.json")


def test_rows_of_which_none_can_be_used_are_told_by_the_first(folder, words):
    source = DataSource(str(folder / "data.jsonl"))
    bad, lost = row(*turns(img="a" * 9999)), row(*turns(image="no.png"))
    for lines, named in (
        ([*[bad] * 20, GOOD], None),
        ([bad, lost], ("2 of 2 rows", "data.jsonl:2: the image", "data.image_folder")),
        ([*[bad] * 21, GOOD], ("none of its first 20 rows", "also 2, 3, ")),
    ):
        Path(source.path).write_text("\n".join(lines))
        with words.refused(ValueError, *named) if named else nullcontext():
            require_first_rows([source])
    # Nothing is fetched for this, and no library loaded.
    require_first_rows([replace(source, allow_urls=True), DataSource("someone/rows")])


@pytest.mark.parametrize(("number", "summary"), [(20, "20 of 20 rows"), (21, "its first 20 rows")])
def test_all_rows_are_counted_where_they_are_as_many_as_are_listed(tmp_path, number, summary):
    (tmp_path / "a.jsonl").write_text("5\n" * number)
    with pytest.raises(ValueError, match=f"{summary} can"):
        require_first_rows([DataSource(str(tmp_path / "a.jsonl"))])


def test_written_conversations_replace_no_file_unless_told(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"data\.jsonl"):
        write_conversations(path, [json.loads(GOOD)["messages"]])
    assert path.read_text() == "mine"
    write_conversations(path, [json.loads(GOOD)["messages"]], overwrite=True)
    assert path.read_text() == GOOD + "\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight", value) for value in (None, {}, True, "2", 0)]
    + [("max_samples", value) for value in (True, 0, 1.5)],
)
def test_a_field_of_a_set_that_is_no_number_above_0_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*; expected an? (number|integer) above 0"):
        make_sources([{"path": "a.jsonl", field: value}], {})


def test_an_empty_path_in_a_part_is_no_placeholder_of_the_rows_image():
    parts = [{"type": "image", "image": ""}, {"type": "text", "text": "q"}]
    with pytest.raises(ValueError, match="the row has 1 images, but its messages have 0 image"):
        check_messages([said("user", parts), ANSWER], images=["a.png"])


def test_a_first_line_longer_than_what_is_looked_at_is_a_row_whatever_lists_it_has(folder):
    long = {"messages": turns("a" * 70_000), "meta": [{"of": "the row"}]}
    path = folder / "data.json"
    path.write_text(f'{{"id": [{{"a": 1}}], {json.dumps(long)[1:]}\n{GOOD}\n')
    conversations = read_conversations(DataSource(str(path), ignore=("id", "meta")))
    assert conversations == [turns("a" * 70_000), turns("a", "b")]
