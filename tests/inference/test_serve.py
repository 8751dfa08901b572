"""``glm4v-patched serve``: OpenAI's own client against it, over loopback."""

import asyncio
import io
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
import uvicorn
from PIL import Image

from glm4v_patched.inference.answer_worker import Answerer, count_positions
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving.answer_queue import (
    AnswerEnd,
    AnswerQueue,
    AnswerSequence,
    OpenAIPenalties,
    QueuedRequest,
)
from glm4v_patched.inference.serving.app import make_app
from glm4v_patched.inference.serving.connections import run_server
from glm4v_patched.inference.serving.limits import ApiError, ServerLimits
from glm4v_patched.inference.serving.requests import ParsedRequest
from glm4v_patched.inference.serving.serve import add_adapters
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load_with_processor
from tests.helpers.answering import write_adapters
from tests.helpers.processes import serving
from tests.helpers.serving import QUESTION, about, call, data_url, png
from tests.helpers.tiny import update_json

KEY = "secret"
NEW = 6
IMAGE = about(data_url(png()))
WORDS = [{"role": "user", "content": QUESTION}]
NEXT = {"role": "user", "content": "And now?"}


class Server(NamedTuple):
    url: str
    log: Path
    process: subprocess.Popen

    def client(self, key: str = KEY, timeout: float = 60) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=timeout)

    def ask(self, messages, model: str = "tiny", **options):
        return self.client().chat.completions.create(model=model, messages=messages, **options)


@pytest.fixture(scope="module")
def endless(files, tmp_path_factory) -> Path:
    """The tiny model, whose answers end when they are cut."""
    folder = tmp_path_factory.mktemp("serve") / "endless"
    shutil.copytree(files.model, folder)
    update_json(folder / "generation_config.json", eos_token_id=[10**6])
    return folder


@pytest.fixture(scope="module")
def adapters(endless) -> dict[str, Path]:
    """Two LoRA adapters on it."""
    folders = {"one": endless.parent / "one", "two.b": endless.parent / "two"}
    for scale, folder in zip((0.3, 0.6), folders.values(), strict=True):
        write_adapters(folder, endless, scale)
    return folders


@pytest.fixture(scope="module")
def server(endless, adapters):
    command = [sys.executable, "-m", "glm4v_patched", "serve", str(endless), "--device", "cpu"]
    command += ["--port", "0", "--api-key", KEY, "--served-model-name", "tiny"]
    command += ["--max-new-tokens", str(NEW), "--max-body-mb", "2"]
    command += [f"--adapter={name}={folder}" for name, folder in adapters.items()]
    log = endless.parent / "serve.log"
    with serving(command, r"is served at (\S+)", log) as (url, process):
        yield Server(url, log, process)


@pytest.fixture(scope="module")
def answerer(endless, load_answerer) -> Answerer:
    return load_answerer(endless)


def text_of(reply) -> str:
    return reply.choices[0].message.content


def streamed(chunks) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_a_mistake_is_told(files, endless, adapters, refused):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for arguments, named in (
            (["--port", port], "cannot listen on"),
            (["--api-key", ""], "--api-key"),
            (["--adapter", "a=x", "--adapter", "a=y"], "--adapter a: "),
            (["--adapter", f"a={endless}"], "--adapter a="),
            (["--adapter", f"a={files.adapters}"], "--adapter a="),
            (["--served-model-name", "a", "--adapter", f"a={adapters['one']}"], "--adapter a: "),
        ):
            command = ["serve", endless, "--device", "cpu", "--port", "0", *arguments]
            refused(command, named, served=endless.parent, port=port)


