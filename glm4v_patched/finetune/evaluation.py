"""The loss of rows that are not learned, while training goes on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ..remote.loss import IGNORE_INDEX


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    rows: Sequence,
    collator: Callable[[list], Mapping[str, torch.Tensor]],
    batch_size: int,
    device: torch.device,
    loss_of: Callable[[dict[str, Any]], torch.Tensor],
    workers: int = 0,
) -> tuple[float, int]:
    """The mean loss of all supervised tokens of ``rows``, and their number; the same on all
    processes, of which each computes its share.

    Logits are not built as a whole (the config's ``skip_logits``). The model is in eval mode
    meanwhile, and no random number is drawn.

    Args:
        model: As it is trained: DeepSpeed's engine, where there is one.
        loss_of: The sum of the losses of all supervised tokens of a batch.
        workers: Processes that read pictures.
    """
    share, weights = _share(len(rows), batch_size)
    loader: DataLoader = DataLoader(
        rows,  # type: ignore[arg-type]  # a sequence, which has what is asked of a Dataset
        batch_sampler=share,
        collate_fn=collator,
        num_workers=workers,
        generator=torch.Generator(),  # else it draws a seed from everybody's
    )
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        # Compiled layers would be compiled anew without gradients.
        with torch.compiler.set_stance("force_eager"):
            for batch, weight in zip(loader, weights, strict=True):
                tokens = (batch["labels"][:, 1:] != IGNORE_INDEX).sum().to(device)
                loss = loss_of(dict(batch))
                totals += weight * torch.stack([loss.double(), tokens.double()])
    finally:
        model.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(totals)
    total, number = totals.tolist()
    return total / max(number, 1), int(number)


def _share(rows: int, batch_size: int) -> tuple[list[list[int]], list[int]]:
    """This process's batches of row numbers, and 1 for each that counts.

    All have as many batches, because they gather weights together: where one has none left, it
    computes its first, or the very first, again.
    """
    rank, processes = 0, 1
    if dist.is_initialized():
        rank, processes = dist.get_rank(), dist.get_world_size()
    numbers = list(range(rows))
    batches = [numbers[start : start + batch_size] for start in range(0, rows, batch_size)]
    mine = batches[rank::processes]
    missing = -(-len(batches) // processes) - len(mine)
    return mine + batches[:1] * missing, [1] * len(mine) + [0] * missing
