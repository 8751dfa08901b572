"""Count the frozen elements that ZeRO-3 has gathered at a time in a backward pass that recomputes.

One process on a CPU; expected is at most one block's.
"""

import importlib
import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH = 8, 64


class Block(nn.Module):
    """A frozen layer with a small trained one beside it, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.frozen(x)) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, use_reentrant: bool | None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


def measure(use_reentrant: bool | None) -> tuple[int, int]:
    """Return the largest number of gathered elements, and the number of one block."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }
    model = Model(use_reentrant)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained), config=config
    )
    frozen = [p for p in model.parameters() if not p.requires_grad]
    peak = 0

    def look(*_):
        nonlocal peak
        gathered = [p.ds_numel for p in frozen if p.ds_status == ZeroParamStatus.AVAILABLE]
        peak = max(peak, sum(gathered))

    for block in model.blocks:
        block.up.register_full_backward_hook(look)
    for _ in range(3):  # the trace of parameters is complete after the first step
        peak = 0
        engine.backward(engine(torch.randn(2, WIDTH, requires_grad=True)))
        engine.step()
    return peak, sum(p.ds_numel for p in frozen) // LAYERS


if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    # DeepSpeed would compile collectives for a CPU first, for a minute; one process needs none.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    print("DeepSpeed", deepspeed.__version__, "torch", torch.__version__)
    wrong = 0
    for name, how in {"none": None, "non-reentrant": False, "reentrant": True}.items():
        peak, block = measure(how)
        wrong += peak > block
        print(f"checkpoints {name}: {peak:,} frozen elements gathered; a block has {block:,}")
    print(f"{wrong} of 3 kinds of checkpoints gather more than one block")
    sys.exit(wrong > 0)
