"""What the GPU is busy with in a training step."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

LONGEST = 25
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
Kernels = list[tuple[str, float, float]]
"""Name, start and duration of each, in microseconds."""


def profile_step(step: Callable[[], object]) -> dict:
    """What a step's kernels take; empty without a GPU.

    Returns:
        ``profile_ms``: :func:`time_by_kind`; ``profile_kernels``: :func:`longest`. Profiling itself
        makes a step longer, where the GPU waits for the CPU.
    """
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
    return {"profile_ms": time_by_kind(kernels), "profile_kernels": longest(kernels)}


def longest(kernels: Kernels) -> list[dict]:
    """The :data:`LONGEST` kernels by their time in all: name, milliseconds, number of calls."""
    durations = defaultdict(list)
    for name, _, duration in kernels:
        durations[name].append(duration)
    by_time = sorted(durations.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return [{"name": n[:120], "ms": round(sum(d) / 1000, 2), "calls": len(d)} for n, d in by_time]


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
