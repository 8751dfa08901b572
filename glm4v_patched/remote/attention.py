"""One way into transformers' attention registry, shared by vision tower and language model.

Rows that hold several samples are attended to sample by sample (:class:`PackedSamples`), so that no
mask over the whole row is ever made.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Shapes: B batch, Q query length, K key length, H query heads, G key-value heads, C head channels;
# packed: R length of the rows, N samples of one group, M length of the longest of them, X heads of
# either kind.


class PackedSamples(NamedTuple):
    """Where the samples of packed rows lie. Tokens are counted through all rows, ``0 .. B * R``.

    Samples are gathered in groups of similar lengths, filled on the right with their own last
    token, which under a causal mask no real query sees. At most half of what a group holds is
    filling, so attention takes memory in proportion to the rows however unlike the samples are.
    """

    groups: tuple[Tensor, ...]  # (N, M) int64 each, the token in every place
    places: Tensor  # (B * R,) int64, the place of every token, counted through all groups


def group_samples(position_ids_BR: Tensor) -> PackedSamples | None:
    """Group the samples of rows by length; ``None`` where every row is one sample. Positions, 0
    where a row or a sample starts, are read on the host: the only transfer from the device."""
    rows, length = position_ids_BR.shape
    starts = (position_ids_BR.flatten() == 0).cpu().nonzero().flatten()
    if len(starts) == rows:
        return None
    lengths = starts.diff(append=starts.new_tensor([rows * length]))
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts[order]
    groups, places, taken = [], starts.new_empty(rows * length), 0
    while len(lengths):
        # The longest, and as many of the next as leave no more filling than tokens.
        num_places = lengths[0] * torch.ones_like(lengths).cumsum(0)
        size = int((num_places <= 2 * lengths.cumsum(0)).sum())
        of_group_N1, starts_N1 = lengths[:size, None], starts[:size, None]
        columns_M = torch.arange(int(lengths[0]), device="cpu")
        group_NM = starts_N1 + columns_M.minimum(of_group_N1 - 1)
        is_token_NM = columns_M < of_group_N1
        places[group_NM[is_token_NM]] = taken + is_token_NM.flatten().nonzero().flatten()
        taken += group_NM.numel()
        groups.append(group_NM.to(position_ids_BR.device, non_blocking=True))
        lengths, starts = lengths[size:], starts[size:]
    return PackedSamples(tuple(groups), places.to(position_ids_BR.device, non_blocking=True))


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
    """``(B, Q, H * C)`` by the named implementation (eager, sdpa, flex, flash, ...).

    Args:
        module: Carries ``is_causal`` and ``num_key_value_groups`` (query heads per key-value
            head), which the implementations read.
        attention_mask: What transformers makes for that implementation; or packed samples, for one
            that is causal without a mask (sdpa).
        attention_collector: Takes the weights ``(B, H, Q, K)``, which only eager attention makes.
    """
    if isinstance(attention_mask, PackedSamples):
        return _attend_within_samples(
            module, query_BHQC, key_BGKC, value_BGKC, attention_mask, implementation, **kwargs
        )
    if implementation == "sdpa" and _is_drawn(module, query_BHQC, key_BGKC, attention_mask):
        # torch's fused kernel, told of the groups, reads each key once for all heads of its group.
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
    def gather(tokens_BXRC: Tensor, group_NM: Tensor) -> Tensor:
        tokens = tokens_BXRC.transpose(1, 2).flatten(0, 1)
        gathered = tokens.index_select(0, group_NM.flatten()).unflatten(0, group_NM.shape)
        return gathered.transpose(1, 2)

    outputs = []
    for group_NM in packed.groups:
        query, key, value = (gather(x, group_NM) for x in (query_BHRC, key_BGRC, value_BGRC))
        out = attend(module, query, key, value, None, implementation, **kwargs)
        outputs.append(out.flatten(0, 1))
    out = torch.cat(outputs).index_select(0, packed.places)
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
    """Attention spelled out, with the softmax in fp32. Returns the output and the weights."""
    groups = cast(int, module.num_key_value_groups)
    key_BHKC = key_BGKC.repeat_interleave(groups, dim=1)
    value_BHKC = value_BGKC.repeat_interleave(groups, dim=1)
    scores_BHQK = query_BHQC @ key_BHKC.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores_BHQK = scores_BHQK + attention_mask
    weights_BHQK = torch.softmax(scores_BHQK, dim=-1, dtype=torch.float32).to(query_BHQC.dtype)
    return (weights_BHQK @ value_BHKC).transpose(1, 2), weights_BHQK


def _is_drawn(module, query_BHQC: Tensor, key_BGKC: Tensor, mask: Tensor | None) -> bool:
    """Whether a causal layer has one query for a cache, and heads that share keys."""
    is_one = query_BHQC.shape[2] == 1 < key_BGKC.shape[2] and module.is_causal
    has_groups = query_BHQC.shape[1] != key_BGKC.shape[1]
    is_for_all_heads = mask is None or (
        mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1
    )
    return is_one and has_groups and is_for_all_heads
