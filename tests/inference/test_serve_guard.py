"""The guard of both servers: access, sizes and fetched images, without a model."""

import asyncio
import json
import os
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import uvicorn
from uvicorn.server import ServerState

from glm4v_patched.data import fetching
from glm4v_patched.data.image_files import decode_data_url
from glm4v_patched.inference.serving import connections, guard, request_images
from glm4v_patched.inference.serving.connections import Connection, track_requests
from glm4v_patched.inference.serving.guard import BODY_KEY, Guard, parse_body
from glm4v_patched.inference.serving.limits import (
    LIMITS_VARIABLE,
    MAX_JSON_VALUES,
    MAX_TEXT_BYTES,
    ApiError,
    ServerLimits,
)
from glm4v_patched.inference.serving.serve import allowed_hosts
from tests.helpers.serving import EchoQueue, about, call, data_url, echo_app, png, send

IMAGE = data_url(png())
FETCHED = png() + bytes(1000)
INVALID = "invalid_request_error"
POLICY = "content-security-policy"


def protocol_of(app, existing: set | None = None, kind: type[Connection] = Connection):
    """Return what makes connections of an application, eight at most, and their server's state."""
    config = uvicorn.Config(track_requests(app), ws="none", lifespan="off")
    config.load()
    state = ServerState()
    open_connections = set() if existing is None else existing
    return partial(kind, open_connections, 8, {}, config=config, server_state=state), state


async def echo(scope, receive, send) -> None:
    """Send back the body that the guard passes on."""
    content = b"{}"
    if scope["method"] == "POST":
        content = (await receive())["body"]
        assert json.loads(content) == scope[BODY_KEY]
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": content})


def ask(body: object = None, limits: ServerLimits | None = None, **options) -> tuple[int, dict]:
    return asyncio.run(call(Guard(echo, limits or ServerLimits()), body, **options))


@pytest.mark.parametrize(
    ("host", "called", "origin", "is_refused"),
    [
        ("127.0.0.1", "localhost.evil.example", None, True),
        ("0.0.0.0", "evil.example:8000", None, True),
        ("0.0.0.0", f"{socket.gethostname()}:8000", None, False),
        ("Box.lan", "box.lan", None, False),
        ("127.0.0.1", "127.0.0.1:8000", "http://localhost:3000", False),
        ("0.0.0.0", "192.168.0.7:8000", "http://192.168.0.7:8000", False),
        ("127.0.0.1", "127.0.0.1:8000", "http://93.184.216.34", True),
    ],
)
def test_without_a_key_other_hosts_and_pages_are_refused(host, called, origin, is_refused):
    """DNS rebinding, and uploads by a foreign page."""
    headers = {"host": called, "authorization": "Bearer secret"}
    headers |= {} if origin is None else {"origin": origin}
    for key, expected in ((None, 403 if is_refused else 200), ("secret", 200)):
        limits = ServerLimits(api_key=key, hosts=allowed_hosts(host, key))
        assert ask(limits=limits, method="GET", **headers)[0] == expected


def test_a_key_is_parsed_by_http_rules_and_a_websocket_is_closed():
    for sent in ("bearer  secret", "Bearer secrets", "Bearer ", "Basic secret", "secret"):
        status, body = ask(limits=ServerLimits(api_key="secret"), method="GET", authorization=sent)
        assert (status == 200) == (sent == "bearer  secret")
        assert status == 200 or (status, body["error"]["code"]) == (401, "invalid_api_key")
    sent_back: list = []

    async def send(message):
        sent_back.append(message)

    asyncio.run(Guard(echo, ServerLimits())({"type": "websocket", "path": "/"}, None, send))
    assert sent_back == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("name", ["host", "origin", "content-type", "authorization"])
