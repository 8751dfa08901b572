"""The norm of all gradients under ZeRO-3, without copying them.

DeepSpeed copies every gradient to fp64 before it takes the norm, in every step, clipped or not: for
all weights of the real model 56 GB written and read again on each of two GPUs. Here a GPU reads
each gradient once, where it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .internals import Replacements, zero3_optimizers


def take_norms_in_place(model: nn.Module, replacements: Replacements) -> None:
    """Have ZeRO-3 take norms of gradients without copies, from the first forward pass on.

    A GPU sums in fp32, in blocks; the norm is infinite from 1.8e19 on. A CPU, which adds one number
    after the other, sums in fp64. Gradients that are offloaded to the CPU are DeepSpeed's, as is
    every norm but the Euclidean.

    Raises:
        RuntimeError: out of that forward pass, if DeepSpeed has renamed what is replaced.
    """

    def once(*_: Any) -> None:
        hook.remove()
        replacements.apply(zero3_optimizers(model), "get_grad_norm_direct", _in_place)

    hook = model.register_forward_pre_hook(once)


def _in_place(norm: Callable) -> Callable:
    """``norm``, ZeRO-3's ``get_grad_norm_direct``, given one number in the place of gradients.

    A norm is its own norm, so all else that DeepSpeed computes (the sum over processes, what an
    infinite norm means) stays as it is. One number for all, because each one costs the CPU several
    launches. All gradients count on every process alike: this model is not split by tensor
    parallelism.
    """

    def norm_in_place(
        gradients: list[Tensor], parameters: list[nn.Parameter], norm_type: float = 2
    ) -> Tensor:
        if norm_type == 2:
            dtype = torch.float32 if gradients[0].is_cuda else torch.float64
            norms = torch._foreach_norm(gradients, 2, dtype=dtype)
            gradients, parameters = [torch.linalg.vector_norm(torch.stack(norms))], parameters[:1]
        total = norm(gradients, parameters, norm_type)
        # DeepSpeed writes -1 for one that is not finite, and before 0.19 squares it when it sums
        # up groups: the norm of such gradients would be small, and nothing would be clipped.
        return torch.where(total < 0, torch.inf, total)

    return norm_in_place
