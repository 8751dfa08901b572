"""GPUs, memory, folders, and the environment of processes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm4v_patched.engine import gpus
from glm4v_patched.engine.environment import (
    REPOSITORY_ROOT,
    python_module_command,
    rank_environments,
    training_environment,
)
from glm4v_patched.engine.folders import find_folder_problem
from glm4v_patched.engine.gpus import Gpu, Gpus, driver_cuda_version, find_gpus, free_bytes_per_gpu
from glm4v_patched.engine.ram import free_ram


@pytest.fixture
def strange_folder(tmp_path, monkeypatch) -> Path:
    """Make a current folder with modules of the names that libraries import."""
    for name in ("json", "numpy", "PIL", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"print('RAN {name}')\n")
    monkeypatch.chdir(tmp_path)
    # The package may be found by it; an empty entry would be the current folder.
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY_ROOT))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def test_code_in_the_current_folder_is_not_run(strange_folder, monkeypatch):
    assert python_module_command("a", "b") == [sys.executable, "-P", "-m", "a", "b"]
    # The way in which torch's launcher starts processes.
    by_torch = [sys.executable, "-u", "-m", "glm4v_patched.cli", "--version"]
    for command, variables in (
        (python_module_command("glm4v_patched.cli", "--version"), None),
        (by_torch, training_environment(1)),
    ):
        ended = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0 and "RAN" not in ended.stdout, ended
    # In a checkout without installation, the package is found in the current folder.
    monkeypatch.chdir(REPOSITORY_ROOT)
    assert python_module_command("a") == [sys.executable, "-m", "a"]
    assert "PYTHONSAFEPATH" not in training_environment(1)


def test_variables_that_the_user_sets_are_kept(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("glm4v_patched.engine.environment.count_cores", lambda: 8)
    environment = training_environment(2)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = training_environment(2, on_cpu=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment and environment["OMP_NUM_THREADS"] == "1"
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["DS_ACCELERATOR"]) == ("", "cpu")


def test_ranks_have_their_own_numbers_and_one_master():
    ranks = rank_environments(3)
    for rank, environment in enumerate(ranks):
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(rank), str(rank))
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1


@pytest.mark.parametrize("missing", [os.W_OK, os.X_OK])
def test_a_new_folder_needs_a_parent_with_write_and_execute_permission(
    missing, tmp_path, monkeypatch
):
    assert find_folder_problem(str(tmp_path / "new" / "one")) is None
    # The tests may run as root, who may do everything.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & missing)
    assert f"permission to write to {tmp_path}" in find_folder_problem(
        str(tmp_path / "new" / "one")
    )


class Driver:
    """Stand-in for NVIDIA's driver: the functions that are called, with C's conventions."""

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
            case "cuDeviceGetAttribute", (number, attribute, device):
                number._obj.value = {75: 9, 76: device.value}[attribute]
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
def use_driver(monkeypatch):
    def use(driver: Driver | None) -> None:
        def load(name: str) -> Driver:
            if driver is None or name != "libcuda.so.1":
                raise OSError("cannot open shared object file")
            return driver

        monkeypatch.setattr(gpus, "torch_cuda_version", lambda: (13, 0))
        monkeypatch.setattr(ctypes, "CDLL", load)

    return use


def test_gpus_are_queried_and_no_context_is_left_on_them(use_driver):
    driver = Driver(["NVIDIA H200", "NVIDIA A100"])
    use_driver(driver)
    gpus_found = find_gpus()
    assert gpus_found == Gpus(
        (Gpu("NVIDIA H200", 2**40 + 10, (9, 10)), Gpu("NVIDIA A100", 2**40 + 11, (9, 11)))
    )
    assert len(gpus_found) == 2 and not gpus_found.reason
    assert free_bytes_per_gpu(2) == [2**30 + 10, 2**30 + 11] and driver.contexts == 0
    with pytest.raises(RuntimeError, match="error 101 for the memory of GPU 2"):
        free_bytes_per_gpu(3)


def test_the_reason_for_no_gpu_is_reported(use_driver, monkeypatch):
    use_driver(None)
    assert "libcuda.so.1 was not found" in find_gpus().reason
    use_driver(Driver([], fails="cuInit", status=802))
    assert find_gpus() == Gpus((), "NVIDIA's driver cannot be started: cuInit returned error 802")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for driver in (Driver([]), Driver([], fails="cuInit", status=100)):
        use_driver(driver)
        assert find_gpus() == Gpus((), "NVIDIA's driver shows none")
    for visible in ("9", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert find_gpus() == Gpus((), f"CUDA_VISIBLE_DEVICES is {visible!r}")
    use_driver(Driver(["NVIDIA H200"], fails="cuDeviceTotalMem_v2"))
    with pytest.raises(RuntimeError, match="error 999 for GPU 0"):
        find_gpus()


def test_the_newest_cuda_version_of_the_driver(use_driver):
    for driver, newest in (
        (None, None),
        (Driver([], fails="cuDriverGetVersion"), None),
        (Driver([]), (12, 8)),
    ):
        use_driver(driver)
        assert driver_cuda_version() == newest


def test_as_many_gpus_are_found_as_torch_sees():
    gpus_found = find_gpus()
    if torch.version.cuda is None:
        assert gpus_found.reason.startswith("this torch was built without CUDA")
    assert len(gpus_found) == torch.cuda.device_count()


def test_free_ram_respects_the_limits_of_control_groups(monkeypatch):
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
        # The inactive file cache counts as free: the kernel reclaims it when memory is needed.
        stat = str(Path(file).with_name("memory.stat"))
        prefix = "total_" if "limit_in_bytes" in file else ""
        monkeypatch.setitem(files, stat, f"anon 7\n{prefix}inactive_file 1000\nfile 1200\n")
        assert free_ram() == 3000
        monkeypatch.setitem(files, used, "9000\n")
        assert free_ram() == 0
        files.pop(file)
