"""Read repositories of the Hub through huggingface_hub; its errors are passed on."""

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

# A server may take this long to commit. HF_HUB_DOWNLOAD_TIMEOUT replaces this limit if it is set.
REQUEST_TIMEOUT_S = 60
RETRY_HINT = "run the same command again: it continues where this run stopped"


def limit_request_time() -> None:
    """Limit the time of every request, because most calls of huggingface_hub set no limit.

    The limit is :data:`REQUEST_TIMEOUT_S`, or ``HF_HUB_DOWNLOAD_TIMEOUT`` if it is set.
    """
    is_set = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT")
    seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT if is_set else REQUEST_TIMEOUT_S
    session = huggingface_hub.get_session()
    client, hooks = type(session), session.event_hooks
    huggingface_hub.set_client_factory(
        lambda: client(event_hooks=hooks, follow_redirects=True, timeout=seconds)
    )


def describe_error(error: Exception) -> str:
    """Return the message for an unexpected error of the client, a disk or a library."""
    cause = error.__cause__
    adds_reason = cause and str(cause) not in str(error)
    reason = f" ({type(cause).__name__}: {cause})" if adds_reason else ""
    return (
        f"{type(error).__name__}: {error}{reason}; {RETRY_HINT} (the Hub is "
        f"{url_origin(constants.ENDPOINT)}; `python -X dev -m hub_upload` shows the traceback)"
    )


def without_secrets(message: str) -> str:
    """Return the message on one line, without the token and without URL queries (signatures)."""
    if token := get_token():
        message = message.replace(token, "<token>")
    message = re.sub(r"\?[\w.%-]+=[^\s'\"),;]*", "", message)
    return printable(" ".join(message.split()))


def list_repository(
    api: HfApi, name: str, revision: str | None
) -> tuple[ModelInfo, dict[str, RepoSibling]]:
    """Return the Hub's information about a repository at a revision, and its files by path."""
    info = api.model_info(name, revision=revision, files_metadata=True)
    if not info.sha or info.siblings is None or any(file.size is None for file in info.siblings):
        raise ValueError(
            f"{url_origin(constants.ENDPOINT)} returned no commit of {name}, or no file sizes, "
            f"which a Hub always returns: check HF_ENDPOINT; {RETRY_HINT}"
        )
    return info, {file.rfilename: file for file in info.siblings}


def has_same_content(remote: RepoSibling | None, file: File) -> bool:
    """Return whether a file on the Hub has the content of ``file``."""
    if remote is None or remote.size != file.size:
        return False
    if remote.lfs:
        return remote.lfs.sha256 == file.sha256
    return file.content is not None and remote.blob_id == git_hash(file.content)


def read_repository(name: str, revision: str | None, into: Path) -> tuple[str, dict[str, File]]:
    """Return the commit of a revision and its files, by path.

    Small files are downloaded and compared with the hashes that the Hub lists.

    Args:
        revision: Commit, tag or branch; None for main.
        into: New folder for the downloads.
    """
    info, remote = list_repository(HfApi(), name, revision)
    small = [path for path, file in remote.items() if is_small(path, file.size or 0)]
    into.mkdir()
    patterns = [glob.escape(path) for path in small]
    snapshot_download(name, revision=info.sha, local_dir=into, allow_patterns=patterns)
    local = read_folder(into)
    if wrong := [p for p in small if p not in local or not has_same_content(remote[p], local[p])]:
        raise ValueError(
            f"{name}: the downloaded {wrong[0]} does not have the hash that the Hub lists; "
            f"{RETRY_HINT}"
        )
    files = {n: File(f.size or 0, f.lfs.sha256 if f.lfs else None) for n, f in remote.items()}
    return str(info.sha), files | local
