"""Caches of fixed size for ``generate``: what they are given beside the rows, and their reuse.

A CUDA graph refers to its cache by address. ``generate`` would make a new one for every size of
prompt; so one is kept for the next call of as many rows.
"""

from typing import Any

from transformers import StaticCache

from ...engine.implementations import CUDA_GRAPHS, ModelUsage, use_implementations
from ...engine.kernels.cuda_graphs import CudaGraphCallable
from ...models.base import ModelSource
from ...models.check_weights import quantized_by
from ...models.quantized_weights import resolve_cache
from ...remote.keywords import cache_kwarg
from .loop import decode_without_sync


class StaticCaches:
    """The cache of one model for the number of rows that was wanted last, of the largest size.

    When it is handed out again it is emptied: what was answered with it must not be needed. On a
    GPU steps and the model's tower are recorded (:mod:`...engine.kernels.cuda_graphs`).
    """

    def __init__(self, model: Any, step: int):
        """
        Args:
            step: Sizes are multiples of it, for each size is recorded.
        """
        self.model, self.step = model, step
        if model.device.type == "cuda":
            use_implementations(model, ModelUsage(purpose=CUDA_GRAPHS))
        self._rows = self._room = 0
        self._cache: StaticCache | None = None
        self._graph: CudaGraphCallable | None = None

    def of(self, rows: int, positions: int) -> StaticCache:
        """An empty cache with room for so many positions of each row."""
        if self._cache is not None and rows == self._rows and positions <= self._room:
            self._cache.reset()
            return self._cache
        self._cache = self._graph = None  # their memory is for the next one
        self._rows, self._room = rows, -(-positions // self.step) * self.step
        self._cache = StaticCache(config=self.model.config, max_cache_len=self._room)
        return self._cache

    def options(self, rows: int, positions: int) -> dict[str, Any]:
        """What ``generate`` is given beside the rows; on a CPU nothing is recorded."""
        given = cache_kwarg(self.of(rows, positions)) | {"custom_generate": decode_without_sync}
        if self.model.device.type == "cuda":
            self._graph = given["step"] = self._graph or CudaGraphCallable(self.model)
        return given


def chosen(cache: str, device: str, base: ModelSource, weights: str | None = None) -> str:
    """``static`` or ``dynamic``; ``auto`` is ``static`` on a GPU, if the steps of such weights can
    be recorded."""
    weights = weights or quantized_by(base.model, base.revision)
    return resolve_cache(cache, weights, "dynamic" if device == "cpu" else "static")
