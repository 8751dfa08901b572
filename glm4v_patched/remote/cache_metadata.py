"""Metadata of a key-value cache: position ids and padding of the sequences in it.

An image takes more cache entries than position ids, so the position id of the next token cannot be
computed from the cache's length. This module records it with each prefill, a forward pass that
adds a prompt to the cache.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from .image_layout import ExpandedBatch

# A name's suffix lists the tensor's dimensions: last_B1 is (B, 1).
# Shapes: B sequences, L length of input_ids, R length of the expanded prompt.


class CacheMetadata(NamedTuple):
    """Metadata of one prefill of a cache.

    Attributes:
        text_start: Cache index, at least 1. All entries from there on are text, and their position
            ids increase by 1.
        length: Cache length up to which this metadata is valid.
        text_start_position: ``(B, 1)``, the position id at ``text_start``.
        key_fingerprint: ``(B, bytes)`` uint8, the bytes of one layer's keys just before
            ``text_start``. They identify a sequence after the cache's sequences were reordered,
            selected, repeated or copied. ``None`` if the keys were not readable.
    """

    text_start: int
    length: int
    text_start_position: Tensor
    key_fingerprint: Tensor | None


# The attribute that we add to a Cache: its list[CacheMetadata], the latest prefill last.
METADATA_ATTRIBUTE = "glm4v_metadata"


def cached_length(cache: Cache | None) -> int:
    """Return the number of a cache's entries. For a static cache this waits for the device."""
    length: Any = 0 if cache is None else cache.get_seq_length()
    # A static cache of transformers 5 returns its own counter, a tensor that changes later.
    return int(length) if isinstance(length, Tensor) else length


def is_static(cache: Cache | None) -> bool:
    """Return whether the cache has a fixed capacity; its length is then stored on the device."""
    return cache is not None and bool(cache.is_compileable)


def _num_filled(cache: Cache) -> int:
    """Return the number of a cache's entries, without waiting for the device."""
    if not is_static(cache):
        return cached_length(cache)
    return records[-1].length if (records := _get_metadata(cache)) else 0


def static_capacity(cache: Cache | None) -> int | None:
    """Return the capacity of a static cache in entries; ``None`` for any other cache."""
    layers = [] if cache is None else cache.layers
    return getattr(layers[0], "max_cache_len", None) if layers else None


def check_cache_capacity(cache: Cache | None, length: int) -> None:
    """Raise ``ValueError`` if a static cache is smaller than ``length`` entries."""
    capacity = static_capacity(cache)
    if capacity is not None and capacity < length:
        raise ValueError(
            f"the static cache has {capacity} entries but {length} are needed: give it one entry "
            "for each token of the expanded prompt and of the answer"
        )


def _get_metadata(cache: Cache | None) -> list[CacheMetadata]:
    """Return the metadata of all prefills of a cache, the latest last."""
    return getattr(cache, METADATA_ATTRIBUTE, [])


def record_pass(cache: Cache, batch: ExpandedBatch, past_length: int) -> None:
    """Record that a forward pass added ``batch`` to the cache after ``past_length`` entries.

    If the cache was cropped before, this function drops metadata whose text starts after
    ``past_length``.
    """
    length = past_length + batch.input_ids.shape[1]
    records = [
        record._replace(length=min(record.length, past_length))
        for record in _get_metadata(cache)
        if record.text_start <= past_length
    ]
    if records and not batch.text_start and records[-1].length == past_length:
        # The batch is text that continues the text of the last record.
        records[-1] = records[-1]._replace(length=length)
    else:
        text_start = past_length + max(batch.text_start, 1)
        last_B1 = batch.position_ids.amax(dim=1, keepdim=True)
        record = CacheMetadata(
            text_start=text_start,
            length=length,
            text_start_position=last_B1 + 1 - (length - text_start),
            key_fingerprint=_compute_fingerprint(cache, text_start, length),
        )
        records.append(record)
    setattr(cache, METADATA_ATTRIBUTE, records)


