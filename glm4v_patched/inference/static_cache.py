"""A cache of fixed size for ``generate``, whose steps are then compiled and replayed as one graph.

transformers compiles a step for every number of rows and every size of the cache, and makes a new
cache for every call, for which a CUDA graph is recorded again. Here sizes are rounded up, and a
cache is kept for the next call.
"""

from typing import Any

import torch
from transformers import CompileConfig, StaticCache

# Sizes are multiples of it.
STEP = 256


class StaticCaches:
    """The caches of one model, one for each number of rows: the largest that was wanted.

    A cache that is handed out again is emptied: what was answered with it must not be needed.
    """

    def __init__(self, model: Any, changes: dict[str, Any] | None = None):
        """``changes``: inductor's options that are laid over those of :func:`compiling`."""
        self.model, self.changes = model, changes
        self._caches: dict[int, tuple[int, StaticCache]] = {}

    def of(self, rows: int, positions: int) -> StaticCache:
        """An empty cache with room for so many positions of each row."""
        room, cache = self._caches.pop(rows, (0, None))
        if cache is None or room < positions:
            room = -(-positions // STEP) * STEP
            cache = StaticCache(config=self.model.config, max_cache_len=room)
        else:
            cache.reset()
        self._caches[rows] = room, cache
        return cache

    def options(self, rows: int, positions: int) -> dict[str, Any]:
        """What ``generate`` is given beside the rows; on a CPU nothing is compiled."""
        given: dict[str, Any] = {"past_key_values": self.of(rows, positions)}
        if self.model.device.type == "cuda":
            given["compile_config"] = compiling(rows, self.changes)
        return given


def compiling(rows: int, changes: dict[str, Any] | None = None) -> CompileConfig:
    """How a step is compiled: as one graph for this number of rows, replayed as a CUDA graph.

    ``changes`` are inductor's options that are laid over these.
    """
    options: dict[str, Any] = {"triton.cudagraphs": True}
    if rows == 1:
        # A product with one vector is then a reduction of inductor's own, which reads weights
        # nearly as fast as the memory gives them.
        options["coordinate_descent_tuning"] = True
    return CompileConfig(
        fullgraph=True,
        dynamic=False,
        mode=None,  # type: ignore[arg-type]  # torch takes either a mode or options
        options=options | (changes or {}),
    )


def is_worth_it(device: torch.device, tokens: int) -> bool:
    """Whether so many steps repay the minute that one takes to be compiled."""
    return device.type == "cuda" and tokens >= 2000
