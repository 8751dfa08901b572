"""How many processes decode pictures while a training process trains. Needs no torch."""

import os
import shutil
from collections.abc import Mapping
from typing import Any

MOST_WORKERS = 8
BATCHES_AHEAD = 2
"""Of each worker."""
SHARED_MEMORY = "/dev/shm"
"""Through which batches come to the training process."""
BYTES_A_PIXEL = 3 * 4
NUM_WORKERS, PREFETCH = "dataloader_num_workers", "dataloader_prefetch_factor"


def loader_options(
    asked: Mapping[str, Any], processes: int, pictures: int, side: int = 1120
) -> dict[str, Any]:
    """Fields of ``TrainingArguments`` that a recipe leaves open, for one of its processes.

    Each gets its share of the cores but one, at most 8 workers, and not more than fit into shared
    memory with the batches that they make ahead; without a core to spare it decodes itself.

    Workers end with an epoch: those that persist would leave the random numbers of later epochs
    others than without workers, or than after a resumption.

    Args:
        asked: The recipe's own fields.
        processes: That train on this machine.
        pictures: The most in a batch of one process.
        side: Of a picture, in pixels.
    """
    workers = asked.get(NUM_WORKERS)
    if workers is None:
        workers = default_workers(processes, pictures, side)
    options = {NUM_WORKERS: workers}
    return options | ({PREFETCH: BATCHES_AHEAD} if workers else {})


def default_workers(processes: int, pictures: int, side: int) -> int:
    """How many workers suit this machine; 0 for none."""
    workers = min(cores() // processes - 1, MOST_WORKERS)
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:  # not Linux
        return max(workers, 0)
    if pictures:
        batch = pictures * side * side * BYTES_A_PIXEL
        # One more of each is made while those ahead wait.
        workers = min(workers, free // processes // (batch * (BATCHES_AHEAD + 1)))
    return max(workers, 0)


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
