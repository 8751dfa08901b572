"""GPUs and their links, compiler, disks, shared memory, limits; needs no torch."""

import os
import resource
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..engine.folders import find_folder_problem, nearest_existing
from ..engine.gpus import (
    Gpu,
    driver_cuda_version,
    torch_cuda_version,
    find_gpus,
    query_gpu_memory_use,
)
from ..engine.ram import free_ram
from ..terminal_text import format_bytes
from .findings import FAILS, OK, WARNING, Finding

GB, GIB = 10**9, 2**30
PUBLISHED_WEIGHTS = 28 * GB
MAX_IDLE_GPU_MEMORY = 2 * GIB  # of a GPU: more than a desktop takes
# A container has 64 MB of it unless told otherwise. NCCL takes about 10 MB for a pair of processes,
# and each worker that prepares images keeps some of 15 MB there.
MIN_SHARED_MEMORY = GIB
MIN_TEMPORARY_SPACE = GB
MIN_OPEN_FILES = 4096
# bf16 in hardware, and Triton's compiler.
AMPERE = (8, 0)


def check_machine(on_cpu: bool) -> Iterator[Finding]:
    """Args:
    on_cpu: Whether training is to use no GPU.
    """
    gpus = find_gpus()
    if on_cpu:
        yield Finding("GPUs", OK, "none is to be used (--device cpu)")
    elif not gpus.devices:
        cure = "train where there is one; for trials of small models: --device cpu"
        yield Finding("GPUs", WARNING, f"none: {gpus.reason}", cure)
    else:
        yield from _check_gpus(gpus.devices)
        yield _check_compiler()
    yield from _check_disks()
    yield _check_shared_memory()
    yield Finding("memory", OK, f"{format_bytes(free_ram())} are free")
    yield from _check_limits()


def _check_gpus(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    names = ", ".join(f"{gpu.name} ({gpu.memory / GB:.0f} GB)" for gpu in dict.fromkeys(gpus))
    yield Finding("GPUs", OK, f"{len(gpus)}: {names}")
    yield _check_driver()
    old = [
        f"GPU {index} has compute capability {_dotted(gpu.capability)}"
        for index, gpu in enumerate(gpus)
        if gpu.capability < AMPERE
    ]
    if old:
        text = f"{'; '.join(old)}: it computes bf16 many times slower, and fp16 overflows"
        yield Finding("bf16", WARNING, text, "use a GPU of the Ampere generation or newer")
    for use in query_gpu_memory_use():
        if use.used > MAX_IDLE_GPU_MEMORY:
            text = f"{use.used / GIB:.0f} of {use.total / GIB:.0f} GiB are taken"
            cure = "end what runs there (nvidia-smi), or leave it out by CUDA_VISIBLE_DEVICES"
            yield Finding(f"GPU {use.index}", WARNING, text, cure)


def _check_driver() -> Finding:
    built, runs = torch_cuda_version(), driver_cuda_version()
    if built is None or runs is None:
        return Finding("driver", WARNING, "nothing says which CUDA it runs")
    text = f"it runs CUDA {_dotted(runs)}, and torch is built with {_dotted(built)}"
    if runs[0] < built[0]:
        cure = f"update NVIDIA's driver, or install a torch for CUDA {runs[0]} (pytorch.org)"
        return Finding("driver", FAILS, f"{text}: torch will see no GPU", cure)
    return Finding("driver", OK, text)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _check_compiler() -> Finding:
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if compiler is None:
        text = "there is no C compiler, with which Triton builds what starts its kernels"
        return Finding("compiler", FAILS, text, "apt-get install gcc; or engine.compile: false")
    if not header.is_file():
        text = f"{header} is not there, which Triton compiles against"
        cure = "apt-get install python3-dev (of this Python); or engine.compile: false"
        return Finding("compiler", FAILS, text, cure)
    return Finding("compiler", OK, f"{compiler}, and Python's headers, for engine.compile")


def _check_disks() -> Iterator[Finding]:
    yield _check_disk("temporary files", Path(tempfile.gettempdir()), MIN_TEMPORARY_SPACE, "TMPDIR")
    cache = hub_cache()
    there = any(cache.glob("models--*--glm-4v-9b/snapshots/*/config.json"))
    yield _check_disk("cache of the Hub", cache, 0 if there else PUBLISHED_WEIGHTS, "HF_HOME")


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _check_disk(name: str, folder: Path, wanted: int, variable: str) -> Finding:
    cure = f"set {variable} to a folder on a larger disk"
    if fault := find_folder_problem(str(folder)):
        return Finding(f"disk: {name}", FAILS, f"{folder}: {fault}", cure)
    free = shutil.disk_usage(nearest_existing(str(folder))).free
    text = f"{format_bytes(free)} are free in {folder}"
    if free >= wanted:
        return Finding(f"disk: {name}", OK, text)
    return Finding(f"disk: {name}", WARNING, f"{text}, and {format_bytes(wanted)} may be needed", cure)


def _check_shared_memory() -> Finding:
    check, folder = "/dev/shm", Path("/dev/shm")
    cure = "in a container: start it with --shm-size=16g (Docker), or --ipc=host"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding(check, FAILS, "it is not there, or may not be written", cure)
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB are free"
    if usage.free >= MIN_SHARED_MEMORY:
        return Finding(check, OK, text)
    told = "NCCL and the workers that prepare images may end in a bus error"
    return Finding(check, WARNING, f"{text}: {told}", cure)


def _check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES or soft >= hard:
        yield Finding("open files", OK, f"at most {soft:,} in a process")
    else:
        text = f"at most {soft:,} in a process, of {hard:,} that are allowed: workers that prepare"
        text += " images may end with 'Too many open files'"
        yield Finding("open files", WARNING, text, f"ulimit -n {min(hard, 65536)}")
