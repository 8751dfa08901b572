"""Atomic writes, locks, and checks of files before they are written or copied.

An atomic write leaves either the old content or all of the new content, even after a power cut. The
checks refuse links, pipes and folders where a regular file is expected.
"""

import fcntl
import glob
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .terminal_text import format_bytes


@contextmanager
def explain_failed_writes(path: Path, note: str = "") -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``RuntimeError`` that names the file and the cure.

    Args:
        note: Appended to the message.
    """
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"{path} cannot be written: {error.strerror or error}; make room for it, and run the "
            f"same command again{note}"
        ) from error


def take_lock(descriptor: int, path: Path, kind: int = fcntl.LOCK_EX) -> None:
    """Lock an open file or folder with flock until it is closed.

    Args:
        path: The path to name in messages.
        kind: ``fcntl.LOCK_EX`` (one holder) or ``fcntl.LOCK_SH`` (shared).

    Raises:
        BlockingIOError: Another process holds the lock.
        ValueError: The file system has no locks.
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
    """Create or replace a file atomically; text is written as UTF-8.

    A symbolic link is replaced, and its target stays as it is.

    Raises:
        OSError: The file cannot be written. The old file is unchanged, and no partial file is left.
    """
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing in pieces; the new file replaces the old one after the block.

    See :func:`write_atomically`.
    """
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


def find_file_problem(path: Path, refuse_hard_links: bool = False) -> str | None:
    """Return why a path is not a regular file, such as "is a folder"; None if it is or is missing.

    Args:
        refuse_hard_links: Whether further hard links are a problem, as for a file that is written
            in place.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(status.st_mode):
        return f"is a link to {os.readlink(path)}"
    if stat.S_ISDIR(status.st_mode):
        return "is a folder"
    if not stat.S_ISREG(status.st_mode):
        return "is a pipe, a socket or a device"
    if refuse_hard_links and status.st_nlink > 1:
        return f"is a file with {status.st_nlink} names (hard links)"
    return None


def require_file(path: Path, refuse_hard_links: bool = False) -> None:
    """Raise ``ValueError`` if :func:`find_file_problem` finds a problem."""
    if problem := find_file_problem(path, refuse_hard_links):
        raise ValueError(
            f"{path} {problem}, and is neither followed nor replaced; move it away, or give "
            "another name"
        )


def is_in_model_folder(path: Path, folder: Path) -> bool:
    """Return whether the file that a path leads to lies in a model's folder.

    For a snapshot in the Hub's cache, the blobs of its repository count as inside, too.
    """
    root, target = folder.resolve(), path.resolve()
    is_snapshot = root.parent.name == "snapshots" and root.parents[1].name.startswith("models--")
    is_blob = is_snapshot and target.parent == root.parents[1] / "blobs"
    return target.is_relative_to(root) or is_blob


def require_copyable(path: Path, folder: Path) -> None:
    """Raise ``ValueError`` for a file that must not be copied from a model's folder.

    Such a file is a link to a file outside of the folder, or has further hard links.
    """
    if path.is_symlink():
        if not path.is_file() or not is_in_model_folder(path, folder):
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}, outside the model's folder, and is not "
                "copied; put the file itself there, or take the link away"
            )
    elif problem := find_file_problem(path, refuse_hard_links=True):
        raise ValueError(f"{path} {problem}, and is not copied; put the file itself there")


def apply_umask(folder: Path) -> None:
    """Give new weights in a folder the usual mode of new files (0666 without the umask).

    safetensors writes files that only their owner can read.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    for path in folder.glob("*.safetensors"):
        if path.stat().st_nlink == 1:  # hard links have one mode together
            path.chmod(0o666 & ~mask)


def remove_partial(folder: Path, names: list[str]) -> None:
    """Remove the partial files that a process killed in :func:`open_atomically` left.

    No process may be writing these files.
    """
    for path in folder.glob("*.partial"):
        match = re.fullmatch(r"(.+)\.[0-9a-f]{32}\.partial", path.name)
        if match and match[1] in names:
            path.unlink(missing_ok=True)


def require_new_folder(out: Path) -> None:
    """Raise ``ValueError`` unless ``out`` is missing or an empty folder."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"--out {out} exists and would not be replaced; give a new folder")


def require_free_disk(needed: float, out: Path) -> None:
    """Raise ``ValueError`` if the disk of ``out`` has fewer than ``needed`` bytes free."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed:
        raise ValueError(
            f"--out {out}: its disk has {format_bytes(free_bytes)} free, and the model needs "
            f"{format_bytes(needed)}; give a folder on a larger disk"
        )


@contextmanager
def create_folder_atomically(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``out`` on success and removed on an error.

    Temporary folders that killed processes have left are removed, too.
    """
    # The folder is called .partial only while it is locked: _remove_leftovers of another process
    # removes folders called so that are not locked.
    name = f".{out.name}.{uuid.uuid4().hex}"
    new, partial = (out.with_name(f"{name}.{kind}") for kind in ("new", "partial"))
    new.mkdir(parents=True)
    lock = os.open(new, os.O_RDONLY)
    try:
        with suppress(ValueError):  # a file system without locks: leftovers are not removed
            take_lock(lock, new)
            _remove_leftovers(out)
        new.rename(partial)
        yield partial
        apply_umask(partial)
        partial.rename(out)
    finally:
        os.close(lock)
        for path in (new, partial):
            shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(out: Path) -> None:
    """Remove temporary folders of ``out`` that no process has locked."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.{'[0-9a-f]' * 32}.partial"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY)
            try:
                take_lock(lock, path)
                shutil.rmtree(path)
            finally:
                os.close(lock)
