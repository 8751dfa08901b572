"""Next-token cross-entropy over supervised positions. Knows nothing of this model."""

from collections.abc import Callable, Collection
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Shapes: B batch, L length, K kept positions of a row, R length of rows with their images grown, D
# width, V vocabulary, S supervised positions of the whole batch.

IGNORE_INDEX = -100


def next_token_loss(
    logits_BLV: Tensor, labels_BL: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy in fp32 of each position's logits against the label that follows it.

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
    """:func:`next_token_loss` of ``project(hidden_BLD)``, whose logits exist for ``chunk_size``
    supervised positions at a time, in forward and again (recomputed) in backward."""

    def chunk_loss(hidden_SD: Tensor, targets_S: Tensor) -> Tensor:
        return F.cross_entropy(project(hidden_SD).float(), targets_S, reduction="sum")

    rows, targets = supervised_positions(labels_BL.to(hidden_BLD.device))
    hidden_chunks = hidden_BLD[rows].split(chunk_size)
    total: Any = 0.0  # a batch without labels is one empty chunk: its loss is 0 and has a graph
    for hidden, target in zip(hidden_chunks, targets.split(chunk_size), strict=True):
        total = total + checkpoint(chunk_loss, hidden, target, use_reentrant=False)
    return _average(total, targets, num_items_in_batch)


def supervised_positions(labels_BL: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """``((row, position), labels)``, ``(S,)`` int64 each, of what predicts a supervised label."""
    # As long as the rows: a graph with ``labels_BL[:, 1:]`` alone would not run on rows of 2 ids.
    following = F.pad(labels_BL, (0, 1), value=IGNORE_INDEX)[:, 1:]
    batch, position = (following != IGNORE_INDEX).nonzero(as_tuple=True)
    return (batch, position), following[batch, position]


class KeptColumns(NamedTuple):
    """The positions that ``logits_to_keep`` names."""

    columns: slice | Tensor | None  # in every row; all
    length: int | None = None  # of the rows that a mask was made for

    @classmethod
    def of(cls, logits_to_keep: int | Tensor) -> "KeptColumns":
        """Raises ``ValueError`` for a number below 0 or a tensor that is not of all rows."""
        if not isinstance(logits_to_keep, Tensor):
            if logits_to_keep < 0:
                raise ValueError(f"logits_to_keep is {logits_to_keep}; expected 0 (all) or more")
            return cls(slice(-logits_to_keep, None) if logits_to_keep else None)
        if logits_to_keep.ndim != 1:
            raise ValueError(
                f"logits_to_keep is a tensor of {logits_to_keep.ndim} dimensions; expected a plain "
                "number, positions (K,), or a mask (L,), the same for all rows"
            )
        if logits_to_keep.dtype != torch.bool:
            return cls(logits_to_keep)
        return cls(logits_to_keep.nonzero().flatten(), len(logits_to_keep))

    def take(self, values_BR: Tensor) -> Tensor:
        """Of ``(B, R)`` or ``(B, R, D)`` the kept positions."""
        return values_BR if self.columns is None else values_BR[:, self.columns]

    def are_cut(self, labels: Tensor | None, given: Tensor | None) -> bool:
        """Whether ``labels`` are those of kept positions, not of all of the rows ``given``."""
        if self.columns is None or labels is None or given is None:
            return False
        if min(labels.ndim, given.ndim) < 2 or labels.shape[1] == given.shape[1]:
            return False
        length, kept = given.shape[1], self.take(given).shape[1]
        if labels.shape[1] != kept:
            raise ValueError(
                f"labels have {labels.shape[1]} positions and the rows {length}, of which "
                f"logits_to_keep keeps {kept}: give labels for all positions or for those"
            )
        return True

    def shifted_labels(self, labels_BK: Tensor, length: int) -> Tensor:
        """``(B, L)``: at each kept position the label of the next kept one, elsewhere -100."""
        kept = (
            self.columns.to(labels_BK.device) if isinstance(self.columns, Tensor) else self.columns
        )
        columns = torch.arange(length, device=labels_BK.device)[kept]
        everywhere = labels_BK.new_full((labels_BK.shape[0], length), IGNORE_INDEX)
        everywhere[:, columns[:-1]] = labels_BK[:, 1:]
        return everywhere

    def check(self, given: Tensor | None, grown_length: int, image_ids: Collection[int]) -> None:
        """Raise ``ValueError`` unless the kept positions of the rows as given are those of the rows
        as grown; ``image_ids`` are those that none of them may have where rows grew."""
        if self.columns is None or given is None:
            return
        length = given.shape[1]
        grows = f"rows of {length} ids take {grown_length} positions here"
        cure = "give grown rows, as this model's processor makes them"
        if self.length not in (None, grown_length):
            cure = "" if length == grown_length else f"{cure}, and "
            raise ValueError(
                f"logits_to_keep is a mask of {self.length} positions, but {grows}: {cure}give one "
                "entry for each position"
            )
        if not image_ids or length == grown_length:
            return
        kept = self.take(given)
        ids = torch.tensor([*image_ids], device=kept.device)
        if not isinstance(self.columns, slice) or bool(torch.isin(kept, ids).any()):
            raise ValueError(
                f"labels were cut to {kept.shape[1]} positions, among which there are images, but "
                f"{grows}: {cure}"
            )


def _average(total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    if num_items_in_batch is None:
        num_items_in_batch = targets.numel()
    if isinstance(num_items_in_batch, Tensor):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def with_loss(layer: nn.Linear) -> nn.Linear:
    """Let an output projection compute the loss, too, without keeping its logits.

    In its own forward, because a sharded weight is gathered for that: once, whatever the number of
    chunks. No subclass does it: quantizers and exporters know ``nn.Linear`` by its class.
    """
    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]
    return layer


def computes_loss(layer: nn.Module) -> bool:
    """Whether it is as :func:`with_loss` left it; also behind a hook of accelerate's."""
    method = layer.__dict__.get("_old_forward", layer.__dict__.get("forward"))
    return getattr(method, "__func__", None) is forward


def forward(
    layer: nn.Linear,
    hidden_BLD: Tensor,
    labels_BL: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Logits ``(..., V)``; with labels the :func:`chunked_next_token_loss` instead."""
    # A pickled method is found again by its name: nn.Linear's own then.
    project = partial(type(layer).forward, layer)
    if labels_BL is None:
        return project(hidden_BLD)
    return chunked_next_token_loss(project, hidden_BLD, labels_BL, num_items_in_batch, chunk_size)
