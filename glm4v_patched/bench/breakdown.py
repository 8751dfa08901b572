"""What a training step is made of: memory by part, the GPU's time by kind of kernel."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ..engine.deepspeed.internals import is_sharded, shard_of
from ..engine.memory_plan import GIB
from ..engine.prepare import Engine

# The first whose pattern is in a kernel's name. Communication runs beside the others.
KINDS = {
    "communication": r"nccl",
    "attention": r"fmha|flash|sdpa|attention",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitk",
    "optimizer": r"multi_tensor|adam|optimizer",
    "quantisation": r"quant",
    "compiled element-wise": r"triton",
    "copies": r"memcpy|memset|copy|catarray|fill",
}
Kernels = list[tuple[str, float, float]]  # name, start and duration in microseconds


def memory_parts(trainer: Engine, batch: dict[str, Tensor]) -> dict[str, float]:
    """Train one more step on a GPU and look at it: GiB of each part, and the ``peak``.

    - ``weights``: of the model, this process's shard;
    - ``optimizer``: its states and fp32 weights, as far as they are on the GPU;
    - ``gradients``: what the backward pass leaves for the update, and buffers that hold gradients
      from one step to the next;
    - ``activations``: what the forward pass leaves for the backward pass;
    - ``logits``: the most that the output layer and the loss take, forward or backward;
    - ``rest``: the peak less all of these: gathered weights, the inside of a layer, buckets. 0
      where they are never all there at once.
    """
    model, watch = trainer.model, _PeakWatch(trainer.model)
    before = _kept(model)
    loss = trainer.forward(batch)
    after_forward = _kept(model)
    trainer.backward(loss)
    del loss
    after_backward = _kept(model)
    trainer.update()
    watch.end()
    parts = {"weights": _held(model), "optimizer": _on_gpu(trainer.optimizer_tensors())}
    parts["gradients"] = max(after_backward - before, 0) + _on_gpu(trainer.gradient_buffers())
    parts["activations"] = max(after_forward - before, 0)
    parts["logits"] = watch.of_output_layer
    parts["rest"] = max(watch.peak - sum(parts.values()), 0)
    return {name: size / GIB for name, size in (parts | {"peak": watch.peak}).items()}


def _kept(model: nn.Module) -> int:
    """Bytes that are allocated, but for weights that ZeRO-3 holds gathered at the moment."""
    gathered = sum(weight.data.nbytes for weight in model.parameters() if is_sharded(weight))
    return torch.cuda.memory_allocated() - gathered


def _held(model: nn.Module) -> int:
    """Bytes of weights and buffers between steps: under ZeRO-3 of this process's shard. What
    bitsandbytes keeps beside weights of 4 bits (4 % of them) is not counted here."""
    weights = [shard_of(weight) for weight in model.parameters()]
    return _on_gpu([*weights, *model.buffers()])


def _on_gpu(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cuda")


class _PeakWatch:
    """The peak of a step, and how far it rises in the output layer's forward and backward."""

    def __init__(self, model: nn.Module):
        self.peak = self.of_output_layer = self.start = 0
        (layer,) = (part for name, part in model.named_modules() if name.endswith("output_layer"))
        self.handles = [layer.register_forward_pre_hook(self._begin)]
        self.handles.append(layer.register_forward_hook(self._forward_ends))
        torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        self._begin()
        for handle in self.handles:
            handle.remove()

    # Hooks return nothing: inputs, outputs and gradients stay as they are.

    def _begin(self, *_) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        self.start = torch.cuda.memory_allocated()

    def _end(self, *_) -> None:
        rise = torch.cuda.max_memory_allocated() - self.start
        self.of_output_layer = max(self.of_output_layer, rise)
        self._begin()

    def _forward_ends(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._end()
        if output.requires_grad:
            output.register_hook(self._begin)
            inputs[0].register_hook(self._end)


def profile_step(step: Callable[[], object]) -> dict:
    """What a step's kernels take, by kind; empty without a GPU. Profiling itself
    makes a step longer, where the GPU waits for the CPU."""
    if not torch.cuda.is_available():
        step()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = [(event["name"], event["ts"], event["dur"]) for event in on_gpu]
    return {"profile_ms": time_by_kind(kernels)}


def time_by_kind(kernels: Kernels) -> dict[str, float]:
    """Milliseconds by kind of kernel. ``idle`` is when nothing but communication ran, ``step`` the
    time from the first kernel to the last."""
    total: dict[str, float] = defaultdict(float)
    begin = reached = min(start for _, start, _ in kernels)
    end, busy = max(start + duration for _, start, duration in kernels), 0.0
    for name, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        kind = kind_of(name)
        total[kind] += duration
        if kind != "communication":
            busy += max(start + duration - max(start, reached), 0.0)
            reached = max(reached, start + duration)
    total |= {"idle": end - begin - busy, "step": end - begin}
    return {kind: microseconds / 1000 for kind, microseconds in total.items()}


def kind_of(kernel: str) -> str:
    """The kind that a kernel's name says it is."""
    name = kernel.lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