def test_an_image_is_answered_as_answer_does_it_turn_after_turn(server, answerer):
    contents = [png(), png(color="blue")]
    first = about(*map(data_url, contents))
    reply = server.ask(first)
    image_parts = [{"type": "image", "image": content} for content in contents]
    message = {"role": "user", "content": [*image_parts, {"type": "text", "text": QUESTION}]}
    [alone] = answerer.answer([[message]])
    assert (text_of(reply), reply.choices[0].finish_reason) == (alone.text, "length")
    length = answerer.encode([[message]])["input_ids"].shape[1]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (length, NEW)
    assert reply.usage.total_tokens == length + NEW
    assert text_of(server.ask(about(data_url(contents[0])))) != alone.text
    # As programs do it, with all keys of the message that they got.
    answer_message = reply.choices[0].message.model_dump() | {"annotations": [], "tool_calls": []}
    second = server.ask([*first, answer_message, NEXT])
    [alone] = answerer.answer([[message, {"role": "assistant", "content": alone.text}, NEXT]])
    assert text_of(second) == alone.text


def test_what_is_streamed_is_the_answer_up_to_a_text_that_stops_it(server):
    whole = server.ask(IMAGE, max_tokens=40)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = server.ask(IMAGE, max_tokens=40, **options)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert streamed(chunks) == text_of(whole) and len(chunks) > 4
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert usage.choices == [] and usage.usage == whole.usage
    # Without being asked, usage is not told: clients of old take every chunk for one of text.
    assert all(chunk.choices for chunk in server.ask(IMAGE, stream=True))
    stop = text_of(whole)[len(text_of(whole)) // 2 :][:3]
    expected = text_of(whole).partition(stop)[0].rstrip()
    reply = server.ask(IMAGE, max_tokens=40, stop=["not there at all", stop])
    assert (text_of(reply), reply.choices[0].finish_reason) == (expected, "stop")
    assert reply.usage.completion_tokens < 40
    assert streamed(server.ask(IMAGE, max_tokens=40, stop=stop, stream=True)) == expected


def test_responses_and_completions_say_the_same(server):
    client = server.client()
    expected = text_of(server.ask(IMAGE, max_tokens=20))
    [url, words] = IMAGE[0]["content"]
    parts = [{"type": "input_image", "image_url": url["image_url"]["url"], "detail": "auto"}]
    parts += [{"type": "input_text", "text": words["text"]}]
    arguments = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 20}
    reply = client.responses.create(model="tiny", **arguments)
    assert (reply.output_text, reply.status) == (expected, "incomplete")
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage.output_tokens == 20
    with client.responses.stream(model="tiny", **arguments) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].type == "response.incomplete" and len(deltas) > 2
    assert "".join(deltas) == events[-1].response.output_text == expected
    # What it said is context, in the form that it had.
    more = [*arguments["input"], *[item.model_dump() for item in reply.output], NEXT]
    second = client.responses.create(model="tiny", input=more, instructions="Be kind.")
    turns = [{"role": "system", "content": "Be kind."}, *IMAGE]
    turns += [{"role": "assistant", "content": expected}, NEXT]
    assert second.output_text == text_of(server.ask(turns))

    text = client.completions.create(model="tiny", prompt="[a", max_tokens=20)
    assert text.choices[0].text and text.usage.completion_tokens == 20
    chunks = client.completions.create(model="tiny", prompt=["[a"], max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text.choices[0].text


def test_sampled_tokens_depend_on_the_seed(server):
    def drawn(**options):
        return text_of(server.ask(WORDS, max_tokens=12, **options))

    greedy = drawn()
    assert greedy == drawn(temperature=0, top_p=0.5) == drawn(top_p=0)
    assert drawn(temperature=1, extra_body={"top_k": 1}) == greedy
    hot: dict[str, Any] = {"temperature": 2.0, "top_p": 0.9}
    seeds = (0, 2**63 - 1, -(2**63))  # OpenAI's range
    seeded = [drawn(**hot, seed=seed) for seed in seeds]
    assert seeded == [drawn(**hot, seed=seed) for seed in seeds]
    assert len({drawn(**hot), drawn(**hot), *seeded[:2]}) == 4
    # The ends of what is taken are computed.
    assert drawn(temperature=1e-3) and drawn(temperature=100)


def test_penalties_lower_the_logits_of_tokens_in_the_answer(server):
    ids = torch.tensor([[0, 1, 2, 2, 3], [0, 1, 3, 3, 3]])
    scores = OpenAIPenalties(2, presence=0.5, frequency=0.25)(ids, torch.ones(2, 5))
    assert scores.tolist() == [[1, 1, 0, 0.25, 1], [1, 1, 1, -0.25, 1]]
    replies = [server.ask(WORDS, max_tokens=30, frequency_penalty=penalty) for penalty in (0, 2)]
    assert text_of(replies[0]) != text_of(replies[1])


def test_refusals_have_the_form_of_openai(server):
    with pytest.raises(openai.AuthenticationError, match="API key") as error:
        server.client("wrong").models.list()
    assert error.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError, match="top_q: this key is not supported") as error:
        server.ask(WORDS, extra_body={"top_q": 1})
    assert (error.value.param, error.value.type) == ("top_q", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
        server.client().embeddings.create(model="tiny", input="a")
    message = "30000.* bytes, and this server accepts 2000000"
    with pytest.raises(openai.APIStatusError, match=message):  # and not a broken connection
        server.ask(about("data:image/png;base64," + "A" * 30_000_000), stream=True)
    assert "/v1/models: 401 " in server.log.read_text()


def test_adapters_are_served_by_name_beside_their_model(server, endless, adapters, load_answerer):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny", *adapters]
    assert client.models.retrieve("one").id == "one"
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("org/other")
    prompt = [{"role": "user", "image": png(), "content": QUESTION}]
    served = {"tiny": endless} | adapters
    expected = {n: load_answerer(folder).answer([prompt])[0].text for n, folder in served.items()}
    assert len({*expected.values()}) == 3
    for name in [*served, "one"]:
        assert text_of(server.ask(IMAGE, model=name)) == expected[name]


def test_adapters_that_are_served_stay_on_beside_others(adapters, load_answerer):
    base, other = (find_source(str(folder)) for folder in adapters.values())
    loaded = load_with_processor(base, "cpu")
    model, using = add_adapters(loaded.model, base, {"two.b": other})
    both = Answerer(loaded._replace(model=model), Generation(max_new_tokens=NEW))
    for name, folder in adapters.items():
        with using(name):
            assert both.answer([WORDS]) == load_answerer(folder).answer([WORDS])


def test_requests_at_the_same_time_are_answered_together_and_as_alone(server):
    """With images and without, for models by name, whole and streamed."""

    def ask(number: int) -> str:
        messages = about(*[data_url(png())] * (number % 3), text=f"{QUESTION} {number}")
        model = "one" if number % 4 == 3 else "tiny"
        options = {"max_tokens": 10 + number, "model": model, "stream": number % 2 == 1}
        reply = server.ask(messages, **options)
        return streamed(reply) if number % 2 else text_of(reply)

    with ThreadPoolExecutor(8) as threads:
        together = [*threads.map(ask, range(8))]
    assert together == [*map(ask, range(8))] and len({*together}) > 4
    # The line of a batch may come after its answers.
    assert re.search(r", batch of \d+: length", server.log.read_text())


# Evaluations that ask a server, unchanged; ``nox -f tests/noxfile.py -s clients`` installs them.


def evalscope(url: str) -> str:
    from evalscope.api.messages import ChatMessageUser, ContentImage, ContentText
    from evalscope.api.model import GenerateConfig, get_model

    how = {"eval_type": "openai_api", "config": GenerateConfig(temperature=0)}
    model = get_model(model="tiny", base_url=url, api_key=KEY, **how)
    parts = [ContentImage(image=data_url(png())), ContentText(text=QUESTION)]
    return model.generate([ChatMessageUser(content=parts)]).completion


def lmms_eval(url: str) -> str:
    from lmms_eval.api.instance import Instance
    from lmms_eval.models.chat.openai import OpenAICompatible

    model = OpenAICompatible(model_version="tiny", base_url=url, api_key=KEY)
    model.task_dict = {"task": {"test": [Image.open(io.BytesIO(png()))]}}

    def messages_of(image) -> list[dict]:
        parts = [{"type": "image", "url": image}, {"type": "text", "text": QUESTION}]
        return [{"role": "user", "content": parts}]

    arguments = ("", messages_of, {"max_new_tokens": 6, "temperature": 0}, 0, "task", "test")
    about_task = {"task": "task", "doc_id": 0, "repeats": 1}
    [reply] = model.generate_until([Instance("generate_until", arguments, 0, metadata=about_task)])
    return reply.text if hasattr(reply, "text") else reply


@pytest.mark.parametrize("client", [evalscope, lmms_eval])
def test_a_client_is_answered_as_openais(client: Callable[[str], str], server):
    pytest.importorskip(client.__name__)
    assert client(server.url) == text_of(server.ask(IMAGE))


def asking(events_by_name: dict, name: object, **wanted) -> QueuedRequest:
    events_by_name[name] = events = []
    return QueuedRequest(
        ParsedRequest(**{"prompt": WORDS, "generation": Generation()} | wanted), events.append
    )


def batches_of(
    answerer, monkeypatch, asks: list[QueuedRequest], fails=lambda batch: None
) -> list[int]:
    """Return the batch sizes in which requests that wait together are answered."""
    sizes: list[int] = []
    generate = answerer.generate

    def note(batch, *arguments, **options):
        sizes.append(len(batch["input_ids"]))
        fails(batch)
        return generate(batch, *arguments, **options)

    monkeypatch.setattr(answerer, "generate", note)
    queue = AnswerQueue({"": answerer})
    with queue._changed:
        queue._waiting.extend(asks)
        queue._changed.notify()
    last, ended = asking({}, "last", seed=1, max_tokens=1), threading.Event()
    last.on_event = lambda event: ended.set() if isinstance(event, AnswerEnd) else None
    queue.submit(last)
    assert ended.wait(60)
    queue.stop()
    queue.join()
    assert not queue.is_alive
    return sizes[:-1]


def about_images(number: int) -> list[dict]:
    image, text = {"type": "image", "image": png()}, {"type": "text", "text": "a"}
    return [{"role": "user", "content": [*[image] * number, text]}]


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([{}] * 17, [16, 1]),
        ([{"seed": 3}] * 2, [1, 1]),
        ([{"seed": 0}, {}], [1, 1]),
        ([{"generation": Generation(temperature=2.0)}] * 2 + [{}], [2, 1]),
        ([{"presence_penalty": 0.5}, {"presence_penalty": 1.0}], [1, 1]),
        ([{"frequency_penalty": 0.5}, {}], [1, 1]),
        ([{"prompt": about_images(8)}] * 2, [2]),
        ([{"prompt": about_images(number)} for number in (8, 9)], [1, 1]),
        ([{"prompt": about_images(17)}, {}], [1, 1]),
    ],
)
def test_a_batch_is_of_requests_that_sample_alike_and_of_sixteen_sequences_or_images_at_most(
    answerer, monkeypatch, requests, sizes
):
    events_by_name: dict[object, list] = {}
    asks = [
        asking(events_by_name, number, max_tokens=1 + number % 2, **wanted)
        for number, wanted in enumerate(requests)
    ]
    gone = asking({}, "gone")
    gone.cancelled.set()
    assert batches_of(answerer, monkeypatch, [gone, *asks]) == sizes
    for number, events in events_by_name.items():
        assert events[-1][:2] == ("length", 1 + number % 2)


