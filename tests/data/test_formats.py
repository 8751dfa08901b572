"""Reading rows: what is taken, and that all else is refused with file, line and cure."""

import json
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from glm4v_patched.data.messages import ROLES, _without_places, pictures_of, text_of
from glm4v_patched.data.rows import (
    read_conversations,
    read_rows,
    require_first_rows,
    write_conversations,
)
from glm4v_patched.data.source import Source


def said(role: str, content="x", **more) -> dict:
    return {"role": role, "content": content, **more}


def row(*messages: dict, **more) -> str:
    return json.dumps({"messages": messages, **more})


GOOD = row(said("user", "a"), said("assistant", "b"))
PICTURE = said("user", "q", image="a.png")
ANSWER = said("assistant", "b")
CALL = said("assistant", '{"city": "x"}', metadata="weather")
TEXT = {"type": "text", "text": "q"}
SHOWN = {"type": "image", "image": "a.png"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture
def folder(tmp_path) -> Path:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    return tmp_path


def read(folder: Path, *lines: str | bytes) -> list[list[dict]]:
    written = [line if isinstance(line, bytes) else line.encode() for line in lines]
    (folder / "data.jsonl").write_bytes(b"\n".join(written) + b"\n")
    return read_conversations(folder / "data.jsonl")


# What is taken


@pytest.mark.parametrize(
    "messages",
    [
        [said("system"), said("user"), said("assistant")],
        [said("user"), said("assistant"), said("user"), said("assistant")],
        [said("system", "", tools=[TOOL]), said("user"), CALL, said("observation"), ANSWER],
        [said("system", tools=[{"name": "weather"}]), said("user"), ANSWER],
        [said("user"), ANSWER, CALL, said("observation"), said("observation"), ANSWER],
        [said("user"), said("assistant", "b", metadata="")],
        [said("user", "x <|assistant|> <images> 2 < 3"), said("assistant", "image <b>")],
    ],
    ids=range(7),
)
def test_conversations_are_taken_as_they_stand(folder, messages):
    assert read(folder, row(*messages)) == [messages]


def test_several_pictures_are_parts_before_the_words(folder):
    path = str(folder / "a.png")
    for content in ([SHOWN, SHOWN, TEXT], [TEXT, SHOWN, SHOWN], [SHOWN, TEXT, SHOWN]):
        ((question, _),) = read(folder, row(said("user", content), ANSWER))
        shown = {"type": "image", "image": path}
        assert question == said("user", [shown, shown, TEXT])
        assert pictures_of([question]) == [path, path]


def test_one_picture_in_parts_is_the_messages_picture(folder):
    expected = said("user", "q", image=str(folder / "a.png"))
    url = {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}}
    for part in (SHOWN, url, {"type": "image", "path": "a.png"}, {"type": "image", "url": "a.png"}):
        assert read(folder, row(said("user", [part, TEXT]), ANSWER)) == [[expected, ANSWER]]
    words = [{"type": "text", "text": "<image>\nq"}]
    assert read(folder, row(said("user", [SHOWN, *words]), ANSWER)) == [[expected, ANSWER]]


@pytest.mark.parametrize("mark", [{"train": False}, {"loss": False}, {"weight": 0}])
def test_a_turn_may_be_context_only(folder, mark):
    turns = [said("user"), said("assistant", **mark), said("user"), ANSWER]
    (read_turns,) = read(folder, row(*turns))
    assert read_turns[1] == said("assistant", train=False)
    kept = [
        said("user"),
        said("assistant", **{key: type(value)(not value) for key, value in mark.items()}),
    ]
    assert read(folder, row(*kept)) == [[said("user"), said("assistant")]]


def test_pictures_of_a_row_go_to_the_places_in_its_words(folder):
    Image.new("RGB", (8, 8)).save(folder / "b.png")
    a, b = (str(folder / name) for name in ("a.png", "b.png"))
    turns = [said("user", "<image>q"), ANSWER, said("user", "q\n<image>"), ANSWER]
    ((first, _, second, _),) = read(folder, row(*turns, images=["a.png", "b.png"]))
    assert (first, second) == (said("user", "q", image=a), said("user", "q", image=b))
    ((question, _),) = read(folder, row(said("user", "<image>\n<image>q"), ANSWER, images=[a, b]))
    assert pictures_of([question]) == [a, b] and text_of(question) == "q"
    parts = [{"type": "image"}, {"type": "image"}, TEXT]  # TRL's
    ((question, _),) = read(folder, row(said("user", parts), ANSWER, images=["b.png", "a.png"]))
    assert pictures_of([question]) == [b, a]
    # A picture that a message names is none of the row's.
    ((first, _, second, _),) = read(
        folder, row(said("user", "<image>q", image="a.png"), *turns[1:], images=["b.png"])
    )
    assert (first["image"], second["image"]) == (a, b)
    assert read(folder, row(said("user"), ANSWER, images=[])) == [[said("user"), ANSWER]]


