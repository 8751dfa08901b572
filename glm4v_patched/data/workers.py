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
"""Values that torch requires if there are no workers. They replace the recipe's if no worker fits
into memory."""


def loader_options(
    trainer_config: Mapping[str, Any], processes: int, max_images: int, side: int = 1120
) -> dict[str, Any]:
    """Return the data-loading fields of ``TrainingArguments`` for one training process.

    A number of workers that the recipe sets is used. By default, each process gets one worker fewer
    than its share of the cores, at most 8, and at most :func:`workers_that_fit`. A process without
    workers decodes images itself. By default, workers are not persistent: otherwise the random
    numbers of later epochs would differ from those of runs without workers and of resumed runs.

    Args:
        trainer_config: The fields that the recipe sets.
        processes: Number of training processes on this machine.
        max_images: The largest number of images in a batch of one process.
        side: Side of an image, in pixels.
    """
    workers = trainer_config.get(NUM_WORKERS)
    if workers == 0:
        return {NUM_WORKERS: 0}
    if workers is None:
        workers = default_workers(processes, max_images, side)
    if workers:
        return {NUM_WORKERS: workers, PREFETCH: trainer_config.get(PREFETCH, BATCHES_AHEAD)}
    return {NUM_WORKERS: 0} | {
        name: value for name, value in WITHOUT_WORKERS.items() if name in trainer_config
    }


def start_method(
    offload: object, trainer_config: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Return the start method of workers in ``multiprocessing``; None for its default.

    A method that the recipe sets is used. Otherwise workers are spawned if the optimizer is
    offloaded. Forked workers would keep the pages that the parent had at the fork. The first step
    rewrites all optimizer states, so each of their pages would exist twice. ``forkserver`` is not
    used, because its workers do not notice that the training process was killed.

    Args:
        offload: True if the optimizer is offloaded. False and "auto" mean that it is not.
        trainer_config: The fields that the recipe sets.
    """
    return trainer_config.get(CONTEXT) or ("spawn" if offload is True else None)


def default_workers(processes: int, max_images: int, side: int) -> int:
    """Return how many workers each process gets by default; 0 for none."""
    workers = min(count_cores() // processes - 1, MAX_WORKERS)
    return workers_that_fit(max(workers, 0), processes, max_images, side)


def workers_that_fit(workers: int, processes: int, max_images: int, side: int = 1120) -> int:
    """Return how many of a process's ``workers`` may start, so that the batches of all processes
    fit into half of the shared memory that is free now.

    The other half is for NCCL and for evaluation. Workers of evaluation start while those of
    training still have batches in shared memory.
    """
    if not os.path.isdir(SHARED_MEMORY):  # not Linux
        return workers
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    batch_bytes = max_images * side * side * BYTES_PER_PIXEL
    # Each worker decodes one more batch while its prefetched ones wait.
    bytes_per_worker = batch_bytes * (BATCHES_AHEAD + 1)
    needed_bytes = bytes_per_worker * processes  # for one worker in each process
    return min(workers, free_bytes // 2 // needed_bytes) if needed_bytes else workers
