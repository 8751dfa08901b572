"""What servers, networks and disks do, in one line that says what to do about it."""

import errno
import os
import re
from traceback import walk_tb

import huggingface_hub
from huggingface_hub import constants, get_token
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import _http

from glm4v_patched.patch.repository import host_of
from glm4v_patched.terminal_text import printable

# A server may take its time over a commit; without the client's variable, so many seconds.
LONGEST_SILENCE = 60
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_HUB = "the server's answer is not that of a Hub"
AGAIN = "run the same command again: it finds what has arrived and does the rest"


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


def reason_of(error: BaseException) -> str | None:
    """What happened, and what to do; ``None`` for a mistake of ours."""
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
    # The client takes answers for what they should be: what is raised in it is the server's fault.
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in frames]
    known = [p for p in packages if p in ("hub_upload", "glm4v_patched", "huggingface_hub")]
    if known[-1:] == ["huggingface_hub"]:
        return f"{NO_HUB} ({type(error).__name__}: {error}): check HF_ENDPOINT; {AGAIN}"
    return str(error) if isinstance(error, (OSError, ValueError, RuntimeError)) else None


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