def test_sharegpt_and_llava_are_read(folder):
    turns = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "b"}]
    path = str(folder / "a.png")
    for pictures in ({"image": "a.png"}, {"images": ["a.png"]}):
        line = json.dumps({"id": "7", **pictures, "system": "s", "conversations": turns})
        expected = [said("system", "s"), said("user", "q", image=path), ANSWER]
        assert read(folder, line) == [expected]
    line = json.dumps({"system": "", "conversations": [{"from": "human", "value": "q"}, turns[1]]})
    assert read(folder, line) == [[said("user", "q"), ANSWER]]
    again = [{"from": "user", "value": "q"}, turns[1] | {"train": False}]
    assert read(folder, line, json.dumps({"conversations": [*again, *again[:1], turns[1]]}))[1][1][
        "train"
    ] is False  # fmt: skip


REFUSED_TURNS = {
    "role": ({"from": "user", "role": "user"}, 'key "role" is not read: write "from"'),
    "from": ({"from": "robot", "value": "x"}, '"from" is "robot"; expected system, human, gpt or'),
    "no value": ({"from": "human"}, 'key "value" is missing'),
    "function_call": ({"from": "function_call", "value": "{}"}, '"from" is "function_call"; exp'),
    "text": ("hello", 'is "hello"; expected {"from"'),
}


@pytest.mark.parametrize("name", REFUSED_TURNS)
def test_turns_that_are_not_understood_are_refused(folder, name):
    turn, message = REFUSED_TURNS[name]
    answered = {"from": "gpt", "value": "b"}
    good = json.dumps({"conversations": [{"from": "human", "value": "a"}, answered]})
    bad = json.dumps({"conversations": [turn, answered]})
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: turn 1 of 2 of con.*{message}"):
        read(folder, good, bad)
    twice = json.dumps(
        {"system": "s", "conversations": [{"from": "system", "value": "s"}, answered]}
    )
    for line, told in [
        (twice, "2 of 3 is of system, after one of system"),
        (GOOD, '"messages" is n'),
    ]:
        with pytest.raises(ValueError, match=told):
            read(folder, good, line)


def test_prompt_and_completion_are_read_and_only_the_completion_is_learned(folder):
    pair = json.dumps({"prompt": "<image>q", "completion": "b", "image": "a.png"})
    asked = said("user", "q", image=str(folder / "a.png"))
    before = [said("user", "a"), said("assistant", "x"), said("user", "q")]
    turns = json.dumps({"prompt": before, "completion": [ANSWER]})
    assert read(folder, pair, turns) == [
        [asked, ANSWER],
        [before[0], said("assistant", "x", train=False), before[2], ANSWER],
    ]
    for line, told in [
        ({"prompt": "q", "completion": 5}, "completion is 5; expected text, or a list"),
        ({"prompt": "q"}, 'key "completion" is missing'),
        ({"prompt": "q", "chosen": "a", "completion": "b"}, '"chosen" .*which TRL trains on'),
    ]:
        with pytest.raises(ValueError, match=told):
            read(folder, json.dumps(line))


