"""Causal attention masks, for prefills (passes over prompts) and for decode steps."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from .attention import PackedSamples, group_samples
from .cache_metadata import cached_length, is_static, static_capacity
from .image_checks import is_exporting
from .image_layout import ExpandedBatch
from .keywords import CACHE_KEYWORD, MASK_PARAMETERS, NEEDS_CACHE_POSITION

# A name's suffix lists the tensor's dimensions: embeds_BQD is (B, Q, D).
# Shapes: B sequences, R expanded length, D hidden size, Q new tokens, K keys (the capacity of a
# static cache, or the length of any other cache).


def causal_mask(
    config, embeds_BRD: Tensor, batch: ExpandedBatch, cache: Cache | None, past_length: int
) -> Tensor | PackedSamples | None:
    """Make the mask for the configured attention implementation.

    Returns:
        :class:`PackedSamples` for packed sequences with sdpa, else transformers' mask; ``None`` if
        the implementation needs no mask.
    """
    mask, packed = batch.attention_mask, batch.packed_position_ids
    if past_length == 0:
        cache = None  # there are no earlier keys to attend to
    if config._attn_implementation == "sdpa" and cache is None:
        # sdpa is causal without a mask (is_causal).
        if packed is not None and not is_exporting():
            return group_samples(packed)
        if mask is not None and mask.ndim == 2 and _is_right_padded(mask, batch.has_padding):
            mask = None  # causal attention hides padding on the right
    return _transformers_mask(config, embeds_BRD, mask, packed, cache, past_length)


def _transformers_mask(config, embeds, mask, packed_position_ids, cache, past_length) -> Any:
    """Make the mask with ``create_causal_mask`` of transformers."""
    # transformers 4.57 names the embeddings input_embeds, and needs cache_position.
    embeds_keyword = "inputs_embeds" if "inputs_embeds" in MASK_PARAMETERS else "input_embeds"
    arguments = {
        "config": config,
        "attention_mask": mask,
        CACHE_KEYWORD: cache,
        # Not the model's position ids, because transformers starts a new packed sample at each
        # repeated position id.
        "position_ids": packed_position_ids,
        embeds_keyword: embeds,
    }
    if NEEDS_CACHE_POSITION:
        arguments["cache_position"] = torch.arange(
            past_length, past_length + embeds.shape[1], device=embeds.device
        )
    return create_causal_mask(**arguments)  # a BlockMask for flex attention


def decode_mask(config, embeds_BQD, padding_mask, cache, past_length) -> Any:
    """Make the mask for ``Q`` generated tokens after a cache.

    Args:
        padding_mask: ``(B, K)``, 0 at padding; ``None`` if there is no padding.
    """
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        return _transformers_mask(config, embeds_BQD, padding_mask, None, cache, past_length)
    num_new, device, capacity = embeds_BQD.shape[1], embeds_BQD.device, static_capacity(cache)
    mask = None
    # With a static cache every step has a mask, so that one compiled graph serves all steps.
    if capacity or num_new > 1:
        columns = torch.arange(capacity or past_length + num_new, device=device)
        last_visible = past_length if num_new == 1 else past_length + columns[:num_new, None]
        mask = (columns <= last_visible).view(1, 1, num_new, -1)
    if padding_mask is not None:
        is_token = padding_mask.bool()[:, None, None]
        mask = is_token.expand(-1, -1, num_new, -1) if mask is None else mask & is_token
    if mask is None or implementation == "sdpa":
        return mask
    return embeds_BQD.new_zeros(()).masked_fill(~mask, torch.finfo(embeds_BQD.dtype).min)


def _is_right_padded(attention_mask: Tensor, has_padding: bool) -> bool:
    """Return whether a 2D mask has padding only at the ends of sequences, or none at all."""
    if not has_padding:
        return True
    if torch.compiler.is_compiling():
        return False  # unknown, because a graph cannot branch on the values of the mask
    is_token = attention_mask.bool()
    # This is a device sync. It replaces the one in create_causal_mask.
    return bool((is_token[:, 1:] <= is_token[:, :-1]).all())


def cache_allows_decode_step(cache, attention_mask: Tensor | None, implementation: str) -> bool:
    """Return whether a decode step can use this cache.

    A static cache needs a 4D ``attention_mask``, if the implementation is sdpa or eager. Any other
    cache must not be empty.
    """
    if not isinstance(cache, Cache):
        return False
    if is_static(cache):
        has_mask = attention_mask is not None and attention_mask.ndim == 4
        return has_mask or implementation not in ("sdpa", "eager")
    return cached_length(cache) > 0
