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


def profile_step(step: Callable[[], object]) -> dict:
    """What a step's kernels take; empty without a GPU.

    Returns:
        ``profile_ms``: :func:`time_by_kind`; ``profile_kernels``: the :data:`LONGEST` kernels by
        their time in all, each with its name, milliseconds and number of calls. Profiling itself
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
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [event for event in events if event.get("cat") in on_gpu]
    kernels = [(event["name"], event["ts"], event["dur"]) for event in kernels]
    return {"profile_ms": time_by_kind(kernels), "profile_kernels": longest(kernels)}


def longest(kernels: list[tuple[str, float, float]]) -> list[dict]:
    """The kernels that take most in all, from ``(name, start, duration)`` in microseconds."""
    durations = defaultdict(list)
    for name, _, duration in kernels:
        durations[name].append(duration)
    by_time = sorted(durations.items(), key=lambda item: -sum(item[1]))
    return [
        {"name": name[:120], "ms": round(sum(of_name) / 1000, 2), "calls": len(of_name)}
        for name, of_name in by_time[:LONGEST]
    ]


def time_by_kind(kernels: list[tuple[str, float, float]]) -> dict[str, float]:
    """Milliseconds by kind of kernel, from ``(name, start, duration)`` in microseconds.

    ``idle`` is when nothing but communication ran, ``step`` the time from the first kernel to the
    last.
    """
    total: dict[str, float] = defaultdict(float)
    compute = []
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
