"""How many processes decode pictures while a training process trains. Needs no torch."""

import os
import shutil
from typing import Any

MOST_WORKERS = 8
BATCHES_AHEAD = 2
"""Of each worker."""
SHARED_MEMORY = "/dev/shm"
"""Through which batches come to the training process."""
BYTES_A_PIXEL = 3 * 4


def loader_options(
    processes: int, pictures: int = 4, side: int = 1120, shared_memory: str = SHARED_MEMORY
) -> dict[str, Any]:
    """Fields of ``TrainingArguments`` for a training process of this machine.

    Each gets its share of the cores but one, at most 8 workers, and not more than fit into shared
    memory with the batches that they make ahead; without a core to spare it decodes itself.

    Args:
        processes: That train on this machine.
        pictures: The most in a batch of one process.
        side: Of a picture, in pixels.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min((cores or 1) // processes - 1, MOST_WORKERS)
    try:
        free = shutil.disk_usage(shared_memory).free
    except OSError:  # not Linux
        free = None
    if free is not None and pictures:
        batch = pictures * side * side * BYTES_A_PIXEL
        # One more of each is made while those ahead wait.
        workers = min(workers, free // processes // (batch * (BATCHES_AHEAD + 1)))
    workers = max(workers, 0)
    return {
        "dataloader_num_workers": workers,
        "dataloader_persistent_workers": workers > 0,
        "dataloader_prefetch_factor": BATCHES_AHEAD if workers else None,
        "dataloader_pin_memory": True,
    }