@pytest.mark.parametrize(("spare", "sizes"), [(-1, [1, 1]), (0, [2]), (1, [2])])
def test_a_request_with_fewer_positions_left_than_the_longest_answer_is_answered_apart(
    answerer, monkeypatch, spare, sizes
):
    """All sequences of a batch are as long as its longest answer."""
    events: dict[object, list] = {}
    long = [{"role": "user", "content": "x" * 990}]
    [length] = count_positions(answerer.processor, [long])
    left = answerer.model.config.seq_length - length
    asks = [
        asking(events, "long", prompt=long, max_tokens=990),
        asking(events, "short", max_tokens=left - spare),
    ]
    assert batches_of(answerer, monkeypatch, asks) == sizes
    assert events["long"][-1][:2] == ("length", left)
    assert events["short"][-1][:2] == ("length", left - spare)


def test_a_request_that_fails_takes_no_other_with_it(answerer, monkeypatch):
    def fail(batch):
        if batch["attention_mask"].sum(-1).max() > 60:
            raise RuntimeError("no memory")

    events_by_name: dict[object, list] = {}
    texts = {2: "x" * 60, 5: "word " * 3000}
    prompts = {n: [{"role": "user", "content": text}] for n, text in texts.items()}
    prompts[4] = [{"role": "user", "image": png()[:-30], "content": "a"}]
    asks = [asking(events_by_name, n, max_tokens=n) for n in (1, 3)]
    asks += [asking(events_by_name, n, prompt=p, max_tokens=9) for n, p in prompts.items()]
    batches_of(answerer, monkeypatch, asks, fail)
    ends = {name: events[-1] for name, events in events_by_name.items()}
    statuses = {n: (end.status, end.param) for n, end in ends.items() if isinstance(end, ApiError)}
    assert statuses == {2: (500, None), 4: (400, "messages"), 5: (400, "messages")}
    assert (ends[1][:2], ends[3][:2]) == (("length", 1), ("length", 3))


