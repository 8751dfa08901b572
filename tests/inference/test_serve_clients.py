"""Requests of other people's clients and the replies to them, without a model."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving import conversation, requests
from glm4v_patched.inference.serving.answer_queue import AnswerEnd
from glm4v_patched.inference.serving.limits import ApiError
from glm4v_patched.inference.serving.response_store import LruStore, ResponseStore
from tests.helpers.serving import (
    CHAT,
    QUESTION,
    EchoQueue,
    about,
    call,
    data_url,
    echo_app,
    numbered_ids,
    png,
)

RESPONSES = "/v1/responses"
RECORDED = Path(__file__).parent / "clients" / "recorded"
"""Written by tests/inference/clients/record.py."""
USER = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}
NEXT = {"role": "user", "content": "c"}
CONTENT = png()


def system(text: str, role: str = "system") -> dict:
    return {"role": role, "content": text}


@pytest.fixture
def queue() -> EchoQueue:
    return EchoQueue()


@pytest.fixture
def ask(queue):
    """Answer a request, and return its status and JSON."""
    app = echo_app(queue)

    def ask(body: dict, path: str = CHAT, app=app):
        return asyncio.run(call(app, body, path=path))

    return ask


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_three_turns_of_a_client_are_answered(path, ask, queue, monkeypatch):
    """Whole and streamed, around an empty answer, and with an image that is none."""
    numbered_ids(monkeypatch)
    recorded = json.loads(path.read_text())
    *requests, last = recorded["requests"]
    for request in requests:
        status, answered = ask(request["body"], request["path"])
        assert status == 200, answered
    assert ask(last["body"], last["path"])[0] == 400
    assert "UnidentifiedImageError" in str(recorded["answers"]["error"])
    talks = [queue.requests[start : start + 3] for start in (0, 3)]
    for turns in talks:
        turns = [[m for m in wanted.prompt if m["role"] != "system"] for wanted in turns]
        words = [[text_of(message) for message in prompt] for prompt in turns]
        assert words[2] == [QUESTION, "Turn 1 of tiny.", "And now?", "Turn 2 of tiny.", "Why?"]
        assert words[:2] == [words[2][:1], words[2][:3]]
        assert all("image" in prompt[0] for prompt in turns)
        assert [m["role"] for m in turns[2]] == ["user", "assistant", "user", "assistant", "user"]
    first, *more = queue.requests[6:8]
    assert text_of(first.prompt[-1]) == QUESTION
    if first.stop and more:  # an answer that is empty stays out
        assert text_of(more[0].prompt[-1]) == f"{QUESTION}\n\nAnd now?"
        assert "image" in more[0].prompt[-1]


def text_of(message: dict) -> str:
    assert isinstance(message["content"], str)
    return message["content"]


EMPTY = [SAID | {"content": empty} for empty in (None, "", " \n", [])]
EMPTY += [{"role": "assistant"}, {"role": "assistant", "content": "", "tool_calls": []}]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([system("x"), system("y", "developer"), USER], [system("x\n\ny"), USER]),
        ([USER, NEXT], [USER | {"content": "a\n\nc"}]),
        ([USER, SAID, SAID, NEXT], [USER, SAID | {"content": "b\n\nb"}, NEXT]),
        # The template can say these.
        ([USER, SAID, system("x"), NEXT], [USER, SAID, system("x"), NEXT]),
        ([USER, system("x", "developer")], [USER, system("x")]),
        ([SAID, USER], [SAID, USER]),
        ([system(""), USER | {"id": "1", "name": "me", "type": "message"}], [USER]),
        *([(USER, empty, NEXT), [USER | {"content": "a\n\nc"}]] for empty in EMPTY),
        ([USER, EMPTY[1]], [USER]),
        # Of the assistant and the system, words are words; of the user, the place of an image.
        ([USER, SAID | {"content": "<image>"}, NEXT], [USER, SAID | {"content": "<image>"}, NEXT]),
        (
            [about(data_url(CONTENT), text="<image>\na")[0], SAID, NEXT],
            [USER | {"image": CONTENT}, SAID, NEXT],
        ),
    ],
)
def test_messages_are_joined_and_left_out_as_the_template_needs(messages, expected, ask, queue):
    status, answered = ask({"messages": messages})
    assert status == 200, answered
    assert queue.requests[0].prompt == expected


def test_images_of_messages_that_are_joined_keep_their_order(ask, queue):
    images = [png(color=color) for color in ("red", "blue", "green")]
    one, two = about(*map(data_url, images[:2]), text="a"), about(data_url(images[2]), text="b")
    assert ask({"messages": [*one, *two]})[0] == 200
    parts = [{"type": "image", "image": image} for image in images]
    text = {"type": "text", "text": "a\n\nb"}
    assert queue.requests[0].prompt == [{"role": "user", "content": [*parts, text]}]


@pytest.mark.parametrize(
    "options",
    [
        # Of Open WebUI's pages, as its server has them before it asks another one.
        {"chat_id": "a", "session_id": "b", "id": "c", "parent_id": None, "folder_id": None}
        | {"filter_ids": [], "tool_servers": [], "files": None, "metadata": {"a": {"b": 1}}},
        {"store": True, "safety_identifier": "a", "prompt_cache_retention": "24h", "user": "b"},
        {"verbosity": "medium", "reasoning_effort": "none", "function_call": "auto"},
        {"chat_template_kwargs": {"enable_thinking": False}, "request_id": "a", "priority": 0},
        {"model": "dummy"},
        {"model": None, "max_tokens": 7, "max_completion_tokens": 7, "top_k": -1},
        {"n": 1, "logprobs": False, "presence_penalty": 0, "stop": None, "logit_bias": {}},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me"},
        # What GLM-4's own glm4v_api_request.py sends, and VLMEvalKit.
        {"model": "glm-4v", "stream": False, "max_tokens": 2048, "presence_penalty": 1.2},
        {"model": "glm-4v-9b", "max_tokens": 16_384, "n": 1, "temperature": 0},
        {"top_k": 0, "top_p": 1},
        # Of an image.
        {"messages": about(data_url(CONTENT) + "\n", text="a", detail="high", max_pixels=9)},
    ],
)
def test_neutral_options_change_nothing(options, ask, queue):
    status, answered = ask({"messages": [USER]} | options)
    assert status == 200, answered
    [wanted] = queue.requests
    image = {"image": CONTENT} if "messages" in options else {}
    assert wanted.prompt == [USER | image] and wanted.model == "tiny"
    assert wanted.generation == Generation()


def test_the_page_lists_all_that_is_ignored():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    lines = {"a request": requests.IGNORED_KEYS, "a message": conversation.IGNORED_MESSAGE_KEYS}
    lines["a part of a message, or its `image_url`"] = conversation.IGNORED_PART_KEYS
    for name, keys in lines.items():
        [line] = re.findall(rf"^\| {name} \|(.*)", page, re.M)
        listed = re.findall("`([a-z_]+)`", line.partition("; `store`")[0].partition(":")[0])
        assert {*listed} == {*keys} - {"store"}


def test_a_model_has_its_own_name_before_those_of_any_glm_4v():
    queue = EchoQueue(("tiny", "glm-4v"))
    for name, expected in (("glm-4v", "glm-4v"), ("glm-4v-9b", "tiny"), (None, "tiny")):
        asyncio.run(call(echo_app(queue), {"messages": [USER], "model": name}))
        assert queue.requests[-1].model == expected
    # A placeholder is a model where one is served alone.
    for name in ("dummy", "gpt"):
        status, answered = asyncio.run(call(echo_app(queue), {"messages": [USER], "model": name}))
        assert (status, answered["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"n": 2}, "n", "n is 2, which this server does not support; expected 1"),
        ({"n": True}, "n", "n is true"),
        ({"logprobs": True}, "logprobs", "is true, which this server does not support"),
        ({"temperature": 1e-39}, "temperature", "is 1e-39; expected 0 (greedy), or at least 0.001"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "max_tokens is 3 and max_"),
        ({"top_q": 1}, "top_q", "top_q: this key is not supported; expected one of model, "),
        ({"stop": ["a", "b" * 1001]}, "stop[1]", "at most 1000 characters"),
        ({"seed": 2**63}, "seed", ""),
        ({"model": "gpt"}, "model", 'there is no model "gpt"; this server has "tiny"'),
    ],
)
def test_unsupported_options_are_refused(options, param, message, ask):
    status, answered = ask({"messages": [USER]} | options)
    assert status in (400, 404) and answered["error"]["param"] == param
    assert message in answered["error"]["message"]


A_PART, PART = {"type": "text", "text": "a"}, "messages[1].content[0]"
AN_IMAGE = about(data_url(CONTENT))[0]["content"][0]


@pytest.mark.parametrize(
    ("message", "param", "problem"),
    [
        ("a", "messages[1]", "valid dictionary"),
        ({"role": "tool", "content": "a"}, "messages[1].role", '"tool"; expected one of system,'),
        ({"role": ["user"], "content": "a"}, "messages[1].role", "a list"),
        ({"content": "a"}, "messages[1].role", "null"),
        ({"type": "reasoning", "summary": []}, "messages[1].type", '"reasoning"'),
        (USER | {"content": None}, "messages[1].content", "null; expected text"),
        (USER | {"content": " "}, "messages[1].content", "is empty"),
        (USER | {"content": 5}, "messages[1].content", "5"),
        (USER | {"train": False}, "messages[1].train", "expected only role and content"),
        (SAID | {"tool_calls": [{"id": "a"}]}, "messages[1].tool_calls", "does not support"),
        (USER | {"content": ["a"]}, "messages[1].content[0]", '"a"; expected {"type": "text"'),
        (USER | {"content": [A_PART, {"type": "input_file"}]}, "messages[1].content[1].type", ""),
        (USER | {"content": [A_PART | {"text": 1}]}, "messages[1].content[0].text", "1"),
        (USER | {"content": [A_PART | {"train": 1}]}, f"{PART}.train", "not supported"),
        (USER | {"content": [{"type": "input_image", "file_id": "f"}]}, PART, "the keys file_id"),
        (USER | {"image": "/etc/passwd"}, "messages[1].image", "not an image"),
        (USER | {"content": [{"type": "image", "image": 5}]}, f"{PART}.image", "is 5; expected"),
        # No character, in places where it is not sent back as a value.
        (USER | {"\udc00": 1}, "messages[1].\\udc00", "half of a surrogate pair"),
        (USER | {"content": "\ud800"}, "messages[1].content", "half of a surrogate pair"),
        (USER | {"k" * 9999: 1}, f"messages[1].{'k' * 38}...{'k' * 38}", "is not supported"),
        (USER | {"content": "a <image>"}, "messages[1].content", "0 images"),
        (SAID | {"content": [AN_IMAGE]}, "messages[1].content", "user"),
        (USER | {"content": [A_PART, AN_IMAGE, A_PART]}, "messages[1].content", "between texts"),
    ],
)
def test_a_refusal_names_the_key_in_the_words_of_the_api(message, param, problem, ask, capsys):
    status, answered = ask({"messages": [USER, message]})
    error = answered["error"]
    assert (status, error["param"]) == (400, param) and problem in error["message"]
    for word in ("learned", "row", "train:", "a.png", "metadata"):
        assert word not in error["message"]
    # One line, and no traceback.
    [line] = capsys.readouterr().out.splitlines()
    assert f"{CHAT}: 400 {param}" in line


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [system("x")]}, "input"),
        ({"input": [USER, SAID]}, "input[1]"),
        ({"input": [USER], "include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"input": [USER], "text": {"format": {"type": "json_schema"}}}, "text"),
        ({"input": [USER], "tools": [{"type": "function"}]}, "tools"),
        ({"input": [USER], "background": True}, "background"),
        ({"input": [USER], "conversation": "c"}, "conversation"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].type"),
    ],
)
def test_a_refusal_of_a_response_names_the_key(body, param, ask):
    status, answered = ask(body, RESPONSES)
    assert (status, answered["error"]["param"]) == (400, param), answered


def test_responses_are_stored_for_requests_that_refer_to_them(ask, queue):
    image = {"type": "input_image", "image_url": data_url(CONTENT)}
    question = {"role": "user", "content": [image, {"type": "input_text", "text": "a"}]}
    _, first = ask({"input": [question], "instructions": "x"}, RESPONSES)
    assert first["store"] is True and first["previous_response_id"] is None
    [item] = first["output"]
    answer = SAID | {"content": item["content"][0]["text"]}
    image_message = USER | {"image": CONTENT}
    for more in (
        {"input": "c", "previous_response_id": first["id"]},
        {"input": [question, {"type": "item_reference", "id": item["id"]}, NEXT]},
        {"input": [question, {"id": item["id"]}, NEXT]},
        {"input": [question, item, NEXT], "store": False},
    ):
        status, second = ask(more, RESPONSES)
        assert status == 200 and queue.requests[-1].prompt == [image_message, answer, NEXT], second
        assert second["previous_response_id"] == more.get("previous_response_id")
    # The last one was not stored.
    status, refused = ask({"input": "d", "previous_response_id": second["id"]}, RESPONSES)
    error = refused["error"]
    assert (status, error["param"]) == (400, "previous_response_id")
    assert error["code"] == "previous_response_not_found" and "send the messages" in str(error)
    reference = {"type": "item_reference", "id": second["output"][0]["id"]}
    status, refused = ask({"input": [reference, NEXT]}, RESPONSES)
    assert (status, refused["error"]["param"]) == (404, "input[0]")


def test_what_is_stored_counts_as_part_of_a_request(queue, ask):
    app = echo_app(queue, max_images=2)
    images = [{"type": "input_image", "image_url": data_url(png())}] * 2
    _, first = ask({"input": [USER | {"content": images}]}, RESPONSES, app)
    more = {"input": [USER | {"content": images[:1]}], "previous_response_id": first["id"]}
    status, refused = ask(more, RESPONSES, app)
    assert (status, refused["error"]["code"]) == (400, "too_many_images")
    assert "3 images" in refused["error"]["message"]


def test_a_store_drops_the_least_recently_used_beyond_its_limits():
    store = LruStore(max_entries=3, max_bytes=40)
    for key in "aabc":
        store.put(key, key * 4)
    assert store.get("a") == b'"aaaa"'
    store.put("d", "dddd")
    assert [key for key in "abcd" if store.get(key)] == ["a", "c", "d"]
    store.put("e", "e" * 28)  # 30 bytes of JSON
    assert [key for key in "acde" if store.get(key)] == ["d", "e"]
    store.put("f", "f" * 40)  # alone too large
    assert not any(map(store.get, "def")) and store._bytes == 0


def test_the_store_has_bytes_as_the_largest_requests():
    store = ResponseStore(max_body_bytes=1000)
    for number in range(30):
        output = [{"id": f"msg-{number}", "text": "a"}]
        store.save([{"text": "b" * 900}], {"id": f"resp-{number}", "output": output})
    assert store.conversation("resp-27") and store.item("msg-0", "input[0]")["text"] == "a"
    with pytest.raises(ApiError, match="no stored response"):
        store.conversation("resp-25")


def test_what_is_continued_counts_as_bytes_of_its_request(queue, ask):
    """A small request may refer to a large one, and many of them at a time."""
    app = echo_app(queue, max_body_bytes=1000, max_buffered_bodies=1)
    for size, expected in ((300, 200), (800, 429)):
        status, first = ask({"input": "b" * size}, RESPONSES, app)
        assert status == 200, first
        more = {"input": "c", "previous_response_id": first["id"]}
        assert ask(more, RESPONSES, app)[0] == expected


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_error_in_the_middle_of_a_stream_is_an_event_of_the_api(path, queue, monkeypatch):
    def submit(queued) -> None:
        queued.on_event("Hel")
        queued.on_event(ApiError(503, "stopped"))

    monkeypatch.setattr(queue, "submit", submit)
    events = stream_of(queue, path)
    if path == CHAT:
        assert events[-1]["error"]["message"] == "stopped"
        return
    kinds = [event["type"] for event in events]
    assert kinds[-3:] == ["response.output_text.delta", "error", "response.failed"]
    assert events[-2]["message"] == events[-2]["error"]["message"] == "stopped"
    assert events[-1]["response"]["status"] == "failed"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]


def test_the_events_of_a_response_are_complete_and_in_order(queue, monkeypatch):
    def submit(queued) -> None:
        queued.on_event("Hel")
        queued.on_event("lo")
        queued.on_event(AnswerEnd("length", 2, 7))

    monkeypatch.setattr(queue, "submit", submit)
    events = stream_of(queue, RESPONSES)
    kinds = [event["type"].removeprefix("response.") for event in events]
    opened = ["created", "in_progress", "output_item.added", "content_part.added"]
    text_events = ["output_text.delta"] * 2 + ["output_text.done", "content_part.done"]
    assert kinds == [*opened, *text_events, "output_item.done", "incomplete"]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    item, response = events[-2]["item"], events[-1]["response"]
    assert response["output"] == [item] and item["content"][0]["text"] == "Hello"
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}


def stream_of(queue: EchoQueue, path: str) -> list[dict]:
    key = "input" if path == RESPONSES else "messages"
    body = {key: [USER], "stream": True}
    lines = asyncio.run(call(echo_app(queue), body, path=path))[1]["lines"]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
