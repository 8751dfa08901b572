"""Passes the requests of the chat page on to gradio, and nothing else of them or of gradio's API.

gradio refuses files that were not uploaded to it only after ``launch()``, which a page that is
mounted does not call; and every release has other routes that take a path or an address. So the
routes, parameters and keys that the page needs are listed here, what else a request has is dropped
or refused before gradio reads it, and files are known by the names that this process gave out.
"""

import asyncio
import base64
import hashlib
import io
import json
import re
import secrets
from contextlib import redirect_stdout
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from .serving.guard import SECONDS_TO_SEND, HostGuard, Message, Receive, Send, require_json
from .serving.limits import MOST_BYTES_OF_TEXT, ApiError, Limits

API = "/gradio_api"
UPLOAD, FILE = f"{API}/upload", f"{API}/file="
# Paths of a method, and the one parameter of the query that is passed on.
ROUTES = {
    "GET": {
        r"/|/favicon\.ico|/manifest\.json|/theme\.css": None,
        r"/(assets|static)(/[\w-][\w.-]*)+": None,
        rf"{API}/heartbeat/\w+": None,
        rf"{API}/queue/data": "session_hash",
    },
    "POST": {UPLOAD: "upload_id", rf"{API}/(queue/join|cancel|reset)": None},
}
# Others could change what gradio believes of the address, the user or the way here.
REQUEST_HEADERS = (b"host", b"origin", b"user-agent", b"accept", b"content-type", b"content-length")
COOKIE = "glm4v_patched_page"
MOST_BYTES_KEPT = 2 * 10**9
"""Of all uploads."""
MOST_SESSIONS = 1000
MOST_STREAMS = 32
"""Of events: a page has two."""

NOWHERE = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE = (
    "default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src "
    "'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": f"{NOWHERE}; sandbox",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-dns-prefetch-control": "off",
    "x-frame-options": "DENY",
}
SCRIPT = re.compile(rb"<script\b[^>]*>(.*?)</script>", re.DOTALL | re.IGNORECASE)

Word = Annotated[str, Field(pattern=r"^\w{1,64}$")]


class Upload(BaseModel):
    path: str
    meta: dict[Literal["_type"], Literal["gradio.FileData"]] = {"_type": "gradio.FileData"}


class Question(BaseModel):
    text: str
    files: list[Upload]


class Join(BaseModel):
    """An event of the page: the question, and None in place of what gradio keeps itself."""

    data: list[Question | None] = Field(max_length=2)
    fn_index: int
    session_hash: Word
    trigger_id: int | None = None


class Reset(BaseModel):
    event_id: Word


class Cancel(Reset):
    fn_index: int
    session_hash: Word


BODIES: dict[str, type[BaseModel]] = {"queue/join": Join, "cancel": Cancel, "reset": Reset}


