"""Images by their addresses: what is public, and how much and how long is waited for."""

import ipaddress
import socket
import ssl
import threading
import time
from contextlib import suppress

import pytest

from glm4v_patched.data import fetching
from glm4v_patched.data.fetching import fetch
from glm4v_patched.data.public_addresses import is_public

LAN = "10.0.0.1"
OK = b"HTTP/1.1 200 OK\r\n"
# Each of IANA's ranges by its first and last address, and others around IPv4 in IPv6.
RANGES_V4 = "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12"
RANGES_V4 += " 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15"
RANGES_V4 += " 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32"
RANGES_V6 = "::/96 64:ff9b::/96 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/32 2001:2::/48"
RANGES_V6 += " 2001:db8::/32 2001:10::/28 2001:20::/28 2002::/16 3fff::/20 5f00::/16 fc00::/7"
RANGES_V6 += " fe80::/10 fec0::/10 ff00::/8 4000::/3 ::ffff:0:0:0/96"
PUBLIC = "1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 172.15.255.255"
PUBLIC += " 172.32.0.0 192.0.1.0 192.0.3.0 192.88.98.255 198.17.255.255 198.20.0.0 223.255.255.255"
PUBLIC += " 168.63.129.15 168.63.129.17 2001:200::1 2001:4860:4860::8888 2003::1 2606:4700::1111"
PUBLIC += " 2a00:1450::1 3ffe:ffff::1 3fff:1000::1 ::ffff:8.8.8.8"


@pytest.mark.parametrize("ranges", [RANGES_V4, RANGES_V6])
def test_no_special_range_is_public(ranges):
    for network in map(ipaddress.ip_network, ranges.split()):
        for address in (network[0], network[-1], network[network.num_addresses // 3]):
            assert not is_public(str(address)), address
            if address.version == 4:  # in each of the ways that IPv6 has
                mapped = ipaddress.ip_address((0xFFFF << 32) + int(address))
                six_to_four = ipaddress.ip_address((0x2002 << 112) + (int(address) << 80))
                assert not is_public(str(mapped)) and not is_public(str(six_to_four))
    for address in ("192.0.0.192", "fe80::1%eth0", "::127.0.0.1", "2002:7f00:1::", "::1", "::"):
        assert not is_public(address)


def test_what_lies_beside_special_ranges_is_public():
    assert [address for address in PUBLIC.split() if not is_public(address)] == []


@pytest.fixture
def host(monkeypatch):
    """Serve what a list of handlers sends, one a connection, at "host"; which names lead where."""
    handlers: list = []
    names = {"host": ["127.0.0.1"], "inside": [LAN], "both": ["93.184.216.34", LAN]}
    look_up = socket.getaddrinfo

    def found(name, port, *rest, **options):
        if name in names:
            return [(2, 1, 6, "", (address, port)) for address in names[name]]
        return look_up(name, port, *rest, **options)

    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(10_000)
                    with suppress(OSError):  # the client is gone
                        handlers.pop(0)(connection)

        port = server.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", found)
        monkeypatch.setattr(fetching, "ALLOWED_PORTS", [port, 80, 443])
        monkeypatch.setattr(fetching, "is_public", lambda a: a == "127.0.0.1" or is_public(a))
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://host:{port}", handlers
        server.shutdown(socket.SHUT_RDWR)


def sends(*parts: bytes, wait: float = 0):
    def handler(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)
            time.sleep(wait)

    return handler


def redirect(place: str):
    return sends(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\n\r\n".encode(), bytes(9))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "http://inside/a.png",
            f"inside is {LAN}, which is not an address of .*download the image",
        ),
        ("http://both/a.png", f"both is {LAN}"),
        ("https://[::1]/a.png", "::1"),
        ("http://0x7f000001.:443/", "."),
        ("http://169.254.169.254/latest", "169.254.169.254"),
        ("http://host:22/", "port is 22; expected one of .*: download"),
        ("http://user:word@host/", "user name or password"),
        ("http://93.184.216.34\\@host/", "user name or password"),
        ("http://ho st/", "without spaces"),
        ("http://host/\r\nX: y", "control characters"),
        ("http:///a.png", "and a host name"),
        ("http://host:99999/", "."),
    ],
)
def test_an_address_that_is_not_public_http_is_refused_unasked(host, monkeypatch, url, message):
    if "host" not in url.partition("//")[2]:
        monkeypatch.setattr(fetching, "is_public", is_public)
    monkeypatch.setattr(socket, "create_connection", lambda *arguments: pytest.fail(str(arguments)))
    with pytest.raises(ValueError, match=message):
        fetch(url)


