"""Memory that DeepSpeed's CPU collectives leave behind when a training ends. Needs no torch."""

import os
import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# DeepSpeed's (csrc/cpu/comm/shm.cpp), with user, address, port and rank behind it.
BUFFER = "deepspeed_allreduce_buffer_{user}_"
# Between a buffer's creation and its use it looks as if nobody wanted it.
SECONDS_TO_MAP = 5


def remove_left_buffers() -> list[Path]:
    """Delete buffers of this user that no process uses, and return them.

    Each process of a training on the CPU makes one, of 67 MB of the machine's memory, and DeepSpeed
    never deletes it: some dozens of short trainings fill the memory until the next start.
    """
    there = list(SHARED_MEMORY.glob(BUFFER.format(user=os.getuid()) + "*"))
    left = []
    for buffer in there and sorted(set(there) - _mapped()):
        with suppress(FileNotFoundError):
            if time.time() - buffer.stat().st_ctime > SECONDS_TO_MAP:
                buffer.unlink()
                left.append(buffer)
    return left


def _mapped() -> set[Path]:
    """Files of shared memory that processes of this user have mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # another user's, or the process has ended
            for line in maps.read_text(errors="replace").splitlines():
                if f"{SHARED_MEMORY}/" in line:
                    found.add(Path(line[line.index(f"{SHARED_MEMORY}/") :]))
    return found
