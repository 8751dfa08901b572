"""What servers, networks and disks do, in one line that says what to do about it."""

import errno
import json
import os
import re
import struct
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub
from huggingface_hub import constants, get_token
from huggingface_hub.errors import FileMetadataError, HTTPError
from huggingface_hub.utils import _http

from glm4v_patched.patch.repository import host_of

# What the client says of answers that it looks at before it uses them.
MALFORMED = "Malformed response|improperly formatted|Invalid server response"
# A server may take its time over a commit; without the client's variable, so many seconds.
LONGEST_SILENCE = 60
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
AGAIN = "run the same command again: it finds what has arrived and does the rest"
CURES = {
    401: "it is not there, or the token is not valid: check the name, or `hf auth login` again",
    403: "the token may not do this: accept the repository's terms, get the right, or use --pr",
    404: "it is not there, or not for this token: check name, revision and the token's rights",
    409: "somebody else made it at the same moment",
    412: "the branch has moved: somebody else has committed. Nothing was committed",
    429: "too many requests: wait a little",
    507: "the server's disk is full: its owner must make room",
}


class Failure(RuntimeError):
    """Why it cannot be done, and what to do about it."""


class BadAnswer(Exception):
    """An answer without what every Hub tells; the message says what is missing."""


def limit_silence() -> None:
    """Let no request wait longer than ``HF_HUB_DOWNLOAD_TIMEOUT``; most of them set no limit."""
    given = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT")
    seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT if given else LONGEST_SILENCE
    told = f"huggingface_hub {huggingface_hub.__version__} has no default_client_factory"
    assert hasattr(_http, "default_client_factory"), f"{told}: pip install 'huggingface_hub<3'"

    def limit(request) -> None:
        limits = request.extensions["timeout"]
        limits |= {kind: min(value or seconds, seconds) for kind, value in limits.items()}

    def make_client():
        client = _http.default_client_factory()
        client.event_hooks["request"].append(limit)
        return client

    huggingface_hub.set_client_factory(make_client)


@contextmanager
def during(what: str, state: str = AGAIN) -> Iterator[None]:
    """Turn what happens outside of this program into a ``Failure``: what was done, and is left."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        if (reason := reason_of(error)) is None:
            raise
        raise Failure(f"{what}: {reason}; {state}") from error


def reason_of(error: BaseException) -> str | None:
    """What happened and what to do; ``None`` for a mistake of this program."""
    link: BaseException | None = error
    while link is not None and not isinstance(error, Failure):
        told = " ".join(str(link).split())
        if reason := _reason_of_disk(link, told) or _reason_of_server(link, told):
            return reason
        link = link.__cause__ or link.__context__
    is_of_client = type(error).__module__.split(".")[0] == "huggingface_hub"
    told_well = is_of_client or isinstance(error, (OSError, ValueError, RuntimeError))
    return str(error) if told_well else None


def _reason_of_disk(error: BaseException, told: str) -> str | None:
    # Libraries in Rust (tokenizers, safetensors) raise classes of their own.
    found = re.search(r"\(os error (\d+)\)", told)
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number not in FULL:
        return None
    return f"no space left on a disk of this machine, or in its quota ({told}): make room"


def _reason_of_server(error: BaseException, told: str) -> str | None:
    if (status := status_of(error)) is not None:
        unknown = "the server fails: wait a little" if status >= 500 else "the server refuses"
        return f"{CURES.get(status, unknown)} ({status}: {getattr(error, 'server_message', None)})"
    if "404" in told and "xet-write-token" in told:
        # The client uploads through hf_xet, where it is installed, without asking the server.
        return f"this server has no Xet storage: set HF_HUB_DISABLE_XET=1 ({told})"
    if _is_malformed(error, told):
        kind = f"{type(error).__name__}: {told}"
        return f"the server's answer is not that of a Hub ({kind}): check HF_ENDPOINT"
    if not isinstance(error, HTTPError):
        return None
    if type(error).__name__.endswith("Timeout"):
        host, seconds = host_of(str(error.request.url)), error.request.extensions["timeout"]["read"]
        cure = "check the network and HF_ENDPOINT, or wait longer with HF_HUB_DOWNLOAD_TIMEOUT"
        return f"{host} did not answer within {seconds:g} s: {cure}"
    return f"the connection failed ({type(error).__name__}: {told})"


def _is_malformed(error: BaseException, told: str) -> bool:
    if isinstance(error, (BadAnswer, FileMetadataError)):
        return True
    if isinstance(error, ValueError) and re.search(MALFORMED, told):
        return True
    # The client takes answers for what they should be.
    kinds = (LookupError, TypeError, AttributeError, struct.error, json.JSONDecodeError)
    frames = traceback.walk_tb(error.__traceback__)
    modules = {frame.f_globals.get("__name__", "").split(".")[0] for frame, _ in frames}
    return isinstance(error, kinds) and "huggingface_hub" in modules


def status_of(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def printable(text: str) -> str:
    """A line with escapes for what would move the cursor, turn the text or not print at all."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def without_secrets(message: str) -> str:
    """One line without the token and without the query of addresses, which may carry signatures."""
    if token := get_token():
        message = message.replace(token, "<token>")
    message = re.sub(r"\?[\w.%-]+=[^\s'\"),;]*", "", message)
    return printable(" ".join(message.split()))
