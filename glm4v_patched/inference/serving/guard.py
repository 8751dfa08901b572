"""Refuses requests before an application sees them: who asks, the size, what may be fetched.

An ASGI middleware, of our own server and of vLLM's (``--middleware``), which has no such limits.
Needs no torch.
"""

import asyncio
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from .limits import MOST_VALUES, ApiError, ServerLimits, log
from .request_images import check_and_fetch_images

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

BODY = "glm4v_patched.body"
"""Key of the scope under which the application finds the JSON of the body."""
HOLD = "glm4v_patched.hold"
"""Key of what counts more bytes as those of a request, of what it refers to."""
OPEN_PATHS = ("/health", "/ping")
PAGE_PATH = "/"
"""Of the page of ``chat --web``, in which there is no key: it has to be shown to send one."""
SECONDS_TO_SEND = 60
READERS = 64
"""Threads: so many that hosts from which images are fetched keep no other request waiting."""
ONCE = (b"authorization", b"content-length", b"content-type", b"host", b"origin")
"""Headers of which a request has one at most: of two, other code would read the other one."""
# Of a body that is too large so much is still read: a client that is sending does not see an answer
# when the connection ends under it.
MOST_BYTES_DROPPED = 256 * 10**6


class Guard:
    """Lets a request through to ``app``, or answers it with an error of OpenAI's form.

    A page of the web may lead its own name to this machine, and send to it from the browser of
    whoever reads that page: what calls the server by other names is refused, and what is no JSON.

    Args:
        limits: By default those of the environment (vLLM makes its middleware without arguments).
    """

    def __init__(self, app: Application, limits: ServerLimits | None = None):
        self.app, self.limits = app, limits or ServerLimits.from_environment()
        self.held: dict[int, int] = {}  # bytes of each request whose body arrives or is answered
        self.arriving: dict[int, asyncio.Timeout] = {}  # the deadlines of bodies, oldest first
        self.displaced: set[int] = set()
        self.answered: set[int] = set()
        self.readers = ThreadPoolExecutor(READERS, "reader")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            if scope["type"] == "http":
                receive = await self._admit(scope, receive)
        except ApiError as error:
            await refusal(scope["path"], error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)
        finally:
            self.held.pop(id(scope), None)
            self.answered.discard(id(scope))

    async def _admit(self, scope: Message, receive: Receive) -> Receive:
        """Return what gives the request to the application, or raise ``ApiError``."""
        check_headers(scope["headers"])
        if scope["path"] in OPEN_PATHS:
            return receive
        check_hosts(dict(scope["headers"]), self.limits.hosts)
        if (scope["method"], scope["path"]) == ("GET", PAGE_PATH):
            return receive
        self._check_key_and_type(scope)
        if scope["method"] != "POST":
            return receive
        content = await self._read_in_time(receive, id(scope))
        most = self.limits.most_at_once
        # Not before: slow bodies would keep others out.
        if len(self.answered) >= most:
            raise ApiError(429, f"{most} requests wait or are answered, and no more may: try later")
        self.answered.add(id(scope))
        loop = asyncio.get_running_loop()
        parsing = loop.run_in_executor(self.readers, parse, content, self.limits)
        scope[BODY], content = await parsing
        scope[HOLD] = partial(self._hold, id(scope))
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        return again

    def _hold(self, key: int, size: int) -> None:
        """Count more bytes as those of a request, or raise ``ApiError``."""
        if sum(self.held.values()) + size > self.limits.max_held_bytes:
            raise self._full(f"{size:,} more")
        self.held[key] += size

    async def _read_in_time(self, receive: Receive, key: int) -> bytes:
        try:
            async with asyncio.timeout(SECONDS_TO_SEND) as deadline:
                self.arriving[key] = deadline
                return await self._read(receive, key)
        except TimeoutError:
            if key in self.displaced:
                raise self._full("one that arrives slowly") from None
            raise ApiError(408, f"the request did not arrive in {SECONDS_TO_SEND} s") from None
        finally:
            self.arriving.pop(key, None)
            self.displaced.discard(key)

    def _check_key_and_type(self, scope: Message) -> None:
        headers = dict(scope["headers"])
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
            require_json(headers)

    async def _read(self, receive: Receive, key: int) -> bytes:
        parts, size, most = [], 0, self.limits.max_body_bytes
        is_whole = is_full = False
        while not is_whole and size <= most + MOST_BYTES_DROPPED:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the request ended before all of it was there")
            parts.append(message.get("body", b""))
            is_whole, size = not message.get("more_body", False), size + len(parts[-1])
            self.held[key] = size
            is_full = is_full or size > most or not self._make_room(key)
            if is_full:
                parts.clear()
                self.held[key] = 0
        if size > most:
            raise ApiError(
                413,
                f"the request has {size if is_whole else f'over {size}'} bytes; this server takes "
                f"{most} (--max-body-mb): send fewer or smaller images",
                code="request_too_large",
            )
        if is_full:
            raise self._full(f"{size:,} more")
        return b"".join(parts)

    def _make_room(self, key: int) -> bool:
        """Return whether all bodies together are small enough, after those have been given up that
        have been arriving for longest: slow ones would keep others out."""
        over = sum(self.held.values()) - self.limits.max_held_bytes
        for other, deadline in self.arriving.items():
            if over > 0 and other not in (key, *self.displaced) and self.held.get(other):
                over -= self.held[other]
                self.held[other] = 0
                self.displaced.add(other)
                deadline.reschedule(asyncio.get_running_loop().time())
        return over <= 0 and key not in self.displaced

    def _full(self, more: str) -> ApiError:
        return ApiError(
            429,
            f"the requests that wait or are answered may have {self.limits.max_held_bytes:,} "
            f"bytes, which leave no room for {more}: try later",
        )


