"""A cache of fixed size for ``generate``, whose steps are then recorded or compiled as one graph.

transformers compiles a step for every number of rows and every size of the cache, and makes a new
cache for every call, for which a CUDA graph is recorded again. Here sizes are rounded up, and the
cache is kept for the next call of as many rows.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import StaticLayer

from ...engine.reading import HEAD_CHANNELS
from ...models.base import Base
from ...models.check_weights import quantised_by
from ...models.quantised_weights import kept_cache
from ...remote.keywords import WANTS_CACHE_POSITION, named_cache
from .loop import draw_ahead, private
from .recorded_calls import RecordedCalls, record_tower

# A step is compiled in about a minute, in which so many are made that are only recorded.
STEPS_THAT_REPAY = 8000


class StaticCaches:
    """The cache of one model for the number of rows that was wanted last, of the largest size.

    When it is handed out again it is emptied: what was answered with it must not be needed. On a
    GPU the model's tower is recorded, too (:mod:`recorded_calls`).
    """

    def __init__(
        self,
        model: Any,
        step: int,
        draws_ahead: bool = False,
        records: bool = False,
        **compiled: Any,
    ):
        """
        Args:
            step: Sizes are multiples of it: what is not filled is read, too, but each size is
                compiled.
            draws_ahead: Whether ``generate`` is given :func:`loop.draw_ahead`.
            records: Whether steps are recorded (:mod:`recorded_calls`) and not compiled; then
                ``draws_ahead``, too.
            compiled: For :func:`compiling`.
        """
        self.model, self.step, self.compiled = model, step, compiled
        self.draws_ahead, self.records = draws_ahead or records, records
        if model.device.type == "cuda":
            from .small_batch_matmul import takes_layers_of

            self.compiled = {"own_products": takes_layers_of(model)} | compiled
            record_tower(model)
        self._rows = self._room = 0
        self._cache: StaticCache | None = None
        self._graph: RecordedCalls | None = None

    def of(self, rows: int, positions: int) -> StaticCache:
        """An empty cache with room for so many positions of each row."""
        if self._cache is not None and rows == self._rows and positions <= self._room:
            self._cache.reset()
            return self._cache
        self._cache = self._graph = None  # their memory is for the next one
        self._rows, self._room = rows, -(-positions // self.step) * self.step
        self._cache = StaticCache(config=self.model.config, max_cache_len=self._room)
        if self.model.device.type == "cuda" and not WANTS_CACHE_POSITION:
            for layer in self._cache.layers:
                private(layer, "cumulative_length")
                layer.__class__ = OneKeyLayer
        return self._cache

    def options(self, rows: int, positions: int) -> dict[str, Any]:
        """What ``generate`` is given beside the rows; on a CPU nothing is compiled or recorded."""
        given = named_cache(self.of(rows, positions))
        if self.draws_ahead:
            given["custom_generate"] = draw_ahead
        if self.model.device.type != "cuda":
            return given
        if self.records:
            self._graph = given["step"] = self._graph or RecordedCalls(self.model)
        else:
            given["compile_config"] = compiling(rows, **self.compiled)
        return given


class OneKeyLayer(StaticLayer):
    """Takes the key and the value of one drawn id by one kernel, and not by five."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_one = self.is_initialized and key_states.shape[-2] == 1
        is_eager = key_states.is_cuda and not torch.compiler.is_compiling()
        *_, channels = key_states.shape
        if not (is_one and is_eager and channels in HEAD_CHANNELS):
            return super().update(key_states, value_states, *args, **kwargs)
        from ...engine.reading_triton import write_one  # takes Triton

        keys: Any = self.keys
        values: Any = self.values
        write_one(keys, values, self.cumulative_length, key_states, value_states)
        return keys, values


def compiling(
    rows: int,
    changes: dict[str, Any] | None = None,
    fullgraph: bool = False,
    own_products: bool = True,
) -> CompileConfig:
    """How a step is compiled: as one graph for this number of rows, replayed as a CUDA graph.

    Args:
        changes: Inductor's options that are laid over these.
        fullgraph: Fail where it is not one graph, as adapters or weights of 4 bits may have it.
        own_products: Whether :mod:`small_batch_matmul` takes the weights of the layers.
    """
    from .small_batch_matmul import ProductsOfFewRows

    # Small kernels that do not wait for each other are then one, and each is started while the one
    # before it ends (from Hopper on).
    options: dict[str, Any] = {"triton.cudagraphs": True, "combo_kernels": True}
    options |= {"triton.enable_pdl": True, "post_grad_custom_pre_pass": ProductsOfFewRows()}
    if rows == 1 and not own_products:
        # A product with one vector is then a reduction of inductor's own, which reads weights in
        # fewer bytes, too: if its other factor, such as SwiGLU of 10 operations, is computed once
        # before and not for each of its sums, and if tuning begins at the best of more sizes of
        # blocks, or else it ends at one that is not the best.
        options |= {"coordinate_descent_tuning": True, "realize_opcount_threshold": 9}
        options["max_autotune_pointwise"] = True
    return CompileConfig(
        fullgraph=fullgraph,
        dynamic=False,
        mode=None,  # type: ignore[arg-type]  # torch takes either a mode or options
        options=options | (changes or {}),
    )


def chosen(cache: str, device: str, steps: int, base: Base, weights: str | None = None) -> str:
    """``static``, ``graph`` or ``dynamic``; ``auto`` is ``static`` on a GPU where so many steps
    repay compilation, and else ``graph``, if the steps of such weights can be recorded."""
    weights = weights or quantised_by(base.model, base.revision)
    fixed = "static" if steps >= STEPS_THAT_REPAY else "graph"
    return kept_cache(cache, weights, "dynamic" if device == "cpu" else fixed)