def test_alpacas_rows_are_read_with_their_history_and_pictures(folder):
    picture = str(folder / "a.png")
    alpaca = {"instruction": "<image>q", "input": "more", "output": "b", "images": ["a.png"]}
    earlier = {"system": "s", "history": [["old", "answer"]]}
    question = said("user", "q\nmore", image=picture)
    assert read(folder, json.dumps(alpaca)) == [[question, ANSWER]]
    history = [said("system", "s"), said("user", "old"), said("assistant", "answer")]
    assert read(folder, json.dumps(alpaca | earlier)) == [[*history, question, ANSWER]]
    plain = {"instruction": "q", "input": "", "output": "b", "system": "", "history": []}
    assert read(folder, json.dumps(plain)) == [[said("user", "q"), ANSWER]]
    nulls = plain | dict.fromkeys(["input", "system", "history", "images"])
    assert read(folder, json.dumps(nulls)) == [[said("user", "q"), ANSWER]]
    source = Source(str(folder / "data.jsonl"))
    (folder / "data.jsonl").write_text(json.dumps({"instruction": "q"}))
    (asked,) = read_rows(source, to_learn=False)
    assert asked.messages == [said("user", "q")]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output": ""}, "the content of assistant is empty"),
        ({"output": ["b", {}]}, "output is a list; expected text"),
        ({"output": True}, "output is true; expected text"),
        ({"output": None}, "ends with a message of user; expected one of the assistant"),
        (
            {"history": [["a"]]},
            r"turn 1 of 1 of history: is a list; expected .* or \[question, answer\]",
        ),
        ({"history": "a"}, 'history is "a"; expected a list'),
        ({"image": "a.png", "images": ["a.png"]}, 'pictures under "images" and "image"'),
        ({"mood": "good"}, 'the key "mood" is not read: a row has instruction, output'),
        ({"messages": []}, '"messages" is not read: the first row of this file has "instruction"'),
    ],
    ids=range(9),
)
def test_alpacas_rows_that_are_not_understood_are_refused(folder, changed, message):
    alpaca = {"instruction": "q", "output": "b"}
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: .*{message}"):
        read_named = Source(str(folder / "data.jsonl"), format="alpaca")
        (folder / "data.jsonl").write_text(f"{json.dumps(alpaca)}\n{json.dumps(alpaca | changed)}")
        read_conversations(read_named)


def test_a_format_may_be_named_and_keys_left_out(folder):
    (folder / "data.jsonl").write_text(row(said("user"), ANSWER, id=5, source="x") + "\n")
    path = str(folder / "data.jsonl")
    with pytest.raises(ValueError, match='"id", "source" .*name it in data.ignore$'):
        read_conversations(path)
    assert read_conversations(Source(path, ignore=("id", "source"))) == [[said("user"), ANSWER]]
    with pytest.raises(ValueError, match='"messages" is not read: the first row .*"conversations"'):
        read_conversations(Source(path, format="conversations", ignore=("id", "source")))


@pytest.mark.parametrize("other", ["messages", "conversations", "prompt"])
def test_a_key_that_is_left_out_tells_no_format(folder, other):
    given = {"instruction": "q", "output": "b", other: "of another trainer"}
    (folder / "data.jsonl").write_text(json.dumps(given))
    source = Source(str(folder / "data.jsonl"), ignore=(other,))
    assert read_conversations(source) == [[said("user", "q"), ANSWER]]


def test_pictures_get_absolute_paths(folder):
    other = said("user", "q", image=str(folder / "b" / ".." / "a.png"))
    ((first, _), (second, _)) = read(folder, row(PICTURE, ANSWER), row(other, ANSWER))
    assert first["image"] == second["image"] == str(folder / "a.png")


@pytest.mark.parametrize("content", ["<image>\nq", "<image>q", " <image>  q", "q\n<image>"])
def test_the_mark_of_a_picture_at_either_end_of_its_words_is_its_place_and_no_word(folder, content):
    ((question, _),) = read(folder, row(said("user", content, image="a.png"), ANSWER))
    assert question == said("user", "q", image=str(folder / "a.png"))


def test_a_picture_needs_no_question(folder):
    for content in ("", "<image>"):
        ((question, _),) = read(folder, row(said("user", content, image="a.png"), ANSWER))
        assert question["content"] == ""


def test_utf_8_with_a_byte_order_mark_and_any_line_ends_is_taken(folder):
    assert len(read(folder, b"\xef\xbb\xbf" + GOOD.encode(), "", GOOD)) == 2
    assert len(read(folder, GOOD + "\r", GOOD + "\r")) == 2
    # A whole character by two escapes, and one that ends a line elsewhere.
    ((question, _),) = read(folder, row(said("user", "\U0001f600\u2028\x85"), ANSWER))
    assert question["content"] == "\U0001f600\u2028\x85"


# What is refused