@pytest.mark.parametrize(
    "place", ["ftp://host/a", "file:///etc/passwd", "http://inside/", "//inside/x", "data:,a"]
)
def test_a_redirect_is_looked_at_as_the_first_address_is(host, place):
    url, handlers = host
    handlers.append(redirect(place))
    with pytest.raises(ValueError, match="it redirects to"):
        fetch(f"{url}/a.png")


def test_redirects_are_followed_and_have_an_end(host):
    url, handlers = host
    handlers += [redirect("/b c".replace(" ", "%20")), redirect(f"{url}/\u00e9?q=\u00e9")]
    handlers.append(sends(OK + b"\r\n", b"image"))
    assert fetch(f"{url}/a.png") == b"image"
    handlers += [redirect("/again")] * 20
    with pytest.raises(ValueError, match="redirects more than 10 times"):
        fetch(f"{url}/a.png")


def test_a_relative_redirect_leads_on_from_the_page_that_sent_it(monkeypatch):
    redirects = {"http://a/x": "http://b/c/d", "http://b/c/d": "e", "http://b/c/e": None}
    monkeypatch.setattr(fetching, "_get", lambda url, *_: (b"image", redirects[url]))
    assert fetch("http://a/x") == b"image"


def test_the_address_that_was_looked_at_is_connected_to(host, monkeypatch):
    """A name that leads elsewhere when it is asked again, and a proxy."""
    url, handlers = host
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    looked_up, look_up = [], socket.getaddrinfo

    def once(name, *arguments, **options):
        looked_up.append(name)
        if looked_up.count("host") > 1:
            pytest.fail("a name was looked up twice")
        return look_up(name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", once)
    handlers.append(sends(OK + b"\r\n", b"image"))
    assert fetch(url) == b"image" and "host" in looked_up
    looked_up.clear()
    handlers.append(sends())
    with pytest.raises(ValueError, match="proxy is not used.*download"):
        fetch(url)


@pytest.mark.parametrize(
    "parts",
    [
        [b"H"] * 50,
        [OK, *[b"X: y\r\n"] * 50],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 50,
        [OK + b"\r\n", *[b"a"] * 50],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\na\r\n"] * 50],
    ],
    ids=["status", "headers", "continue", "content", "chunks"],
)
def test_what_arrives_slowly_ends_in_time(host, parts):
    url, handlers = host
    handlers.append(sends(*parts, wait=0.1))
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"cannot be fetched: it took over 0\.4 s"):
        fetch(url, seconds=0.4)
    assert time.monotonic() - begin < 3


def test_a_slow_handshake_ends_in_time(host):
    url, handlers = host
    handlers.append(lambda connection: time.sleep(4))
    with pytest.raises(ValueError, match=r"took over 0\.4 s"):
        fetch(url.replace("http", "https"), seconds=0.4)


def test_connecting_ends_in_time(monkeypatch):
    """Whoever names addresses that do not answer can name any number of them."""
    waited = []

    def be_silent(address, timeout):
        waited.append(timeout)
        time.sleep(timeout)
        raise TimeoutError("timed out")

    addresses = [(2, 1, 6, "", ("93.184.216.34", 80))] * 50
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: addresses)
    monkeypatch.setattr(socket, "create_connection", be_silent)
    monkeypatch.setattr(fetching, "RESPONSE_TIMEOUT", 3)
    with pytest.raises(ValueError, match=r"it took over 0\.2 s"):
        fetch("http://host/a.png", seconds=0.2)
    assert sum(waited) < 1


def test_only_content_above_max_bytes_is_refused_whatever_is_announced(host):
    url, handlers = host
    for head, body, message in (
        (b"\r\n", b"123456", "over 5 bytes"),
        (b"Content-Length: 6\r\n\r\n", b"123456", "over 5 bytes"),
        (b"Content-Length: 99999999999\r\n\r\n", b"1", "over 5 bytes"),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"fffffff\r\n" + bytes(99), "over 5 bytes"),
        (b"Content-Length: 5\r\n\r\n", b"123", "ended after 3 of 5 bytes"),
        (b"Content-Length: -5\r\n\r\n", b"123456", "over 5 bytes"),
    ):
        handlers.append(sends(OK + head, body))
        with pytest.raises(ValueError, match=message):
            fetch(url, max_bytes=5)
    handlers.append(sends(OK + b"\r\n", b"12345"))
    assert fetch(url, max_bytes=5) == b"12345"
    handlers.append(sends(b"HTTP/1.1 404 No\x1b[31m\r\n\r\n"))
    with pytest.raises(ValueError, match='HTTP 404 "No.*31m"') as error:
        fetch(url)
    assert "\x1b" not in str(error.value)


def test_a_certificate_is_checked():
    connection = fetching._Https("host", 443)
    assert connection._context.verify_mode == ssl.CERT_REQUIRED
