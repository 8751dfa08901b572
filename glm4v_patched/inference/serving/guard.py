"""Refuses requests before an application sees them: the key, the size, what may be fetched.

An ASGI middleware, of our own server and of vLLM's (``--middleware``), which has no such limits.
Needs no torch.
"""

import asyncio
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from . import pictures
from .errors import ApiError
from .limits import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY = "glm4v_patched.body"
"""Key of the scope under which the application finds the JSON of the body."""
OPEN_PATHS = ("/health", "/ping")
SECONDS_TO_SEND = 60
# So many of the largest bodies are held, or more smaller ones: each is there in three forms.
LARGEST_AT_ONCE = 8
# Of a body that is too large so much is still read: a client that is sending does not see an answer
# when the connection ends under it.
MOST_BYTES_DROPPED = 256 * 10**6


class Guard:
    """Lets a request through to ``app``, or answers it with an error of OpenAI's form.

    Args:
        limits: By default those of the environment (vLLM makes its middleware without arguments).
    """

    def __init__(self, app: Callable[..., Awaitable[None]], limits: Limits | None = None):
        self.app = app
        self.limits = Limits.from_environment() if limits is None else limits
        self.held: dict[int, int] = {}  # bytes of each request that waits or is answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return
        key = id(scope)
        self.held[key] = 0
        try:
            self._check_head(scope)
            if scope["method"] == "POST":
                receive = await self._read_body(scope, receive, key)
        except ApiError as error:
            await _answer(send, error)
        else:
            await self.app(scope, receive, send)
        finally:
            del self.held[key]

    def _check_head(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        hosts, key, most = self.limits.hosts, self.limits.api_key, self.limits.most_at_once
        host = headers.get(b"host", b"").decode("latin-1")
        if hosts is not None and not _is_called_by(_without_port(host), hosts):
            raise ApiError(
                403,
                f"the server was called {host!r}; expected an address in numbers, or "
                f"{' or '.join(hosts)}: other names need a server that has an --api-key",
            )
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_right = secrets.compare_digest(given.strip(), (key or "").encode())
        if key is not None and not (is_right and scheme.lower() == b"bearer"):
            raise ApiError(
                401,
                "the API key is missing or wrong: send the server's own as Authorization: Bearer "
                "KEY",
                code="invalid_api_key",
            )
        if most is not None and len(self.held) > most:
            raise ApiError(429, f"{most} requests wait or are answered, and no more may: try later")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").decode("latin-1")
            # A page of the web may send other types without asking, to any machine.
            if kind.partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, f"Content-Type is {kind!r}; expected application/json")

    async def _read_body(self, scope: Scope, receive: Receive, key: int) -> Receive:
        """Read the body, and return what gives it to the application."""
        try:
            async with asyncio.timeout(SECONDS_TO_SEND):
                content = await self._content(receive, key)
        except TimeoutError:
            raise ApiError(408, f"the request did not arrive in {SECONDS_TO_SEND} s") from None
        try:
            body = await asyncio.to_thread(json.loads, content)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None
        if self.limits.reads_pictures:
            await asyncio.to_thread(pictures.check_all, body, self.limits)
        scope[BODY] = body
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def again() -> MutableMapping[str, Any]:
            return messages.pop() if messages else await receive()

        return again

    async def _content(self, receive: Receive, key: int) -> bytes:
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


def _is_called_by(host: str, hosts: tuple[str, ...]) -> bool:
    """Whether it is one of these, or an address in numbers: no name that leads elsewhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in hosts
    return True


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).strip("[]").lower()


async def _answer(send: Send, error: ApiError) -> None:
    content = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
