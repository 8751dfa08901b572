"""Fetches images by http(s) from the public internet: for rows of data and for clients of a server.

Whoever writes an address could else have this machine ask its own services, a router or a cloud's
metadata. So a name is looked up once, all of its addresses must be public, and one of those is
connected to, without a proxy; the same for each redirect.
"""

import http.client
import socket
import threading
import time
from contextlib import closing, suppress
from typing import Any
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies

from .messages import describe_value
from .public_addresses import is_public

SECONDS_TO_ANSWER = 60
"""Of each step: connecting, and each piece that arrives."""
SECONDS_TO_ARRIVE = 600
MOST_BYTES_FETCHED = 256 * 2**20
MOST_REDIRECTS = 10
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = (80, 443, 8080, 8443)
CURE = "download the image and give its file"


def fetch(url: str, most: int = MOST_BYTES_FETCHED, seconds: float = SECONDS_TO_ARRIVE) -> bytes:
    """Return what an URL of http(s) leads to.

    Args:
        seconds: For all of it: redirects, headers and content.

    Raises:
        ValueError: it cannot be fetched, is not public, or has more than ``most`` bytes.
    """
    end, place = time.monotonic() + seconds, url
    try:
        for _ in range(MOST_REDIRECTS + 1):
            content, leads_to = _ask(place, most, end)
            if leads_to is None:
                return content
            place = urljoin(place, leads_to)
        raise ValueError(f"it leads on more than {MOST_REDIRECTS} times")
    except (OSError, http.client.HTTPException, ValueError) as error:
        told = str(error) or type(error).__name__
        if time.monotonic() >= end:
            told = f"it took over {seconds:g} s"
        elif isinstance(error, OSError) and getproxies():
            told += f"; no proxy is used, which could lead inside: {CURE}"
        led = "" if place == url else f" (it leads to {describe_value(place)})"
        raise ValueError(f"the image {describe_value(url)} cannot be fetched{led}: {told}") from None


def _ask(url: str, most: int, end: float) -> tuple[bytes, str | None]:
    """Return what an URL answers, or where it leads to."""
    if any(sign <= " " or sign == "\x7f" for sign in url):
        raise ValueError("expected an URL without spaces and control characters (write %20)")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected http or https, and the name of a host")
    if "@" in parts.netloc:
        raise ValueError(f"it has a user's name or password, which nothing is sent to: {CURE}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if port not in PORTS:
        expected = ", ".join(map(str, PORTS))
        raise ValueError(f"its port is {port}; expected one of {expected}: {CURE}")
    kind = _Https if parts.scheme == "https" else _Http
    # Some hosts refuse Python's own name.
    headers = {"User-Agent": "glm4v-patched", "Connection": "close"}
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    target += f"?{quote(parts.query, safe='/%:@!$&()*+,;=~?[]')}" if parts.query else ""
    left = max(end - time.monotonic(), 0)
    timeout = min(left, SECONDS_TO_ANSWER) or 1e-3  # 0 is to wait for nothing
    with closing(kind(parts.hostname, port, timeout=timeout)) as connection:
        watch = threading.Timer(left, connection.cut_off)
        watch.daemon = True
        watch.start()
        try:
            connection.request("GET", target, headers=headers)
            with connection.getresponse() as answer:
                return _read(answer, most)
        finally:
            watch.cancel()
            if connection.handle is not None:
                connection.handle.close()
            if time.monotonic() >= end:
                raise TimeoutError


def _read(answer: http.client.HTTPResponse, most: int) -> tuple[bytes, str | None]:
    if answer.status in REDIRECTS and (leads_to := answer.getheader("Location")):
        return b"", leads_to
    if answer.status != 200:
        raise ValueError(f"HTTP {answer.status} {describe_value(answer.reason)}")
    content = bytearray()
    while len(content) <= most and (part := answer.read1(2**16)):
        content += part
    if len(content) > most or (answer.length or 0) > most:
        raise ValueError(f"it has over {most:,} bytes")
    if answer.length:  # of what was announced; read1() says nothing of it
        raise ValueError(
            f"the connection ended after {len(content):,} of {len(content) + answer.length:,} "
            "bytes; start again"
        )
    return bytes(content), None


class _Http(http.client.HTTPConnection):
    """Connects to a public address of its host alone."""

    handle: socket.socket | None = None
    is_over = False

    def connect(self) -> None:
        addresses = public_addresses(self.host, self.port)
        for number, address in enumerate(addresses, start=1):
            try:
                self.sock = socket.create_connection(address, self.timeout)
                break
            except OSError:
                if number == len(addresses) or self.is_over:
                    raise
        # Another descriptor of the same connection, which neither TLS nor http.client closes.
        self.handle = self.sock.dup()
        if self.is_over:
            self.cut_off()

    def cut_off(self) -> None:
        """End the connection from another thread, whatever it waits for."""
        self.is_over = True
        if self.handle is not None:
            with suppress(OSError):
                self.handle.shutdown(socket.SHUT_RDWR)


class _Https(http.client.HTTPSConnection, _Http):
    pass  # TLS begins when _Http has connected


def public_addresses(host: str, port: int) -> list[Any]:
    """Look a name up; raises ``ValueError`` if one of its addresses is not public."""
    addresses = [found[4][:2] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address, _ in addresses:
        if not is_public(str(address)):
            raise ValueError(
                f"{host} is {address}, which is no address of the public internet: {CURE}"
            )
    return addresses
