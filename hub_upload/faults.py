"""What servers, networks and disks do, in one line that says what to do about it."""

import errno
import functools
import json
import os
import re
import struct
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub
from huggingface_hub import ModelInfo, constants, get_token
from huggingface_hub.errors import FileMetadataError
from huggingface_hub.utils import _http

from glm4v_patched.patch.repository import host_of

# 0.36 speaks through requests, 1.x through httpx, 2.x through httpx2: errors without a common base.
HTTP_LIBRARIES = ("requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2")
# What the client says of answers that it looks at before it uses them.
MALFORMED = "Malformed response|improperly formatted|Invalid server response"
# A server may take its time over a commit; without the client's variable, so many seconds.
LONGEST_SILENCE = 60
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Failure(Exception):
    """Why it cannot be done, and what to do about it."""


class NotOfAHub(Exception):
    """An answer without what every Hub tells; the message says what is missing."""


class NoAnswer(Exception):
    """A server was silent for too long. The client does not know this class, so it asks no more."""


def end_silence() -> None:
    """From now on no request of this process waits for ever for the next byte of an answer.

    As long as ``HF_HUB_DOWNLOAD_TIMEOUT`` says; most of the client's requests set no limit, and
    those that look at files wait a minute, six times. Transfers of hf_xet have limits of its own.
    """
    seconds = LONGEST_SILENCE
    if os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT"):
        seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
    # The client's own factories are private; 0.36 and newer call them differently.
    if huggingface_hub.__version__.startswith("0."):
        make = _http._default_backend_factory
        huggingface_hub.configure_http_backend(lambda: _with_limit(make(), seconds, old=True))
    else:
        make = _http.default_client_factory
        huggingface_hub.set_client_factory(lambda: _with_limit(make(), seconds, old=False))


def _with_limit(session, seconds: float, old: bool):
    """A session of requests, or a client of httpx, whose ``send`` has a time-out."""
    send = session.send

    @functools.wraps(send)
    def send_with_limit(request, **options):
        if old:
            options["timeout"] = _least(options.get("timeout"), seconds)
        else:
            limits = request.extensions["timeout"]
            limits |= {kind: _least(value, seconds) for kind, value in limits.items()}
        try:
            return send(request, **options)
        except Exception as error:
            # The libraries have no base in common, but these names.
            if not type(error).__name__.endswith("Timeout"):
                raise
            host = host_of(str(request.url))
            raise NoAnswer(
                f"{host} did not answer within {seconds:g} s: check the network and HF_ENDPOINT, "
                "or wait longer with HF_HUB_DOWNLOAD_TIMEOUT"
            ) from error

    session.send = send_with_limit
    return session


def _least(given: float | tuple | None, seconds: float) -> float:
    return min(given, seconds) if isinstance(given, (int, float)) else seconds


def commit_of(info: ModelInfo) -> str:
    if not info.sha:
        raise NotOfAHub("no commit")
    return info.sha


@contextmanager
def during(what: str, state: str, writing: bool = False) -> Iterator[None]:
    """Turn what happens outside of this program into a ``Failure`` of one line.

    Args:
        what: What was being done.
        state: What it leaves behind, and how to go on.
        writing: It takes the right to write.
    """
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        reason = reason_of(error, writing)
        if reason is None and isinstance(error, (OSError, ValueError, RuntimeError)):
            reason = str(error)
        if reason is None:
            raise
        raise Failure(f"{what}: {reason}; {state}") from error


def reason_of(error: BaseException, writing: bool = False) -> str | None:
    """What happened and what to do; ``None`` if neither server, network nor disk is known to it."""
    if isinstance(error, Failure):
        return str(error)
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    for link in chain:
        told = " ".join(str(link).split())
        if isinstance(link, NoAnswer):
            return told
        if status_of(link) is not None:
            return _reason_of_status(link, writing)
        if _errno(link) in FULL:
            return f"no space left on a disk of this machine, or in its quota ({told}): make room"
        if "404" in told and "xet-write-token" in told:
            # 2.4 uploads through hf_xet, where it is installed, without asking the server.
            return f"this server has no Xet storage: set HF_HUB_DISABLE_XET=1 ({told})"
        if "Consistency check failed" in told:
            return f"a file did not arrive whole ({told})"
        if isinstance(link, json.JSONDecodeError) and _is_of_client(link):
            return "the server's answer is no JSON: it fails, or HF_ENDPOINT is not that of a Hub"
        if _is_malformed(link):
            kind = "" if isinstance(link, NotOfAHub) else f"{type(link).__name__}: "
            return (
                f"the server's answer is not that of a Hub ({kind}{told}): it fails, or "
                "HF_ENDPOINT is not that of a Hub"
            )
        if type(link).__module__.split(".")[0] in HTTP_LIBRARIES:
            return f"the connection failed ({type(link).__name__}: {told})"
    # What the client says itself: that it is told to be offline, that a file is not there.
    return str(error) if type(error).__module__.split(".")[0] == "huggingface_hub" else None


def status_of(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def server_message(error: BaseException) -> str:
    return getattr(error, "server_message", None) or "no reason given"


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # Libraries in Rust (tokenizers, safetensors) raise classes of their own.
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _is_malformed(error: BaseException) -> bool:
    if isinstance(error, (NotOfAHub, FileMetadataError)):
        return True
    # The client takes answers for what they should be.
    if isinstance(error, (LookupError, TypeError, AttributeError, struct.error)):
        return _is_of_client(error)
    return isinstance(error, ValueError) and bool(re.search(MALFORMED, str(error)))


def _is_of_client(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    modules = {frame.f_globals.get("__name__", "").split(".")[0] for frame, _ in frames}
    return "huggingface_hub" in modules


READING = {
    401: "it is not there, or not without a valid token: check its name, then log in with `hf auth "
    "login` or set another HF_TOKEN",
    403: "the token may not read this: accept the terms on the repository's page, or set another "
    "HF_TOKEN",
    404: "it is not there, or not for this token: check its name, the revision and the token's "
    "rights",
    507: "the server's disk is full: its owner must make room",
}
WRITING = READING | {
    401: "the token is not valid: `hf auth login` again, or set another HF_TOKEN",
    403: "the token may not do this: it needs the right to write to this repository and its "
    "organisation, or, where the repository exists, --pr",
    404: "it is not there, or not for this token: check --repo and the token's rights",
    409: "somebody else made it at the same moment",
    412: "the branch has moved since it was compared: somebody else has committed. Nothing was "
    "committed",
}


def _reason_of_status(error: BaseException, writing: bool) -> str:
    status = status_of(error)
    cure = (WRITING if writing else READING).get(status)
    if status == 429:
        cure = f"too many requests: wait {_seconds_to_wait(error.response.headers)}"
    elif cure is None:
        cure = "the server fails: wait a little" if status >= 500 else "the server refuses"
    return f"{cure} ({status}: {server_message(error)})"


def _seconds_to_wait(headers) -> str:
    # The Hub's own is "ratelimit".
    found = re.search(r"\bt=(\d+)", headers.get("ratelimit", ""))
    found = found or re.fullmatch(r"(\d+)", headers.get("Retry-After", ""))
    return f"{found[1]} seconds" if found else "a little"


def printable(text: str) -> str:
    """A line with escapes for what would move the cursor, turn the text or not print at all."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def without_secrets(message: str) -> str:
    """One line without the token and without the query of addresses, which may carry signatures."""
    if token := get_token():
        message = message.replace(token, "<token>")
    message = re.sub(r"\?[\w.%-]+=[^\s'\"),;]*", "", message)
    return printable(" ".join(message.split()))
