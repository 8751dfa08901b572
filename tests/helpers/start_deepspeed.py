"""Starts DeepSpeed in a worker, and mends two things of it that go wrong on a CPU."""

import os
from pathlib import Path

import torch

from glm4v_patched.engine.deepspeed.gather import wait_for_every_gather

# ZeRO-3 at its harshest: every parameter is sharded, and gathered only while it is used.
NOTHING_STAYS_GATHERED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def start_deepspeed() -> None:
    """``deepspeed.init_distributed``; on the CPU, with correct loading and nothing left behind."""
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    if not torch.cuda.is_available():
        _unlink_shared_buffers()
        wait_for_every_gather()


def _unlink_shared_buffers() -> None:
    """Every run leaves 67 MB a process in shared memory otherwise, a killed one too.

    All processes have mapped them by now.
    """
    torch.distributed.barrier()
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    for buffer in Path("/dev/shm").glob(f"deepspeed_*_{address}_{port}_{os.environ['RANK']}"):
        buffer.unlink()
