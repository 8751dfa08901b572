"""``glm4v-patched serve``: OpenAI's own client against it, over loopback."""

import base64
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import openai
import pytest
from PIL import Image

from glm4v_patched.cli import main
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving.answer_queue import AnswerQueue, Ask, Ended, Failed
from glm4v_patched.inference.serving.limits import Limits
from glm4v_patched.inference.serving.requests import read_request
from glm4v_patched.models import loading
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load
from tests.helpers.processes import ROOT, serving

KEY = "secret"
NEW = 6
QUESTION = "What is it?"


class Server(NamedTuple):
    url: str
    log: Path
    model: Path
    process: subprocess.Popen

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def ask(self, messages, key: str = KEY, **options):
        """The reply to a question, whose pictures are URLs."""
        return self.client(key).chat.completions.create(model="tiny", messages=messages, **options)


@pytest.fixture(scope="module")
def endless(files, tmp_path_factory) -> Path:
    """The tiny model, whose answers end when they are cut."""
    folder = tmp_path_factory.mktemp("serve") / "endless"
    shutil.copytree(files.model, folder)
    path = folder / "generation_config.json"
    values = json.loads(path.read_text()) | {"eos_token_id": [10**6]}
    path.write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def server(endless):
    command = [sys.executable, "-m", "glm4v_patched", "serve", str(endless), "--device", "cpu"]
    command += ["--port", "0", "--api-key", KEY, "--served-model-name", "tiny"]
    command += ["--max-new-tokens", str(NEW)]
    command += ["--max-body-mb", "2", "--max-pictures", "3"]
    log = endless.parent / "serve.log"
    with serving(command, r"is served at (\S+)", log) as (url, process):
        yield Server(url, log, endless, process)


@pytest.fixture(scope="module")
def answerer(endless) -> Answerer:
    return Answerer(load(find_source(str(endless)), "cpu"), Generation(max_new_tokens=NEW))


