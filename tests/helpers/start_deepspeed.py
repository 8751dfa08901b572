"""Starts DeepSpeed in a worker, and mends what goes wrong with it on a CPU."""

import torch

from glm4v_patched.engine.deepspeed.internals import nothing_compiled
from glm4v_patched.engine.deepspeed.zero3 import wait_for_every_gather

# ZeRO-3 at its harshest: every parameter is sharded, and gathered only while it is used.
NOTHING_STAYS_GATHERED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def start_deepspeed() -> None:
    """``deepspeed.init_distributed``; on the CPU nothing is compiled, and loading is correct."""
    import deepspeed

    with nothing_compiled():
        deepspeed.init_distributed(verbose=False)
    if not torch.cuda.is_available():
        wait_for_every_gather()
