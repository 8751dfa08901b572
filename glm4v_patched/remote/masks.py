"""Where queries may look: masks for whole rows, and for ids that generation draws after them."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from .attention import PackedSamples, group_samples
from .cache_metadata import cached_length, is_static, room_of
from .image_layout import ExpandedBatch
from .keywords import CACHE_KEYWORD, MASK_PARAMETERS, WANTS_CACHE_POSITION

# Shapes: B rows, R length of the grown rows, D width, N new ids, K keys: as many as the cache has
# room for if it is static, as many as it holds if not.


def causal_mask(
    config, embeds_BRD: Tensor, rows: ExpandedBatch, cache: Cache | None, past_length: int
) -> Tensor | PackedSamples | None:
    """The mask that the configured attention implementation takes; ``None`` where it needs none."""
    mask, packed = rows.attention_mask, rows.packed_position_ids
    if past_length == 0:
        cache = None  # is empty: the rows see themselves alone
    if config._attn_implementation == "sdpa" and cache is None:
        # The others get what transformers makes: eager a mask over whole rows, like its scores.
        if packed is not None and not torch.compiler.is_exporting():
            return group_samples(packed)
        if mask is not None and mask.ndim == 2 and _hides_no_padding(mask, rows.has_padding):
            mask = None  # causal is what is left
    return _mask_of_transformers(config, embeds_BRD, mask, packed, cache, past_length)


def _mask_of_transformers(config, embeds, mask, packed_position_ids, cache, past_length) -> Any:
    # transformers 4.57 spells it input_embeds, and wants to be told where the queries stand.
    spelled = "inputs_embeds" if "inputs_embeds" in MASK_PARAMETERS else "input_embeds"
    arguments = {
        "config": config,
        "attention_mask": mask,
        CACHE_KEYWORD: cache,
        # Not rows.position_ids: transformers takes a repeated position for the start of a sample.
        "position_ids": packed_position_ids,
        spelled: embeds,
    }
    if WANTS_CACHE_POSITION:
        arguments["cache_position"] = torch.arange(
            past_length, past_length + embeds.shape[1], device=embeds.device
        )
    return create_causal_mask(**arguments)  # flex attention's is a BlockMask


def mask_of_drawn(config, embeds_BND, padding_mask, cache, past_length) -> Any:
    """As :func:`causal_mask`, for ids drawn after a cache; ``padding_mask`` is ``(B, K)``."""
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        return _mask_of_transformers(config, embeds_BND, padding_mask, None, cache, past_length)
    num_new, device, room = embeds_BND.shape[1], embeds_BND.device, room_of(cache)
    mask = None
    # With a static cache there is a mask in every step, for all are one graph.
    if room or num_new > 1:
        columns = torch.arange(room or past_length + num_new, device=device)
        last = past_length if num_new == 1 else past_length + columns[:num_new, None]
        mask = (columns <= last).view(1, 1, num_new, -1)
    if padding_mask is not None:
        visible = padding_mask.bool()[:, None, None]
        mask = visible.expand(-1, -1, num_new, -1) if mask is None else mask & visible
    if mask is None or implementation == "sdpa":
        return mask
    return embeds_BND.new_zeros(()).masked_fill(~mask, torch.finfo(embeds_BND.dtype).min)


def _hides_no_padding(attention_mask: Tensor, has_padding: bool) -> bool:
    """Whether no row of a 2D mask has a token after padding."""
    if not has_padding or torch.compiler.is_compiling():
        return not has_padding  # a graph cannot depend on values
    is_token = attention_mask.bool()
    # A transfer from the device, in the place of transformers' own for a mask of ones.
    return bool((is_token[:, 1:] <= is_token[:, :-1]).all())


def is_ready(cache, attention_mask: Tensor | None, implementation: str) -> bool:
    """Whether a cache is filled; what a static one holds is said by its mask."""
    if not isinstance(cache, Cache):
        return False
    if is_static(cache):
        has_mask = attention_mask is not None and attention_mask.ndim == 4
        return has_mask or implementation not in ("sdpa", "eager")
    return cached_length(cache) > 0
