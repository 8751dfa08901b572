"""What NVIDIA's driver and its ``nvidia-smi`` tell of GPUs; needs no torch."""

import ctypes
import importlib.util
import re
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

SECONDS = 10  # nvidia-smi takes one or two where the driver is not kept loaded
OLDEST_FOR_FP8 = (8, 9)
"""Compute capability of Ada; Hopper has 9.0."""


@dataclass(frozen=True)
class Use:
    """Memory in bytes that is taken of a GPU, by whomever."""

    index: int
    used: int
    total: int


def cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as (major, minor); None where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    failed = driver.cuDriverGetVersion(ctypes.byref(number))
    return None if failed else (number.value // 1000, number.value % 1000 // 10)


def cuda_of_torch() -> tuple[int, int] | None:
    """The CUDA that torch was built with; read without importing it. None for none."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return None
    cuda = runpy.run_path(str(Path(package.origin).with_name("version.py")))["cuda"]
    if cuda is None:
        return None
    major, _, minor = cuda.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def fault_of_fp8(name: str, capability: tuple[int, int]) -> str | None:
    """Why a GPU cannot multiply in fp8."""
    if capability >= OLDEST_FOR_FP8:
        return None
    oldest, found = (".".join(map(str, numbers)) for numbers in (OLDEST_FOR_FP8, capability))
    return (
        f"fp8 needs GPUs of compute capability {oldest} or newer (Ada, Hopper), and {name} has "
        f"{found}; leave out fp8"
    )


def memory_in_use() -> list[Use]:
    """Of all GPUs of the machine; none where ``nvidia-smi`` does not say."""
    query = "--query-gpu=index,memory.used,memory.total"
    lines = _nvidia_smi(query, "--format=csv,noheader,nounits").splitlines()
    rows = [re.findall(r"\d+", line) for line in lines]
    mib = 2**20
    return [Use(int(a), int(b) * mib, int(c) * mib) for a, b, c in (r for r in rows if len(r) == 3)]


def links() -> list[tuple[int, int, str]]:
    """Of each pair of GPUs of the machine, how ``nvidia-smi topo -m`` calls what joins them."""
    return parse_topology(_nvidia_smi("topo", "-m"))


def parse_topology(text: str) -> list[tuple[int, int, str]]:
    """The pairs of GPUs in a table of ``nvidia-smi topo -m``, each once."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split("\t") for line in plain.splitlines() if re.match(r"GPU\d+\s*\t", line)]
    pairs = combinations(range(len(rows)), 2)
    return [(a, b, rows[a][b + 1].strip()) for a, b in pairs if b + 1 < len(rows[a])]


def is_nvlink(link: str) -> bool:
    return re.fullmatch(r"NV\d+", link) is not None


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