class PageGuard(HostGuard):
    """Stands before gradio's application.

    Args:
        folder: Where gradio puts uploads.
        limits: Of a file's bytes, and of requests at the same time.
    """

    def __init__(self, app: Any, hosts: list[str], folder: str, limits: Limits):
        super().__init__(app, hosts)
        self.folder, self.limits = Path(folder), limits
        self.owners: dict[str, str] = {}  # of uploads, by path: the cookie of a browser
        self.sessions: dict[str, str | None] = {}  # by gradio's names, in the same way
        self.bytes_kept = 0
        self.open: dict[int, bool] = {}  # requests, and whether each is a stream of events

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = self._secured(scope, send)
        await super().__call__(scope, receive, send)

    async def admit(self, scope: Message, receive: Receive) -> Receive:
        headers = dict(scope["headers"])
        await super().admit(scope, receive)
        _require_same_origin(scope, headers)
        query = self._route(scope, headers)
        self._count(scope)
        if scope["path"] == UPLOAD:
            receive = self._upload(headers, receive)
        elif scope["method"] == "POST":
            receive = await self._event(scope, headers, receive)
        kept = [(name, headers[name]) for name in REQUEST_HEADERS if name in headers]
        scope["query_string"], scope["headers"] = query, kept
        return receive

    def forget(self, scope: Message) -> None:
        self.open.pop(id(scope), None)

    def _route(self, scope: Message, headers: dict[bytes, bytes]) -> bytes:
        """Return the query that is passed on, or raise ``ApiError``."""
        path, method = scope["path"], scope["method"].replace("HEAD", "GET")
        if method == "GET" and path.startswith(FILE):
            self._require_owner(path.removeprefix(FILE), headers)
            return b""
        for pattern, parameter in ROUTES.get(method, {}).items():
            if re.fullmatch(pattern, path, re.ASCII):
                given = rf"(?:^|&)({parameter}=\w{{1,64}})(?:&|$)".encode()
                found = re.search(given, scope["query_string"])
                query = found[1] if found else b""
                if path.startswith(f"{API}/heartbeat/"):
                    self._require_session(path.rpartition("/")[2], headers)
                elif query.startswith(b"session_hash="):
                    self._require_session(query.decode().partition("=")[2], headers)
                return query
        raise ApiError(404, f"the page has no {scope['method']} of this address")

    def _count(self, scope: Message) -> None:
        is_stream = scope["path"].startswith((f"{API}/heartbeat/", f"{API}/queue/data"))
        most = MOST_STREAMS if is_stream else self.limits.most_at_once
        if most is not None and [*self.open.values()].count(is_stream) >= most:
            raise ApiError(
                429, f"{most} requests of this kind are open, and no more may: try later"
            )
        self.open[id(scope)] = is_stream

    def _require_owner(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise ``ApiError`` if a path is not that of an upload of the same browser, or of its
        preview."""
        owner = self.owners.get(path) or self.owners.get(path.removesuffix(".png"))
        if owner is None or owner != _cookie(headers):
            raise ApiError(404, "this file was not uploaded to the page by this browser")

    def _require_session(self, name: str, headers: dict[bytes, bytes]) -> None:
        """Raise ``ApiError`` if another browser has used a session of gradio's before: it has a
        conversation, and browsers choose its name by ``Math.random()``."""
        owner = self.sessions.setdefault(name, _cookie(headers))
        if len(self.sessions) > MOST_SESSIONS:
            self.sessions.pop(next(iter(self.sessions)))
        if owner != _cookie(headers):
            raise ApiError(404, "this conversation was not begun by this browser")

    def _upload(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Return what gives an upload to gradio, which counts the bytes of each file of it."""
        size, most = (
            headers.get(b"content-length", b""),
            self.limits.largest_at_once * self.limits.max_body_bytes,
        )
        if not size.isdigit():
            raise ApiError(411, "an upload needs a Content-Length")
        if int(size) > most:
            raise ApiError(
                413, f"the upload has {size.decode()} bytes; the page takes {most} at once"
            )
        if self.bytes_kept + int(size) > MOST_BYTES_KEPT:
            raise ApiError(
                413,
                f"the uploads have {self.bytes_kept:,} bytes, which leave no room for "
                f"{int(size):,} more (of {MOST_BYTES_KEPT:,}): end the page and start it again",
            )
        if _cookie(headers) is None:
            raise ApiError(403, "an upload needs the cookie that comes with the page")
        seconds = SECONDS_TO_SEND * max(1, int(size) / self.limits.max_body_bytes)
        ends = asyncio.get_running_loop().time() + seconds

        async def before_the_end() -> Message:
            try:
                async with asyncio.timeout_at(ends):
                    return await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}

        return before_the_end

    async def _event(
        self, scope: Message, headers: dict[bytes, bytes], receive: Receive
    ) -> Receive:
        """Return what gives an event to gradio: the known keys of it alone."""
        require_json(headers)
        try:
            async with asyncio.timeout(SECONDS_TO_SEND):
                content = await _read(receive)
        except TimeoutError:
            raise ApiError(408, f"the request did not arrive in {SECONDS_TO_SEND} s") from None
        try:
            body = BODIES[scope["path"].removeprefix(f"{API}/")].model_validate_json(content)
        except ValidationError as error:
            told = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, told["loc"]))
            raise ApiError(
                400, f"the body is no event of the page: {where}: {told['msg']}"
            ) from None
        for given in body.data if isinstance(body, Join) else ():
            for upload in given.files if given else ():
                self._require_owner(upload.path, headers)
        if isinstance(body, Join | Cancel):
            self._require_session(body.session_hash, headers)
        messages = [{"type": "http.request", "body": body.model_dump_json().encode()}]
        headers[b"content-length"] = str(len(messages[0]["body"])).encode()

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        return again

    def _secured(self, scope: Message, send: Send) -> Send:
        """Return what sends a response with the headers that keep the page to itself."""
        path, cookie = scope["path"], _cookie(dict(scope["headers"]))
        start: Message = {}
        content = b""

        async def respond(message: Message) -> None:
            nonlocal start, content
            if message["type"] == "http.response.start":
                start = message
                start["headers"] = _without_ours(message["headers"])
                if path.startswith(FILE):
                    start["headers"].append((b"cache-control", b"no-store"))
                if path not in ("/", UPLOAD):
                    await send(start)
                return
            if path not in ("/", UPLOAD):
                await send(message)
                return
            content += message.get("body", b"")
            if message.get("more_body", False):
                return
            if path == UPLOAD and start["status"] == 200:
                self._keep(json.loads(content), cookie)
            elif path == "/" and start["status"] == 200:
                start["headers"] = _of_page(start["headers"], content, cookie)
            await send(start)
            await send({"type": "http.response.body", "body": content})

        return respond

    def _keep(self, paths: list[str], cookie: str | None) -> None:
        assert cookie is not None  # _upload asks for it
        for path in paths:
            if not Path(path).resolve().is_relative_to(self.folder.resolve()):
                raise RuntimeError(f"gradio put an upload at {path}, outside of {self.folder}")
            self.bytes_kept += Path(path).stat().st_size
            self.owners[path] = cookie


