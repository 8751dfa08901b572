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

    def __init__(self, model: Any):
        self.model = model
        self._caches: dict[int, StaticCache] = {}

    def of(self, rows: int, positions: int) -> StaticCache:
        """An empty cache with room for so many positions of each row."""
        cache = self._caches.get(rows)
        if cache is not None and cache.layers[0].max_cache_len >= positions:
            cache.reset()
            return cache
        self._caches.pop(rows, None)
        room = -(-positions // STEP) * STEP
        cache = self._caches[rows] = StaticCache(config=self.model.config, max_cache_len=room)
        return cache

    def options(self, rows: int, positions: int) -> dict[str, Any]:
        """What ``generate`` is given, beside the rows."""
        config = compiling(rows, **({} if self.model.device.type == "cuda" else {"backend": None}))
        given: dict[str, Any] = {"past_key_values": self.of(rows, positions)}
        return given if config is None else given | {"compile_config": config}


def compiling(
    rows: int, changes: dict[str, Any] | None = None, backend: str | None = "inductor"
) -> CompileConfig | None:
    """How a step is compiled: as one graph for this number of rows, replayed as a CUDA graph.

    Args:
        changes: Inductor's options that are laid over these.
        backend: ``None``: not at all.
    """
    if backend is None:
        return None
    options: dict[str, Any] = {"triton.cudagraphs": True}
    if rows == 1:
        # A product with one vector is then a reduction of inductor's own, which reads weights
        # nearly as fast as the memory gives them.
        options["coordinate_descent_tuning"] = True
    return CompileConfig(
        fullgraph=True,
        dynamic=False,
        backend=backend,
        mode=None,  # type: ignore[arg-type]  # torch takes either a mode or options
        options=options | (changes or {}),
    )


def is_worth_it(device: torch.device, tokens: int) -> bool:
    """Whether so many steps repay the minute that one takes to be compiled."""
    return device.type == "cuda" and tokens >= 2000