def test_who_waits_when_the_server_is_stopped_is_told_so_and_its_health(answerer):
    events_by_name: dict[object, list] = {}
    queue = AnswerQueue({"": answerer})
    app = make_app(queue, Generation(), ServerLimits(api_key=KEY), print)

    def health() -> int:
        """Which needs no key."""
        return asyncio.run(call(app, method="GET", path="/health"))[0]

    assert health() == 200
    with queue._changed:
        queue._waiting.append(asking(events_by_name, "waits"))
        queue.stop()
    queue.join()
    queue.submit(asking(events_by_name, "late"))
    assert [error.status for [error] in events_by_name.values()] == [503, 503]
    assert health() == 503


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL], ids=["nohup", "terminal"])
def test_a_closed_terminal_ends_the_server_unless_it_was_started_under_nohup(monkeypatch, handler):
    ended: list[int] = []

    def run(self, sockets):
        signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
        assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL, "SIGHUP would kill the server"
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGHUP, signal.SIGTERM)]
    signal.signal(signal.SIGHUP, handler)
    try:
        run_server(print, None, print)  # type: ignore[arg-type]
    finally:
        for number, previous in before:
            signal.signal(number, previous)
    assert ended == ([] if handler == signal.SIG_IGN else [signal.SIGTERM])


