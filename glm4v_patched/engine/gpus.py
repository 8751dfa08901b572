"""The GPUs that training processes will see. Needs no torch, so that mistakes are told early."""

import ctypes
import os
from ctypes import byref
from dataclasses import dataclass
from typing import Any

from .nvidia_driver import cuda_of_torch

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


def find_gpus() -> Gpus:
    """What the CUDA driver shows: ``CUDA_VISIBLE_DEVICES`` and parts of GPUs (MIG) are its matter.

    No context is made, so that nothing is taken of a GPU's memory.
    """
    if cuda_of_torch() is None:
        return Gpus((), "this torch was built without CUDA (its version ends in +cpu)")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
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


def free_on_gpus(number: int) -> list[int]:
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