def parse(content: bytes, limits: ServerLimits) -> tuple[Any, bytes]:
    """Return the JSON of a body, and the body, with images in place of what was fetched."""
    # Before it is parsed: small values take a hundred times the memory that they have here. In
    # base64 there is no such sign.
    if (values := sum(map(content.count, b",[{"))) > MOST_VALUES:
        raise ApiError(
            413,
            f"the request has {values:,} commas and opening brackets; this server takes "
            f"{MOST_VALUES:,}: send less text",
            code="request_too_large",
        )
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; expected an object")
    return (body, json.dumps(body).encode()) if check_and_fetch_images(body, limits) else (body, content)


def check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ``ApiError`` if two readers could take a request for two different ones."""
    names = [name.lower() for name, _ in headers]
    for name in ONCE:
        if (number := names.count(name)) > 1:
            raise ApiError(400, f"the request has {number} headers {name.decode()}; expected one")
    if b"transfer-encoding" in names and b"content-length" in names:
        raise ApiError(400, "the request has transfer-encoding and content-length; expected one")


def require_json(headers: dict[bytes, bytes]) -> None:
    """Raise ``ApiError`` for other types, which a page of the web may send to any machine without
    asking."""
    kind = headers.get(b"content-type", b"").decode("latin-1")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"Content-Type is {kind!r}; expected application/json")


def check_hosts(headers: dict[bytes, bytes], hosts: Sequence[str] | None) -> None:
    """Raise ``ApiError`` if a request, or the page that sends it, is of another host."""
    if hosts is None:
        return
    host = _without_port(headers.get(b"host", b""))
    origin = _without_port(headers.get(b"origin", b"").rpartition(b"://")[2])
    told = ""
    # An address in numbers is no name that leads elsewhere; a page may come from one.
    if host not in hosts and address_of(host) is None:
        told = f"called {host!r}"
    elif b"origin" in headers and origin not in (host, *hosts):
        address = address_of(origin)
        if address is None or not address.is_loopback:
            told = f"asked by a page of {origin!r}"
    if told:
        raise ApiError(
            403,
            f"the server was {told}; expected an address of this machine in numbers, or "
            f"{' or '.join(hosts)}: other names need a server that has an --api-key",
        )


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address in numbers, or None of a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _without_port(given: bytes) -> str:
    host = given.decode("latin-1")
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).strip("[]").lower()


def refusal(path: str, error: ApiError) -> Any:
    """The response to a request that is refused, of which a line is printed."""
    from starlette.responses import JSONResponse  # which serve.py looks for

    log(path, error)
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body(), error.status, headers)