def _require_same_origin(scope: Message, headers: dict[bytes, bytes]) -> None:
    """Raise ``ApiError`` if another page sends the request, also one of this machine."""
    origin = headers.get(b"origin")
    if origin is not None and origin != b"http://" + headers.get(b"host", b""):
        raise ApiError(403, f"the page was asked by another one ({origin.decode('latin-1')!r})")
    # Who follows a link to the page comes from elsewhere.
    is_link = scope["path"] == "/" and headers.get(b"sec-fetch-dest") == b"document"
    if not is_link and headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise ApiError(403, "the page was asked by another one")


def _cookie(headers: dict[bytes, bytes]) -> str | None:
    try:
        found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
    except CookieError:
        return None
    return found.value if found is not None and len(found.value) >= 32 else None


async def _read(receive: Receive) -> bytes:
    content, is_whole = b"", False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the request ended before all of it was there")
        content += message.get("body", b"")
        is_whole = not message.get("more_body", False)
        if len(content) > MOST_BYTES_OF_TEXT:
            raise ApiError(413, f"the question has over {MOST_BYTES_OF_TEXT:,} bytes: ask less")
    return content


def _without_ours(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    taken = {name for name, _ in ours}
    kept = [
        (name, value)
        for name, value in headers
        if name.lower() not in taken and not name.lower().startswith(b"access-control-")
    ]
    return [*kept, *ours]


def _of_page(
    headers: list[tuple[bytes, bytes]], content: bytes, cookie: str | None
) -> list[tuple[bytes, bytes]]:
    """The headers of the page itself, which runs the scripts that are in it now, and no others."""
    digests = [hashlib.sha256(script).digest() for script in SCRIPT.findall(content)]
    scripts = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    policy = b"content-security-policy"
    found = [(name, value) for name, value in headers if name != policy]
    found.append((policy, PAGE.format(scripts=scripts).encode()))
    if cookie is None:
        kept = f"{COOKIE}={secrets.token_urlsafe(32)}; Path=/; HttpOnly; SameSite=Lax"
        found.append((b"set-cookie", kept.encode()))
    return found


async def require_guarded(app: PageGuard) -> None:
    """Raise ``RuntimeError`` unless this gradio gives its page through the guard, which refuses a
    file that was not uploaded."""
    import gradio

    async def ask(method: str, path: str, event: Any = None) -> tuple[int, bytes]:
        sent: list[Message] = []
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
        }
        scope |= {"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
        scope |= {"query_string": b"", "root_path": "", "client": None, "server": None}
        scope["headers"] = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]

        async def receive() -> Message:
            return {"type": "http.request", "body": json.dumps(event).encode()}

        async def send(message: Message) -> None:
            sent.append(message)

        with redirect_stdout(io.StringIO()):  # to which the guard writes what it refuses
            await app(scope, receive, send)
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)

    secret = str(Path(__file__).resolve())
    given = {"text": "", "files": [{"path": secret, "meta": {"_type": "gradio.FileData"}}]}
    event = {"data": [given, None], "fn_index": 0, "session_hash": "none"}
    status, page = await ask("GET", "/")
    refused = [
        (await ask("POST", f"{API}/queue/join", event))[0],
        (await ask("POST", f"{API}/call/ask", event))[0],
        (await ask("GET", f"{FILE}{secret}"))[0],
    ]
    if status != 200 or b"<script>window.gradio_config" not in page or refused != [404] * 3:
        raise RuntimeError(
            f"gradio {gradio.__version__} does not give the page that its guard knows (its answers "
            f"were {status} and {refused}; expected 200 with gradio_config, and three of 404): "
            "install another, such as gradio==6.31.0"
        )