LONG = {"id": 7, "messages": [said("user"), ANSWER]}
REFUSED = {
    # Keys of a row
    "images of the row and of a message": (
        row(PICTURE, ANSWER, images=["a.png"]),
        r"pictures of the row: 1, places for them \(<image>\) in its messages: 0; write one <im",
    ),
    "more marks than images": (
        row(said("user", "<image><image>q"), ANSWER, images=["a.png"]),
        "pictures of the row: 1, .*: 2; write one",
    ),
    "more images than marks": (
        row(said("user", "<image>q"), ANSWER, images=["a.png", "a.png"]),
        "pictures of the row: 2, .*: 1; write one",
    ),
    "images twice": (row(said("user"), ANSWER, image="a", images=["a"]), 'under "images" and "im'),
    "images with the answer": (
        row(said("user"), said("assistant", "<image>"), images=["a.png"]),
        "message 2 of 2: places for pictures: 1 .*: only the user shows pictures; take <image> out",
    ),
    "caption": (json.dumps({"image": "a.png", "caption": "c"}), '"caption" is not read: a row has'),
    "caption beside": (row(said("user"), ANSWER, caption="c"), '"caption" is not read: a row has'),
    "Messages": (json.dumps({"Messages": []}), 'key "Messages" .*write "messages", in small'),
    "conversations": (
        json.dumps({"conversations": [{"from": "human", "value": "q"}]}),
        'key "conversations" is not read: the first row of this file has "messages"; write rows of',
    ),
    "tools of a row": (row(said("user"), ANSWER, tools=[TOOL]), '"tools" .*the system message'),
    "unknown keys": (
        row(said("user"), ANSWER, id=1, split="a"),
        'the keys "id", "split" are not read: a row has messages.*; take out what',
    ),
    "Alpaca": (
        json.dumps({"instruction": "q", "output": "a"}),
        '"instruction", "output" are not read: the first row of this file has "messages"; write ro',
    ),
    "no messages": ("{}", '"messages" is missing'),
    # Keys of a message
    **{
        key: (row(said("user", **{key: "a.png"}), ANSWER), f'message 1 of 2: .*"{key}".*"image"')
        for key in ("images", "Image", "IMAGE", "img", "image_url", "picture")
    },
    "from and value": (
        row({"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}),
        '"from" is not read: write "role": .*; the key "value" is not read: write "content"',
    ),
    "tool_calls": (row(said("user"), said("assistant", tool_calls=[])), 'tool\'s name as "meta'),
    "no role": (row({"content": "x"}, ANSWER), 'key "role" is missing'),
    "no content": (row({"role": "user"}, ANSWER), 'key "content" is missing'),
    # Values
    "role": (row(said("teacher"), ANSWER), '"teacher" is not one of .*, observation$'),
    **{
        f"role {other}": (row(said(other), ANSWER), f'"{other}" is not one of .*; write "{ours}"')
        for other, ours in (("tool", "observation"), ("human", "user"), ("Assistant", "assistant"))
    },
    "function_call": (row(said("user"), said("assistant", function_call={})), 'name as "meta'),
    "tool_call_id": (
        row(said("user"), CALL, said("observation", tool_call_id="1"), ANSWER),
        'the key "tool_call_id" is not read: take it out: a message of observation answers',
    ),
    "role of no text": (row(said(["user"]), ANSWER), "the role a list is not one of"),
    **{
        f"parts {number}": (row(said("user", parts), ANSWER), f"message 1 of 2: .*{message}")
        for number, (parts, message) in enumerate(
            [
                ([], "content of user is empty"),
                (["q"], 'part 1 of 1 is "q"; expected an object with a type'),
                ([{"text": "q"}], "part 1 of 1 has the type null; expected text or image"),
                ([{"type": "video"}], 'has the type "video"'),
                ([{"type": "text", "text": None}], "the text of part 1 of 1 is null"),
                ([{"type": "text", "text": "q", "x": 1}], 'key "x" is not read: part 1 of 1 has'),
                ([{"type": "image", "src": "a.png"}], 'key "src" is not read: part 1 of 1 has'),
                ([{"type": "image", "image": "a", "url": "b"}], "under image and url: give one"),
                ([TEXT, SHOWN, TEXT], "a picture stands between words: .*write them first"),
                ([SHOWN, {"type": "text", "text": "<image><image>"}], "2 .<image>., pictures: 1"),
                ([{"type": "image_url", "image_url": {"url": "a.png", "x": 1}}], 'key "x"'),
            ]
        )
    },
    "a place without a picture": (
        row(said("user", [{"type": "image"}, TEXT]), ANSWER),
        "pictures of the row: 0, .*: 1; write one",
    ),
    "train of a user": (row(said("user", train=True), ANSWER), "train and the role user: only th"),
    "train of text": (row(said("user"), said("assistant", train="no")), 'train is "no"; expected'),
    "nothing to train": (
        row(said("user"), said("assistant", train=False)),
        "train: false in each of its 1 turns of the assistant: nothing of it would be learned",
    ),
    "two marks of training": (
        row(said("user"), said("assistant", train=False, loss=False)),
        "has train and loss, which say the same",
    ),
    "a weight": (row(said("user"), said("assistant", weight=0.5)), "weight is 0.5; expected 0 or"),
    "content null": (row(said("user", None), ANSWER), "content is null; expected text"),
    "content number": (row(said("user", 5), ANSWER), "content is 5; expected text"),
    "messages object": (json.dumps({"messages": {"role": "user"}}), "messages is an object"),
    "messages null": (json.dumps({"messages": None}), "messages is null; expected a list"),
    "messages empty": (json.dumps({"messages": []}), "messages is an empty list"),
    "message of text": (json.dumps({"messages": ["hello"]}), "message 1 of 1: is a text"),
    "row of text": ('"hello"', "is a text; expected"),
    "row of number": ("5", "is a number; expected"),
    # Pictures
    "lost": (row(said("user", image="no.png"), ANSWER), r"image .*no\.png does not exist"),
    "folder": (row(said("user", image="."), ANSWER), "is no file"),
    "null": (row(said("user", image=None), ANSWER), "image is null; .*leave the key out"),
    "empty path": (row(said("user", image=""), ANSWER), 'image is ""; .*leave the key out'),
    "list": (row(said("user", image=["a.png"]), ANSWER), "image is a list; expected the path of"),
    "number": (row(said("user", image=5), ANSWER), "image is 5; expected the path of one"),
    "URL": (row(said("user", image="https://x.y/a.png"), ANSWER), "expected a path: save the"),
    "data URL": (row(said("user", image="data:image/png;base64,@"), ANSWER), "which is no base"),
    "data URL of text": (row(said("user", image="data:image/png,a"), ANSWER), "expected data:im"),
    "NUL": (row(said("user", image="a\0.png"), ANSWER), "a path holds no character of code 0"),
    "of the assistant": (row(said("user"), said("assistant", image="a.png")), "role assistant: on"),
    "of the system": (row(said("system", image="a.png"), said("user"), ANSWER), "role system: on"),
    "of a tool": (
        row(said("user"), CALL, said("observation", image="a.png"), ANSWER),
        "3 of 4: has an image and the role observation",
    ),
    # Places of pictures
    "mark without picture": (
        row(said("user", "<image>\nq"), ANSWER),
        r"pictures: 1 \(<image>\), pictures: 0: give the message its picture",
    ),
    "two marks": (
        row(said("user", "<image><image>q", image="a.png"), ANSWER),
        r"pictures: 2 \(<image>\), pictures: 1: write one place for each picture, or none",
    ),
    "mark in the middle": (
        row(said("user", "is <image> red?", image="a.png"), ANSWER),
        "the model has a picture before the words; write <image> at their beginning",
    ),
    "mark in an answer": (row(said("user"), said("assistant", "<image>")), "only the user shows"),
    "mark of the system": (row(said("system", "<image>"), said("user"), ANSWER), "take <image> o"),
    "mark in metadata": (
        row(said("user"), said("assistant", metadata="<image>")),
        "a picture has no place in it",
    ),
    **{
        f"{mark}{' with picture' * more}": (
            row(said("user", mark + "q", **({"image": "a.png"} if more else {})), ANSWER),
            "cannot be the picture's place" if more else "pictures: 0",
        )
        for mark in (
            "<|begin_of_image|>", "<|image|>", "<|image_1|>", "<image_2>", "<|image_pad|>",
            "<ImageHere>", "<img>a.png</img>", "<image 1>", "<image1>", "<image/>", "<image />",
            "<IMG>", "[IMG]", "[image]", "< image >", "<start_of_image>",
            "<image_soft_token>", "<image-placeholder>", "<image_placeholder>", "<IMAGE_TOKEN>",
            "<__media__>", "&lt;image&gt;",
        )
        for more in (False, True)
    },
    "both ids": (
        row(said("user", "<|begin_of_image|><|endoftext|><|end_of_image|>q"), ANSWER),
        r"pictures: 2 \(<\|begin_of_image\|>\), pictures: 0",
    ),
    # Turns
    "empty answer": (row(said("user"), said("assistant", "")), "content of assistant is empty"),
    "white answer": (row(said("user"), said("assistant", " \n")), r"is ' \\n', which is empty"),
    "empty answer in the middle": (
        row(said("user"), said("assistant", ""), said("user"), ANSWER),
        "message 2 of 4: the content of assistant is empty: write the answer, or leave the row out",
    ),
    "empty call": (row(said("user"), said("assistant", "", metadata="f")), "assistant is empty"),
    "empty question": (row(said("user", ""), ANSWER), "content of user is empty"),
    "empty system": (row(said("system", ""), said("user"), ANSWER), "content of system is empty"),
    "empty observation": (row(said("user"), CALL, said("observation", ""), ANSWER), "observation"),
    "assistant alone": (row(ANSWER), "1 of 1 is of assistant, at the beginning: expected one of s"),
    "assistant first": (row(ANSWER, said("user"), ANSWER), "at the beginning"),
    "ends with the user": (row(said("user"), ANSWER, said("user")), "ends with a message of user"),
    "user alone": (row(said("user")), "with a message of user; expected one of"),
    "user twice": (row(said("user"), said("user"), ANSWER), "2 of 3 .*expected one of ass.*join"),
    "assistant twice": (row(said("user"), ANSWER, ANSWER), "3 of 3 .*after one of ass.*join"),
    "system twice": (row(said("system"), said("system"), said("user"), ANSWER), "join the two"),
    "system later": (row(said("user"), said("system"), ANSWER), "2 of 3 is of system, after"),
    "system alone": (row(said("system"), ANSWER), "2 of 2 is of assistant, after one of system"),
    "user after a tool": (
        row(said("user"), CALL, said("observation"), said("user"), ANSWER),
        "4 of 5 is of user, after one of observation",
    ),
    # Tools and metadata
    "tools of a user": (row(said("user", tools=[TOOL]), ANSWER), "expected them in a system messa"),
    **{
        f"tools {number}": (row(said("system", tools=tools), said("user"), ANSWER), message)
        for number, (tools, message) in enumerate(
            [
                ({}, "tools is an empty object; expected a list"),
                ([], "tools is an empty list"),
                ("weather", 'tools is "weather"; expected a list of functions'),
                (["weather"], 'tool 1 of 1 is "weather"; expected an object'),
                ([TOOL, {"type": "code"}], 'tool 2 of 2 has the type "code"; expected "function"'),
                ([{"type": "function"}], "tool 1 of 1 has the name null; expected text"),
                ([{"function": {"name": 5}}], "tool 1 of 1 has the name 5; expected text"),
                ([{"function": {"name": " "}}], "expected text"),
                ([{"function": "f"}], 'the function of tool 1 of 1 is "f"; expected an object'),
                ([{**TOOL, "strict": True}], 'key "strict" is not read: tool 1 of 1, which has'),
            ]
        )
    },
    "metadata": (row(said("user"), said("assistant", metadata=5)), "metadata is 5; expected text"),
    "metadata of a user": (row(said("user", metadata="f"), ANSWER), "only the assistant calls a"),
    "metadata null": (row(said("user"), said("assistant", metadata=None)), "metadata is null"),
    "metadata of two lines": (row(said("user"), said("assistant", metadata="a\nb")), "one line"),
    # JSON
    "no JSON": ("not json", r"no JSON \(Expecting value, column 1\): not json"),
    "of Python": ("{'messages': []}", r"no JSON .*write it with json\.dumps"),
    "comma": (GOOD.rstrip() + ",", r"no JSON .*leave out the comma"),
    "cut": (GOOD[:-5], "no JSON"),
    "cut early": ('{"messages": [', r"no JSON \(Expecting value, column 15\)"),
    "cut behind a comma": ('{"messages": [{"role": "user"},', r'no JSON .*"user"},$'),
    "two rows in one line": (GOOD + GOOD, "no JSON .Extra data"),
    "deep": ('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "twice": ('{"messages": [], ' + GOOD[1:], 'key "messages" stands 2 times in one object'),
    "twice in a message": (
        '{"messages": [{"role": "user", "role": "assistant", "content": ""}]}',
        'key "role" stands 2 times',
    ),
    "NaN": (row(said("system", tools=[{"name": "f", "x": float("nan")}]), ANSWER), "NaN is no val"),
    "infinite": (
        row(said("system", tools=[{"name": "f", "x": 1}]), ANSWER).replace("1}", "9e999}"),
        "message 1 of 2: Out of range float",
    ),
    "half a character": (row(said("user", "a\ud83d"), ANSWER), r"1 of 2: holds '\\ud83d', half of"),
    "half a character in a path": (row(said("user", image="\udc80"), ANSWER), "half of a"),
    "half a character in a tool": (
        row(said("system", tools=[{"name": "f", "\ud800": 1}]), said("user"), ANSWER),
        "message 1 of 3: holds",
    ),
    "number of 5,000 digits": ("9" * 5000, "a number has 5,000 characters; expected 300 at most"),
    "long number in a tool": (
        row(said("system", tools=[{"name": "x"}]), ANSWER).replace('"x"', f"[-{'9' * 5000}]"),
        "a number has 5,001 characters; .* write it as text",
    ),
    "60,000 keys, one twice": (
        "{" + "".join(f'"k{n}": 1, ' for n in range(60_000)) + '"k59999": 1}',
        'the key "k59999" stands 2 times',
    ),
    "60,000 keys": (
        json.dumps(json.loads(GOOD) | {f"k{n}": 1 for n in range(60_000)}),
        '"k0", .*, "k19" and 59,980 more are not read: .{,150}$',
    ),
    "no UTF-8": (GOOD.replace('"a"', '"\xe9"').encode("latin-1"), "is the byte 0xe9, which is no"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_is_refused_with_file_line_and_cure(folder, name):
    line, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"(?s)1 of 3 rows .*data\.jsonl:2: .*{message}"):
        read(folder, GOOD, line, GOOD)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "1: row 1 is no JSON"),
        (f"\n[\n{GOOD}\n{GOOD}]", r"4: the JSON has '{' where , or ] is expected"),
        (json.dumps(json.loads(GOOD), indent=2), "is one JSON object over several lines"),
        (GOOD.encode("utf-16"), "is UTF-16 or UTF-32; expected .*in UTF-8"),
        (GOOD.encode("utf-16-le"), "is UTF-16 or UTF-32"),
        (GOOD.encode("utf-16-be"), "is UTF-16 or UTF-32"),
        (GOOD.encode("utf-32"), "is UTF-16 or UTF-32"),
        (b"PAR1\0\0", "cannot be read by datasets: .*6 bytes"),
        (b"\x1f\x8b\x08\x00", "cannot be read: "),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", r"is a picture \(JPEG\); expected a row of JSON"),
        (
            f'{{"rows": [\n{GOOD}], "more": [{GOOD}]}}',
            'is one object with the lists "more", "rows"',
        ),
        (f'{{"rows": [\n{GOOD}]', r"2: the JSON ends where , or } is expected"),
        ("", "it is empty"),
        ("\n \n", "0 conversations; expected at least 1 line"),
    ],
    ids=range(14),
)
def test_a_file_of_another_kind_is_named(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"data\.jsonl:? ?{message}"):
        read_conversations(path)


@pytest.mark.parametrize(
    "content",
    [
        "<image" + "1" * 60 + " and more",
        "<image" + " " * 200_000 + "and more",
        "<image>which" + " " * 200_000 + "one",
    ],
    ids=range(3),
)
def test_places_are_looked_for_once(content):
    """Each took minutes or more, where it was tried in all ways that there are."""
    start = time.perf_counter()
    pictures = content.count("<image>")
    _without_places(content, "user", pictures)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("how", ["pipe", "link to a pipe", "socket", "device"])
def test_what_is_no_file_is_not_waited_for(tmp_path, request, how):
    path = tmp_path / "a.jsonl"
    if how == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif how == "device":
        path.symlink_to("/dev/null")
    else:
        made = path if how == "pipe" else tmp_path / "made"
        os.mkfifo(made)
        # Who would wait for it is let go, and fails.
        writer = threading.Timer(10, lambda: os.close(os.open(made, os.O_WRONLY | os.O_NONBLOCK)))
        writer.start()
        request.addfinalizer(writer.cancel)
        if made != path:
            path.symlink_to(made)
    for read_them in (read_conversations, lambda path: require_first_rows([Source(str(path))])):
        with pytest.raises(
            ValueError, match=r"a\.jsonl: no file, but a pipe, .* write its rows to"
        ):
            read_them(path)


def test_a_line_that_never_ends_is_not_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("glm4v_patched.data.text_rows.MOST_CHARACTERS", 1000)
    path = tmp_path / "a.jsonl"
    for end in ("\n", ""):
        path.write_text(f"{GOOD}\n{'x' * 999}\n{'x' * 5000}\n{GOOD}\n{'x' * 1000}{end}")
        found = [(of.line, getattr(of, "text", "")[:12]) for of in read_rows(path)]
        long, short = "has 134,217,", "no JSON (Exp"
        assert found == [(1, ""), (2, short), (3, long), (4, ""), (5, long)]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="no.jsonl: there is no such file"):
        read_conversations(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match=f"{tmp_path.name}: a folder without a data set; expect"):
        read_conversations(tmp_path)


def test_up_to_20_faults_are_listed_and_all_are_counted(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{GOOD}\n" + "".join(f'{{"k{n}": 1}}\n' for n in range(23)))
    with pytest.raises(ValueError) as refused:
        read_conversations(path)
    lines = str(refused.value).splitlines()
    assert lines[0] == f"{path}: 23 of 24 rows cannot be used:"
    assert [line.split(": ")[0] for line in lines[1:-1]] == [f"  {path}:{n}" for n in range(2, 22)]
    assert lines[-1] == "  and 3 more"


def test_what_is_wrong_with_many_rows_is_told_once_with_all_of_them(tmp_path):
    path = tmp_path / "data.jsonl"
    human = [row(*[said("human"), ANSWER] * n) for n in (1, 2, 3)]
    often = [line for n in range(20) for line in ("[]", f'{{"k{n}": 1}}')]
    path.write_text("\n".join([GOOD, *["5"] * 23, GOOD, "6", *human, *often]))
    with pytest.raises(ValueError) as refused:
        read_conversations(path)
    number, role, list_, first, *others, last = str(refused.value).splitlines()[1:]
    assert number.startswith(f"  {path}:2: is a number; ")
    assert number.endswith("; also lines 3 to 24, 26")
    assert ":27: message 1 of 2: the role " in role and role.endswith("; also lines 28 to 29")
    assert list_.endswith("; also lines 32, 34, 36, 38, 40, 42, 44, 46 and 11 more")
    assert ':31: the key "k0"' in first and "; also" not in first
    assert len(others) == 16 and last == "  and 3 more"
    (tmp_path / "a.json").write_text(f"[{GOOD}, 5, 5]")
    with pytest.raises(ValueError, match=r"a\.json, row 2: is a number; .*; also row 3$"):
        read_conversations(tmp_path / "a.json")


def test_rows_of_which_none_can_be_used_are_told_by_the_first(folder):
    source = Source(str(folder / "data.jsonl"))

    def told(*lines: str) -> str:
        (folder / "data.jsonl").write_text("\n".join(lines))
        try:
            require_first_rows([source])
        except ValueError as error:
            return str(error)
        return ""

    bad, lost = row(said("user", img="a"), ANSWER), row(said("user", image="no.png"), ANSWER)
    assert told(*[bad] * 20, GOOD) == told(bad, GOOD, lost) == ""
    assert "2 of 2 rows cannot be used" in told(bad, lost)
    assert "data.jsonl:2: the image" in told(bad, lost) and "no.png does not exist" in told(lost)
    assert told(lost).endswith("data.image_folder names another one)")
    many = told(*[bad] * 21, *[GOOD] * 5)
    assert "none of its first 20 rows can be used" in many
    assert many.endswith("; also lines 2 to 20\ncorrect them")
    # Nothing is fetched for this, and no library loaded.
    (folder / "data.jsonl").write_text(bad)
    require_first_rows([replace(source, allow_urls=True), Source("someone/rows")])


def test_what_is_shown_of_a_row_is_short_and_printable(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(row(said("user", image="data:" + "\x1b[31m" * 10_000), ANSWER))
    with pytest.raises(ValueError) as refused:
        read_conversations(path)
    assert len(str(refused.value)) < 1000 and "\x1b" not in str(refused.value)


def test_written_conversations_replace_no_file_unless_told(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"data\.jsonl exists and is not overwritten"):
        write_conversations(path, [json.loads(GOOD)["messages"]])
    assert path.read_text() == "mine"
    write_conversations(path, [json.loads(GOOD)["messages"]], overwrite=True)
    assert path.read_text() == GOOD + "\n"


def test_every_role_has_a_place():
    assert {message["role"] for message in [said("system"), said("user"), CALL]} < {*ROLES}
