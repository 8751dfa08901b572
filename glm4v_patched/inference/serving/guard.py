"""ASGI middleware that checks requests: host, API key, size, number and size of images, URLs.

Our own server uses this middleware. vLLM's server has no such limits, and loads it by the option
``--middleware``. Needs no torch.
"""

import asyncio
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from .limits import MAX_JSON_VALUES, ApiError, ServerLimits, log
from .request_images import check_and_fetch_images

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

BODY_KEY = "glm4v_patched.body"
"""Key of the ASGI scope for the parsed JSON of the body."""
COUNT_BYTES_KEY = "glm4v_patched.count_bytes"
"""Key of the ASGI scope for a function that adds bytes to a request's size, such as the bytes of a
stored response that the request refers to."""
OPEN_PATHS = ("/health", "/ping")  # need neither a known host nor an API key
PAGE_PATH = "/"
"""Path of ``chat --web``'s page. It needs no API key, because only the loaded page can send one."""
BODY_TIMEOUT_S = 60
READER_THREADS = 64
"""Threads that parse bodies and fetch images. There are many, so that a slow image host does not
delay other requests."""
SINGLE_HEADERS = (b"authorization", b"content-length", b"content-type", b"host", b"origin")
"""Headers that may occur only once. If there were two, a proxy could read the first, and this
server the second."""
# How many bytes of a body beyond its limit are read and discarded. If the connection were closed
# while the client sends, the client would not see the response.
MAX_DISCARDED_BYTES = 256 * 10**6


class Guard:
    """Middleware that passes a request on to ``app``, or answers with an error in OpenAI's format.

    Requests for other host names and POST requests without JSON are refused: a web page in a user's
    browser could send such requests to this machine (DNS rebinding, cross-site forms).

    Args:
        limits: None reads them from the environment, because vLLM passes its middleware no
            arguments.
    """

    def __init__(self, app: Application, limits: ServerLimits | None = None):
        self.app, self.limits = app, limits or ServerLimits.from_environment()
        # The keys or elements of each of these are ``id(scope)`` of requests.
        self.buffered: dict[int, int] = {}  # bytes in memory, until the request is answered
        self.deadlines: dict[int, asyncio.Timeout] = {}  # timeouts of arriving bodies, oldest first
        self.evicted: set[int] = set()  # arriving bodies that were dropped to free memory
        self.admitted: set[int] = set()  # requests that wait or are being answered
        self.readers = ThreadPoolExecutor(READER_THREADS, "reader")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            if scope["type"] == "http":
                receive = await self._admit(scope, receive)
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)
        finally:
            self.buffered.pop(id(scope), None)
            self.admitted.discard(id(scope))

    async def _admit(self, scope: Message, receive: Receive) -> Receive:
        """Return the ASGI receive function for the application, or raise ``ApiError``."""
        check_headers(scope["headers"])
        if scope["path"] in OPEN_PATHS:
            return receive
        check_hosts(dict(scope["headers"]), self.limits.hosts)
        if (scope["method"], scope["path"]) == ("GET", PAGE_PATH):
            return receive
        self._check_key_and_type(scope)
        if scope["method"] != "POST":
            return receive
        content = await self._read_with_timeout(receive, id(scope))
        max_requests = self.limits.max_requests
        # Counted only after the body has arrived: slow clients must not lock out others.
        if len(self.admitted) >= max_requests:
            raise ApiError(429, f"the server is busy with {max_requests} requests: try again later")
        self.admitted.add(id(scope))
        loop = asyncio.get_running_loop()
        parsing = loop.run_in_executor(self.readers, parse_body, content, self.limits)
        scope[BODY_KEY], content = await parsing
        scope[COUNT_BYTES_KEY] = partial(self._count_bytes, id(scope))
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        return receive_again

    def _count_bytes(self, scope_id: int, size: int) -> None:
        """Add bytes to a request's size.

        Raises:
            ApiError: All requests together would exceed the limit.
        """
        if sum(self.buffered.values()) + size > self.limits.max_buffered_bytes:
            raise self._out_of_memory(f"{size:,} more bytes")
        self.buffered[scope_id] += size

    async def _read_with_timeout(self, receive: Receive, scope_id: int) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as deadline:
                self.deadlines[scope_id] = deadline
                return await self._read(receive, scope_id)
        except TimeoutError:
            if scope_id in self.evicted:
                raise self._out_of_memory("this request, which arrives slowly") from None
            raise ApiError(408, f"the request did not arrive within {BODY_TIMEOUT_S} s") from None
        finally:
            self.deadlines.pop(scope_id, None)
            self.evicted.discard(scope_id)

    def _check_key_and_type(self, scope: Message) -> None:
        headers = dict(scope["headers"])
        key = self.limits.api_key
        scheme, _, sent_key = headers.get(b"authorization", b"").partition(b" ")
        is_correct = secrets.compare_digest(sent_key.strip(), (key or "").encode())
        if key is not None and not (is_correct and scheme.lower() == b"bearer"):
            raise ApiError(
                401,
                "the API key is missing or wrong: send this server's key in the header "
                "Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        if scope["method"] == "POST":
            require_json(headers)

    async def _read(self, receive: Receive, scope_id: int) -> bytes:
        chunks, size, max_bytes = [], 0, self.limits.max_body_bytes
        is_complete = is_refused = False
        while not is_complete and size <= max_bytes + MAX_DISCARDED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client disconnected before the request was complete")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            is_complete = not message.get("more_body", False)
            self.buffered[scope_id] = size
            is_refused = is_refused or size > max_bytes or not self._evict_slow_bodies(scope_id)
            if is_refused:
                chunks.clear()
                self.buffered[scope_id] = 0
        if size > max_bytes:
            raise ApiError(
                413,
                f"the request has {size if is_complete else f'over {size}'} bytes, and this server "
                f"accepts {max_bytes} (--max-body-mb): send fewer or smaller images",
                code="request_too_large",
            )
        if is_refused:
            raise self._out_of_memory(f"{size:,} more bytes")
        return b"".join(chunks)

    def _evict_slow_bodies(self, scope_id: int) -> bool:
        """Drop other arriving bodies, oldest first, until the rest fits into memory.

        Without this, clients that send slowly could lock out others.

        Returns:
            Whether this request's body fits.
        """
        excess = sum(self.buffered.values()) - self.limits.max_buffered_bytes
        for other, deadline in self.deadlines.items():
            if excess > 0 and other not in (scope_id, *self.evicted) and self.buffered.get(other):
                excess -= self.buffered[other]
                self.buffered[other] = 0
                self.evicted.add(other)
                deadline.reschedule(asyncio.get_running_loop().time())  # ends the other's read
        return excess <= 0 and scope_id not in self.evicted

    def _out_of_memory(self, refused: str) -> ApiError:
        return ApiError(
            429,
            f"the server is busy: with {refused}, all requests together would have more than "
            f"{self.limits.max_buffered_bytes:,} bytes: try again later",
        )


def parse_body(content: bytes, limits: ServerLimits) -> tuple[Any, bytes]:
    """Return the parsed JSON of a body, and the body's bytes.

    In both, URLs of images are replaced by the fetched images.
    """
    # Values are counted before parsing, because a small value takes a hundred times the memory of
    # its text once it is parsed. Base64 images contain none of the counted characters.
    if (num_values := sum(map(content.count, b",[{"))) > MAX_JSON_VALUES:
        raise ApiError(
            413,
            f"the request has {num_values:,} commas and opening brackets, and this server accepts "
            f"{MAX_JSON_VALUES:,}: send less text",
            code="request_too_large",
        )
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}; expected an object")
    has_changed = check_and_fetch_images(body, limits)
    return body, json.dumps(body).encode() if has_changed else content


