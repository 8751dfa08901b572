"""What of the requests to the chat page reaches gradio; with a stand-in for it, and with it."""

import asyncio
import base64
import hashlib
import json
import os
import re

import pytest
from PIL import Image

from glm4v_patched.inference import page_guard, web
from glm4v_patched.inference.page_guard import API, COOKIE, FILE, UPLOAD, PageGuard
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving.limits import Limits

HOST = "127.0.0.1:7860"
OURS, THEIRS = "o" * 43, "t" * 43
SCRIPT = "let a = 1;"
JSON = {"content-type": "application/json"}


class Reply:
    def __init__(self, sent: list[dict]):
        self.status = sent[0]["status"]
        self.headers = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
        self.body = b"".join(message.get("body", b"") for message in sent)

    def __getitem__(self, name: str) -> str:
        [value] = [value for found, value in self.headers if found == name]
        return value


async def request(app, method, target, body=b"", cookie=OURS, **headers) -> Reply:
    """Send a request as a browser does; a header of None is left out, a list is sent twice."""
    path, _, query = target.partition("?")
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"host": HOST, "cookie": f"{COOKIE}={cookie}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    if method == "POST":
        headers = {
            "content-length": str(len(content)),
            "content-type": JSON["content-type"],
        } | headers
    pairs = [
        (name.encode(), each.encode())
        for name, value in headers.items()
        for each in (value if isinstance(value, list) else [value])
        if each is not None
    ]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    scope |= {"headers": pairs, "raw_path": path.encode(), "http_version": "1.1", "root_path": ""}
    scope |= {"scheme": "http", "asgi": {"version": "3.0"}, "client": None, "server": None}
    sent, waiting = [], [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        return waiting.pop() if waiting else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return Reply(sent)


def ask(app, *given, **headers) -> Reply:
    return asyncio.run(asyncio.wait_for(request(app, *given, **headers), 20))


class Gradio:
    """Stands for gradio: keeps what reaches it, and answers an upload as it does."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []
        self.wait = None

    async def __call__(self, scope, receive, send):
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        self.seen.append((scope, body))
        if self.wait is not None:
            await self.wait.wait()
        path, content = scope["path"], f"<script>{SCRIPT}</script><script src=a></script>"
        if path == UPLOAD:
            name = self.folder / f"{len(self.seen)}.tif"
            name.write_bytes(body)
            content = json.dumps([str(name)])
        headers = [(b"x-frame-options", b"ALLOWALL"), (b"access-control-allow-origin", b"*")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content.encode()})


@pytest.fixture
def gradio(tmp_path):
    (tmp_path / "uploads").mkdir()
    return Gradio(tmp_path / "uploads")


@pytest.fixture
def guard(gradio):
    return PageGuard(gradio, ["localhost"], str(gradio.folder), Limits(max_body_bytes=1000))


@pytest.fixture
def secret(tmp_path):
    """A file that only its owner reads, and that the page was not given."""
    path = tmp_path / "taxes.png"
    Image.new("RGB", (9, 9)).save(path)
    path.chmod(0o600)
    return str(path)


def event(*paths: str, **changes) -> dict:
    files = [
        {"path": path, "url": f"http://{HOST}{FILE}{path}", "orig_name": "a.png", "size": 1}
        | {"mime_type": "image/png", "meta": {"_type": "gradio.FileData"}}
        for path in paths
    ]
    given = {"text": "What is it?", "files": files}
    return {"data": [given, None], "fn_index": 0, "trigger_id": 6, "session_hash": "a1"} | changes


def upload(app, cookie=OURS) -> str:
    reply = ask(app, "POST", f"{UPLOAD}?upload_id=a", b"content", cookie, content_type="multipart")
    assert reply.status == 200, reply.body
    return json.loads(reply.body)[0]


def test_an_upload_is_shown_to_the_browser_that_sent_it_and_asked_about_by_it_alone(guard, gradio):
    path = upload(guard)
    for shown in (path, f"{path}.png"):
        assert ask(guard, "GET", FILE + shown).status == 200
        assert ask(guard, "GET", FILE + shown, cookie=THEIRS).status == 404
        assert ask(guard, "GET", FILE + shown, cookie=None).status == 404
    assert ask(guard, "POST", f"{API}/queue/join", event(path)).status == 200
    assert json.loads(gradio.seen[-1][1]) == {
        "data": [
            {
                "text": "What is it?",
                "files": [{"path": path, "meta": {"_type": "gradio.FileData"}}],
            },
            None,
        ],
        "fn_index": 0,
        "trigger_id": 6,
        "session_hash": "a1",
    }
    assert dict(gradio.seen[-1][0]["headers"])[b"content-length"] == b"%d" % len(gradio.seen[-1][1])
    assert ask(guard, "POST", f"{API}/queue/join", event(path), THEIRS).status == 404


def neighbors(path: str, secret: str) -> list[str]:
    """Other names of files, and addresses."""
    folder = os.path.dirname(path)
    link = f"{folder}/link.png"
    os.symlink(secret, link)
    return [
        *(
            secret,
            "/etc/passwd",
            f"file://{secret}",
            link,
            folder,
            f"{folder}/",
            "",
            ".",
            path + "/",
        ),
        *(f"{folder}/../../{os.path.basename(secret)}", f"{path}/../../../taxes.png", f"{path}\0"),
        *("http://127.0.0.1:9/a.png", "http://169.254.169.254/", "//127.0.0.1/a", "data:,a"),
        *(path.upper(), f"{path}.png.png", f"{folder}/./{os.path.basename(path)}", f" {path}"),
    ]


def test_no_other_file_or_address_reaches_gradio(guard, gradio, secret):
    path = upload(guard)
    before = len(gradio.seen)
    for other in neighbors(path, secret):
        assert ask(guard, "GET", FILE + other).status == 404, other
        assert ask(guard, "POST", f"{API}/queue/join", event(path, other)).status == 404, other
    for body in (
        *(b"", b"{", b"[]", b"null", [], event(data=None), event(data=[[secret]] * 2)),
        event(data=[{"path": secret, "meta": {"_type": "gradio.FileData"}}]),
        event(data=[{"text": "", "files": [secret]}]),
        event(data=[{"text": "", "files": [{"path": [secret]}]}]),
        event(data=[{"text": "", "files": {"path": secret}}]),
        event(data=[None] * 3),
        event(session_hash="../a"),
        event(fn_index="ask"),
    ):
        assert ask(guard, "POST", f"{API}/queue/join", body).status == 400, body
    assert len(gradio.seen) == before
    # What the page does not send is dropped: of others, gradio reads paths, too.
    more = {"event_data": {"path": secret}, "simple_format": True, "event_id": secret}
    nested = event(data=[{"text": "a", "files": [], "path": secret, "meta": {}}], **more)
    assert ask(guard, "POST", f"{API}/queue/join", nested).status == 200
    assert secret.encode() not in gradio.seen[-1][1] and b"simple" not in gradio.seen[-1][1]


@pytest.mark.parametrize(
    "target",
    [
        *("/config", "/login", "/logout", "/monitoring", "/monitoring/summary", "/svelte/a"),
        *("/openapi.json", "/docs", "/pwa_icon", "/robots.txt", "/assets/../config", "/assets/.a"),
        *("/static//etc/passwd", "/assets/..%2fa", "//", "/file=/etc/passwd", "/file/etc/passwd"),
        *("/assets", "/proxy=http://127.0.0.1:9", f"{API}/proxy=http://127.0.0.1:9"),
        *(f"{API}/file/etc/passwd", f"{API}/FILE=/etc/passwd", f"{API}//file=/etc/passwd"),
        *(f"{API}/{name}" for name in ("call/ask", "call/v2/ask", "run/ask", "api/ask", "info")),
        *(f"{API}/{name}" for name in ("stream/a/b/c/playlist.m3u8", "stream/a", "stream/a/close")),
        *(f"{API}/{name}" for name in ("component_server", "custom_component/a/b/c/d", "mcp/sse")),
        *(f"{API}/{name}" for name in ("deep_link", "process_recording", "vibe-edit", "vibe-code")),
        *(f"{API}/{name}" for name in ("upload_progress", "startup-events", "token", "app_id")),
        *(f"{API}/{name}" for name in ("runs", "run-history/records", "queue/status", "user")),
        *(f"{API}/queue/join/", f"{API}/queue/joins", f"{API}/upload/", f"{API}/heartbeat/a/b"),
    ],
)
def test_other_routes_are_not_there(guard, gradio, target):
    for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS", "DELETE"):
        assert ask(guard, method, target, {}).status == 404
    assert not gradio.seen


def test_gradio_sees_of_a_request_what_the_page_needs(guard, gradio):
    hidden = {"x_forwarded_host": "evil", "x_gradio_user": "a", "authorization": "b", "range": "c"}
    for target, query in (
        ("/?deep_link=a&view=api", b""),
        (f"{API}/queue/data?a=b&session_hash=c1&session_hash=d", b"session_hash=c1"),
        (f"{API}/queue/data?session_hash=../c", b""),
        ("/theme.css?v=1", b""),
    ):
        assert ask(guard, "GET", target, **hidden).status == 200
        scope = gradio.seen[-1][0]
        assert scope["query_string"] == query and dict(scope["headers"]) == {b"host": HOST.encode()}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://localhost:7860"},
        {"origin": f"https://{HOST}"},
        {"origin": ""},
        {"origin": "http://evil.example"},
        {"origin": [f"http://{HOST}", "null"]},
        {"host": "evil.example"},
        {"host": [HOST, "evil.example"]},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site", "sec_fetch_dest": "iframe"},
    ],
)
def test_other_pages_are_refused(guard, gradio, headers):
    path = upload(guard)
    before = len(gradio.seen)
    for method, target, body in (
        *(("GET", "/", b""), ("GET", FILE + path, b""), ("GET", f"{API}/queue/data", b"")),
        *(("POST", UPLOAD, b"a"), ("POST", f"{API}/queue/join", event()), ("GET", "/config", b"")),
    ):
        reply = ask(guard, method, target, body, **headers)
        assert reply.status in (400, 403), (target, reply.body)
        assert reply["x-frame-options"] == "DENY"
    assert len(gradio.seen) == before


def test_the_page_itself_and_who_follows_a_link_to_it_are_let_in(guard):
    own = {"origin": f"http://{HOST}", "sec_fetch_site": "same-origin"}
    assert ask(guard, "POST", f"{API}/queue/join", event(), **own).status == 200
    link = {"sec_fetch_site": "cross-site", "sec_fetch_dest": "document"}
    assert ask(guard, "GET", "/", **link).status == 200
    assert ask(guard, "GET", "/theme.css", **link).status == 403
    tunnel = {"host": "localhost:9000", "origin": "http://localhost:9000"}
    assert ask(guard, "POST", f"{API}/queue/join", event(), **tunnel).status == 200


def test_every_response_keeps_the_page_to_itself(guard):
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    path = upload(guard)
    for target in ("/", "/theme.css", FILE + path, FILE + "a", "/config", f"{API}/heartbeat/a"):
        reply = ask(guard, "GET", target)
        assert reply["x-frame-options"] == "DENY" and reply["referrer-policy"] == "no-referrer"
        assert reply["x-content-type-options"] == "nosniff"
        assert reply["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in dict(reply.headers)
        parts = reply["content-security-policy"].split("; ")
        policy = {name: value for name, _, value in (part.partition(" ") for part in parts)}
        for name in ("default-src", "frame-ancestors", "form-action"):
            assert policy[name] == "'none'"
        assert ("sandbox" in policy) == (target != "/")
        if target == "/":
            assert f"'sha256-{digest}'" in policy["script-src"]
            assert "unsafe" not in policy["script-src"] and policy["connect-src"] == "'self'"
    assert ask(guard, "GET", FILE + path)["cache-control"] == "no-store"


def test_each_browser_gets_a_cookie_once_that_scripts_do_not_read(guard):
    assert "set-cookie" not in dict(ask(guard, "GET", "/").headers)
    first, second = (ask(guard, "GET", "/", cookie=None)["set-cookie"] for _ in range(2))
    assert first != second and "HttpOnly" in first
    value = first.partition("=")[2].partition(";")[0]
    assert upload(guard, value) and ask(guard, "POST", UPLOAD, b"a", "short").status == 403


def test_uploads_are_bounded(guard, monkeypatch):
    for size, status in ((None, 411), ("a", 411), ("-1", 411), ("8001", 413), ("8000", 200)):
        reply = ask(guard, "POST", UPLOAD, b"a" * 10, content_length=size)
        assert reply.status == status, (size, reply.body)
    monkeypatch.setattr(page_guard, "MOST_BYTES_KEPT", 25)
    assert guard.bytes_kept == 10
    upload(guard)  # seven more
    assert ask(guard, "POST", UPLOAD, b"a" * 9).status == 413
    assert ask(guard, "POST", UPLOAD, b"a" * 8).status == 200
    text = event(data=[{"text": "a" * 10**6, "files": []}])
    assert ask(guard, "POST", f"{API}/queue/join", text).status == 413


def test_slow_bodies_end(guard, gradio, monkeypatch):
    monkeypatch.setattr(page_guard, "SECONDS_TO_SEND", 0.01)

    async def slow(target: str, **headers) -> Reply:
        sent = []
        pairs = [(b"host", HOST.encode()), (b"content-type", b"application/json")]
        pairs += [(b"content-length", b"9"), (b"cookie", f"{COOKIE}={OURS}".encode())]
        scope = {"type": "http", "method": "POST", "path": target, "query_string": b""}

        async def send(message):
            sent.append(message)

        await guard(scope | {"headers": pairs}, asyncio.Event().wait, send)
        return Reply(sent)

    assert asyncio.run(slow(f"{API}/queue/join")).status == 408
    # gradio is told that the client is gone, which ends an upload.
    with pytest.raises(KeyError, match="body"):
        asyncio.run(slow(UPLOAD))
    assert not guard.open


def test_streams_and_other_requests_are_bounded_and_end(guard, gradio, monkeypatch):
    monkeypatch.setattr(page_guard, "MOST_STREAMS", 2)

    async def many() -> list[int]:
        gradio.wait = asyncio.Event()
        targets = [f"{API}/heartbeat/a", f"{API}/queue/data?session_hash=a", f"{API}/heartbeat/b"]
        running = [asyncio.ensure_future(request(guard, "GET", each)) for each in targets]
        running.append(asyncio.ensure_future(request(guard, "GET", "/theme.css")))
        await asyncio.sleep(0.01)
        gradio.wait.set()
        return [reply.status for reply in await asyncio.gather(*running)]

    assert asyncio.run(many()) == [200, 200, 429, 200] and not guard.open


def test_an_upload_outside_of_the_folder_is_not_given_out(guard, gradio, tmp_path):
    gradio.folder = tmp_path
    with pytest.raises(RuntimeError, match="outside of"):
        upload(guard)
    assert not guard.owners


# With gradio itself.


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("gradio", reason='gradio is missing: pip install -e ".[web]"')
    folder = str(tmp_path_factory.mktemp("page"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRADIO_TEMP_DIR", folder)
        patched.setenv("GRADIO_SSR_MODE", "True")
        made = web.make_page(["a"], [None], Generation(max_new_tokens=6), None)
        yield web.application(made, folder)


def test_the_page_starts_behind_its_guard_alone(page, monkeypatch):
    asyncio.run(page_guard.require_guarded(page))
    with monkeypatch.context() as patched:
        patched.setattr(PageGuard, "_require_owner", lambda *_: None)
        with pytest.raises(RuntimeError, match="install another, such as gradio=="):
            asyncio.run(page_guard.require_guarded(page))
    with monkeypatch.context() as patched:
        patched.setattr(page, "app", Gradio(None))
        with pytest.raises(RuntimeError, match="install another, such as gradio=="):
            asyncio.run(page_guard.require_guarded(page))


def test_a_file_has_a_limit_of_its_own(page):
    """gradio counts it, which launch() is not needed for."""
    most = Limits().max_body_bytes
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    for size, status in ((most + 1, 413), (most, 200)):
        content = head + bytes(size) + b"\r\n--x--\r\n"
        kind = {"content_type": "multipart/form-data; boundary=x"}
        reply = ask(page, "POST", UPLOAD, content, **kind)
        assert reply.status == status, reply.body[:200]
    assert page.bytes_kept == most


def routes(found) -> set[tuple[str, str]]:
    """Method and path of each route, however it is nested."""
    every = set()
    for route in found:
        inner = getattr(route, "original_router", route)
        if hasattr(inner, "routes") and not hasattr(route, "methods"):
            every |= routes(inner.routes)
        else:
            every |= {(method, route.path) for method in getattr(route, "methods", None) or ["GET"]}
    return every


def test_of_all_routes_of_gradio_those_of_the_page_are_there(page):
    every = routes(page.app.routes)
    assert len(every) > 60 and any("component_server" in path for _, path in every)
    there = set()
    for method, path in every:
        try:
            asyncio.run(page.admit(scope_of(method, path), None))
        except page_guard.ApiError as error:
            if error.status == 404:
                continue
        there.add(f"{method} {path}")
    assert there == {
        *("GET /", "HEAD /", "GET /theme.css", "GET /favicon.ico", "GET /manifest.json"),
        *("GET /static/{path:path}", "GET /assets/{path:path}"),
        *(f"GET {API}/heartbeat/{{session_hash}}", f"GET {API}/queue/data"),
        *(f"POST {API}/{name}" for name in ("upload", "queue/join", "cancel", "reset")),
    }


def scope_of(method: str, path: str) -> dict:
    path = re.sub("{.*?}", "a", path)
    return {"method": method, "path": path, "headers": [(b"host", HOST.encode())]} | {
        "query_string": b""
    }


def test_a_session_is_of_the_browser_that_began_it(guard, gradio, monkeypatch):
    """Whoever knew its name got the conversation, its events, or ended it."""
    cancel = {"event_id": "a", "fn_index": 0, "session_hash": "a1"}
    asked = [("POST", f"{API}/queue/join", event()), ("POST", f"{API}/cancel", cancel)]
    asked += [("GET", f"{API}/{name}") for name in ("heartbeat/a1", "queue/data?session_hash=a1")]
    for given in asked:
        guard.sessions.clear()
        assert ask(guard, *given).status == 200
        for other in asked:
            assert ask(guard, *other).status == 200
            assert ask(guard, *other, cookie=THEIRS).status == 404
    monkeypatch.setattr(page_guard, "MOST_SESSIONS", 2)
    for name in ("a2", "a3", "a4"):
        ask(guard, "GET", f"{API}/heartbeat/{name}")
    assert [*guard.sessions] == ["a3", "a4"]
