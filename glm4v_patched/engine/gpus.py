"""Query GPUs through NVIDIA's driver. Needs no torch: problems are reported before its import."""

import ctypes
import importlib.util
import os
import runpy
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_FP8_CAPABILITY = (8, 9)
"""Compute capability of Ada; Hopper has 9.0."""
CUDA_ERROR_NO_DEVICE = 100
COMPUTE_CAPABILITY_ATTRIBUTES = (75, 76)
"""Numbers with which cuDeviceGetAttribute returns the major and the minor version."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: total memory in bytes, and compute capability, (9, 0) for Hopper."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Gpus:
    """The visible GPUs. If there are none, ``reason`` says why; otherwise it is empty."""

    devices: tuple[Gpu, ...]
    reason: str = ""

    def __len__(self) -> int:
        return len(self.devices)


def find_gpus() -> Gpus:
    """Return the GPUs that the CUDA driver shows to this process.

    ``CUDA_VISIBLE_DEVICES`` and MIG determine which these are. The query creates no CUDA context,
    so it uses no memory of the GPUs.
    """
    if torch_cuda_version() is None:
        return Gpus((), "this torch was built without CUDA (its version ends in +cpu)")
    driver = _load_driver()
    if driver is None:
        return Gpus((), "NVIDIA's driver is not installed (libcuda.so.1 was not found)")
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(byref(count))
    if status and status != CUDA_ERROR_NO_DEVICE:
        return Gpus((), f"NVIDIA's driver cannot be started: cuInit returned error {status}")
    if status or not count.value:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = "NVIDIA's driver shows none"
        return Gpus((), reason if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}")
    return Gpus(tuple(_query_gpu(driver, index) for index in range(count.value)))


def _load_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _query_gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    subject = f"GPU {index}"
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    capability = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    _check_status(driver.cuDeviceGet(byref(device), index), subject)
    _check_status(driver.cuDeviceGetName(name, len(name), device), subject)
    _check_status(driver.cuDeviceTotalMem_v2(byref(memory), device), subject)
    for version, attribute in zip(capability, COMPUTE_CAPABILITY_ATTRIBUTES, strict=True):
        _check_status(driver.cuDeviceGetAttribute(byref(version), attribute, device), subject)
    major, minor = (version.value for version in capability)
    return Gpu(name.value.decode(errors="replace"), memory.value, (major, minor))


def free_bytes_per_gpu(count: int) -> list[int]:
    """Return the free bytes of the first ``count`` GPUs.

    The query creates a CUDA context on each GPU and destroys it, so the returned numbers do not
    include the memory that a context takes.

    Raises:
        RuntimeError: There are fewer GPUs, or the driver returns an error.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    free_bytes = []
    for index in range(count):
        subject = f"the memory of GPU {index}"
        device, context = ctypes.c_int(), ctypes.c_void_p()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _check_status(driver.cuInit(0) or driver.cuDeviceGet(byref(device), index), subject)
        _check_status(driver.cuDevicePrimaryCtxRetain(byref(context), device), subject)
        status = driver.cuCtxPushCurrent_v2(context)
        status = status or driver.cuMemGetInfo_v2(byref(free), byref(total))
        driver.cuCtxPopCurrent_v2(byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(device)
        _check_status(status, subject)
        free_bytes.append(free.value)
    return free_bytes


def _check_status(status: Any, subject: str) -> None:
    if status:
        raise RuntimeError(f"NVIDIA's driver returned error {status} for {subject}")


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports; None without a driver."""
    version, driver = ctypes.c_int(), _load_driver()
    if driver is None or driver.cuDriverGetVersion(byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10  # 12040 is 12.4


def torch_cuda_version() -> tuple[int, int] | None:
    """Return the CUDA version that torch was built with, or None; torch is not imported."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return None
    cuda = runpy.run_path(str(Path(package.origin).with_name("version.py")))["cuda"]
    if cuda is None:
        return None
    major, _, minor = cuda.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def find_fp8_problem(name: str, capability: tuple[int, int]) -> str | None:
    """Return why a GPU cannot multiply in fp8, or None."""
    if capability >= MIN_FP8_CAPABILITY:
        return None
    required, actual = (".".join(map(str, pair)) for pair in (MIN_FP8_CAPABILITY, capability))
    return (
        f"fp8 needs GPUs of compute capability {required} or newer (Ada, Hopper), and {name} has "
        f"{actual}; leave out fp8"
    )
