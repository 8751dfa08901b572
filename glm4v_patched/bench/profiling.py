"""What the GPU is busy with in a training step."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

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


def profile_step(step: Callable[[], object]) -> dict[str, float] | None:
    """Milliseconds of one step by kind of kernel; None without a GPU.

    ``idle`` is when nothing but communication ran, ``step`` the time from the first kernel to the
    last. Profiling itself makes a step longer, where the GPU waits for the CPU.
    """
    if not torch.cuda.is_available():
        step()
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kernels = [
        event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return time_by_kind([(event["name"], event["ts"], event["dur"]) for event in kernels])


def time_by_kind(kernels: list[tuple[str, float, float]]) -> dict[str, float]:
    """Sum up ``(name, start, duration)`` in microseconds."""
    total, compute = defaultdict(float), []
    for name, start, duration in kernels:
        kind = kind_of(name)
        total[kind] += duration
        if kind != "communication":
            compute.append((start, start + duration))
    begin = min(start for _, start, _ in kernels)
    end = max(start + duration for _, start, duration in kernels)
    busy, reached = 0.0, begin
    for start, stop in sorted(compute):
        busy += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    total |= {"idle": end - begin - busy, "step": end - begin}
    return {kind: microseconds / 1000 for kind, microseconds in total.items()}


def kind_of(kernel: str) -> str:
    """The kind that a kernel's name says it is."""
    name = kernel.lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
