"""Runs an application by uvicorn, and keeps clients that send nothing from ending its service."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .guard import Application, Message, Receive, Send

MOST_CONNECTIONS = 256
LEAST_CONNECTIONS = 16
"""Fewer are an error before the server starts."""
OTHER_FILES = 32
"""Descriptors left for what is not a connection of a client: image files, fetches, logs."""
CONNECTIONS_THAT_WAIT = 2048
SECONDS_FOR_A_HEAD = 10
SECONDS_TO_READ = 60
"""How long a client may read nothing of its response, once the socket's buffers are full."""
SECONDS_TO_END = 3
KEY = "glm4v_patched.connection"
"""Of the state of a request's scope: the connection that it came by."""


class Connection(asyncio.Protocol):
    """End connections whose client sends or reads nothing, and bound their number.

    uvicorn 0.54 waits for ever for the head of a first request and for a client to read its
    response. Its ``limit_concurrency`` refuses new requests while silent connections keep the
    number, so it lets them lock everybody out. Here a head has :data:`SECONDS_FOR_A_HEAD`, and of
    more than ``most`` connections the oldest that have not sent a whole request are aborted.
    uvicorn's own protocol gets all that asyncio says; :func:`note_requests` says what came of it.

    Args:
        others: All connections of the server.
        options: Those by which uvicorn makes a protocol.
    """

    def __init__(
        self, others: set["Connection"], most: int, app_state: dict[str, Any], **options: Any
    ):
        self.http = H11Protocol(app_state=app_state | {KEY: self}, **options)
        self.others, self.most = others, most
        self.loop = asyncio.get_running_loop()
        self.unread_since: float | None = None
        self.wait_for_request()

    def wait_for_request(self) -> None:
        self.has_head = self.has_body = False
        self.since = self.loop.time()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.others.add(self)
        self.http.connection_made(transport)
        self.watch = self.loop.call_later(1, self._end_if_silent)
        unheard = [each for each in self.others if not each.has_body]
        unheard.sort(key=lambda each: each.since)
        # Those that are closing are here until the loop's next round: they are among the oldest.
        for each in unheard[: max(len(self.others) - self.most, 0)]:
            each.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.watch.cancel()
        self.others.discard(self)
        self.http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.http.data_received(data)

    def eof_received(self) -> None:
        self.http.eof_received()

    def pause_writing(self) -> None:
        self.unread_since = self.loop.time()
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self.unread_since = None
        self.http.resume_writing()

    def end(self) -> None:
        """End when the server does: at once, if the client is still sending a body. Who is left
        after a while is aborted, since uvicorn would cancel the application with a traceback."""
        is_sending = self.has_head and not self.has_body
        self.loop.call_later(0 if is_sending else SECONDS_TO_END, self.transport.abort)

    def _end_if_silent(self) -> None:
        now, unread = self.loop.time(), self.unread_since
        is_silent = not self.has_head and now - self.since >= SECONDS_FOR_A_HEAD
        if is_silent or (unread is not None and now - unread >= SECONDS_TO_READ):
            self.transport.abort()
        else:
            self.watch = self.loop.call_later(1, self._end_if_silent)


def note_requests(app: Application) -> Application:
    """Return an application that tells each :class:`Connection` how much of a request it has."""

    async def noting(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        connection = scope["state"].pop(KEY)
        connection.has_head, connection.has_body = True, scope["method"] != "POST"

        async def receive_noting() -> Message:
            message = await receive()
            connection.has_body = connection.has_body or not message.get("more_body", False)
            return message

        try:
            await app(scope, receive_noting, send)
        finally:
            connection.wait_for_request()

    return noting


def most_connections() -> tuple[int, int]:
    """Return how many connections may be open, and how many are accepted in a round of the loop.

    An aborted connection keeps its descriptor for up to three rounds, in each of which others are
    accepted: twice the number of connections are descriptors in a burst.

    Raises:
        RuntimeError: the process may open too few files.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/dev/fd")) + OTHER_FILES
    most = MOST_CONNECTIONS
    if limit != resource.RLIM_INFINITY:
        most = min(most, (limit - taken) // 2)
    if most < LEAST_CONNECTIONS:
        raise RuntimeError(
            f"this process may open {limit} files, which leaves {max(most, 0)} connections for "
            f"clients; expected {LEAST_CONNECTIONS}, of {taken + 2 * LEAST_CONNECTIONS} files: "
            "raise it (ulimit -n 1024)"
        )
    return most, most // 4


def run_server(app: Application, listener: socket.socket, on_exit: Callable[[], object]) -> None:
    """Serve until the process is told to end, by SIGINT, SIGTERM or SIGHUP.

    Args:
        on_exit: Called when it is told to, before what is being answered is waited for.

    Raises:
        RuntimeError: too few files may be opened.
    """
    connections: set[Connection] = set()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(CONNECTIONS_THAT_WAIT)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            on_exit()
            for connection in connections:
                connection.end()
            await super().shutdown(sockets)

    most, at_once = most_connections()
    options: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_level": "warning"}
    options["timeout_graceful_shutdown"] = 2 * SECONDS_TO_END  # Connection's is over before
    options["http"] = partial(Connection, connections, most)
    # asyncio accepts so many in a round of its loop, before it tells a protocol of any; how many
    # wait in the kernel is set again afterwards.
    options |= {"backlog": at_once, "loop": "asyncio"}
    server = Server(uvicorn.Config(note_requests(app), **options))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    server.run(sockets=[listener])