def png(size=(80, 60), colour="orange", mode="RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def about(*urls: str, text: str = QUESTION) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def text_of(reply) -> str:
    return reply.choices[0].message.content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "TAKEN"], "--port {port} cannot be listened at: Address already in use"),
        (["--port", "70000"], "--port 70000: expected 0 to 65535"),
        (["--host", "no.such.invalid"], "--host no.such.invalid --port 0 cannot be listened at"),
        (["--api-key", ""], "--api-key is empty"),
        (["--temperature", "0"], "--temperature 0.0: expected at least 0.001"),
        (
            ["--repetition-penalty", "101"],
            "penalty 101.0: expected a number from 0.01",
        ),
        (["--load-in-4bit"], "--load-in-4bit needs a GPU"),
        (["--max-picture-megapixels", "179"], "more than 178 are refused by Pillow"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(
    files, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [port if each == "TAKEN" else each for each in arguments]
        free = [] if "--port" in given else ["--port", "0"]
        assert main(["serve", str(files.model), "--device", "cpu", *free, *given]) == 1
    assert message.format(port=port) in capsys.readouterr().err


def test_mistakes_are_told_without_torch_and_name_missing_packages(tmp_path):
    code = "import sys; sys.modules['torch'] = sys.modules['uvicorn'] = None\n"
    code += "import runpy; runpy.run_module('glm4v_patched', run_name='__main__')"
    command = [sys.executable, "-c", code, "serve", "none", "--device", "cpu", "--port", "0"]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 1 and "serve needs uvicorn: " in told.stderr
    command[2] = code.replace(" = sys.modules['uvicorn']", "")
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 1 and "none: " in told.stderr and "Traceback" not in told.stderr


def test_a_picture_is_answered_as_answer_does_it(server, answerer):
    contents = [png(), png(colour="blue")]
    reply = server.ask(about(*map(data_url, contents)))
    shown = [{"type": "image", "image": content} for content in contents]
    message = {"role": "user", "content": [*shown, {"type": "text", "text": QUESTION}]}
    [alone] = answerer.answer([[message]])
    assert (text_of(reply), reply.choices[0].finish_reason) == (alone.text, "length")
    length = answerer.encode([[message]])["input_ids"].shape[1]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (length, NEW)
    assert text_of(server.ask(about(data_url(contents[0])))) != alone.text


def test_a_second_turn_knows_the_first(server, answerer):
    first = about(data_url(png()))
    reply = server.ask(first)
    # As programs do it, with all keys of the message that they got.
    said = reply.choices[0].message.model_dump()
    assert said["refusal"] is None
    second = server.ask([*first, said, {"role": "user", "content": "And now?"}])
    picture = {"role": "user", "image": png(), "content": QUESTION}
    turns = [picture, {"role": "assistant", "content": text_of(reply)}]
    [alone] = answerer.answer([[*turns, {"role": "user", "content": "And now?"}]])
    assert text_of(second) == alone.text


def test_what_is_streamed_is_the_answer(server):
    messages = about(data_url(png()))
    whole = server.ask(messages, max_tokens=40)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = server.ask(messages, max_tokens=40, **options)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    parts = [delta.content for delta in deltas if delta.content]
    assert "".join(parts) == text_of(whole) and len(parts) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(deltas[1:]) + [
        "length"
    ]
    assert usage.choices == [] and usage.usage == whole.usage
    # Without being asked, usage is not told: clients of old take every chunk for one of text.
    assert all(chunk.choices for chunk in server.ask(messages, stream=True))


def test_an_answer_ends_before_a_text_that_stops_it(server):
    messages = about(data_url(png()))
    text = text_of(server.ask(messages, max_tokens=40))
    stop = text[len(text) // 2 :][:3]
    expected = text[: text.index(stop)].rstrip()
    reply = server.ask(messages, max_tokens=40, stop=["not there at all", stop])
    assert (text_of(reply), reply.choices[0].finish_reason) == (expected, "stop")
    assert reply.usage.completion_tokens < 40
    chunks = server.ask(messages, max_tokens=40, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_what_is_drawn_depends_on_the_seed(server):
    messages = [{"role": "user", "content": QUESTION}]

    def drawn(**options):
        return text_of(server.ask(messages, max_tokens=12, **options))

    greedy = drawn()
    assert greedy == drawn() == drawn(temperature=0, top_p=0.5) == drawn(top_p=1)
    hot = {"temperature": 2.0, "top_p": 0.9}
    assert drawn(**hot, seed=1) == drawn(**hot, seed=1) != drawn(**hot, seed=2)
    assert len({drawn(**hot) for _ in range(3)}) == 3
    assert drawn(temperature=1, extra_body={"top_k": 1}) == greedy
    for seed in (2**63 - 1, -(2**63)):  # OpenAI's
        assert drawn(**hot, seed=seed) == drawn(**hot, seed=seed)
    assert drawn(temperature=1e-3) and drawn(**hot, extra_body={"repetition_penalty": 0.01})


def test_the_model_is_listed(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("org/other")


def refused(server, messages, kind, match: str, **options) -> openai.APIStatusError:
    with pytest.raises(kind, match=match) as error:
        server.ask(messages, **options)
    assert error.value.body["type"] and error.value.body["message"]
    return error.value


def test_a_wrong_key_is_refused(server):
    error = refused(server, about(), openai.AuthenticationError, "API key", key="wrong")
    assert error.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    with urllib.request.urlopen(server.url.replace("/v1", "/health")) as reply:
        assert json.load(reply) == {"status": "ok"}


def test_100_megapixels_are_refused_and_not_decoded(server):
    large = png((12_500, 8_000), 1, "1")
    assert len(large) < 10**6
    before = time.monotonic()
    error = refused(
        server,
        about(data_url(large)),
        openai.BadRequestError,
        r"12,500 x 8,000 pixels \(100.0 million\); this server takes 50 million",
    )
    assert error.code == "image_too_large" and time.monotonic() - before < 20


def test_a_body_that_is_too_large_is_refused(server):
    for stream in (False, True):  # with the answer, and not a broken connection
        messages = about("data:image/png;base64," + "A" * 30_000_000)
        error = refused(
            server,
            messages,
            openai.APIStatusError,
            r"30000\d+ bytes; this server takes 2000000",
            stream=stream,
        )
        assert error.status_code == 413


def test_more_pictures_than_allowed_are_refused(server):
    tiny = data_url(png((1, 1)))
    assert text_of(server.ask(about(*[tiny] * 3), max_tokens=2))
    error = refused(
        server,
        about(*[tiny] * 4, tiny),
        openai.BadRequestError,
        r"have 4 pictures or more; this server takes 3 \(--max-pictures\)",
    )
    assert (error.code, error.param) == ("too_many_images", "messages")


def test_only_errors_of_the_messages_are_the_clients(endless, answerer, monkeypatch):
    def failed() -> Failed:
        events: SimpleQueue = SimpleQueue()
        body = {"messages": [{"role": "user", "content": QUESTION}]}
        engine.submit(Ask(read_request(body, "m", Generation(), Limits()), events.put))
        while not isinstance(event := events.get(timeout=60), Failed):
            assert not isinstance(event, Ended)
        return event.error

    def fail(*given, **options):
        raise ValueError("no good")

    engine = AnswerQueue(answerer, 1024, lambda line: None)
    monkeypatch.setattr(answerer, "generate", fail)
    assert (failed().status, failed().param) == (500, None)
    monkeypatch.setattr(answerer, "encode", fail)
    assert (failed().status, failed().param) == (400, "messages")
    engine.stop()


LOCAL = str(ROOT / "docs" / "loss.png")


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://127.0.0.1:1/a.png", "fetches no pictures .*--allow-urls"),
        ("https://example.org/a.png", "fetches no pictures"),
        ("file:///etc/passwd", "expected data:image"),
        (LOCAL, "expected data:image"),
        ("data:image/png;base64,!!!", "no base64"),
        ("data:image/png;base64,AAAA", "are no picture"),
        (data_url(png()[:-30]), "cannot be read as a picture"),
        (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n"), "EPS"),
    ],
)
def test_pictures_that_cannot_be_used_are_refused(server, url, match):
    error = refused(server, about(url), openai.BadRequestError, match)
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n": 2}, "n is 2, which this server cannot do; expected 1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is a list"),
        (
            {"response_format": {"type": "json_object"}},
            'is an object, .* expected {"type": "text"}, or',
        ),
        ({"temperature": -1}, "temperature: .*greater than or equal to 0, and it is -1"),
        ({"max_tokens": 0}, "max_tokens: .*greater than or equal to 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens is 3 and .* 4"),
        ({"max_tokens": 1024}, "of the model's 1024 positions .* answer of 1024 tokens"),
        ({"extra_body": {"top_q": 1}}, "top_q: is not read; expected one of messages, model"),
        ({"stop": ""}, "stop.*at least 1 character"),
        ({"stop": ["a", "b" * 1001]}, "stop: a text has 1,001 characters; .* takes 1,000"),
        ({"temperature": 1e-39}, "temperature is 1e-39; expected 0, .* or at least 0.001"),
        ({"seed": 2**63}, "seed: .*less than or equal to 9223372036854775807, and it is 9223"),
        (
            {"extra_body": {"repetition_penalty": 1e-42}},
            "penalty: .*equal to 0.01, and",
        ),
    ],
)
def test_what_the_server_cannot_do_is_refused(server, options, match):
    refused(server, about(data_url(png())), openai.BadRequestError, match, **options)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "an empty list"),
        ([{"role": "tool", "content": "a"}], 'role "tool" is not one of'),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "end with the"),
        ([{"role": "user", "content": "a", "image": LOCAL}], 'key "image" is not read'),
        ([{"role": "user", "content": "a", "name": "b"}], 'key "name" is not read'),
        ([{"role": "user", "content": "word " * 3000}], "of the model's 1024 positions"),
    ],
)
def test_messages_that_the_model_cannot_take_are_refused(server, messages, match):
    refused(server, messages, openai.BadRequestError, match)


