"""The folder that a check writes rows to. Needs no torch."""

import fcntl
import os
import shutil
import time
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory

from .check_cache import default_path

PREFIX, LOCK = "checking-", "lock"
SECONDS_UNTIL_LEFT = 24 * 3600
"""Of a folder without a lock, which earlier versions made."""


def make_workplace() -> TemporaryDirectory:
    """A folder that is removed when nothing holds it; not in /tmp, which may be memory.

    Those that killed checks have left beside it are removed, too.
    """
    cache = default_path()
    try:
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return _make(cache.parent)
    except OSError:
        pass
    return TemporaryDirectory(prefix="glm4v-checking-")


def _make(parent: Path) -> TemporaryDirectory:
    # Nobody else looks before the new folder is locked.
    alone = _take(parent / "checking.lock", os.O_CREAT)
    try:
        if alone is not None:
            _remove_left(parent)
        workplace = TemporaryDirectory(prefix=PREFIX, dir=parent)
        held = _take(Path(workplace.name, LOCK), os.O_CREAT)
        if held is not None:
            weakref.finalize(workplace, os.close, held)
        return workplace
    finally:
        if alone is not None:
            os.close(alone)


def _remove_left(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        held = None
        if (folder / LOCK).exists():
            held = _take(folder / LOCK, wait=False)
            is_left = held is not None
        else:
            is_left = time.time() - folder.lstat().st_mtime > SECONDS_UNTIL_LEFT
        if is_left:
            shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


def _take(path: Path, create: int = 0, wait: bool = True) -> int | None:
    """The descriptor that holds a lock, until it is closed or its process ends; None if another
    holds it, or the file system has no locks."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | create, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(file)
        return None
    return file