def test_a_header_that_two_readers_could_read_differently_is_refused(name):
    """The guard read the last one, starlette the first."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += [(b"authorization", b"Bearer secret"), (b"origin", b"http://localhost")]

    async def with_headers(more: list) -> tuple[int, dict]:
        app = Guard(echo, ServerLimits(api_key="secret", hosts=["localhost"]))
        return await call(lambda scope, *rest: app(scope | {"headers": headers + more}, *rest), {})

    assert asyncio.run(with_headers([]))[0] == 200
    for value in ({*headers} & {(name.encode(), dict(headers)[name.encode()])}) | {(b"Host", b"a")}:
        status, body = asyncio.run(with_headers([value]))
        assert (status, body["error"]["type"]) == (400, INVALID)
        assert "2 headers" in body["error"]["message"]
    framed = [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")]
    assert asyncio.run(with_headers(framed))[0] == 400


@pytest.mark.parametrize(
    ("body", "limits", "status", "message"),
    [
        (b"[" * 10**4, {}, 400, "not valid JSON"),
        (b'{"a": %s1%s}' % (b"[" * 64, b"]" * 64), {}, 400, "more than 64 levels"),
        ({"a": [0] * MAX_JSON_VALUES}, {}, 413, f"{MAX_JSON_VALUES + 1:,} commas"),
        # A million texts, and a key, that begin as images do.
        ({"messages": ["data:"] * 2 * 10**5}, {}, 413, "commas"),
        ({"url": {"data:" + "f" * 10**6: 0}}, {}, 413, "bytes of text"),
        ({"x": [{"url": "data:"}] * 10**5}, {}, 413, "commas"),
        (b"[1]", {}, 400, "is a JSON list; expected an object"),
        ({"prompt": "a\ud800"}, {}, 400, "prompt has '\\ud800', half of a surrogate pair"),
        ({"stop": ["\udfff"]}, {}, 400, "stop[0] has"),
        (b"a" * 1001, {"max_body_bytes": 1000}, 413, "1001 bytes, and this server accepts 1000"),
        ({"messages": "c" * MAX_TEXT_BYTES}, {}, 413, "1,000,008 bytes of text"),
        ({"messages": "\u4e2d" * (MAX_TEXT_BYTES // 3)}, {}, 413, "1,000,007 bytes of text"),
        ({"messages": ["c" * 999_993]}, {}, 413, "1,000,001 bytes of text"),
        # Texts that look as images do.
        ({"messages": [{"content": "data:" + "d" * 2 * 10**6}]}, {}, 413, "2,000,020 bytes"),
        ({"metadata": {"url": "data:" + "e" * 2 * 10**6}}, {}, 413, "2,000,016 bytes"),
        ({}, {"max_requests": 0}, 429, "is busy with 0 requests"),
    ],
)
def test_a_body_that_is_too_large_or_no_json_is_refused(body, limits, status, message):
    actual_status, answered = ask(body, ServerLimits(**limits))
    assert actual_status == status and message in answered["error"]["message"]
    assert answered["error"]["type"] == ("rate_limit_error" if actual_status == 429 else INVALID)


def test_bodies_at_the_limits_are_accepted():
    content = b'{"a": "%s"}' % (b"b" * (MAX_TEXT_BYTES - 1))
    assert parse_body(content, ServerLimits())[1] == content
    assert ask(content, ServerLimits(max_body_bytes=len(content)))[0] == 200
    assert ask({"a": [0] * (MAX_JSON_VALUES - 2)})[0] == 200
    # And handed on as it came.
    parts = [{"type": "input_image", "image_url": IMAGE}, {"type": "image", "image": IMAGE}]
    body = {"messages": about(IMAGE), "input": [{"role": "user", "content": parts}]}
    body["metadata"] = {"url": "https://example.org"}
    assert ask(body) == (200, body)
    # Escapes of JSON that other languages write in data URLs.
    escaped = json.dumps({"image_url": data_url(png((300, 300), mode="RGB"))}).replace("/", "\\/")
    assert ask(escaped.encode())[0] == 200


def test_a_page_cannot_send_other_types_of_content():
    for kind in ("text/plain", "", "application/jsonx"):
        assert ask({}, content_type=kind)[0] == 415
    assert ask({}, content_type="Application/JSON; charset=utf-8")[0] == 200


def test_waiting_requests_may_have_a_limited_number_of_bytes():
    """Eight times what one may have."""

    async def run() -> None:
        async def application(scope, receive, send):
            await over.wait()
            await echo(scope, receive, send)

        app, over = Guard(application, ServerLimits(max_body_bytes=1000)), asyncio.Event()
        body = {"a": "a" * 890}
        waiting = [asyncio.create_task(call(app, body)) for _ in range(8)]
        while len(app.admitted) < 8:
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(call(app, body), 10))[0] == 429
        over.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 8
        assert (await call(app, body))[0] == 200 and not app.buffered and not app.admitted
        app.app = None  # which fails
        with pytest.raises(TypeError):
            await call(app, body)
        assert not app.buffered and not app.admitted

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_body_that_is_slow_gives_way_to_one_that_arrives():
    """Eight of 32 MB that end before their last byte kept others out for a minute."""
    app = Guard(echo, ServerLimits(max_body_bytes=1000))

    async def stalled(scope, receive, send):
        async def part():
            if id(scope) in app.buffered:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b" " * 900, "more_body": True}

        await app(scope, part, send)

    async def run() -> None:
        slow = [asyncio.create_task(call(stalled, {})) for _ in range(8)]
        await asyncio.sleep(0.05)
        assert sum(app.buffered.values()) == 7200
        assert [(await call(app, {"a": "a" * 900}))[0] for _ in range(3)] == [200] * 3
        [done, *_] = slow
        assert (await done)[0] == 429 and not any(task.done() for task in slow[1:])
        assert sum(app.buffered.values()) == 6300 and not app.evicted
        for task in slow[1:]:
            task.cancel()
        await asyncio.gather(*slow[1:], return_exceptions=True)
        assert not app.buffered and not app.deadlines

    asyncio.run(asyncio.wait_for(run(), 30))


def test_bodies_and_hosts_that_are_slow_keep_no_other_out(monkeypatch):
    """64 of them made a 429 for all; bodies have a deadline."""
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 1)
    fetching, over = [], threading.Event()
    fetch = lambda *arguments: fetching.append(arguments) or over.wait(30) and png()  # noqa: E731
    monkeypatch.setattr(request_images, "fetch", fetch)
    app = Guard(echo, ServerLimits(allow_urls=True))

    async def slow(scope, receive, send):
        async def part():
            await asyncio.sleep(0.05)
            return {"type": "http.request", "body": b" ", "more_body": True}

        await app(scope, part, send)

    async def run() -> None:
        bodies = [asyncio.create_task(call(slow, {})) for _ in range(100)]
        await asyncio.sleep(0.3)
        assert len(app.buffered) == 100 and (await call(app, {}))[0] == 200
        assert {status for status, _ in await asyncio.gather(*bodies)} == {408}
        body = {"messages": about("http://slow.invalid")}
        hosts = [asyncio.create_task(call(app, body)) for _ in range(40)]
        while len(fetching) < 40:
            await asyncio.sleep(0.01)
        status, _ = await call(app, {"messages": about()})
        over.set()
        assert {status, *(status for status, _ in await asyncio.gather(*hosts))} == {200}
        assert not app.buffered

    asyncio.run(asyncio.wait_for(run(), 60))


def test_silent_connections_are_closed(monkeypatch):
    """400 of them, half-open and without a key, ended the service; in one burst, too."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 1)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    open_connections: set[Connection] = set()
    accepted: set[Connection] = set()
    most_accepted = 0

    class Counted(Connection):
        """Has a descriptor from when it is accepted until it is lost."""

        def __init__(self, *arguments, **options):
            nonlocal most_accepted
            super().__init__(*arguments, **options)
            accepted.add(self)
            most_accepted = max(most_accepted, len(accepted))

        def connection_lost(self, exc):
            accepted.discard(self)
            super().connection_lost(exc)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        make_protocol, state = protocol_of(Guard(echo, ServerLimits()), open_connections, Counted)
        listener = socket.create_server(("127.0.0.1", 0))
        server = await loop.create_server(make_protocol, sock=listener, backlog=2)
        listener.listen(100)
        address = listener.getsockname()
        opened = []

        async def send_bytes(content: bytes) -> asyncio.StreamReader:
            opened.append(await asyncio.open_connection(*address))
            opened[-1][1].write(content)
            return opened[-1][0]

        def silent() -> socket.socket:
            return socket.create_connection(address, 30)

        burst = asyncio.gather(*[asyncio.to_thread(silent) for _ in range(100)])
        for client in await burst:
            client.setblocking(False)
            opened.append(await asyncio.open_connection(sock=client))
        await asyncio.sleep(0.1)
        assert len(state.connections) == len(open_connections) == len(accepted) == 8
        assert most_accepted <= 16
        for number in range(40):
            await send_bytes((b"", b"GET / HT", head % 9 + b"\r\n{", head[:40])[number % 4])
            if number % 10 == 9:
                await asyncio.sleep(0.05)
                assert len(state.connections) == 8
                assert b"200 OK" in await (await send_bytes(head % 2 + b"\r\n{}")).read(500)
        begin = loop.time()
        # Those whose head has come have the guard's longer deadline.
        while not all(connection.has_head for connection in open_connections):
            await asyncio.sleep(0.05)
        assert 0.5 < loop.time() - begin < 8
        reader = await send_bytes(b"")
        for _ in range(3):  # one that is kept alive is heard again
            opened[-1][1].write(head % 2 + b"\r\n{}")
            assert b"200 OK" in await asyncio.wait_for(reader.read(500), 10)
            await asyncio.sleep(0.55)
        server.close()
        for _, writer in opened:
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_client_that_reads_nothing_of_its_response_is_ended(monkeypatch):
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 1)
    ended = threading.Event()

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        if (await receive())["type"] == "http.disconnect":
            ended.set()

    async def run() -> None:
        make_protocol, _ = protocol_of(endless)
        server = await asyncio.get_running_loop().create_server(make_protocol, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert await asyncio.to_thread(ended.wait, 20)
        server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_server_that_ends_cuts_off_bodies_that_arrive_and_later_all_else(monkeypatch):
    """uvicorn cancelled the application: status 500, and a traceback for each."""
    monkeypatch.setattr(connections, "SHUTDOWN_TIMEOUT_S", 1)

    async def until_it_is_gone(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    app, open_connections = Guard(until_it_is_gone, ServerLimits()), set()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 2\r\n\r\n"

    async def run() -> None:
        make_protocol, state = protocol_of(app, open_connections)
        server = await asyncio.get_running_loop().create_server(make_protocol, "127.0.0.1", 0)
        readers = []
        for content in (b"{", b"{}"):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(head + content)
            readers.append((reader, writer))
        while (len(app.deadlines), len(app.admitted)) != (1, 1):
            await asyncio.sleep(0.01)
        for connection in open_connections:
            connection.end()
            connection.http.shutdown()  # as uvicorn does
        for number, (reader, _) in enumerate(readers):
            assert await asyncio.wait_for(reader.read(), 10) == b""
            await asyncio.sleep(0.05)
            assert len(state.tasks) == len(state.connections) == 1 - number
        server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_number_of_connections_leaves_files_to_open(monkeypatch):
    def limit(files: int) -> None:
        monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (files, files))

    used = len(os.listdir("/dev/fd")) + connections.RESERVED_FILES
    for files, expected in ((connections.resource.RLIM_INFINITY, 256), (10**6, 256)):
        limit(files)
        assert connections.find_connection_limits() == (expected, 64)
    limit(used + 81)
    assert connections.find_connection_limits() == (40, 10)
    limit(used + 31)
    with pytest.raises(RuntimeError, match=rf"open {used + 31} files.*for 15 client.*ulimit -n"):
        connections.find_connection_limits()


@pytest.mark.parametrize(
    ("url", "limits", "code"),
    [
        ("HTTP://example.org/a.png", {}, "url_not_allowed"),
        ("file:///etc/passwd", {"allow_urls": True}, "invalid_image"),
        ("data:image/png;base64,AAAA", {}, "invalid_image"),
        # It is read whatever its type is said to be.
        (IMAGE.replace("image/png", "x/y"), {"max_pixels": 4799}, "image_too_large"),
        (data_url(png((20_000, 20_000), 1, "1")), {}, "image_too_large"),
        ("https://example.org/a.png", {"allow_urls": True, "max_images": 0}, "too_many_images"),
    ],
)
def test_an_image_that_must_not_be_read_is_refused_wherever_it_stands(url, limits, code):
    for key, value in (
        ("image_url", {"url": url}),
        ("image_url", url),
        ("image", url),
        ("video_url", {"url": url}),
        ("file_url", url),
    ):
        content = [{"type": "text", "text": "a"}, {"type": "any", key: value}]
        for whole in ("messages", "input"):
            messages = [{"role": "user", "content": content}]
            status, body = ask({whole: messages}, ServerLimits(**limits))
            assert (status, body["error"]["code"]) == (400, code)
            place = f"{whole}[0].content[1].{key}" + ".url" * isinstance(value, dict)
            assert body["error"]["param"] == (whole if code == "too_many_images" else place)


@pytest.mark.parametrize("key", ["metadata", "tools"])
def test_a_message_hides_no_image_under_a_name_that_a_request_has_for_other_things(key):
    part = {"type": "text", "text": "", key: [{"image_url": "http://example.org/a.png"}]}
    status, body = ask({"messages": [{"role": "user", "content": [part]}]})
    assert (status, body["error"]["code"]) == (400, "url_not_allowed")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request"), (401, "authentication"), (404, "invalid_request")]
    + [(429, "rate_limit"), (499, "invalid_request"), (500, "server"), (503, "server")],
)
def test_an_error_is_of_the_kind_that_clients_know_by_its_status(status, kind):
    assert ApiError(status, "x").body()["error"]["type"] == f"{kind}_error"


