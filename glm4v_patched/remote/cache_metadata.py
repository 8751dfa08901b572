"""What generation knows of rows whose keys are in a cache: their positions and padding.

An image has more entries there than positions, so what comes next cannot be told from its length.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from .image_layout import ExpandedBatch

# Shapes: B rows, R length of the grown rows, N new ids, K keys: as many as the cache has room for
# if it is static, as many as it holds if not.


class CacheMetadata(NamedTuple):
    """What a cache's entries do not say, of one time that rows were put there.

    Attributes:
        anchor: Positions up to the last that is no plain text. All that lie behind it are text,
            each at the position after that of the id before it.
        length: Positions up to which that holds.
        next_position: ``(B, 1)``, the position that follows ``anchor``.
        anchor_keys: ``(B, bytes)`` uint8, some layer's keys just before ``anchor``, by which rows
            are found again that were reordered, selected, repeated or copied since.
    """

    anchor: int
    length: int
    next_position: Tensor
    anchor_keys: Tensor | None


CACHED_ROWS = "glm4v_rows"  # of a cache: a list of CacheMetadata, the latest last


def cached_length(cache: Cache | None) -> int:
    length: Any = 0 if cache is None else cache.get_seq_length()
    # A static cache answers with a tensor, which in transformers 5 is the counter itself.
    return int(length) if isinstance(length, Tensor) else length


def is_static(cache: Cache | None) -> bool:
    """Whether the cache has a fixed size, and its length is known to the device alone."""
    return cache is not None and bool(cache.is_compileable)


def room_of(cache: Cache | None) -> int | None:
    """The positions that a static cache has room for."""
    layers = [] if cache is None else cache.layers
    return getattr(layers[0], "max_cache_len", None) if layers else None


def check_room(cache: Cache | None, length: int) -> None:
    room = room_of(cache)
    if room is not None and room < length:
        raise ValueError(
            f"the cache has room for {room} positions but the rows take {length}: make it larger, "
            "as large as the rows with their images grown and the answer together"
        )


def _known(cache: Cache | None) -> list[CacheMetadata]:
    return getattr(cache, CACHED_ROWS, [])


def remember_rows(cache: Cache, rows: ExpandedBatch, past_length: int) -> None:
    """Rows were put into the cache behind ``past_length`` positions; it may have been cropped."""
    length = past_length + rows.input_ids.shape[1]
    every = [
        known._replace(length=min(known.length, past_length))
        for known in _known(cache)
        if known.anchor <= past_length
    ]
    if every and not rows.plain_from and every[-1].length == past_length:
        every[-1] = every[-1]._replace(length=length)
    else:
        anchor = past_length + max(rows.plain_from, 1)
        last_B1 = rows.position_ids.amax(dim=1, keepdim=True)
        known = CacheMetadata(
            anchor=anchor,
            length=length,
            next_position=last_B1 + 1 - (length - anchor),
            anchor_keys=_keys_before(cache, anchor, length),
        )
        every.append(known)
    setattr(cache, CACHED_ROWS, every)


def remember_drawn(cache: Cache, length: int) -> None:
    """The cache is about to hold that many positions, the last of them drawn one by one."""
    known = _known(cache)
    if known:
        setattr(cache, CACHED_ROWS, [*known[:-1], known[-1]._replace(length=length)])


def _keys_before(cache: Cache, anchor: int, length: int) -> Tensor | None:
    # The last layer's, for they depend on the whole row; layers that were left out have none.
    layers: list[Any] = [*cache.layers]
    filled = [layer for layer in layers if layer.is_initialized]
    keys = filled[-1].keys if filled else None
    if not isinstance(keys, Tensor) or keys.ndim != 4 or keys.shape[2] < length:
        return None
    return keys[:, :, anchor - 1].flatten(1).clone().view(torch.uint8)


def known_rows(cache: Cache | None, length: int) -> CacheMetadata | None:
    """What tells the position behind so many of a cache, if anything does."""
    reaching = [of for of in _known(cache) if of.anchor <= length <= of.length]
    return reaching[-1] if reaching and reaching[-1].anchor_keys is not None else None


def next_position(cache: Cache | None, past_length: int) -> Tensor | None:
    """The position ``(B, 1)`` that follows each row of the cache, -1 for an unknown row."""
    if cache is None or not past_length:
        return None
    known = known_rows(cache, past_length)
    is_same = None if known is None else _same_rows(cache, known, past_length)
    if known is None or is_same is None:
        raise ValueError(
            f"the cache holds {past_length} positions after which the next one is not known (an "
            "image has more entries than positions): it is where this model has put them there, "
            "the cache shows its keys, and it ends in text behind its images and padding; give "
            "position_ids; for peft's prefix tuning, which drops them, use prompt tuning or LoRA"
        )
    # Layers may stand on several devices.
    follows_B1 = known.next_position + (past_length - known.anchor)
    return torch.where(is_same.to(follows_B1.device), follows_B1.T, -1).amax(dim=1, keepdim=True)


def _same_rows(cache: Cache, known: CacheMetadata, length: int) -> Tensor | None:
    """``(B, known rows)`` bool, which rows are which; ``None`` if the cache shows no keys."""
    keys = _keys_before(cache, known.anchor, length)
    if keys is None or known.anchor_keys is None:
        return None
    if keys.shape[1] != known.anchor_keys.shape[1]:
        return keys.new_zeros((keys.shape[0], known.anchor_keys.shape[0]), dtype=torch.bool)
    return (keys[:, None] == known.anchor_keys.to(keys.device)).all(dim=-1)


def check_rows_of_cache(cache: Cache | None, past_length: int, input_ids: Tensor) -> None:
    layers: list[Any] = [*cache.layers] if cache is not None and past_length else []
    keys = layers[0].keys if layers else None
    if isinstance(keys, Tensor) and keys.ndim == 4 and keys.shape[0] != input_ids.shape[0]:
        raise ValueError(
            f"the cache holds {len(keys)} rows but {len(input_ids)} are given: select or repeat "
            "the rows of both alike"
        )


@dataclass(eq=False)
class ExpandedPrompt:
    """A prompt that ``generate`` answers, grown once. Beams and several answers change places only
    among copies of one row, so nothing here follows them; what counts is on the host."""

    input_ids: Tensor  # (B, L) as given, by which the prompt is known again
    rows: ExpandedBatch
    position_ids: Tensor | None = None  # as given; some releases then hand over those of new ids
    passes: int = 0  # how often inputs were made

    @property
    def length(self) -> int:
        return self.rows.input_ids.shape[1]

    def repeated(self, times: int, input_ids: Tensor) -> "ExpandedPrompt":
        """Each row so often; ``input_ids`` are so already."""

        def repeat(value: Any) -> Any:
            return value.repeat_interleave(times, dim=0) if isinstance(value, Tensor) else value

        rows = ExpandedBatch(*map(repeat, self.rows))
        return ExpandedPrompt(input_ids, rows, repeat(self.position_ids))

    def count_images(self, begin_id: int, past_length: int, number: int) -> list[int]:
        """Of each row: all, or where ``number`` is less, those that are not in the cache."""
        is_begin = (self.rows.input_ids == begin_id) & self.rows.image_mask
        if int(is_begin.sum()) != number:
            is_begin = is_begin[:, past_length:]
        return is_begin.sum(dim=1).tolist()

    def num_drawn(self, input_ids: Tensor) -> int:
        return input_ids.shape[1] - self.input_ids.shape[1]

    def num_new(self, input_ids: Tensor, cache: Cache | None) -> int:
        """Drawn ids that are not in the cache yet; 0 if something else has to be computed, too."""
        num_drawn = self.num_drawn(input_ids)
        if cache is None or num_drawn < 1 or len(input_ids) != len(self.input_ids):
            return 0
        if is_static(cache):  # whose own length is on the device
            num_filled = known[-1].length if (known := _known(cache)) else 0
        else:
            num_filled = cached_length(cache)
        num_new = self.length + num_drawn - num_filled
        return num_new if 0 < num_new <= num_drawn else 0

    def positions(self, num_drawn: int, num_new: int) -> Tensor:
        """``(B, N)`` of the last drawn ids."""
        last_B1 = self.rows.position_ids[:, -1:]
        if num_new == 1:
            return last_B1 + num_drawn
        return last_B1 + torch.arange(num_drawn - num_new + 1, num_drawn + 1, device=last_B1.device)

    def padding_mask(self, num_keys: int) -> Tensor | None:
        """``(B, K)`` int64, 0 at padding; ``None`` if there is none."""
        if not self.rows.has_padding:
            return None
        assert self.rows.attention_mask is not None
        return F.pad(self.rows.attention_mask, (0, num_keys - self.length), value=1)
