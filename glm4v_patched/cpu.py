"""The CPU: how many cores this process may use, and whether it multiplies bf16. Needs no torch."""

import math
import os
import platform
from functools import cache
from pathlib import Path

CPU_INFO, CGROUPS = Path("/proc/cpuinfo"), Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
# Instructions that multiply bf16, as Linux names them: AVX-512 BF16, AMX, and Arm's.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
# Environment variables by which torch and oneDNN limit the instructions that they use on x86, and
# the values that exclude bf16.
ISA_LIMITS = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2"),
    "ONEDNN_MAX_CPU_ISA": (
        "sse41",
        "avx",
        "avx2",
        "avx2_vnni",
        "avx2_vnni_2",
        "avx512_core",
        "avx512_core_vnni",
    ),
}


def count_cores() -> int:
    """Return the number of CPU cores that this process may use.

    Its affinity limits the number, and so does the CPU time that its control groups allow
    (``docker run --cpus``).
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return math.ceil(min(allowed or 1, *_quotas()))


def _quotas() -> list[float]:
    """Return the CPU time of each control group, in cores; infinity without a limit."""
    quotas = [math.inf]
    for line in CGROUPS.read_text().splitlines() if CGROUPS.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # cgroup v2
            folders, files = (CGROUP_ROOT / group[1:], CGROUP_ROOT), ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root = CGROUP_ROOT / "cpu"
            folders, files = (root / group[1:], root), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        for folder in folders:
            paths = [folder / name for name in files]
            if all(path.is_file() for path in paths):
                quota, period = " ".join(path.read_text() for path in paths).split()
                quotas.append(int(quota) / int(period) if quota.isdecimal() else math.inf)
    return quotas


@cache
def has_bf16() -> bool:
    """Return whether torch uses instructions of this CPU that multiply bf16.

    Without them, torch converts each operand, which takes two to three times as long as fp32.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    limits = {name: os.environ.get(name, "").lower() for name in ISA_LIMITS if is_x86}
    if any(value in ISA_LIMITS[name] for name, value in limits.items()):
        return False
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    # The line is "flags" on x86 and "Features" on Arm.
    flags = (line.split(":")[1] for line in lines if line.startswith(("flags", "Features")))
    return bool(BF16_FLAGS & {*next(flags, "").split()})
