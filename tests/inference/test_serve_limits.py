"""What clients of ``glm4v-patched serve`` may do; without a model."""

import asyncio
import json
import socket
import threading
import time
import warnings

import pytest
from PIL import Image

from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving import pictures
from glm4v_patched.inference.serving.answer_queue import Answer, Ask, Ended, Started
from glm4v_patched.inference.serving.app import make_app
from glm4v_patched.inference.serving.errors import ApiError
from glm4v_patched.inference.serving.guard import Guard
from glm4v_patched.inference.serving.limits import Limits
from glm4v_patched.inference.serving.pictures import require_size
from glm4v_patched.inference.serving.requests import read_request
from glm4v_patched.inference.serving.serve import hosts_of, listen
from tests.inference.test_serve import about, data_url, png


def test_pictures_that_are_too_large_together_are_refused():
    limits = Limits(max_pixels=100)
    content = data_url(png((10, 10)))
    body = {"messages": about(*[content] * 4)}
    assert read_request(body, "m", Generation(), limits)
    body = {"messages": about(*[content] * 4, data_url(png((1, 1))))}
    limits = Limits(max_pixels=10**6)
    assert read_request(body, "m", Generation(), limits)
    large = data_url(png((1000, 1000), 1, "1"))
    told = r"first 5 pictures have 5.0 million pixels; .* 4 million \(4 times --max-picture-mega"
    with pytest.raises(ApiError, match=told) as error:
        read_request({"messages": about(*[large] * 6)}, "m", Generation(), limits)
    assert error.value.code == "image_too_large"


def test_a_long_text_that_stops_an_answer_takes_no_time():
    said: list[str] = []
    answer = Answer(None, ("b" * 10**6,), said.append)
    start = time.monotonic()
    answer.on_finalized_text("ab")
    assert said == ["a"] and time.monotonic() - start < 1


def test_reading_pictures_in_threads_leaves_the_filters_of_warnings(monkeypatch):
    """One thread begins while another reads, and ends after it."""
    before, content, opened = list(warnings.filters), png(), Image.open
    both = threading.Barrier(2, timeout=30)

    def read(file):
        both.wait()
        if threading.current_thread() is second:
            first.join(30)
        return opened(file)

    monkeypatch.setattr(Image, "open", read)
    first, second = (
        threading.Thread(target=require_size, args=(content, Limits())) for _ in range(2)
    )
    first.start()
    time.sleep(0.1)
    second.start()
    second.join(30)
    assert list(warnings.filters) == before


@pytest.mark.parametrize(
    ("host", "called", "is_refused"),
    [
        ("127.0.0.1", "localhost:8000", False),
        ("127.0.0.1", "[::1]:8000", False),
        ("127.0.0.1", "evil.example:8000", True),
        ("LOCALHOST", "evil.example:8000", True),
        ("LOCALHOST", "LocalHost:8000", False),
        ("0.0.0.0", "evil.example:8000", True),
        ("0.0.0.0", "192.168.0.7:8000", False),
        ("0.0.0.0", f"{socket.gethostname()}:8000", False),
        ("Box.lan", "box.lan", False),
        ("127.0.0.1", "localhost.evil.example", True),
    ],
)
def test_without_a_key_other_names_are_refused(host, called, is_refused):
    statuses: list[int] = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        statuses.append(message.get("status"))

    for key in (None, "secret"):
        headers = [(b"host", called.encode()), (b"authorization", b"Bearer secret")]
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers}
        guard = Guard(application, Limits(api_key=key, hosts=hosts_of(host, key)))
        asyncio.run(guard(scope, None, send))
    assert statuses[0] == (403 if is_refused else 200) and statuses[-1] == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("Bearer  secret", 200),
        ("Bearer secrets", 401),
        ("Bearer ", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("", 401),
    ],
)
def test_a_key_is_taken_as_http_has_it(sent, status):
    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    statuses: list[int] = []

    async def send(message):
        statuses.append(message.get("status"))

    headers = [(b"authorization", sent.encode())]
    scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers}
    asyncio.run(Guard(application, Limits(api_key="secret"))(scope, None, send))
    assert statuses[0] == status


@pytest.mark.parametrize("body", [{"messages": [], "\ud800": 1}, {"messages": [{"\ud800": 1}]}])
def test_half_of_a_surrogate_pair_is_told_of_as_any_other_mistake(body):
    app = make_app(None, "m", Generation(), Limits())  # type: ignore[arg-type]  # asks nothing
    assert asyncio.run(status_of(app, body)) == 400


@pytest.mark.parametrize("given", [{"n": True}, {"logprobs": 0}, {"frequency_penalty": False}])
def test_true_is_not_one(given):
    [(key, value)] = given.items()
    with pytest.raises(ApiError, match=f"{key} is {json.dumps(value)}, which this server cannot"):
        read_request({"messages": about()} | given, "m", Generation(), Limits())
    for number in (0, 0.0):
        given = {"presence_penalty": number, "n": 1}
        assert read_request({"messages": about()} | given, "m", Generation(), Limits())


def test_of_two_that_start_at_once_the_second_is_told():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"--port {port} cannot be listened at: Address already"
        ):
            listen("127.0.0.1", port)


async def status_of(app, body: object) -> int:
    """What an application answers to a POST, whose body comes in two parts."""
    content = json.dumps(body).encode()
    parts, statuses = [content[: len(content) // 2], content[len(content) // 2 :]], []

    async def receive():
        if not parts:
            await asyncio.Event().wait()  # the client stays
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        if "status" in message:
            statuses.append(message["status"])

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    await app(scope | {"query_string": b""}, receive, send)
    [status] = statuses
    return status


def test_waiting_requests_hold_a_limited_number_of_bytes():
    """Eight times what one may have."""

    async def run() -> None:
        async def application(scope, receive, send):
            await over.wait()
            await send({"type": "http.response.start", "status": 200})

        guard, over = Guard(application, Limits(max_body_bytes=1000)), asyncio.Event()
        waiting = [asyncio.create_task(status_of(guard, "a" * 900)) for _ in range(8)]
        while sum(guard.held.values()) < 8 * 902:
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(status_of(guard, "a" * 900), 10) == 429
        over.set()
        assert await asyncio.gather(*waiting) == [200] * 8
        assert await status_of(guard, "a" * 900) == 200 and not guard.held

    asyncio.run(asyncio.wait_for(run(), 30))


def test_hosts_that_are_slow_keep_no_other_request_waiting(monkeypatch):
    fetching, over = [], threading.Event()

    def slow(*given) -> bytes:
        fetching.append(given)
        over.wait(30)
        return png()

    class Engine:
        is_alive = True

        def submit(self, ask: Ask) -> None:
            ask.tell(Started(1))
            ask.tell(Ended("stop", 1))

    monkeypatch.setattr(pictures, "fetch", slow)
    app = make_app(Engine(), "m", Generation(), Limits(allow_urls=True))

    async def run() -> None:
        slow_ones = {"messages": about("http://slow.invalid")}
        waiting = [asyncio.create_task(status_of(app, slow_ones)) for _ in range(40)]
        while len(fetching) < 6:
            await asyncio.sleep(0.01)
        try:
            assert await asyncio.wait_for(status_of(app, {"messages": about()}), 5) == 200
        finally:
            over.set()
        assert await asyncio.gather(*waiting) == [200] * 40

    asyncio.run(asyncio.wait_for(run(), 60))
