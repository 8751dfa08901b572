"""Attention of vision tower and language model, by an implementation of transformers' registry.

With sdpa, the samples of packed sequences are gathered into batches (:class:`PackedSamples`), so
that no sequence needs a block-diagonal mask.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# A name's suffix lists the tensor's dimensions: key_BGKC is (B, G, K, C).
# Shapes: B batch, Q query length, K key length, H query heads, G key-value heads, C head channels;
# and for packed sequences: R sequence length, N samples of a group, M length of the group's longest
# sample, X query heads or key-value heads.


class PackedSamples(NamedTuple):
    """Indices that gather the samples of packed sequences into batches, and scatter them back.

    Samples of similar length form a group, which attends as one batch. Repetitions of a sample's
    last token pad it on the right. Under a causal mask no token attends to this padding. At most
    half of a group is padding, so memory is proportional to the number of tokens.

    Attributes:
        group_indices: For each group ``(N, M)`` int64, indices into the flattened ``B * R`` tokens.
        inverse_indices: ``(B * R,)`` int64, for each token its index in the concatenated,
            flattened groups.
    """

    group_indices: tuple[Tensor, ...]
    inverse_indices: Tensor


def group_samples(position_ids_BR: Tensor) -> PackedSamples | None:
    """Group the samples of packed sequences by length.

    Args:
        position_ids_BR: 0 where a sample starts. They are copied to the host, which is a device
            sync.

    Returns:
        The groups; ``None`` if every sequence is one sample.
    """
    batch_size, length = position_ids_BR.shape
    starts = (position_ids_BR.flatten() == 0).cpu().nonzero().flatten()
    if len(starts) == batch_size:
        return None
    lengths = starts.diff(append=starts.new_tensor([batch_size * length]))
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts[order]
    groups, inverse = [], starts.new_empty(batch_size * length)
    num_slots = 0  # the size of all groups so far, with their padding
    while len(lengths):
        # A group has the longest remaining sample, and as many of the next ones as leave at most
        # half of the group to padding.
        padded_sizes = lengths[0] * torch.ones_like(lengths).cumsum(0)
        group_size = int((padded_sizes <= 2 * lengths.cumsum(0)).sum())
        lengths_N1, starts_N1 = lengths[:group_size, None], starts[:group_size, None]
        columns_M = torch.arange(int(lengths[0]), device="cpu")
        group_NM = starts_N1 + columns_M.minimum(lengths_N1 - 1)
        is_token_NM = columns_M < lengths_N1
        inverse[group_NM[is_token_NM]] = num_slots + is_token_NM.flatten().nonzero().flatten()
        num_slots += group_NM.numel()
        groups.append(group_NM.to(position_ids_BR.device, non_blocking=True))
        lengths, starts = lengths[group_size:], starts[group_size:]
    return PackedSamples(tuple(groups), inverse.to(position_ids_BR.device, non_blocking=True))


def attend(
    module: nn.Module,
    query_BHQC: Tensor,
    key_BGKC: Tensor,
    value_BGKC: Tensor,
    attention_mask: Tensor | PackedSamples | None,
    implementation: str,
    *,
    attention_collector: list[Tensor] | None = None,
    **kwargs,
) -> Tensor:
    """Compute attention by the named implementation (eager, sdpa, flex, flash, ...).

    Args:
        module: The calling layer. Implementations read its ``is_causal`` and
            ``num_key_value_groups`` (query heads per key-value head).
        attention_mask: The mask that transformers makes for this implementation; for sdpa also
            :class:`PackedSamples`.
        attention_collector: List to which the attention weights ``(B, H, Q, K)`` are appended. Only
            eager attention computes them.

    Returns:
        ``(B, Q, H * C)``.
    """
    if isinstance(attention_mask, PackedSamples):
        return _attend_within_samples(
            module, query_BHQC, key_BGKC, value_BGKC, attention_mask, implementation, **kwargs
        )
    if implementation == "sdpa" and _is_decode_step(module, query_BHQC, key_BGKC, attention_mask):
        # With enable_gqa, the kernel reads each key once for all query heads that share it.
        out_BH1C = F.scaled_dot_product_attention(
            query_BHQC, key_BGKC, value_BGKC, attn_mask=attention_mask, enable_gqa=True
        )
        return out_BH1C.transpose(1, 2).flatten(2)
    function = (
        eager_attention if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    )
    scaling = query_BHQC.shape[-1] ** -0.5
    out_BQHC, weights_BHQK = function(
        module,
        query_BHQC,
        key_BGKC,
        value_BGKC,
        attention_mask,
        scaling=scaling,
        dropout=0.0,
        **kwargs,
    )
    if attention_collector is not None:
        attention_collector.append(weights_BHQK)
    return out_BQHC.flatten(2)


def _attend_within_samples(
    module: nn.Module,
    query_BHRC: Tensor,
    key_BGRC: Tensor,
    value_BGRC: Tensor,
    packed: PackedSamples,
    implementation: str,
    **kwargs,
) -> Tensor:
    """Attend within each group of samples, and scatter the outputs back to their sequences."""

    def gather(tokens_BXRC: Tensor, group_NM: Tensor) -> Tensor:
        tokens = tokens_BXRC.transpose(1, 2).flatten(0, 1)
        gathered = tokens.index_select(0, group_NM.flatten()).unflatten(0, group_NM.shape)
        return gathered.transpose(1, 2)

    outputs = []
    for group_NM in packed.group_indices:
        query, key, value = (gather(x, group_NM) for x in (query_BHRC, key_BGRC, value_BGRC))
        out = attend(module, query, key, value, None, implementation, **kwargs)
        outputs.append(out.flatten(0, 1))
    out = torch.cat(outputs).index_select(0, packed.inverse_indices)
    return out.unflatten(0, (query_BHRC.shape[0], -1))


def eager_attention(
    module: nn.Module,
    query_BHQC: Tensor,
    key_BGKC: Tensor,
    value_BGKC: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Compute attention in plain torch, with the softmax in fp32.

    Returns:
        The output ``(B, Q, H, C)`` and the attention weights ``(B, H, Q, K)``.
    """
    repeats = cast(int, module.num_key_value_groups)
    key_BHKC = key_BGKC.repeat_interleave(repeats, dim=1)
    value_BHKC = value_BGKC.repeat_interleave(repeats, dim=1)
    scores_BHQK = query_BHQC @ key_BHKC.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores_BHQK = scores_BHQK + attention_mask
    weights_BHQK = torch.softmax(scores_BHQK, dim=-1, dtype=torch.float32).to(query_BHQC.dtype)
    return (weights_BHQK @ value_BHKC).transpose(1, 2), weights_BHQK


def _is_decode_step(module, query_BHQC: Tensor, key_BGKC: Tensor, mask: Tensor | None) -> bool:
    """Return whether a causal layer has one query and shares each key among several query heads.

    A mask, if there is one, must be boolean and the same for all heads.
    """
    has_one_query = query_BHQC.shape[2] == 1 < key_BGKC.shape[2] and module.is_causal
    has_groups = query_BHQC.shape[1] != key_BGKC.shape[1]
    is_shared_mask = mask is None or (
        mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1
    )
    return has_one_query and has_groups and is_shared_mask