def row(events: list, tokenizer=None, stop=(), max_tokens=9, **options) -> AnswerSequence:
    request = ParsedRequest.model_construct(prompt="", generation=Generation(), stop=stop)
    return AnswerSequence(
        QueuedRequest(request, events.append), tokenizer, max_tokens, [2], **options
    )


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("Hello END!", ("END",), "Hello"),
        (" a  b ", (), "a  b"),
        ("abcd", ("no", "x" * 1000, "cd"), "ab"),
        ("abcd", ("d", "bc", "b"), "a"),
        ("one two END three", ("END", "two ENDS"), "one two"),
        ("one two END three", ("END three", "E"), "one two"),
    ],
)
def test_no_part_of_a_stop_text_leaks_at_any_split(text, stop, expected):
    splits = [[text[:at], text[at:]] for at in range(1, len(text))]
    for pieces in (*splits, [*text]):
        texts: list = []
        sequence = row(texts, stop=stop)
        for piece in pieces:
            sequence.on_finalized_text(piece)
            assert expected.startswith("".join(texts)), pieces
        sequence.on_finalized_text("", stream_end=True)
        assert ("".join(texts), sequence.is_stopped) == (expected, bool(stop)), pieces


def test_a_row_ends_once_whatever_the_batch_does_then(answerer):
    tokenizer = answerer.processor.tokenizer
    for max_tokens, token, reason, tokens in ((3, 1, "length", 3), (1, 2, "stop", 1)):
        events: list = []
        sequence = row(events, tokenizer, max_tokens=max_tokens)
        assert [sequence.append_token(token) for _ in range(5)].index(True) == tokens - 1
        assert events[-1] == AnswerEnd(reason, tokens, 0)
        assert sum(isinstance(event, AnswerEnd) for event in events) == 1
    closed: list = []
    assert row(closed, tokenizer, is_closed=lambda: True).append_token(1)
    assert closed[-1].status == 503


