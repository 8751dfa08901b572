"""Memory that DeepSpeed's CPU collectives leave behind when a training ends. Needs no torch."""

import os
import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# DeepSpeed's (csrc/cpu/comm/shm.cpp), with user, address, port and rank behind it.
BUFFER = "deepspeed_allreduce_buffer"
# By then all ranks of a training have opened it, also those of another container, whose processes
# are not seen here.
SECONDS_TO_OPEN = 600


def remove_own_buffer() -> None:
    """Delete the buffer of this process, one of a training that has ended.

    Each process of a training on the CPU makes one, of 67 MB of the machine's memory, and DeepSpeed
    never deletes it: some dozens of short trainings fill the memory until the next start.
    """
    told = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK")]
    if None not in told:
        name = "_".join([BUFFER, str(os.getuid()), *map(str, told)])
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def remove_left_buffers(seconds: float = SECONDS_TO_OPEN) -> list[Path]:
    """Delete buffers of this user that killed processes have left, and return them: those that no
    process has mapped and that are older than so many seconds."""
    there = set(SHARED_MEMORY.glob(f"{BUFFER}_{os.getuid()}_*"))
    left = []
    for buffer in there and sorted(there - _mapped()):
        with suppress(FileNotFoundError):
            if time.time() - buffer.stat().st_ctime > seconds:
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
