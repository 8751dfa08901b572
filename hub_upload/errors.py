"""What servers, networks and disks do, in one line that says what to do about it."""

import errno
import json
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub
from huggingface_hub import constants, get_token
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import _http

from glm4v_patched.patch.repository import host_of

# A server may take its time over a commit; without the client's variable, so many seconds.
LONGEST_SILENCE = 60
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
AGAIN = "run the same command again: it finds what has arrived and does the rest"


class Failure(RuntimeError):
    """Why it cannot be done, and what to do about it."""


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
    """Turn what the Hub's client raises into a ``Failure``: what was done, why not, what is left.

    The client takes answers for what they should be, so any error of Python's that is raised in it
    may be the server's. Raised in this package, it is a mistake of ours, and stays what it is.
    """
    try:
        yield
    except (Failure, AssertionError):
        raise
    except Exception as error:
        odd = f"the server's answer is not that of a Hub ({type(error).__name__}: {error})"
        reason = reason_of(error) or (f"{odd}: check HF_ENDPOINT" if _of_client(error) else None)
        if reason is None:
            raise
        raise Failure(f"{what}: {reason}; {state}") from error


def _of_client(error: BaseException) -> bool:
    """Whether it was raised in the Hub's client, or in what that calls; not in what it calls of
    ours."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    ours = "hub_upload", "glm4v_patched"
    known = [name for name in packages if name == "huggingface_hub" or name in ours]
    return known[-1:] == ["huggingface_hub"]


def reason_of(error: BaseException) -> str | None:
    """What happened, and what to do where the client does not say; ``None`` for what is no error
    of a disk, a server or the input."""
    link: BaseException | None = error
    while link is not None and not isinstance(error, Failure):
        told = " ".join(str(link).split())
        if reason := _reason_of_disk(link, told) or _reason_of_server(link, told):
            return reason
        link = link.__cause__ or link.__context__
    told_well = isinstance(error, (OSError, ValueError, RuntimeError))
    return str(error) if told_well and not isinstance(error, json.JSONDecodeError) else None


def _reason_of_disk(error: BaseException, told: str) -> str | None:
    # Libraries in Rust (tokenizers, safetensors) raise classes of their own.
    found = re.search(r"\(os error (\d+)\)", told)
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number not in FULL:
        return None
    return f"no space left on a disk of this machine, or in its quota ({told}): make room"


def _reason_of_server(error: BaseException, told: str) -> str | None:
    if "404" in told and "xet-write-token" in told:
        # The client uploads through hf_xet, where it is installed, without asking the server.
        return f"this server has no Xet storage: set HF_HUB_DISABLE_XET=1 ({told})"
    if not isinstance(error, hub_errors.HTTPError):
        return None
    if type(error).__name__.endswith("Timeout"):
        host, seconds = host_of(str(error.request.url)), error.request.extensions["timeout"]["read"]
        cure = "check the network and HF_ENDPOINT, or wait longer with HF_HUB_DOWNLOAD_TIMEOUT"
        return f"{host} did not answer within {seconds:g} s: {cure}"
    if isinstance(error, hub_errors.HfHubHTTPError):
        return told  # the client says what a status means and what to do
    return f"the connection failed ({type(error).__name__}: {told})"


def printable(text: str) -> str:
    """A line with escapes for what would move the cursor, turn the text or not print at all."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def without_secrets(message: str) -> str:
    """One line without the token and without the query of addresses, which may carry signatures."""
    if token := get_token():
        message = message.replace(token, "<token>")
    message = re.sub(r"\?[\w.%-]+=[^\s'\"),;]*", "", message)
    return printable(" ".join(message.split()))
