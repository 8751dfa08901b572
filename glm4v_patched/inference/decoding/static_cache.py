"""A static KV cache that successive calls of ``generate`` share, with its CUDA graph.

A CUDA graph refers to its cache by address, but ``generate`` would make a new cache for every
prompt length. So :class:`StaticCaches` keeps the cache for calls with the same batch size.
"""

from typing import Any

from transformers import StaticCache

from ...engine.implementations import CUDA_GRAPHS, ModelUsage, use_implementations
from ...engine.kernels.cuda_graphs import CudaGraphCallable
from ...models.base import ModelSource
from ...models.check_weights import quantized_by
from ...models.quantized_weights import choose_cache_implementation
from ...remote.keywords import cache_kwarg
from .loop import decode_without_sync


class StaticCaches:
    """The static cache of a model, for the last batch size and the greatest length so far.

    Each use resets the cache. On a GPU, the decode step and the vision tower
    run as CUDA graphs (:mod:`...engine.kernels.cuda_graphs`).
    """

    def __init__(self, model: Any, length_multiple: int):
        """
        Args:
            length_multiple: Cache lengths are rounded up to a multiple of this number, because each
                length needs a CUDA graph of its own.
        """
        self.model, self.length_multiple = model, length_multiple
        if model.device.type == "cuda":
            use_implementations(model, ModelUsage(purpose=CUDA_GRAPHS))
        self._batch_size = self._max_length = 0
        self._cache: StaticCache | None = None
        self._graph: CudaGraphCallable | None = None

    def make_empty_cache(self, batch_size: int, min_length: int) -> StaticCache:
        """Return an empty cache for at least ``min_length`` positions of each sequence."""
        fits = batch_size == self._batch_size and min_length <= self._max_length
        if self._cache is not None and fits:
            self._cache.reset()
            return self._cache
        self._cache = self._graph = None  # frees their memory for the new cache
        self._batch_size = batch_size
        self._max_length = -(-min_length // self.length_multiple) * self.length_multiple
        self._cache = StaticCache(config=self.model.config, max_cache_len=self._max_length)
        return self._cache

    def generate_kwargs(self, batch_size: int, min_length: int) -> dict[str, Any]:
        """Return arguments for ``generate``: an empty cache, our loop and its decode step."""
        kwargs = cache_kwarg(self.make_empty_cache(batch_size, min_length))
        kwargs |= {"custom_generate": decode_without_sync}
        if self.model.device.type == "cuda":
            self._graph = self._graph or CudaGraphCallable(self.model)
            kwargs["decode_step"] = self._graph
        return kwargs


def choose_cache(cache: str, device: str, base: ModelSource, weights: str | None = None) -> str:
    """Return ``"static"`` or ``"dynamic"`` for the option ``--cache``.

    On a GPU, ``auto`` means static if a CUDA graph can capture decode steps with weights of this
    format. Otherwise it means dynamic.
    """
    weights = weights or quantized_by(base.model, base.revision)
    return choose_cache_implementation(cache, weights, "dynamic" if device == "cpu" else "static")
