"""Where queries may look: masks for whole rows, and for ids that generation draws after them."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from .attention import PackedSamples, group_samples
from .cached_rows import cached_length, is_static, room_of
from .keywords import CACHE, MASK_PARAMETERS, WANTS_CACHE_POSITION

# Shapes: B rows, R length of the grown rows, D width, N new ids, K keys: as many as the cache has
# room for if it is static, as many as it holds if not.


def causal_mask(
    config, embeds_BRD, attention_mask, packed_position_ids, cache, past_length, has_padding
) -> Tensor | PackedSamples | None:
    """The mask that the configured attention implementation takes; ``None`` where it needs none."""
    if past_length == 0:
        cache = None  # is empty: the rows see themselves alone
    if config._attn_implementation == "sdpa" and cache is None:
        # The others get what transformers makes: eager a mask over whole rows, like its scores.
        if packed_position_ids is not None:
            return group_samples(packed_position_ids)
        is_2d = attention_mask is not None and attention_mask.ndim == 2
        if is_2d and (not has_padding or _is_padded_on_the_right_only(attention_mask)):
            attention_mask = None  # no token comes after padding, and causal is what is left
    arguments = {
        "config": config,
        "attention_mask": attention_mask,
        CACHE: cache,
        # Not rows.position_ids: transformers takes a repeated position for the start of a sample.
        "position_ids": packed_position_ids,
    }
    # transformers 4.57 spells it input_embeds, and wants to be told where the queries stand.
    spelled = "inputs_embeds" if "inputs_embeds" in MASK_PARAMETERS else "input_embeds"
    arguments[spelled] = embeds_BRD
    if WANTS_CACHE_POSITION:
        arguments["cache_position"] = torch.arange(
            past_length, past_length + embeds_BRD.shape[1], device=embeds_BRD.device
        )
    mask: Any = create_causal_mask(**arguments)  # flex attention's is a BlockMask
    return mask


def mask_of_drawn(config, embeds_BND, padding_mask, cache, past_length) -> Any:
    """As :func:`causal_mask`, for ids drawn after ``past_length`` positions of a cache.

    ``padding_mask`` ``(B, K)``; ``None`` without padding.
    """
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        has_padding = padding_mask is not None
        return causal_mask(config, embeds_BND, padding_mask, None, cache, past_length, has_padding)
    num_new = embeds_BND.shape[1]
    room = room_of(cache)
    num_keys = room or past_length + num_new
    # With a static cache there is a mask in every step, for all are one graph.
    mask = _visible_to_drawn(
        padding_mask, num_keys, past_length, num_new, embeds_BND.device, always=bool(room)
    )
    if mask is None or implementation == "sdpa":
        return mask
    return embeds_BND.new_zeros(()).masked_fill(~mask, torch.finfo(embeds_BND.dtype).min)


def _is_padded_on_the_right_only(attention_mask: Tensor) -> bool:
    """Whether no row of a 2D mask has a token after padding."""
    if torch.compiler.is_compiling():
        return False  # a graph cannot depend on values
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


def _visible_to_drawn(
    padding_mask: Tensor | None, num_keys: int, past_length: int, num_new: int, device, always: bool
) -> Tensor | None:
    """True where a new id may look, ``(B or 1, 1, N, K)``; ``None`` if that is everywhere, unless
    there is to be a mask ``always``."""
    mask = None
    if always or num_new > 1:
        columns = torch.arange(num_keys, device=device)
        last = past_length + torch.arange(num_new, device=device)[:, None] if num_new > 1 else None
        mask = columns <= (past_length if last is None else last)
        mask = mask.view(1, 1, num_new, num_keys)
    if padding_mask is not None:
        visible = padding_mask.bool()[:, None, None]
        mask = visible.expand(-1, -1, num_new, -1) if mask is None else mask & visible
    return mask
