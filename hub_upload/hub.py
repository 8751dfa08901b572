"""What is read of the Hub, through its own client, whose errors pass as they come."""

import glob
import os
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi, ModelInfo, constants, get_token, snapshot_download
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.sha import git_hash

from glm4v_patched.patch.repository import url_origin
from glm4v_patched.terminal_text import printable

from .files import File, is_small, read_folder

# A server may take its time over a commit; without the client's variable, so many seconds.
LONGEST_SILENCE = 60
AGAIN = "run the same command again: it finds what has arrived and does the rest"


def limit_silence() -> None:
    """Let no request wait longer than ``HF_HUB_DOWNLOAD_TIMEOUT``; most of them set no limit."""
    session = huggingface_hub.get_session()
    client, hooks = type(session), {"request": [*session.event_hooks["request"], _limit]}
    huggingface_hub.set_client_factory(
        lambda: client(event_hooks=hooks, follow_redirects=True, timeout=None)
    )


def _limit(request) -> None:
    given = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT")
    seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT if given else LONGEST_SILENCE
    limits = request.extensions["timeout"]
    limits |= {kind: min(value or seconds, seconds) for kind, value in limits.items()}


def describe(error: Exception) -> str:
    """Return an error of the client, a disk or a library as it came, and what to do about it."""
    cause = error.__cause__
    of = f" ({type(cause).__name__}: {cause})" if cause and str(cause) not in str(error) else ""
    return (
        f"{type(error).__name__}: {error}{of}; {AGAIN} (the Hub is {url_origin(constants.ENDPOINT)}; "
        "`python -X dev -m hub_upload` shows where the error was raised)"
    )


def without_secrets(message: str) -> str:
    """One line without the token and without the query of addresses, which may carry signatures."""
    if token := get_token():
        message = message.replace(token, "<token>")
    message = re.sub(r"\?[\w.%-]+=[^\s'\"),;]*", "", message)
    return printable(" ".join(message.split()))


def look_at(api: HfApi, name: str, at: str | None) -> tuple[ModelInfo, dict[str, RepoSibling]]:
    """What the Hub says of a repository, and of the files of the commit that ``at`` names."""
    info = api.model_info(name, revision=at, files_metadata=True)
    if not info.sha or info.siblings is None or any(file.size is None for file in info.siblings):
        told = f"{url_origin(constants.ENDPOINT)} lists no commit of {name}, or no sizes of its files"
        raise ValueError(f"{told}, as a Hub does: check HF_ENDPOINT; {AGAIN}")
    return info, {file.rfilename: file for file in info.siblings}


def is_at(there: RepoSibling | None, file: File) -> bool:
    """Whether the Hub has this content."""
    if there is None or there.size != file.size:
        return False
    if there.lfs:
        return there.lfs.sha256 == file.sha256
    return file.content is not None and there.blob_id == git_hash(file.content)


def read_repository(name: str, revision: str | None, into: Path) -> tuple[str, dict[str, File]]:
    """The commit that ``revision`` (main if ``None``) is at, and its files.

    The small ones are downloaded to a new folder of ours, and compared with the hashes that the
    Hub lists.
    """
    info, there = look_at(HfApi(), name, revision)
    small = [path for path, file in there.items() if is_small(path, file.size or 0)]
    into.mkdir()
    patterns = [glob.escape(path) for path in small]
    snapshot_download(name, revision=info.sha, local_dir=into, allow_patterns=patterns)
    here = read_folder(into)
    if wrong := [p for p in small if p not in here or not is_at(there[p], here[p])]:
        told = f"{name}: {wrong[0]} has another hash than its list of files tells"
        raise ValueError(f"{told}; {AGAIN}")
    files = {n: File(f.size or 0, f.lfs.sha256 if f.lfs else None) for n, f in there.items()}
    return str(info.sha), files | here