def record_decode_step(cache: Cache, length: int) -> None:
    """Record that a decode step will fill the cache with text up to ``length`` entries."""
    records = _get_metadata(cache)
    if records:
        setattr(cache, METADATA_ATTRIBUTE, [*records[:-1], records[-1]._replace(length=length)])


def _compute_fingerprint(cache: Cache, text_start: int, length: int) -> Tensor | None:
    """Return the bytes ``(B, bytes)`` of each sequence's keys just before ``text_start``.

    Return ``None`` if the keys are not readable.
    """
    # Keys of the last layer depend on all earlier tokens. (With early exit, it has no keys: take
    # the last layer that has some.)
    layers: list[Any] = [*cache.layers]
    filled = [layer for layer in layers if layer.is_initialized]
    keys = filled[-1].keys if filled else None
    if not isinstance(keys, Tensor) or keys.ndim != 4 or keys.shape[2] < length:
        return None
    return keys[:, :, text_start - 1].flatten(1).clone().view(torch.uint8)


def find_metadata(cache: Cache | None, length: int) -> CacheMetadata | None:
    """Return the metadata that gives the position id at a cache length; ``None`` if none does."""
    valid = [
        record for record in _get_metadata(cache) if record.text_start <= length <= record.length
    ]
    return valid[-1] if valid and valid[-1].key_fingerprint is not None else None


def compute_next_position(cache: Cache | None, past_length: int) -> Tensor | None:
    """Return the position id ``(B, 1)`` that follows each cached sequence.

    The id is -1 for a sequence that this model did not cache. Return ``None`` for an empty cache.

    Raises:
        ValueError: The position id of no sequence can be determined.
    """
    if cache is None or not past_length:
        return None
    metadata = find_metadata(cache, past_length)
    is_match = None if metadata is None else _match_sequences(cache, metadata, past_length)
    if metadata is None or is_match is None:
        raise ValueError(
            f"the next position id after {past_length} cache entries is unknown (an image takes "
            "more cache entries than position ids): it is known only for caches that this model "
            "filled, whose keys are readable, and that end in text instead of an image or padding; "
            "pass position_ids. peft's prefix tuning drops position_ids: use prompt tuning or LoRA"
        )
    # Each sequence takes the position id of the recorded sequence that matches. The keys, and so
    # is_match, may be on another device than the position ids.
    next_B1 = metadata.text_start_position + (past_length - metadata.text_start)
    return torch.where(is_match.to(next_B1.device), next_B1.T, -1).amax(dim=1, keepdim=True)


def _match_sequences(cache: Cache, metadata: CacheMetadata, length: int) -> Tensor | None:
    """Compare the cache's sequences with the recorded ones by their fingerprints.

    Returns:
        ``(B, recorded sequences)`` bool; ``None`` if the cache's keys are not readable.
    """
    keys = _compute_fingerprint(cache, metadata.text_start, length)
    if keys is None or metadata.key_fingerprint is None:
        return None
    if keys.shape[1] != metadata.key_fingerprint.shape[1]:
        shape = keys.shape[0], metadata.key_fingerprint.shape[0]
        return keys.new_zeros(shape, dtype=torch.bool)
    return (keys[:, None] == metadata.key_fingerprint.to(keys.device)).all(dim=-1)


def check_cache_batch_size(cache: Cache | None, past_length: int, input_ids: Tensor) -> None:
    """Raise ``ValueError`` if the cache's batch size is not that of ``input_ids``."""
    layers: list[Any] = [*cache.layers] if cache is not None and past_length else []
    keys = layers[0].keys if layers else None
    if isinstance(keys, Tensor) and keys.ndim == 4 and keys.shape[0] != input_ids.shape[0]:
        raise ValueError(
            f"the cache holds {len(keys)} sequences but input_ids has {len(input_ids)}: select or "
            "repeat the sequences of both alike"
        )