def test_images_are_counted_together():
    small, large = data_url(png((10, 10))), data_url(png((1000, 1000), 1, "1"))
    assert ask({"messages": about(*[small] * 4)}, ServerLimits(max_pixels=100))[0] == 200
    status, body = ask({"messages": about(*[large] * 5)}, ServerLimits(max_pixels=10**6))
    assert status == 400
    assert "5 images in the messages have 5.0 megapixels" in body["error"]["message"]
    assert ask({"messages": about(*[small] * 3)}, ServerLimits(max_images=3))[0] == 200
    assert ask({"messages": about(*[small] * 4)}, ServerLimits(max_images=3))[0] == 400


@pytest.fixture
def shop(monkeypatch):
    """The port of a web server on this machine from which fetching is allowed, and its requests."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(FETCHED)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(fetching, "ALLOWED_PORTS", [server.server_port])
        # Which would fetch it.
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        yield server.server_port, requests
        server.shutdown()


def test_nothing_is_fetched_from_a_private_network(shop):
    port, requests = shop
    for address in ("localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433", "0177.0.0.1"):
        body = {"messages": about(f"http://{address}:{port}/a.png")}
        status, answered = ask(body, ServerLimits(allow_urls=True))
        assert (status, answered["error"]["code"]) == (400, "invalid_image") and not requests


def test_images_that_are_fetched_share_one_limit_and_are_handed_on_as_data(shop, monkeypatch):
    port, requests = shop
    url = f"http://shop.example:{port}/a.png"
    address = (2, 1, 6, "", ("127.0.0.1", port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address])
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    status, handed_on = ask({"messages": about(url)}, ServerLimits(allow_urls=True))
    assert status == 200 and requests == ["/a.png"]
    url_handed_on = handed_on["messages"][0]["content"][0]["image_url"]["url"]
    assert decode_data_url(url_handed_on) == FETCHED
    most = ServerLimits(allow_urls=True, max_body_bytes=2 * len(FETCHED) - 1)
    assert ask({"messages": about(url, url)}, most)[0] == 400


def test_limits_reach_the_middleware_of_vllm_or_it_does_not_start(monkeypatch, capsys):
    assert ask({"messages": about("\x1b[31mred")})[0] == 400
    line = capsys.readouterr().out  # of the log, which no terminal obeys
    key = "messages[0].content[0].image_url.url"
    assert f"/v1/chat/completions: 400 {key}: this is not an image" in line and "\x1b" not in line
    limits = ServerLimits(hosts=["a", "b"], max_images=3, api_key="secret")
    monkeypatch.setenv(LIMITS_VARIABLE, limits.to_json())
    assert Guard(echo).limits == limits
    monkeypatch.delenv(LIMITS_VARIABLE)
    with pytest.raises(RuntimeError, match="start the server with glm4v-patched serve"):
        Guard(echo)


def test_the_page_is_shown_without_a_key_to_no_other_host_and_what_it_asks_needs_one():
    """Plain ``serve`` has no page."""
    limits = {"api_key": "secret", "hosts": allowed_hosts("127.0.0.1", None)}
    for with_page in (True, False):
        app = echo_app(EchoQueue(), with_page, **limits)

        def status(method: str, path: str, app=app, **headers: str) -> int:
            response = asyncio.run(send(app, {}, method, path, **headers))
            if response.status_code == 200:
                policy = response.headers[POLICY]
                rules = dict(part.split(" ", 1) for part in policy.split("; "))
                for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
                    assert rules[name] == "'none'"
                assert rules["connect-src"] == "'self'" and "unsafe" not in policy
                assert response.headers["x-frame-options"] == "DENY"
                assert response.headers["referrer-policy"] == "no-referrer"
            return response.status_code

        assert status("GET", "/") == (200 if with_page else 404)
        assert status("GET", "/", host="evil.example") == 403
        assert status("GET", "/", origin="http://evil.example") == 403
        for path in ("/v1/models", "//", "/page.html", "/v1/chat/completions", "/docs"):
            assert status("GET", path) == status("POST", path) == 401
        assert status("POST", "/") == status("PUT", "/") == 401
