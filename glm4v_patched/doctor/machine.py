"""Checks of GPUs, driver, compiler, disks, shared memory and limits. Imports no torch."""

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
    find_gpus,
    free_bytes_per_gpu,
    torch_cuda_version,
)
from ..engine.ram import free_ram
from ..terminal_text import format_bytes
from .findings import FAILS, OK, WARNING, Finding

GB, GIB = 10**9, 2**30
PUBLISHED_WEIGHT_BYTES = 28 * GB
MAX_IDLE_GPU_BYTES = 2 * GIB  # more than a desktop uses
# Docker's default for /dev/shm is 64 MB. NCCL uses about 10 MB there for each pair of processes,
# and each data loader worker keeps several images of 15 MB there.
MIN_SHARED_MEMORY_BYTES = GIB
MIN_TEMPORARY_BYTES = GB
MIN_OPEN_FILES = 4096
# The lowest compute capability that has bf16 in hardware and that Triton's compiler supports.
AMPERE = (8, 0)


def check_machine(on_cpu: bool) -> Iterator[Finding]:
    """Yield the findings about this machine.

    Args:
        on_cpu: Whether training is to use the CPU; GPUs are then not checked.
    """
    gpus = find_gpus()
    if on_cpu:
        yield Finding("GPUs", OK, "not checked, because training is to use the CPU (--device cpu)")
    elif not gpus.devices:
        cure = "train on a machine with a GPU; to try a small model on the CPU, add --device cpu"
        yield Finding("GPUs", WARNING, f"there is none: {gpus.reason}", cure)
    else:
        yield from _check_gpus(gpus.devices)
        yield _check_compiler()
    yield from _check_disks()
    yield _check_shared_memory()
    yield Finding("memory", OK, f"{format_bytes(free_ram())} of RAM are free")
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
        text = f"{'; '.join(old)}: bf16 is emulated there, many times slower, and fp16 overflows"
        yield Finding("bf16", WARNING, text, "use a GPU of the Ampere generation or newer")
    cure = "end the processes on it (nvidia-smi lists them), or exclude this GPU by "
    cure += "CUDA_VISIBLE_DEVICES"
    try:
        free_bytes = free_bytes_per_gpu(len(gpus))
    except RuntimeError as error:  # a GPU lacks memory for a context, or is in exclusive use
        yield Finding("GPU memory", WARNING, str(error), cure)
        return
    for index, (gpu, free) in enumerate(zip(gpus, free_bytes, strict=True)):
        if (used := gpu.memory - free) > MAX_IDLE_GPU_BYTES:
            text = f"{used / GIB:.0f} of {gpu.memory / GIB:.0f} GiB are in use"
            yield Finding(f"GPU {index}", WARNING, text, cure)


def _check_driver() -> Finding:
    built, driver = torch_cuda_version(), driver_cuda_version()
    if built is None or driver is None:
        return Finding("driver", WARNING, "the CUDA version of the driver or of torch is unknown")
    text = f"it supports CUDA {_dotted(driver)}, and torch is built for CUDA {_dotted(built)}"
    if driver[0] < built[0]:
        cure = f"update NVIDIA's driver, or install a torch for CUDA {driver[0]} (pytorch.org)"
        return Finding("driver", FAILS, f"{text}: torch will find no GPU", cure)
    return Finding("driver", OK, text)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _check_compiler() -> Finding:
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if compiler is None:
        text = "there is no C compiler, which Triton needs to build the launchers of its kernels"
        cure = "apt-get install gcc; or set engine.compile: false"
        return Finding("compiler", FAILS, text, cure)
    if not header.is_file():
        text = f"{header} does not exist, which Triton needs to build the launchers of its kernels"
        cure = "apt-get install python3-dev (of this Python's version); or set "
        cure += "engine.compile: false"
        return Finding("compiler", FAILS, text, cure)
    return Finding("compiler", OK, f"{compiler}, and Python's headers, for engine.compile")


def _check_disks() -> Iterator[Finding]:
    yield _check_disk("temporary files", Path(tempfile.gettempdir()), MIN_TEMPORARY_BYTES, "TMPDIR")
    cache = hub_cache()
    is_cached = any(cache.glob("models--*--glm-4v-9b/snapshots/*/config.json"))
    yield _check_disk("Hub cache", cache, 0 if is_cached else PUBLISHED_WEIGHT_BYTES, "HF_HOME")


def hub_cache() -> Path:
    """Return the folder of huggingface_hub's downloads."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _check_disk(name: str, folder: Path, needed: int, variable: str) -> Finding:
    """Check a folder and its free space.

    Args:
        name: What the folder is for.
        needed: Free bytes that may be needed.
        variable: Environment variable that moves the folder.
    """
    cure = f"set {variable} to a folder on a larger disk"
    if problem := find_folder_problem(str(folder)):
        return Finding(f"disk: {name}", FAILS, f"{folder}: {problem}", cure)
    free = shutil.disk_usage(nearest_existing(str(folder))).free
    text = f"{format_bytes(free)} are free in {folder}"
    if free >= needed:
        return Finding(f"disk: {name}", OK, text)
    return Finding(
        f"disk: {name}", WARNING, f"{text}, and {format_bytes(needed)} may be needed", cure
    )


def _check_shared_memory() -> Finding:
    check, folder = "/dev/shm", Path("/dev/shm")
    cure = "in a container: start it with --shm-size=16g (Docker), or --ipc=host"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding(check, FAILS, "it does not exist or is not writable", cure)
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB are free"
    if usage.free >= MIN_SHARED_MEMORY_BYTES:
        return Finding(check, OK, text)
    effect = "NCCL and data loader workers may crash with a bus error"
    return Finding(check, WARNING, f"{text}: {effect}", cure)


def _check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES or soft >= hard:
        yield Finding("open files", OK, f"the limit of a process is {soft:,}")
    else:
        text = f"the limit of a process is {soft:,}, and may be raised to {hard:,}: data loader"
        text += " workers may fail with 'Too many open files'"
        yield Finding("open files", WARNING, text, f"ulimit -n {min(hard, 65536)}")
