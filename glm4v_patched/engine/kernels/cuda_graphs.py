"""A step of ``generate``, or the vision tower, recorded as a CUDA graph and replayed, and not
compiled.

Recording takes as long as a few steps; compiling takes as long as thousands. What is replayed are
the kernels that the step itself started, so no number changes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...remote.visual import EVA2CLIPModel


class CudaGraphCallable:
    """Calls a model, or another function. Of calls with equal arguments, but for what their tensors
    hold, the first runs and the second is recorded; later ones replay it, and write their outputs
    where it wrote its.

    The arguments' cache is changed in place, as ``StaticCache`` is.
    """

    def __init__(self, model: Callable[..., Any]):
        self.model = model
        self._others: dict[str, Any] | None = None
        self._tensors: dict[str, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Any = None

    def __call__(self, **given: Any) -> Any:
        tensors = {name: each for name, each in given.items() if isinstance(each, Tensor)}
        others = {name: each for name, each in given.items() if name not in tensors}
        if others != self._others or not _alike(tensors, self._tensors):
            self._graph = self._output = None
            self._others = others
            self._tensors = {name: each.clone() for name, each in tensors.items()}
            return self.model(**given)
        for name, each in tensors.items():
            self._tensors[name].copy_(each)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Other threads read images meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._output = self.model(**self._tensors, **others)
        self._graph.replay()
        return self._output


def _alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    def kinds(tensors: dict[str, Tensor]) -> dict[str, tuple]:
        return {name: (each.shape, each.dtype, each.device) for name, each in tensors.items()}

    return kinds(some) == kinds(others)


class GraphedTower(EVA2CLIPModel):
    """Of one image, whose kernels take as long to be started as to run. Nothing in it may change
    from then on, such as adapters."""

    graph: CudaGraphCallable

    def set_up(self) -> None:
        self.graph = CudaGraphCallable(partial(EVA2CLIPModel.forward, self))

    def forward(self, images: Tensor, record: Any = None) -> Tensor:
        if len(images) != 1 or record is not None or torch.is_grad_enabled():
            return super().forward(images, record)
        return self.graph(images=images)
