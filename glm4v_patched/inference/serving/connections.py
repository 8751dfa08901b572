"""Runs an application by uvicorn, and keeps clients that send nothing from ending its service."""

import os
import resource
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

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
# Of uvicorn, where no public name is for it: connections, and cycle with more_body and
# response_complete, say who has not sent a request; transport and loop end it; the others are
# overridden.
PRIVATE = {"more_body", "response_complete", "connections", "cycle", "transport", "loop"}
PRIVATE |= {"connection_made", "connection_lost", "on_response_complete", "shutdown"}


class Connection(H11Protocol):
    """End connections whose client sends or reads nothing, and bound their number.

    uvicorn 0.54 waits for ever for the head of a first request and for a client to read its
    response. Its ``limit_concurrency`` refuses new requests while silent connections keep the
    number, so it lets them lock everybody out. Here a head has :data:`SECONDS_FOR_A_HEAD`, and of
    more than ``most`` connections the oldest that have not sent a whole request are aborted.
    """

    def __init__(self, *arguments: Any, most: int, **options: Any):
        super().__init__(*arguments, **options)
        self.most = most
        self.unread_since: float | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        self.watch = self.loop.call_later(1, self._end_if_silent)
        # What is closing stays among the connections until the loop's next round.
        others = (each for each in self.connections if isinstance(each, Connection))
        alive = [each for each in others if not each.transport.is_closing()]
        unheard = [each for each in alive if each.is_unheard(with_body=True)]
        unheard.sort(key=lambda each: each.since)
        for each in unheard[: max(len(alive) - self.most, 0)]:
            each.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.watch.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        """End when the server does: at once, if the client is still sending a body. Who is left
        after a while is aborted, since uvicorn would cancel the application with a traceback."""
        super().shutdown()
        is_sending = not self.is_unheard() and self.cycle.more_body
        self.loop.call_later(0 if is_sending else SECONDS_TO_END, self.transport.abort)

    def pause_writing(self) -> None:
        self.unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unread_since = None
        super().resume_writing()

    def is_unheard(self, with_body: bool = False) -> bool:
        """Return whether the client has sent no head of a request, or no body, since its last
        response."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or (with_body and cycle.more_body)

    def _end_if_silent(self) -> None:
        now, unread = self.loop.time(), self.unread_since
        is_silent = self.is_unheard() and now - self.since >= SECONDS_FOR_A_HEAD
        if is_silent or (unread is not None and now - unread >= SECONDS_TO_READ):
            self.transport.abort()
        else:
            self.watch = self.loop.call_later(1, self._end_if_silent)


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


def run_server(
    app: Any, listener: socket.socket, on_exit: Callable[[], object], log_level: str = "warning"
) -> None:
    """Serve until the process is told to end, by SIGINT, SIGTERM or SIGHUP.

    Args:
        on_exit: Called when it is told to, before what is being answered is waited for.
        log_level: uvicorn's.

    Raises:
        RuntimeError: uvicorn has other private names, or too few files may be opened.
    """
    makers = (H11Protocol.__init__, RequestResponseCycle.__init__)
    there = {name for maker in makers for name in maker.__code__.co_names} | {*vars(H11Protocol)}
    if missing := sorted(PRIVATE - there):
        raise RuntimeError(
            f"uvicorn {uvicorn.__version__} has no {', '.join(missing)} (of its H11Protocol), by "
            "which connections are limited: install another, such as uvicorn==0.54.0"
        )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(CONNECTIONS_THAT_WAIT)

        def handle_exit(self, number: int, frame: Any) -> None:
            on_exit()
            super().handle_exit(number, frame)

    most, at_once = most_connections()
    options: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_level": log_level}
    options["timeout_graceful_shutdown"] = 2 * SECONDS_TO_END  # Connection's is over before
    options["http"] = partial(Connection, most=most)
    # asyncio accepts so many in a round of its loop, before it tells a protocol of any; how many
    # wait in the kernel is set again afterwards.
    options |= {"backlog": at_once, "loop": "asyncio"}
    server = Server(uvicorn.Config(app, **options))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    server.run(sockets=[listener])
