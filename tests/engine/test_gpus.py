"""The GPUs are those that NVIDIA's driver shows, counted as torch does; without torch."""

import ctypes

import pytest
import torch

from glm4v_patched.engine import gpus
from glm4v_patched.engine.gpus import Gpu, Gpus, find_gpus, free_on_gpus


class Driver:
    """Stands for NVIDIA's: the functions that are called, with C's conventions."""

    def __init__(self, names: list[str], fails: str = "", status: int = 999):
        self.names, self.fails, self.status = names, fails, status
        self.contexts = 0

    def __getattr__(self, function: str):
        return lambda *arguments: self.call(function, arguments)

    def call(self, function: str, arguments: tuple) -> int:
        if function == self.fails:
            return self.status
        match function, arguments:
            case (("cuInit" | "cuCtxPushCurrent_v2" | "cuCtxPopCurrent_v2"), (_,)):
                pass
            case "cuDeviceGetCount", (number,):
                number._obj.value = len(self.names)
            case "cuDeviceGet", (device, index):
                if index >= len(self.names):
                    return 101
                device._obj.value = index + 10
            case "cuDeviceGetName", (name, 256, device):
                name.value = self.names[device.value - 10].encode()
            case "cuDeviceTotalMem_v2", (memory, device):
                memory._obj.value = 2**40 + device.value
            case "cuDeviceGetAttribute", (number, asked, device):
                number._obj.value = {75: 9, 76: device.value}[asked]
            case "cuDevicePrimaryCtxRetain", (_, device):
                self.contexts, self.current = self.contexts + 1, device.value
            case "cuDevicePrimaryCtxRelease_v2", (_,):
                self.contexts -= 1
            case "cuMemGetInfo_v2", (free, total):
                free._obj.value, total._obj.value = 2**30 + self.current, 2**40
            case _:
                pytest.fail(f"{function}{arguments}")
        return 0


@pytest.fixture
def has_driver(monkeypatch):
    def have(driver: Driver | None) -> None:
        def load(name: str) -> Driver:
            if driver is None or name != "libcuda.so.1":
                raise OSError("cannot open shared object file")
            return driver

        monkeypatch.setattr(gpus, "cuda_of_torch", lambda: (13, 0))
        monkeypatch.setattr(ctypes, "CDLL", load)

    return have


def test_gpus_are_those_of_the_driver_and_no_memory_of_them_is_kept(has_driver):
    driver = Driver(["NVIDIA H200", "NVIDIA A100"])
    has_driver(driver)
    found = find_gpus()
    assert found == Gpus(
        (Gpu("NVIDIA H200", 2**40 + 10, (9, 10)), Gpu("NVIDIA A100", 2**40 + 11, (9, 11)))
    )
    assert len(found) == 2 and not found.reason
    assert free_on_gpus(2) == [2**30 + 10, 2**30 + 11] and driver.contexts == 0
    with pytest.raises(RuntimeError, match="error 101 about GPU 2's memory"):
        free_on_gpus(3)


def test_why_there_is_no_gpu_is_said(has_driver, monkeypatch):
    has_driver(None)
    assert "libcuda.so.1 was not found" in find_gpus().reason
    has_driver(Driver([], fails="cuInit", status=802))
    assert find_gpus() == Gpus((), "NVIDIA's driver cannot be started: cuInit gave error 802")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for driver in (Driver([]), Driver([], fails="cuInit", status=100)):
        has_driver(driver)
        assert find_gpus() == Gpus((), "NVIDIA's driver shows none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert find_gpus() == Gpus((), "CUDA_VISIBLE_DEVICES is '9'")
    has_driver(Driver(["NVIDIA H200"], fails="cuDeviceTotalMem_v2"))
    with pytest.raises(RuntimeError, match="error 999 about GPU 0"):
        find_gpus()


def test_the_driver_counts_and_names_as_torch_does():
    found = find_gpus()
    if torch.version.cuda is None:
        assert found.reason.startswith("this torch was built without CUDA")
    assert len(found) == torch.cuda.device_count()
