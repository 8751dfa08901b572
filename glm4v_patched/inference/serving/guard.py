"""Refuses requests before an application sees them: who asks, the size, what may be fetched.

An ASGI middleware, of our own server and of vLLM's (``--middleware``), which has no such limits.
Needs no torch.
"""

import asyncio
import ipaddress
import json
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .errors import ApiError, log
from .limits import MOST_BYTES_OF_TEXT, Limits
from .pictures import secure, too_much_text

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY = "glm4v_patched.body"
"""Key of the scope under which the application finds the JSON of the body."""
OPEN_PATHS = ("/health", "/ping")
SECONDS_TO_SEND = 60
# So many of the largest bodies are held, or more smaller ones: each is there in three forms.
LARGEST_AT_ONCE = 8
# Of a body that is too large so much is still read: a client that is sending does not see an answer
# when the connection ends under it.
MOST_BYTES_DROPPED = 256 * 10**6
# A text of JSON, before it is parsed. What it has matched is not tried in another way (*+).
DATA_URL = re.compile(rb'"data:[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class HostGuard:
    """Lets a request through to ``app`` if it calls the server by one of its names.

    A page of the web may lead its own name to this machine, and send to it from the browser of
    whoever reads that page.
    """

    def __init__(self, app: Application, hosts: tuple[str, ...] | None):
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            if scope["type"] == "http":
                check_hosts(dict(scope["headers"]), self.hosts)
        except ApiError as error:
            await refuse(scope, send, error)
        else:
            await self.app(scope, receive, send)


class Guard:
    """Lets a request through to ``app``, or answers it with an error of OpenAI's form.

    Args:
        limits: By default those of the environment (vLLM makes its middleware without arguments).
    """

    def __init__(self, app: Application, limits: Limits | None = None):
        self.app = app
        self.limits = Limits.from_environment() if limits is None else limits
        self.held: dict[int, int] = {}  # bytes of each request whose body arrives or is answered
        self.answered = 0
        # So many that hosts from which pictures are fetched keep no other request waiting.
        self.readers = ThreadPoolExecutor(self.limits.most_at_once or 64, "reader")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        key, is_answered = id(scope), False
        try:
            self._check_head(scope)
            if scope["method"] == "POST":
                content = await self._content(receive, key)
                # Not before: slow bodies would keep others out.
                self._check_number()
                self.answered, is_answered = self.answered + 1, True
                receive = await self._checked(scope, content, receive)
        except ApiError as error:
            await refuse(scope, send, error)
        else:
            await self.app(scope, receive, send)
        finally:
            self.held.pop(key, None)
            self.answered -= is_answered

    def _check_head(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        check_hosts(headers, self.limits.hosts)
        key = self.limits.api_key
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_right = secrets.compare_digest(given.strip(), (key or "").encode())
        if key is not None and not (is_right and scheme.lower() == b"bearer"):
            raise ApiError(
                401,
                "the API key is missing or wrong: send the server's own as Authorization: Bearer "
                "KEY",
                code="invalid_api_key",
            )
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").decode("latin-1")
            # A page of the web may send other types without asking, to any machine.
            if kind.partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, f"Content-Type is {kind!r}; expected application/json")

    def _check_number(self) -> None:
        most = self.limits.most_at_once
        if most is not None and self.answered >= most:
            raise ApiError(429, f"{most} requests wait or are answered, and no more may: try later")

    async def _content(self, receive: Receive, key: int) -> bytes:
        try:
            async with asyncio.timeout(SECONDS_TO_SEND):
                return await self._read(receive, key)
        except TimeoutError:
            raise ApiError(408, f"the request did not arrive in {SECONDS_TO_SEND} s") from None

    async def _checked(self, scope: Scope, content: bytes, receive: Receive) -> Receive:
        """Check the body, and return what gives it to the application."""
        loop = asyncio.get_running_loop()
        parsing = loop.run_in_executor(self.readers, parse, content, self.limits)
        scope[BODY], content = await parsing
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def again() -> MutableMapping[str, Any]:
            return messages.pop() if messages else await receive()

        return again

    async def _read(self, receive: Receive, key: int) -> bytes:
        parts, size, most = [], 0, self.limits.max_body_bytes
        is_whole = is_full = False
        while not is_whole and size <= most + MOST_BYTES_DROPPED:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the request ended before all of it was there")
            part = message.get("body", b"")
            is_whole, size = not message.get("more_body", False), size + len(part)
            parts.append(part)
            self.held[key] = size
            is_full = is_full or self._is_full()
            if size > most or is_full:
                parts.clear()
                self.held[key] = 0
        if size > most:
            raise ApiError(
                413,
                f"the request has {size if is_whole else f'over {size}'} bytes; this server takes "
                f"{most} (--max-body-mb): send fewer or smaller pictures",
                code="request_too_large",
            )
        if is_full:
            raise ApiError(
                429,
                f"the requests that wait or are answered have {sum(self.held.values()):,} bytes, "
                f"which leave no room for {size:,} more of {self._most_held():,}: try later",
            )
        return b"".join(parts)

    def _is_full(self) -> bool:
        return self.limits.most_at_once is not None and (
            sum(self.held.values()) > self._most_held()
        )

    def _most_held(self) -> int:
        return LARGEST_AT_ONCE * self.limits.max_body_bytes


def parse(content: bytes, limits: Limits) -> tuple[Any, bytes]:
    """The JSON of a body, and the body, with pictures in place of what was fetched.

    Raises:
        ApiError: it is none, too large, or :func:`pictures.secure` refuses it.
    """
    rest = len(content) - sum(len(found[0]) for found in DATA_URL.finditer(content))
    # Before it is parsed: small values take a hundred times the memory that they have here.
    if rest > MOST_BYTES_OF_TEXT:
        raise too_much_text(rest)
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; expected an object")
    return (body, json.dumps(body).encode()) if secure(body, limits) else (body, content)


def check_hosts(headers: dict[bytes, bytes], hosts: tuple[str, ...] | None) -> None:
    """Raise ``ApiError`` if a request, or the page that sends it, is of another host."""
    if hosts is None:
        return
    host = _without_port(headers.get(b"host", b""))
    # An address in numbers is no name that leads elsewhere; a page may come from one.
    if host not in hosts and _address(host) is None:
        raise _of_another_host("called", host, hosts)
    if b"origin" in headers:
        origin = _without_port(headers[b"origin"].rpartition(b"://")[2])
        address = _address(origin)
        if origin not in (host, *hosts) and not (address and address.is_loopback):
            raise _of_another_host("asked by a page of", origin, hosts)


def _of_another_host(what: str, host: str, hosts: tuple[str, ...]) -> ApiError:
    return ApiError(
        403,
        f"the server was {what} {host!r}; expected an address of this machine in numbers, or "
        f"{' or '.join(hosts)}: other names need a server that has an --api-key",
    )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _without_port(given: bytes) -> str:
    host = given.decode("latin-1")
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).strip("[]").lower()


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer a request with an error, of which a line is printed."""
    log(scope["path"], error)
    content = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