def test_requests_of_other_forms_are_refused(server):
    def post(content: str, path="/chat/completions", kind="application/json"):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
        asked = urllib.request.Request(server.url + path, content.encode(), headers)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(asked)
        return error.value.code, json.load(error.value)["error"]["message"]

    assert post("{")[0] == 400 and post("[" * 10**5)[0] == 400
    assert post("[1]")[0] == 400 and post("{}")[0] == 400
    assert post("{}", kind="text/plain")[0] == 415
    status, told = post("{}", "/embeddings")
    assert status == 404 and "POST /v1/chat/completions" in told
    assert post(json.dumps({"model": "gpt", "messages": about()}))[0] == 404


def test_a_client_that_goes_away_stops_its_answer(server):
    asked = {"max_tokens": 990, "model": "tiny"}
    messages = [{"role": "user", "content": QUESTION}]
    stream = server.client().chat.completions.create(messages=messages, stream=True, **asked)
    next(iter(stream))
    stream.response.close()
    hasty = server.client().with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        hasty.chat.completions.create(messages=messages, **asked)
    # One that is waiting when others leave is answered.
    assert server.ask(messages, max_tokens=2).usage.completion_tokens == 2
    log = server.log.read_text()
    # On a busy machine, the second may have gone before its answer began.
    assert log.count("the client went away") in (1, 2), log
    assert all(int(number) < 990 for number in re.findall(r"(\d+) answered", log)), log


def test_requests_at_the_same_time_are_answered_one_after_the_other(server):
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        asked = [{"role": "user", "content": f"{QUESTION} {number}"}]
        texts[number] = text_of(server.ask(asked, max_tokens=10 + number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(texts)
    for number in range(6):
        ask(number)
    assert together == texts and len({*texts.values()}) > 1


def test_ctrl_c_ends_it_while_it_answers(server):
    """The last test of this file that uses the server."""
    messages = [{"role": "user", "content": QUESTION}]
    stream = server.ask(messages, max_tokens=990, stream=True)
    next(iter(stream))
    server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="the server is being stopped"):
        list(stream)
    assert server.process.wait(30) == 128 + signal.SIGINT
    assert "Traceback" not in server.log.read_text()