def check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ``ApiError`` if a proxy and this server could read the headers differently."""
    names = [name.lower() for name, _ in headers]
    for name in SINGLE_HEADERS:
        if (count := names.count(name)) > 1:
            raise ApiError(400, f"the request has {count} headers {name.decode()}; expected one")
    if b"transfer-encoding" in names and b"content-length" in names:
        raise ApiError(400, "the request has transfer-encoding and content-length; expected one")


def require_json(headers: dict[bytes, bytes]) -> None:
    """Raise ``ApiError`` unless the content type is JSON.

    Other types are refused, because a web page may send some of them to any server without a CORS
    preflight request.
    """
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"the Content-Type is {content_type!r}; expected application/json")


def check_hosts(headers: dict[bytes, bytes], hosts: Sequence[str] | None) -> None:
    """Raise ``ApiError`` if the request's Host or Origin header names another host."""
    if hosts is None:
        return
    host = _without_port(headers.get(b"host", b""))
    origin = _without_port(headers.get(b"origin", b"").rpartition(b"://")[2])
    problem = ""
    # Numeric addresses are allowed, because DNS rebinding needs a name.
    if host not in hosts and parse_address(host) is None:
        problem = f"the request is for the host {host!r}"
    elif b"origin" in headers and origin not in (host, *hosts):
        address = parse_address(origin)
        if address is None or not address.is_loopback:
            problem = f"the request comes from a web page of {origin!r}"
    if problem:
        raise ApiError(
            403,
            f"{problem}; expected a numeric address of this machine, or {' or '.join(hosts)}. To "
            "use other names, start the server with --api-key",
        )


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a numeric address, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _without_port(header: bytes) -> str:
    host = header.decode("latin-1")
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).strip("[]").lower()


def error_response(path: str, error: ApiError) -> Any:
    """Return the response for a refused request, and print a line about it."""
    from starlette.responses import JSONResponse  # serve.py checks first that it is installed

    log(path, error)
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body(), error.status, headers)
