"""Locks that DeepSpeed waits for although nobody will ever remove them. Needs no torch."""

import os
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil
from packaging.version import Version

# Its locks are the kernel's, which end with their process: the file always stays, and says nothing.
FIRST_TORCH_WITHOUT_LOCK_FILES = "2.14"


def extensions_folder() -> Path:
    """Where torch builds extensions, as ``torch.utils.cpp_extension`` has it by default."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "torch_extensions")


def fault_of_abandoned_lock() -> str | None:
    """The lock that would keep DeepSpeed waiting for ever, in words, and how to delete it.

    Processes load DeepSpeed's CPU collectives in turn, under a lock of torch's that before torch
    2.14 is a file: one that is killed meanwhile leaves it behind, and nothing tells the next ones
    that nobody will remove it.
    """
    if Version(version("torch")) >= Version(FIRST_TORCH_WITHOUT_LOCK_FILES):
        return None
    root = extensions_folder()
    python = f"py{sys.version_info.major}{sys.version_info.minor}*"
    for lock in [*root.glob("*_comm/lock"), *root.glob(f"{python}/*_comm/lock")]:
        if _is_abandoned(lock):
            return (
                f"{lock} was left behind by a process that was killed while it loaded DeepSpeed's "
                "CPU collectives (or that had torch "
                f"{FIRST_TORCH_WITHOUT_LOCK_FILES} or newer), and training would wait for it for "
                "ever; no process of this machine has it open. "
                f"Delete it: rm {shlex.quote(str(lock))}"
            )
    return None


def require_no_abandoned_lock() -> None:
    """Raise ``RuntimeError`` if :func:`fault_of_abandoned_lock` finds one."""
    if fault := fault_of_abandoned_lock():
        raise RuntimeError(fault)


def _is_abandoned(lock: Path) -> bool:
    # Its owner keeps it open until just before it deletes it.
    for _ in range(3):
        if not lock.exists():
            return False
        for process in psutil.process_iter():
            try:
                if str(lock.resolve()) in (file.path for file in process.open_files()):
                    return False
            except psutil.Error:  # another user's, or it has ended
                continue
        time.sleep(0.1)
    return lock.exists()
