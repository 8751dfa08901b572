"""Keeps the CPU from running far ahead of the GPU, for the memory that this takes under ZeRO-3.

A gathered layer is released when the CPU has queued its work, but its memory can be used again only
when the GPU has done it. A CPU that is twenty layers ahead has twenty gathered layers in memory;
where they do not fit, torch has to wait for the GPU before it can allocate. LoRA on two H200s, one
image and 6,000 ids each, reserved 24 GiB with it and 32 without, at nearly the same speed
(docs/benchmarks/README.md).
"""

from collections import deque

import torch
from torch import nn

from ..activation_checkpointing import checkpointed_layers


def limit_run_ahead(model: nn.Module, layers: int) -> None:
    """Have the CPU wait, forward and backward, until the GPU is at most so many layers behind.

    Does nothing on a CPU. Call it after ``deepspeed.initialize`` or before.
    """
    if not torch.cuda.is_available():
        return
    reached: deque[torch.cuda.Event] = deque()

    def wait(*_) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.Event()
        event.record()
        reached.append(event)
        if len(reached) > layers:
            reached.popleft().synchronize()

    def wait_in_backward_too(_layer, _inputs, output) -> None:
        wait()
        if output.requires_grad:
            output.register_hook(wait)  # returns nothing: the gradient stays as it is

    for layer in checkpointed_layers(model):
        layer.register_forward_hook(wait_in_backward_too)
