"""How many processes decode images while a training process trains. Needs no torch."""

import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MOST_WORKERS = 8
BATCHES_AHEAD = 2
"""Of each worker."""
SHARED_MEMORY = "/dev/shm"
"""Through which batches come to the training process."""
BYTES_A_PIXEL = 3 * 4
NUM_WORKERS, PREFETCH = "dataloader_num_workers", "dataloader_prefetch_factor"
CONTEXT = "dataloader_multiprocessing_context"
OF_WORKERS = {PREFETCH: None, CONTEXT: None, "dataloader_persistent_workers": False}
"""Without any, other values are errors of torch: where this machine has none to spare, not those
of the recipe count."""


def loader_options(
    asked: Mapping[str, Any], processes: int, images: int, side: int = 1120
) -> dict[str, Any]:
    """Fields of ``TrainingArguments`` that a recipe leaves open, or that cannot be had on this
    machine, for one of its processes.

    Each gets its share of the cores but one, at most 8 workers, and not more than
    :func:`workers_that_fit`; without a core to spare it decodes itself.

    Workers end with an epoch: those that persist would leave the random numbers of later epochs
    others than without workers, or than after a resumption.

    Args:
        asked: The recipe's own fields.
        processes: That train on this machine.
        images: The most in a batch of one process.
        side: Of an image, in pixels.
    """
    workers = asked.get(NUM_WORKERS)
    if workers is None:
        workers = default_workers(processes, images, side)
    elif workers == 0:
        return {NUM_WORKERS: 0}
    if workers:
        return {NUM_WORKERS: workers, PREFETCH: asked.get(PREFETCH, BATCHES_AHEAD)}
    return {NUM_WORKERS: 0} | {name: value for name, value in OF_WORKERS.items() if name in asked}


def worker_start(offload: object, asked: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """How workers start, as ``multiprocessing`` names it; ``None`` for its default.

    As the recipe's own fields say. Else not by a fork beside an offloaded optimizer: a forked
    worker keeps what its parent had in memory as it was then, and that optimizer writes all of its
    states in the first step, so that each page would be there twice. Nor from ``multiprocessing``'s
    server: its workers do not see that the training process was killed.
    """
    return asked.get(CONTEXT) or ("spawn" if offload is True else None)


def default_workers(processes: int, images: int, side: int) -> int:
    """How many workers suit this machine; 0 for none."""
    workers = min(cores() // processes - 1, MOST_WORKERS)
    return workers_that_fit(max(workers, 0), processes, images, side)


def workers_that_fit(workers: int, processes: int, images: int, side: int = 1120) -> int:
    """How many of so many workers fit, with their batches, into half of the shared memory that is
    free now.

    The other half is left to whoever comes next: evaluation, whose workers come while training's
    still hold their batches, and NCCL.
    """
    if not os.path.isdir(SHARED_MEMORY):  # not Linux
        return workers
    free = shutil.disk_usage(SHARED_MEMORY).free
    batch = images * side * side * BYTES_A_PIXEL
    # One more of each is made while those ahead wait.
    needed = batch * (BATCHES_AHEAD + 1) * processes
    return min(workers, free // 2 // needed) if needed else workers


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
