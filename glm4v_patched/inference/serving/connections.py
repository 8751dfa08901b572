"""Runs an application by uvicorn, and keeps clients that send nothing from ending its service."""

import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

MOST_CONNECTIONS = 256
"""Far below the 1,024 files that a process may usually have open."""
SECONDS_FOR_A_HEAD = 10
SECONDS_TO_END = 3
# Of uvicorn, where no public name is for it.
PRIVATE = {"more_body", "response_complete", "connections", "cycle", "transport", "loop"}
PRIVATE |= {"connection_made", "connection_lost", "on_response_complete"}


class Connection(H11Protocol):
    """uvicorn's, with an end for a client that does not say what it wants.

    uvicorn 0.54 waits for ever for the head of a first request, and takes connections until no file
    can be opened (its ``limit_concurrency`` counts whole requests). Here, a head has
    :data:`SECONDS_FOR_A_HEAD`, and of :data:`MOST_CONNECTIONS` the oldest that has not sent a whole
    request gives way to the next.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        self.look = self.loop.call_later(SECONDS_FOR_A_HEAD, self._end_if_silent)
        if len(self.connections) > MOST_CONNECTIONS:
            ours = [each for each in self.connections if isinstance(each, Connection)]
            unheard = [each for each in ours if each.is_unheard(with_body=True)]
            min(unheard, key=lambda each: each.since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def is_unheard(self, with_body: bool = False) -> bool:
        """Whether the client has sent no head of a request, or no body, since it was answered."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or (with_body and cycle.more_body)

    def _end_if_silent(self) -> None:
        left = self.since + SECONDS_FOR_A_HEAD - self.loop.time()
        if left <= 0 and self.is_unheard():
            self.transport.abort()
        else:
            self.look = self.loop.call_later(max(left, 1), self._end_if_silent)


def run_server(
    app: Any, listener: socket.socket, on_exit: Callable[[], object], log_level: str = "warning"
) -> None:
    """Serve until the process is told to end, by SIGINT, SIGTERM or SIGHUP.

    Args:
        on_exit: Called when it is told to, before what is being answered is waited for.
        log_level: uvicorn's.
    """
    makers = (H11Protocol.__init__, RequestResponseCycle.__init__)
    there = {name for maker in makers for name in maker.__code__.co_names} | {*vars(H11Protocol)}
    if missing := sorted(PRIVATE - there):
        raise RuntimeError(
            f"uvicorn {uvicorn.__version__} has no {', '.join(missing)} (of its H11Protocol), by "
            "which connections are limited: install another, such as uvicorn==0.54.0"
        )

    class Server(uvicorn.Server):
        def handle_exit(self, number: int, frame: Any) -> None:
            on_exit()
            super().handle_exit(number, frame)

    options: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_level": log_level}
    options["timeout_graceful_shutdown"] = SECONDS_TO_END
    server = Server(uvicorn.Config(app, http=Connection, **options))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    server.run(sockets=[listener])
