"""The number of worker processes that decode images for a training process. Needs no torch."""

import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..cpu import count_cores

MAX_WORKERS = 8
BATCHES_AHEAD = 2
"""Batches that each worker prefetches."""
SHARED_MEMORY = "/dev/shm"
"""Folder in memory through which workers pass batches to the training process."""
BYTES_PER_PIXEL = 3 * 4  # three channels in fp32
NUM_WORKERS, PREFETCH = "dataloader_num_workers", "dataloader_prefetch_factor"
CONTEXT = "dataloader_multiprocessing_context"
WITHOUT_WORKERS = {PREFETCH: None, CONTEXT: None, "dataloader_persistent_workers": False}
"""Values that torch requires without workers. If no worker fits, they replace the recipe's."""


def loader_options(
    trainer_config: Mapping[str, Any], processes: int, images: int, side: int = 1120
) -> dict[str, Any]:
    """Return the data-loading fields of ``TrainingArguments`` for one training process, where a
    recipe does not set them or sets more workers than fit.

    By default, each process gets one worker fewer than its share of the cores, at most 8, and at
    most :func:`workers_that_fit`; a process without workers decodes images itself. Workers are not
    persistent: otherwise the random numbers of later epochs would differ from those of runs without
    workers and of resumed runs.

    Args:
        trainer_config: The fields that the recipe sets.
        processes: Training processes on this machine.
        images: The largest number of images in a batch of one process.
        side: Side of an image, in pixels.
    """
    workers = trainer_config.get(NUM_WORKERS)
    if workers is None:
        workers = default_workers(processes, images, side)
    elif workers == 0:
        return {NUM_WORKERS: 0}
    if workers:
        return {NUM_WORKERS: workers, PREFETCH: trainer_config.get(PREFETCH, BATCHES_AHEAD)}
    return {NUM_WORKERS: 0} | {
        name: value for name, value in WITHOUT_WORKERS.items() if name in trainer_config
    }


def worker_start(
    offload: object, trainer_config: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Return the start method of workers in ``multiprocessing``; None for its default.

    If the recipe sets a method, it is used. Otherwise workers are spawned if the optimizer is
    offloaded. Forked workers would keep the memory that the parent had at the fork, and the first
    step rewrites all states of the optimizer, so each page of them would exist twice. Workers of
    ``forkserver`` do not notice that the training process was killed, so it is not used.
    """
    return trainer_config.get(CONTEXT) or ("spawn" if offload is True else None)


def default_workers(processes: int, images: int, side: int) -> int:
    """Return how many workers each process gets by default; 0 for none."""
    workers = min(count_cores() // processes - 1, MAX_WORKERS)
    return workers_that_fit(max(workers, 0), processes, images, side)


def workers_that_fit(workers: int, processes: int, images: int, side: int = 1120) -> int:
    """Return how many of ``workers`` fit, with their batches, into half of the shared memory that
    is free now.

    The other half is for NCCL and for evaluation, whose workers start while those of training still
    have batches there.
    """
    if not os.path.isdir(SHARED_MEMORY):  # not Linux
        return workers
    free = shutil.disk_usage(SHARED_MEMORY).free
    batch = images * side * side * BYTES_PER_PIXEL
    # Each worker decodes one more batch while its prefetched ones wait.
    needed = batch * (BATCHES_AHEAD + 1) * processes
    return min(workers, free // 2 // needed) if needed else workers
