"""Next-token cross-entropy over supervised positions. Knows nothing of this model."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Shapes: B batch, L length, D width, V vocabulary, S supervised positions of the whole batch.

IGNORE_INDEX = -100


def next_token_loss(
    logits_BLV: Tensor, labels_BL: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy of each position's logits against the label that follows it.

    Only supervised positions (label not -100) are copied to fp32, on the device of the logits;
    labels move there.

    Args:
        logits_BLV: Any floating dtype.
        labels_BL: int64, aligned with the logits (the shift happens here), any device.
        num_items_in_batch: Supervised tokens over all micro-batches and processes; the sum is
            divided by it. ``None``: by the supervised tokens of this batch.

    Returns:
        fp32 scalar; 0 with a graph when nothing is supervised.
    """
    rows, targets = supervised_positions(labels_BL.to(logits_BLV.device))
    total = F.cross_entropy(logits_BLV[rows].float(), targets, reduction="sum")
    return _average(total, targets, num_items_in_batch)


def chunked_next_token_loss(
    project: Callable[[Tensor], Tensor],
    hidden_BLD: Tensor,
    labels_BL: Tensor,
    num_items_in_batch: Tensor | int | None,
    chunk_size: int,
) -> Tensor:
    """:func:`next_token_loss` of ``project(hidden_BLD)``, without ever holding those logits.

    Logits exist for ``chunk_size`` supervised positions at a time, in forward and again
    (recomputed) in backward.
    """

    def chunk_loss(hidden_SD: Tensor, targets_S: Tensor) -> Tensor:
        return F.cross_entropy(project(hidden_SD).float(), targets_S, reduction="sum")

    rows, targets = supervised_positions(labels_BL.to(hidden_BLD.device))
    hidden_chunks = hidden_BLD[rows].split(chunk_size)
    total: Any = 0.0  # a batch without labels is one empty chunk: its loss is 0 and has a graph
    for hidden, target in zip(hidden_chunks, targets.split(chunk_size), strict=True):
        total = total + checkpoint(chunk_loss, hidden, target, use_reentrant=False)
    return _average(total, targets, num_items_in_batch)


def supervised_positions(labels_BL: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Index of the S positions that predict a supervised label, and those labels.

    Returns:
        ``((batch index, position), labels)``, each ``(S,)`` int64, in row order.
    """
    following = labels_BL[:, 1:]
    batch, position = (following != IGNORE_INDEX).nonzero(as_tuple=True)
    return (batch, position), following[batch, position]


def _average(total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    if num_items_in_batch is None:
        num_items_in_batch = targets.numel()
    if isinstance(num_items_in_batch, Tensor):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


class OutputLayer(nn.Linear):
    """The output projection, which can also compute the loss without keeping its logits.

    The loss is computed here and not outside because a sharded weight is gathered for the forward
    of the module that owns it: once, whatever the number of chunks.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "OutputLayer":
        """An OutputLayer around the same parameters."""
        layer = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        layer.weight = linear.weight
        return layer

    def forward(
        self,
        hidden_BLD: Tensor,
        labels_BL: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        chunk_size: int = 1024,
    ) -> Tensor:
        """Logits ``(..., V)``; with labels the :func:`chunked_next_token_loss` instead."""
        if labels_BL is None:
            return super().forward(hidden_BLD)
        return chunked_next_token_loss(
            super().forward, hidden_BLD, labels_BL, num_items_in_batch, chunk_size
        )