@dataclass(eq=False)
class ExpandedPrompt:
    """The prompt of a ``generate`` call. Its image placeholders are expanded once, before prefill.

    Beam search only exchanges beams of the same prompt, so this object needs no reordering.

    Attributes:
        input_ids: ``(B, L)``, the prompt's ids before expansion. ``generate`` passes the same
            tensor object until it has generated a token.
        batch: The prompt with its image placeholders expanded.
        position_ids: The argument of ``generate``. It is stored, because in decode steps some
            releases of transformers pass only the position ids of new tokens.
        num_prepare_calls: How many times ``prepare_inputs_for_generation`` was called, which is
            once for each forward pass.
        num_columns: The length of ``input_ids`` in the latest of these calls.
    """

    input_ids: Tensor
    batch: ExpandedBatch
    position_ids: Tensor | None = None
    num_prepare_calls: int = 0
    num_columns: int = 0

    @property
    def length(self) -> int:
        """The expanded length ``R``."""
        return self.batch.input_ids.shape[1]

    def repeated(self, repeats: int, input_ids: Tensor) -> "ExpandedPrompt":
        """Return this prompt with each sequence repeated; ``input_ids`` are the repeated ids."""

        def repeat(value: Any) -> Any:
            return value.repeat_interleave(repeats, dim=0) if isinstance(value, Tensor) else value

        batch = ExpandedBatch(*map(repeat, self.batch))
        return ExpandedPrompt(input_ids, batch, repeat(self.position_ids))

    def count_images(self, begin_id: int, past_length: int, num_images: int) -> list[int]:
        """Return the number of images in each sequence.

        If ``num_images`` is not the number of images in the whole prompt, the caller left out the
        cached images: count only those after the first ``past_length`` columns.
        """
        is_begin = (self.batch.input_ids == begin_id) & self.batch.image_mask
        if int(is_begin.sum()) != num_images:
            is_begin = is_begin[:, past_length:]
        return is_begin.sum(dim=1).tolist()

    def num_generated(self, input_ids: Tensor) -> int:
        """Return how many tokens of ``input_ids`` follow the prompt."""
        return input_ids.shape[1] - self.input_ids.shape[1]

    def num_uncached(self, input_ids: Tensor, cache: Cache | None) -> int:
        """Return how many generated tokens have no cache entry yet.

        Return 0 if the cache also lacks prompt tokens, so that no decode step is possible.
        """
        num_generated = self.num_generated(input_ids)
        if cache is None or num_generated < 1 or len(input_ids) != len(self.input_ids):
            return 0
        num_uncached = self.length + num_generated - _num_filled(cache)
        return num_uncached if 0 < num_uncached <= num_generated else 0

    def is_repeated(self, input_ids: Tensor, cache: Cache | None) -> bool:
        """Return whether the previous call had equally many ids, and the cache has all of them."""
        previous, self.num_columns = self.num_columns, input_ids.shape[1]
        if cache is None or previous != self.num_columns:
            return False
        return _num_filled(cache) >= self.length + self.num_generated(input_ids)

    def decode_position_ids(self, num_generated: int, num_uncached: int) -> Tensor:
        """Return the position ids ``(B, num_uncached)`` of the last generated tokens."""
        last_B1 = self.batch.position_ids[:, -1:]
        if num_uncached == 1:
            return last_B1 + num_generated
        first = num_generated - num_uncached + 1
        return last_B1 + torch.arange(first, num_generated + 1, device=last_B1.device)

    def padding_mask(self, num_keys: int) -> Tensor | None:
        """Return the mask ``(B, num_keys)``, 0 at padding; ``None`` if there is no padding."""
        if not self.batch.has_padding:
            return None
        assert self.batch.attention_mask is not None
        return F.pad(self.batch.attention_mask, (0, num_keys - self.length), value=1)
