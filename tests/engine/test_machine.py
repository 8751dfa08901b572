"""What the engine finds: GPUs, memory, and the environment of its processes; without torch."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm4v_patched.engine import gpus
from glm4v_patched.engine.environment import (
    ROOT,
    rank_environments,
    python_module_command,
    training_environment,
)
from glm4v_patched.engine.folders import find_folder_problem
from glm4v_patched.engine.gpus import Gpu, Gpus, driver_cuda_version, find_gpus, free_bytes_per_gpu
from glm4v_patched.engine.ram import free_ram


@pytest.fixture
def strange_folder(tmp_path, monkeypatch) -> Path:
    """The current one, with modules of names that others import."""
    for name in ("json", "numpy", "PIL", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"print('RAN {name}')\n")
    monkeypatch.chdir(tmp_path)
    # By which the package may be found; an empty place there would be the current folder.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def test_code_in_the_current_folder_is_not_run(strange_folder, monkeypatch):
    assert python_module_command("a", "b") == [sys.executable, "-P", "-m", "a", "b"]
    # As torch's launcher starts processes.
    by_torch = [sys.executable, "-u", "-m", "glm4v_patched.cli", "--version"]
    for command, variables in (
        (python_module_command("glm4v_patched.cli", "--version"), None),
        (by_torch, training_environment(1)),
    ):
        ended = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0 and "RAN" not in ended.stdout, ended
    # What lies beside the package is found where it is not installed.
    monkeypatch.chdir(ROOT)
    assert python_module_command("a") == [sys.executable, "-m", "a"]
    assert "PYTHONSAFEPATH" not in training_environment(1)


def test_what_the_reader_sets_stays(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    found = training_environment(2)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert found["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = training_environment(2, on_cpu=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found and found["OMP_NUM_THREADS"] == "1"
    assert (found["CUDA_VISIBLE_DEVICES"], found["DS_ACCELERATOR"]) == ("", "cpu")


def test_each_process_knows_which_one_it_is_and_all_meet_at_one_place():
    ranks = rank_environments(3)
    for rank, found in enumerate(ranks):
        assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(rank))
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "3"
    assert len({(found["MASTER_ADDR"], found["MASTER_PORT"]) for found in ranks}) == 1


@pytest.mark.parametrize("missing", [os.W_OK, os.X_OK])
def test_a_folder_is_made_only_where_one_may_write_and_enter(missing, tmp_path, monkeypatch):
    assert find_folder_problem(str(tmp_path / "new" / "one")) is None
    # Root may do all.
    monkeypatch.setattr(os, "access", lambda place, asked: not asked & missing)
    assert f"{tmp_path} may not be written" in find_folder_problem(str(tmp_path / "new" / "one"))


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
            case (("cuDriverGetVersion" | "cuDeviceGetCount"), (number,)):
                number._obj.value = 12080 if "Version" in function else len(self.names)
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

        monkeypatch.setattr(gpus, "torch_cuda_version", lambda: (13, 0))
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
    assert free_bytes_per_gpu(2) == [2**30 + 10, 2**30 + 11] and driver.contexts == 0
    with pytest.raises(RuntimeError, match="error 101 about GPU 2's memory"):
        free_bytes_per_gpu(3)


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


def test_the_newest_cuda_that_the_driver_runs(has_driver):
    for driver, found in (
        (None, None),
        (Driver([], fails="cuDriverGetVersion"), None),
        (Driver([]), (12, 8)),
    ):
        has_driver(driver)
        assert driver_cuda_version() == found


def test_the_driver_counts_and_names_as_torch_does():
    found = find_gpus()
    if torch.version.cuda is None:
        assert found.reason.startswith("this torch was built without CUDA")
    assert len(found) == torch.cuda.device_count()


def test_free_memory_is_within_the_limits_of_control_groups(monkeypatch):
    assert free_ram() > 0
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   1000 kB\n",
        "/proc/self/cgroup": "4:cpu,memory:/a\n2:cpu:/b\n0::/c:d\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/c:d/memory.max": "max\n",
    }
    monkeypatch.setattr(Path, "is_file", lambda path: str(path) in files)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files[str(path)])
    assert free_ram() == 1_024_000
    for file in (
        "/sys/fs/cgroup/c:d/memory.max",
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
    ):
        monkeypatch.setitem(files, file, "5000\n")
        assert free_ram() == 5000
        used = file.replace("limit_in_bytes", "usage_in_bytes").replace(".max", ".current")
        monkeypatch.setitem(files, used, "3000\n")
        assert free_ram() == 2000
        # Of what is used, pages of files that nobody has looked at lately go when others come.
        stat = str(Path(file).with_name("memory.stat"))
        prefix = "total_" if "limit_in_bytes" in file else ""
        monkeypatch.setitem(files, stat, f"anon 7\n{prefix}inactive_file 1000\nfile 1200\n")
        assert free_ram() == 3000
        monkeypatch.setitem(files, used, "9000\n")
        assert free_ram() == 0
        files.pop(file)
