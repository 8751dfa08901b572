"""Run an application with uvicorn, and close connections whose clients send or read nothing."""

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

from ...terminal_text import no_progress
from .guard import Application, Message, Receive, Send

MAX_CONNECTIONS = 256
MIN_CONNECTIONS = 16
"""With fewer, the server does not start."""
RESERVED_FILES = 32
"""Number of file descriptors that are reserved for image files, fetches and logs."""
LISTEN_BACKLOG = 2048
HEAD_TIMEOUT_S = 10  # for the head (request line and headers) of a request to arrive
READ_TIMEOUT_S = 60
"""How long a client may read nothing of its response once the socket's buffers are full."""
SHUTDOWN_TIMEOUT_S = 3
CONNECTION_KEY = "glm4v_patched.connection"
"""Key of a request's :class:`Connection`, in the state of its ASGI scope."""


class Connection(asyncio.Protocol):
    """One connection, which is aborted if its client sends or reads nothing.

    uvicorn 0.54 waits forever for the head of the first request, and for a client to read its
    response. uvicorn's ``limit_concurrency`` also counts silent connections, which can therefore
    lock out all other clients. This class gives the head :data:`HEAD_TIMEOUT_S` to arrive, and the
    client :data:`READ_TIMEOUT_S` to read. If there are more than ``max_connections`` connections,
    it aborts the oldest ones without a complete request.

    asyncio calls this protocol, which passes all calls on to uvicorn's own protocol.
    :func:`track_requests` records how much of a request has arrived.

    Args:
        connections: All connections of the server.
        options: Arguments of uvicorn's protocol.
    """

    def __init__(
        self,
        connections: set["Connection"],
        max_connections: int,
        app_state: dict[str, Any],
        **options: Any,
    ):
        self.http = H11Protocol(app_state=app_state | {CONNECTION_KEY: self}, **options)
        self.connections, self.max_connections = connections, max_connections
        self.loop = asyncio.get_running_loop()
        # When the client stopped reading its response; None while it reads.
        self.unread_since: float | None = None
        self.wait_for_request()

    def wait_for_request(self) -> None:
        """Start the time limit for the next request's head to arrive."""
        self.has_head = self.has_body = False  # whether head and body have arrived completely
        self.waiting_since = self.loop.time()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.connections.add(self)
        self.http.connection_made(transport)
        self.timer = self.loop.call_later(1, self._abort_if_silent)
        incomplete = [other for other in self.connections if not other.has_body]
        incomplete.sort(key=lambda other: other.waiting_since)
        # Aborted connections stay in the set until the event loop's next iteration. They are among
        # the oldest, so they are aborted once more, in place of others.
        for other in incomplete[: max(len(self.connections) - self.max_connections, 0)]:
            other.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        self.connections.discard(self)
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
        """Abort the connection during shutdown.

        If the client is still sending a body, abort at once, otherwise after
        :data:`SHUTDOWN_TIMEOUT_S`. That is before uvicorn's own timeout, after which uvicorn prints
        a traceback.
        """
        is_sending = self.has_head and not self.has_body
        self.loop.call_later(0 if is_sending else SHUTDOWN_TIMEOUT_S, self.transport.abort)

    def _abort_if_silent(self) -> None:
        now, unread = self.loop.time(), self.unread_since
        is_silent = not self.has_head and now - self.waiting_since >= HEAD_TIMEOUT_S
        if is_silent or (unread is not None and now - unread >= READ_TIMEOUT_S):
            self.transport.abort()
        else:
            self.timer = self.loop.call_later(1, self._abort_if_silent)


def track_requests(app: Application) -> Application:
    """Wrap an application to tell each :class:`Connection` how much of its request has arrived."""

    async def tracked_app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        connection = scope["state"].pop(CONNECTION_KEY)
        connection.has_head, connection.has_body = True, scope["method"] != "POST"

        async def tracked_receive() -> Message:
            message = await receive()
            connection.has_body = connection.has_body or not message.get("more_body", False)
            return message

        try:
            await app(scope, tracked_receive, send)
        finally:
            connection.wait_for_request()

    return tracked_app


def find_connection_limits() -> tuple[int, int]:
    """Return how many connections may be open, and how many are accepted per loop iteration.

    An aborted connection keeps its file descriptor for up to three iterations of the event loop, in
    which new connections are accepted. So a burst needs twice as many descriptors as connections.

    Raises:
        RuntimeError: The process may open too few files.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    other_files = len(os.listdir("/dev/fd")) + RESERVED_FILES
    max_connections = MAX_CONNECTIONS
    if limit != resource.RLIM_INFINITY:
        max_connections = min(max_connections, (limit - other_files) // 2)
    if max_connections < MIN_CONNECTIONS:
        raise RuntimeError(
            f"this process may open {limit} files, enough for {max(max_connections, 0)} client "
            f"connections; {MIN_CONNECTIONS} connections need "
            f"{other_files + 2 * MIN_CONNECTIONS} files: raise the limit (ulimit -n 1024)"
        )
    return max_connections, max_connections // 4


def run_server(app: Application, listener: socket.socket, on_exit: Callable[[], object]) -> None:
    """Serve until the process gets SIGINT, SIGTERM or SIGHUP.

    Args:
        listener: Bound socket.
        on_exit: Called at the signal, before the current requests are awaited.

    Raises:
        RuntimeError: The process may open too few files.
    """
    connections: set[Connection] = set()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(LISTEN_BACKLOG)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            on_exit()
            for connection in connections:
                connection.end()
            await super().shutdown(sockets)

    max_connections, accepted_at_once = find_connection_limits()
    options: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_level": "warning"}
    options["timeout_graceful_shutdown"] = 2 * SHUTDOWN_TIMEOUT_S  # longer than in Connection.end
    options["http"] = partial(Connection, connections, max_connections)
    # asyncio accepts up to `backlog` connections per loop iteration before any protocol is called.
    # It sets the kernel's backlog to the same number, which Server.startup changes to
    # LISTEN_BACKLOG.
    options |= {"backlog": accepted_at_once, "loop": "asyncio"}
    server = Server(uvicorn.Config(track_requests(app), **options))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup sets SIG_IGN
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with no_progress():  # prints no progress while it waits for requests
        server.run(sockets=[listener])
