"""CUDA graphs of a step of ``generate``, or of the vision tower: captured once, then replayed.

Capturing takes as long as a few steps; compiling would take as long as thousands. A replay launches
the same kernels as the step itself, so the outputs are the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...remote.visual import EVA2CLIPModel


class CudaGraphCallable:
    """Wraps a model or function whose calls are captured as a CUDA graph.

    The first call runs eagerly, the second is captured, and later ones replay the graph. A call
    counts as a first call again if it differs from the call before it in the shape, dtype or device
    of a tensor, or in any other argument.

    Replays write their outputs to the tensors that the captured call returned. A cache among the
    arguments must be updated in place, as ``StaticCache`` is.
    """

    def __init__(self, model: Callable[..., Any]):
        self.model = model
        self._other_kwargs: dict[str, Any] | None = None
        self._input_tensors: dict[str, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Any = None

    def __call__(self, **kwargs: Any) -> Any:
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in kwargs.items() if name not in tensors}
        if others != self._other_kwargs or not _have_same_layout(tensors, self._input_tensors):
            self._graph = self._output = None
            self._other_kwargs = others
            self._input_tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            return self.model(**kwargs)
        for name, tensor in tensors.items():
            self._input_tensors[name].copy_(tensor)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # "thread_local": the threads that read images may use CUDA during the capture.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._output = self.model(**self._input_tensors, **others)
        self._graph.replay()
        return self._output


def _have_same_layout(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    def layouts(named: dict[str, Tensor]) -> dict[str, tuple]:
        return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in named.items()}

    return layouts(tensors) == layouts(others)


class GraphedTower(EVA2CLIPModel):
    """Vision tower whose forward pass of a single image is a CUDA graph.

    Without a graph, launching the kernels for one image takes as long as running them. After the
    capture, the tower must not be changed, for example by new adapters.
    """

    graph: CudaGraphCallable

    def set_up(self) -> None:
        """Prepare the graph of a tower whose class was changed to this one."""
        self.graph = CudaGraphCallable(partial(EVA2CLIPModel.forward, self))

    def forward(self, images: Tensor, record: Any = None) -> Tensor:
        if len(images) != 1 or record is not None or torch.is_grad_enabled():
            return super().forward(images, record)
        return self.graph(images=images)
