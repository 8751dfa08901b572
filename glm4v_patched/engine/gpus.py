"""What NVIDIA's driver and its ``nvidia-smi`` tell of GPUs. Needs no torch, so that mistakes are
told early."""

import ctypes
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 10  # nvidia-smi takes one or two where the driver is not kept loaded
OLDEST_FOR_FP8 = (8, 9)
"""Compute capability of Ada; Hopper has 9.0."""
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
COMPUTE_CAPABILITY = (75, 76)  # of cuDeviceGetAttribute: major, minor


@dataclass(frozen=True)
class Gpu:
    """``memory`` is all that it has, in bytes; ``capability`` CUDA's, of Hopper (9, 0)."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Gpus:
    """``reason`` says why none was found; it is empty where there are some."""

    found: tuple[Gpu, ...]
    reason: str = ""

    def __len__(self) -> int:
        return len(self.found)


@dataclass(frozen=True)
class Use:
    """Memory in bytes that is taken of a GPU, by whomever."""

    index: int
    used: int
    total: int


def find_gpus() -> Gpus:
    """What the CUDA driver shows: ``CUDA_VISIBLE_DEVICES`` and parts of GPUs (MIG) are its matter.

    No context is made, so that nothing is taken of a GPU's memory.
    """
    if torch_cuda_version() is None:
        return Gpus((), "this torch was built without CUDA (its version ends in +cpu)")
    driver = _load_driver()
    if driver is None:
        return Gpus((), "no driver of NVIDIA is installed (libcuda.so.1 was not found)")
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(byref(count))
    if status and status != NO_DEVICE:
        return Gpus((), f"NVIDIA's driver cannot be started: cuInit gave error {status}")
    if status or not count.value:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = "NVIDIA's driver shows none"
        return Gpus((), reason if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}")
    return Gpus(tuple(_describe(driver, index) for index in range(count.value)))


def _load_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    about = f"GPU {index}"
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    numbers = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    _require(driver.cuDeviceGet(byref(device), index), about)
    _require(driver.cuDeviceGetName(name, len(name), device), about)
    _require(driver.cuDeviceTotalMem_v2(byref(memory), device), about)
    for number, asked in zip(numbers, COMPUTE_CAPABILITY, strict=True):
        _require(driver.cuDeviceGetAttribute(byref(number), asked, device), about)
    major, minor = (number.value for number in numbers)
    return Gpu(name.value.decode(errors="replace"), memory.value, (major, minor))


def free_bytes_per_gpu(number: int) -> list[int]:
    """Bytes free on the first so many GPUs, less what a process of CUDA takes by itself, whose
    context is given back at once. ``RuntimeError`` if there are fewer, or the driver says none."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    for index in range(number):
        about = f"GPU {index}'s memory"
        device, context = ctypes.c_int(), ctypes.c_void_p()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _require(driver.cuInit(0) or driver.cuDeviceGet(byref(device), index), about)
        _require(driver.cuDevicePrimaryCtxRetain(byref(context), device), about)
        status = driver.cuCtxPushCurrent_v2(context)
        status = status or driver.cuMemGetInfo_v2(byref(free), byref(total))
        driver.cuCtxPopCurrent_v2(byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(device)
        _require(status, about)
        found.append(free.value)
    return found


def _require(status: Any, about: str) -> None:
    if status:
        raise RuntimeError(f"NVIDIA's driver gave error {status} about {about}")


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as (major, minor); None where there is no driver."""
    number, driver = ctypes.c_int(), _load_driver()
    if driver is None or driver.cuDriverGetVersion(byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10


def torch_cuda_version() -> tuple[int, int] | None:
    """The CUDA that torch was built with; read without importing it. None for none."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return None
    cuda = runpy.run_path(str(Path(package.origin).with_name("version.py")))["cuda"]
    if cuda is None:
        return None
    major, _, minor = cuda.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def find_fp8_problem(name: str, capability: tuple[int, int]) -> str | None:
    """Why a GPU cannot multiply in fp8."""
    if capability >= OLDEST_FOR_FP8:
        return None
    oldest, found = (".".join(map(str, numbers)) for numbers in (OLDEST_FOR_FP8, capability))
    return (
        f"fp8 needs GPUs of compute capability {oldest} or newer (Ada, Hopper), and {name} has "
        f"{found}; leave out fp8"
    )


def query_gpu_memory_use() -> list[Use]:
    """Of all GPUs of the machine; none where ``nvidia-smi`` does not say."""
    query = "--query-gpu=index,memory.used,memory.total"
    lines = _nvidia_smi(query, "--format=csv,noheader,nounits").splitlines()
    rows = [re.findall(r"\d+", line) for line in lines]
    mib = 2**20
    return [Use(int(a), int(b) * mib, int(c) * mib) for a, b, c in (r for r in rows if len(r) == 3)]


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it is not there, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
