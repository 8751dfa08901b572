"""What servers, networks and disks do, in one line that says what to do about it."""

import errno
import os
import re

import huggingface_hub
from huggingface_hub import constants, get_token
from huggingface_hub import errors as hub_errors

from glm4v_patched.patch.repository import host_of
from glm4v_patched.terminal_text import printable

# A server may take its time over a commit; without the client's variable, so many seconds.
LONGEST_SILENCE = 60
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_HUB = "the server's answer is not that of a Hub"
AGAIN = "run the same command again: it finds what has arrived and does the rest"


def limit_silence() -> None:
    """Let no request wait longer than ``HF_HUB_DOWNLOAD_TIMEOUT``; most of them set no limit."""
    told = f"huggingface_hub {huggingface_hub.__version__} has no set_client_factory"
    assert hasattr(huggingface_hub, "set_client_factory"), f"{told}: pip install -U huggingface_hub"
    session = huggingface_hub.get_session()
    hooks = [hook for hook in session.event_hooks["request"] if hook is not _limit]
    with_limit = {"request": [*hooks, _limit]}
    client = type(session)
    huggingface_hub.set_client_factory(
        lambda: client(event_hooks=with_limit, follow_redirects=True, timeout=None)
    )


def _limit(request) -> None:
    given = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT")
    seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT if given else LONGEST_SILENCE
    limits = request.extensions["timeout"]
    limits |= {kind: min(value or seconds, seconds) for kind, value in limits.items()}


def reason_of(error: Exception) -> str:
    """Return what happened, and what to do, in one line."""
    link: BaseException | None = error
    while link is not None:
        told = " ".join(str(link).split())
        # Libraries in Rust (tokenizers, safetensors) raise classes of their own.
        found = re.search(r"\(os error (\d+)\)", told)
        if (int(found[1]) if found else getattr(link, "errno", None)) in FULL:
            return f"no space left on a disk, or in its quota ({told}): make room; {AGAIN}"
        if "404" in told and "xet-write-token" in told:
            # The client uploads through hf_xet, where it is installed, without asking the server.
            return f"this server has no Xet storage: set HF_HUB_DISABLE_XET=1 ({told})"
        if isinstance(link, hub_errors.HTTPError):
            return f"{_reason_of_server(link, told)}; {AGAIN}"
        link = link.__cause__ if link.__suppress_context__ else link.__context__
    if isinstance(error, OSError) and error.errno is None:
        return f"{error}; {AGAIN}"  # the client's, of an answer that it cannot use
    if isinstance(error, (OSError, ValueError, RuntimeError)):
        return str(error)
    # The client takes answers for what they should be.
    return (
        f"{NO_HUB}, or this is a mistake of ours ({type(error).__name__}: {error}): check "
        f"HF_ENDPOINT; {AGAIN}; `python -X dev -m hub_upload` shows where it was raised"
    )


def _reason_of_server(error: hub_errors.HTTPError, told: str) -> str:
    if type(error).__name__.endswith("Timeout"):
        host, seconds = host_of(str(error.request.url)), error.request.extensions["timeout"]["read"]
        cure = "check the network and HF_ENDPOINT, or wait longer with HF_HUB_DOWNLOAD_TIMEOUT"
        return f"{host} did not answer within {seconds:g} s: {cure}"
    if isinstance(error, hub_errors.HfHubHTTPError):
        return told  # the client says what a status means and what to do
    return f"the connection failed ({type(error).__name__}: {told})"


def without_secrets(message: str) -> str:
    """One line without the token and without the query of addresses, which may carry signatures."""
    if token := get_token():
        message = message.replace(token, "<token>")
    message = re.sub(r"\?[\w.%-]+=[^\s'\"),;]*", "", message)
    return printable(" ".join(message.split()))
