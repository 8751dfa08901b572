"""Download images over http(s) from the public internet. Their URLs come from rows of data, or from
clients of the server.

A host name is resolved once. All of its addresses must be public, and the connection goes to one of
them, without a proxy. Each redirect follows the same rules. Without these rules, the author of a
URL could make this machine send requests to its own services, to a router or to the metadata
service of a cloud (SSRF).
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

RESPONSE_TIMEOUT = 60
"""Limit in seconds for connecting, and for each read of the response."""
DOWNLOAD_TIMEOUT = 600
"""Limit in seconds for a complete download."""
MAX_DOWNLOAD_BYTES = 256 * 2**20
MAX_REDIRECTS = 10
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
ALLOWED_PORTS = (80, 443, 8080, 8443)
DOWNLOAD_CURE = "download the image yourself and use the path of the file"


def fetch(
    url: str, max_bytes: int = MAX_DOWNLOAD_BYTES, seconds: float = DOWNLOAD_TIMEOUT
) -> bytes:
    """Return the content of an http(s) URL.

    Args:
        max_bytes: Limit for the content.
        seconds: Time limit for all redirects, headers and the content together.

    Raises:
        ValueError: The URL cannot be downloaded or is not public, or its content is too large.
    """
    deadline, current_url = time.monotonic() + seconds, url
    try:
        for _ in range(MAX_REDIRECTS + 1):
            content, redirect = _get(current_url, max_bytes, deadline)
            if redirect is None:
                return content
            current_url = urljoin(current_url, redirect)
        raise ValueError(f"it redirects more than {MAX_REDIRECTS} times")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = str(error) or type(error).__name__
        if time.monotonic() >= deadline:
            reason = f"it took over {seconds:g} s"
        elif isinstance(error, OSError) and getproxies():
            reason += (
                "; the configured proxy is not used, because it may reach private hosts: "
                f"{DOWNLOAD_CURE}"
            )
        target = "" if current_url == url else f" (it redirects to {describe_value(current_url)})"
        raise ValueError(
            f"the image {describe_value(url)} cannot be fetched{target}: {reason}"
        ) from None


def _get(url: str, max_bytes: int, deadline: float) -> tuple[bytes, str | None]:
    """Return the content of a URL and None, or nothing and the URL that it redirects to."""
    if any(character <= " " or character == "\x7f" for character in url):
        raise ValueError("expected a URL without spaces and control characters (write %20)")
    url_parts = urlsplit(url)
    if url_parts.scheme not in ("http", "https") or not url_parts.hostname:
        raise ValueError("expected http:// or https:// and a host name")
    if "@" in url_parts.netloc:
        raise ValueError(f"it contains a user name or password, which is not sent: {DOWNLOAD_CURE}")
    port = url_parts.port or (443 if url_parts.scheme == "https" else 80)
    if port not in ALLOWED_PORTS:
        expected = ", ".join(map(str, ALLOWED_PORTS))
        raise ValueError(f"its port is {port}; expected one of {expected}: {DOWNLOAD_CURE}")
    connection_class = _Https if url_parts.scheme == "https" else _Http
    # Some hosts refuse Python's default user agent.
    headers = {"User-Agent": "glm4v-patched", "Connection": "close"}
    target = quote(url_parts.path or "/", safe="/%:@!$&'()*+,;=~")
    target += f"?{quote(url_parts.query, safe='/%:@!$&()*+,;=~?[]')}" if url_parts.query else ""
    remaining = max(deadline - time.monotonic(), 0)
    timeout = min(remaining, RESPONSE_TIMEOUT) or 1e-3  # 0 would make the socket non-blocking
    with closing(connection_class(url_parts.hostname, port, timeout=timeout)) as connection:
        timer = threading.Timer(remaining, connection.cut_off)
        timer.daemon = True
        timer.start()
        try:
            connection.request("GET", target, headers=headers)
            with connection.getresponse() as response:
                return _read_response(response, max_bytes)
        finally:
            timer.cancel()
            if connection.socket_copy is not None:
                connection.socket_copy.close()
            if time.monotonic() >= deadline:
                raise TimeoutError


def _read_response(response: http.client.HTTPResponse, max_bytes: int) -> tuple[bytes, str | None]:
    if response.status in REDIRECT_STATUSES and (redirect := response.getheader("Location")):
        return b"", redirect
    if response.status != 200:
        raise ValueError(f"HTTP {response.status} {describe_value(response.reason)}")
    content = bytearray()
    while len(content) <= max_bytes and (chunk := response.read1(2**16)):
        content += chunk
    if len(content) > max_bytes or (response.length or 0) > max_bytes:
        raise ValueError(f"it has over {max_bytes:,} bytes")
    if response.length:  # bytes that are missing; read1() does not raise an error for them
        raise ValueError(
            f"the connection ended after {len(content):,} of {len(content) + response.length:,} "
            "bytes; try again"
        )
    return bytes(content), None


class _Http(http.client.HTTPConnection):
    """Connects only to public addresses of its host; another thread can end the connection."""

    socket_copy: socket.socket | None = None
    is_cut_off = False

    def connect(self) -> None:
        addresses = public_addresses(self.host, self.port)
        for number, address in enumerate(addresses, start=1):
            try:
                self.sock = socket.create_connection(address, self.timeout)
                break
            except OSError:
                if number == len(addresses) or self.is_cut_off:
                    raise
        # cut_off() needs its own descriptor, because TLS and http.client detach or close the first.
        self.socket_copy = self.sock.dup()
        if self.is_cut_off:
            self.cut_off()

    def cut_off(self) -> None:
        """End the connection from another thread, even while it blocks."""
        self.is_cut_off = True
        if self.socket_copy is not None:
            with suppress(OSError):
                self.socket_copy.shutdown(socket.SHUT_RDWR)


class _Https(http.client.HTTPSConnection, _Http):
    pass  # TLS starts after _Http has connected


def public_addresses(host: str, port: int) -> list[Any]:
    """Return the addresses of a host name; raise ``ValueError`` if one of them is not public."""
    addresses = [info[4][:2] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address, _ in addresses:
        if not is_public(str(address)):
            raise ValueError(
                f"{host} is {address}, which is not an address of the public internet: "
                f"{DOWNLOAD_CURE}"
            )
    return addresses