OK = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
HOST, POST = b"Host: 127.0.0.1\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n"
POST += HOST + b"Authorization: Bearer secret\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
WITH_BODY = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
RAW: dict[bytes, set[bytes]] = {
    b"GET /health\r\n\r\n": {b"400"},
    b"GET /health HTTP/1.1\r\n\r\n": {b"400"},
    b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n": {b"400"},
    b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n": {b"200", b"400"},
    b"GET /health HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n": {
        b"200"
    },
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": {b"400", b"401"},
    b"\x16\x03\x01\x02\x00\x01" + bytes(99) + b"\r\n\r\n": {b"400"},
    b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n": {b"401"},
    POST + b"Content-Length: -1\r\n\r\n": {b"400"},
    POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n": {b"400"},
    POST + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}": {b"400"},
    CHUNKED + b"Content-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n": {b"400"},
    CHUNKED + b"\r\nzz\r\nabc\r\n": {b"400"},
    CHUNKED + b"\r\n%x;a=b\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(OK), OK): {b"200"},
}
BODIES = {
    b"": b"400", b"null": b"400", b"\xff": b"400", OK.replace(b"a", b"\xff"): b"400",
    OK.replace(b'"a"', b"NaN"): b"400", OK.replace(b"1}", b"1e999}"): b"400",
    OK.replace(b'"a"', b"[" * 900 + b"]" * 900): b"400", b'{"a":' * 60_000: b"413",
    OK.replace(b'"a"', b'"\\ud800"'): b"400", OK.replace(b"messages", b"\\ud800"): b"400",
    OK.replace(b"user", b"\\udfff"): b"400", OK.replace(b"1}", b"1" * 5000 + b"}"): b"400",
    OK.replace(b'"a"', b'"\\u0000"'): b"200", OK.decode().encode("utf-16"): b"200",
}  # fmt: skip


def test_raw_requests_of_strangers_are_refused_and_the_next_one_is_answered(server):
    """None has a status of 5xx, none waits, and the log has no traceback."""
    host, _, port = server.url.removeprefix("http://").removesuffix("/v1").partition(":")
    bodies = {WITH_BODY % (len(body), body): {status} for body, status in BODIES.items()}
    wrong = []
    for raw, expected in (RAW | bodies).items():
        with socket.create_connection((host, int(port)), 10) as client:
            client.sendall(raw)
            status_line = client.recv(20).split(b" ")
        if status_line[0] != b"HTTP/1.1" or status_line[1] not in expected:
            wrong.append((raw[-99:], status_line))
    assert wrong == []
    assert text_of(server.ask(WORDS)) and "Traceback" not in server.log.read_text()


def test_a_client_that_goes_away_stops_its_answer(server):
    body = {"max_tokens": 990, "model": "tiny", "messages": WORDS}
    stream = server.client().chat.completions.create(stream=True, **body)
    next(iter(stream))
    stream.response.close()
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.3).chat.completions.create(**body)
    # A request that waits while others disconnect is answered.
    assert server.ask(WORDS, max_tokens=2).usage.completion_tokens == 2
    log = server.log.read_text()
    # On a busy machine, the second may disconnect before its answer begins.
    disconnected = re.findall(r"(\d+) generated .*: the client disconnected", log)
    assert len(disconnected) in (1, 2), log
    assert all(int(number) < 990 for number in disconnected), log


def test_ctrl_c_ends_it_while_it_answers(server):
    """The last test of this file that uses the server; beside 400 half-open connections."""
    host, port = re.search(r"//(.*):(\d+)/", server.url).groups()  # type: ignore[union-attr]
    silent = [socket.create_connection((host, int(port)), 10) for _ in range(400)]
    stream = server.ask(WORDS, max_tokens=990, stream=True)
    next(iter(stream))
    server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="the server is shutting down"):
        list(stream)
    assert server.process.wait(30) == 128 + signal.SIGINT
    assert "Traceback" not in server.log.read_text()
    for connection in silent:
        connection.close()
