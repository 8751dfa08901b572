"""Files that hold either what they held or all that is written, whatever happens meanwhile.

And what of others may lie under a file's name: links, pipes, folders.
"""

import fcntl
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def explain_failed_writes(path: Path, kept: str = "") -> Iterator[None]:
    """Raise ``RuntimeError`` with the file and the cure, where a block raises ``OSError``."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"{path} cannot be written: {error.strerror or error}; make room for it, and run the "
            f"same command again{kept}"
        ) from error


def take_lock(descriptor: int, path: Path, kind: int = fcntl.LOCK_EX) -> None:
    """Lock an open file or folder, as long as it is open; the path is for messages.

    Raises:
        BlockingIOError: another process has locked it.
        ValueError: its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ValueError(
            f"{path} is on a file system without locks, which keep other processes out "
            f"({error.strerror}); give a path on a local disk, or mount it with locks (NFS: lockd)"
        ) from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file, or make it; a power cut cannot leave its name and half of its bytes.

    Text is written in UTF-8. A link is replaced, and what it leads to stays as it is.

    Raises:
        OSError: it cannot be written; what was there is there still, and nothing is beside it.
    """
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """As :func:`write_atomically`, a piece at a time: the file is replaced when the block ends."""
    path = path.absolute()
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def find_file_problem(path: Path, alone: bool = False) -> str | None:
    """What has a file's name and is no file; None of a file, and where nothing is.

    Args:
        alone: Whether it may have no other name either (a hard link): it will be written in place.
    """
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(found.st_mode):
        return f"is a link to {os.readlink(path)}"
    if stat.S_ISDIR(found.st_mode):
        return "is a folder"
    if not stat.S_ISREG(found.st_mode):
        return "is a pipe, a socket or a device"
    if alone and found.st_nlink > 1:
        return f"is a file with {found.st_nlink} names (hard links)"
    return None


def require_file(path: Path, alone: bool = False) -> None:
    """Raise ``ValueError`` for what :func:`find_file_problem` has words for."""
    if fault := find_file_problem(path, alone):
        raise ValueError(
            f"{path} {fault}, and is neither followed nor replaced; move it away, or give another "
            "name"
        )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file, links followed, is one of a model's folder; of a snapshot of the Hub's cache,
    also one of the repository's blobs beside it."""
    root, end = folder.resolve(), path.resolve()
    of_cache = root.parent.name == "snapshots" and root.parents[1].name.startswith("models--")
    return end.is_relative_to(root) or (of_cache and end.parent == root.parents[1] / "blobs")


def require_inside(path: Path, folder: Path) -> None:
    """Raise ``ValueError`` if what will be copied is no file of ``folder`` itself, or one that has
    another name, too (a hard link)."""
    if path.is_symlink():
        if not path.is_file() or not is_inside(path, folder):
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}, outside the model's folder, and is not "
                "copied; put the file itself there, or take the link away"
            )
    elif fault := find_file_problem(path, alone=True):
        raise ValueError(f"{path} {fault}, and is not copied; put the file itself there")


def apply_umask(folder: Path) -> None:
    """Give the weights in a folder the mode of every other new file: safetensors writes them for
    their owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o666 & ~mask)


def remove_partial(folder: Path, names: list[str]) -> None:
    """Remove what was written of files when a process was killed. Nobody may be writing them."""
    for path in folder.glob("*.partial"):
        if (found := re.fullmatch(r"(.+)\.[0-9a-f]{32}\.partial", path.name)) and found[1] in names:
            path.unlink(missing_ok=True)
