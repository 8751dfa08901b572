"""Next-token cross-entropy over supervised tokens, for any model."""

from collections.abc import Callable, Collection
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .sharding import greatest_over_processes

# A name's suffix lists the tensor's dimensions: hidden_BLD is (B, L, D).
# Shapes: B sequences, L length of input_ids, K columns that logits_to_keep selects, R expanded
# length, D hidden size, V vocabulary, S supervised tokens of the whole batch.

IGNORE_INDEX = -100  # the label of unsupervised tokens


def next_token_loss(
    logits_BLV: Tensor, labels_BL: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Compute the cross-entropy of each token's logits and the next token's label, in fp32.

    Args:
        logits_BLV: Any floating dtype.
        labels_BL: int64 on any device, unshifted.
        num_items_in_batch: The divisor of the summed loss: the number of supervised tokens in all
            micro-batches and processes. ``None``: the number in this batch.

    Returns:
        fp32 scalar. If no token is supervised it is 0, and backward works.
    """
    indices, targets = supervised_positions(labels_BL.to(logits_BLV.device))
    total = F.cross_entropy(logits_BLV[indices].float(), targets, reduction="sum")
    return _average(total, targets, num_items_in_batch)


def chunked_next_token_loss(
    project: Callable[[Tensor], Tensor],
    hidden_BLD: Tensor,
    labels_BL: Tensor,
    num_items_in_batch: Tensor | int | None,
    chunk_size: int,
    is_sharded: bool = False,
) -> Tensor:
    """Compute :func:`next_token_loss` of ``project(hidden_BLD)`` without storing all logits.

    Logits exist for ``chunk_size`` supervised tokens at a time, and backward recomputes them.

    Args:
        is_sharded: Whether each call of ``project`` gathers weights, so that all processes have to
            compute equally many chunks.
    """

    def chunk_loss(hidden_SD: Tensor, targets_S: Tensor) -> Tensor:
        return F.cross_entropy(project(hidden_SD).float(), targets_S, reduction="sum")

    indices, targets = supervised_positions(labels_BL.to(hidden_BLD.device))
    # Without supervised tokens there is one empty chunk, so that backward works, too.
    hidden_chunks = [*hidden_BLD[indices].split(chunk_size)]
    target_chunks = [*targets.split(chunk_size)]
    if is_sharded:
        num_chunks = greatest_over_processes(len(hidden_chunks), targets.device)
        num_empty = num_chunks - len(hidden_chunks)
        hidden_chunks += [hidden_chunks[0][:0]] * num_empty
        target_chunks += [targets[:0]] * num_empty
    total: Any = 0.0
    for hidden, target in zip(hidden_chunks, target_chunks, strict=True):
        total = total + checkpoint(chunk_loss, hidden, target, use_reentrant=False)
    return _average(total, targets, num_items_in_batch)


def supervised_positions(labels_BL: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Find the tokens whose next token is supervised.

    Returns:
        ``((sequences, columns), labels of the next tokens)``, each ``(S,)`` int64.
    """
    # Pad before slicing, because a graph with ``labels_BL[:, 1:]`` fails on sequences of 2 ids.
    next_labels = F.pad(labels_BL, (0, 1), value=IGNORE_INDEX)[:, 1:]
    sequences, columns = (next_labels != IGNORE_INDEX).nonzero(as_tuple=True)
    return (sequences, columns), next_labels[sequences, columns]


class LogitsToKeep(NamedTuple):
    """The columns that the argument ``logits_to_keep`` selects, the same in every sequence.

    Attributes:
        columns: Slice or indices of the columns; ``None`` selects all.
        mask_length: Length of the mask if the argument was a boolean mask, else ``None``.
    """

    columns: slice | Tensor | None
    mask_length: int | None = None

    @classmethod
    def from_argument(cls, logits_to_keep: int | Tensor) -> "LogitsToKeep":
        """Read the argument: a number of last columns (0: all), indices, or a boolean mask.

        Raises:
            ValueError: The number is below 0 or the tensor has more than one dimension.
        """
        if not isinstance(logits_to_keep, Tensor):
            if logits_to_keep < 0:
                raise ValueError(f"logits_to_keep is {logits_to_keep}; expected 0 (all) or more")
            return cls(slice(-logits_to_keep, None) if logits_to_keep else None)
        if logits_to_keep.ndim != 1:
            raise ValueError(
                f"logits_to_keep is a tensor of {logits_to_keep.ndim} dimensions; expected a plain "
                "number, columns (K,), or a mask (L,), the same for all sequences"
            )
        if logits_to_keep.dtype != torch.bool:
            return cls(logits_to_keep)
        return cls(logits_to_keep.nonzero().flatten(), len(logits_to_keep))

    def select(self, values_BR: Tensor) -> Tensor:
        """Return the selected columns of ``(B, R)`` or ``(B, R, D)``."""
        return values_BR if self.columns is None else values_BR[:, self.columns]

    def labels_are_selected(self, labels: Tensor | None, inputs: Tensor | None) -> bool:
        """Return whether ``labels`` has only the selected columns, not all of ``inputs``.

        Raises:
            ValueError: ``labels`` has neither the selected columns nor all of ``inputs``.
        """
        if self.columns is None or labels is None or inputs is None:
            return False
        if min(labels.ndim, inputs.ndim) < 2 or labels.shape[1] == inputs.shape[1]:
            return False
        length, num_selected = inputs.shape[1], self.select(inputs).shape[1]
        if labels.shape[1] != num_selected:
            raise ValueError(
                f"labels have {labels.shape[1]} columns, but the sequences have {length} and "
                f"logits_to_keep selects {num_selected}: give labels for all columns or for the "
                "selected ones"
            )
        return True

    def shifted_labels(self, labels_BK: Tensor, length: int) -> Tensor:
        """Return shifted labels ``(B, L)``: each selected column has the label of the next one.

        The last selected column and all others have -100.
        """
        selection = self.columns
        if isinstance(selection, Tensor):
            selection = selection.to(labels_BK.device)
        columns = torch.arange(length, device=labels_BK.device)[selection]
        shifted = labels_BK.new_full((labels_BK.shape[0], length), IGNORE_INDEX)
        shifted[:, columns[:-1]] = labels_BK[:, 1:]
        return shifted

    def check_fits_expansion(
        self, inputs: Tensor | None, expanded_length: int, forbidden_ids: Collection[int]
    ) -> None:
        """Raise ``ValueError`` if the selection does not fit the expanded prompts.

        Args:
            inputs: ``input_ids`` or ``inputs_embeds``, unexpanded.
            expanded_length: Length of the prompts after expansion.
            forbidden_ids: Ids that no selected column of an unexpanded prompt may have.
        """
        if self.columns is None or inputs is None:
            return
        length = inputs.shape[1]
        problem = f"prompts of {length} ids expand to {expanded_length} tokens"
        cure = "give expanded prompts, as this model's processor makes them"
        if self.mask_length not in (None, expanded_length):
            cure = "" if length == expanded_length else f"{cure}, and "
            raise ValueError(
                f"logits_to_keep is a mask of {self.mask_length} columns, but {problem}: {cure}"
                "give one value for each token"
            )
        if not forbidden_ids or length == expanded_length:
            return
        # Only a slice of last columns without images selects the same tokens after expansion.
        selected = self.select(inputs)
        ids = torch.tensor([*forbidden_ids], device=selected.device)
        if not isinstance(self.columns, slice) or bool(torch.isin(selected, ids).any()):
            raise ValueError(
                f"labels were cut to {selected.shape[1]} columns, among which there are images, "
                f"but {problem}: {cure}"
            )


def _average(total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Divide the summed loss by ``num_items_in_batch``, by default the number of targets."""
    if num_items_in_batch is None:
        num_items_in_batch = targets.numel()
    if isinstance(num_items_in_batch, Tensor):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def fuse_cross_entropy(layer: nn.Linear) -> nn.Linear:
    """Replace the ``forward`` of an output projection by :func:`forward`, which takes labels.

    Because that function computes the chunked loss inside of the layer's ``forward``, a sharded
    weight is gathered once for all chunks. The layer's class stays ``nn.Linear``, which quantizers
    and exporters look for.
    """
    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]
    return layer


def has_fused_cross_entropy(layer: nn.Module) -> bool:
    """Return whether :func:`fuse_cross_entropy` changed the layer.

    accelerate may have wrapped ``forward`` since.
    """
    method = layer.__dict__.get("_old_forward", layer.__dict__.get("forward"))
    return getattr(method, "__func__", None) is forward


def forward(
    layer: nn.Linear,
    hidden_BLD: Tensor,
    labels_BL: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Compute logits ``(..., V)``, or with labels the :func:`chunked_next_token_loss`.

    This function has the name of the method that it replaces, because pickle restores methods by
    name: an unpickled layer has the ``forward`` of ``nn.Linear`` again.
    """
    project = partial(type(layer).forward, layer)
    if labels_BL is None:
        return project(hidden_BLD)
    return chunked_next_token_loss(project, hidden_BLD, labels_BL, num_items_in_batch, chunk_size)
