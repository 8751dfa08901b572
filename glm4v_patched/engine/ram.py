"""The free memory of this machine; needs no torch."""

import re
from pathlib import Path


def free_ram() -> float:
    """Bytes that processes can take before the kernel ends some: free, and within the limit of
    this one's control groups (which containers set)."""
    limits = [1024.0 * _number("MemAvailable:", Path("/proc/meminfo").read_text())]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, group = line.split(":", 2)
        if kind == "":
            names = "memory.max", "memory.current", "inactive_file"
            folders = [f"/sys/fs/cgroup{group}", "/sys/fs/cgroup"]
        elif "memory" in kind.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            folders = [f"/sys/fs/cgroup/memory{group}", "/sys/fs/cgroup/memory"]
        else:
            continue
        limits += [_free_in_group(Path(folder), *names) for folder in folders]
    return max(min(limits), 0)


def _free_in_group(folder: Path, limit: str, used: str, reclaimed: str) -> float:
    """What a control group leaves, with pages of files, which go when memory is needed."""
    limit, used, stat = (
        path.read_text().strip() if (path := folder / name).is_file() else ""
        for name in (limit, used, "memory.stat")
    )
    if not limit.isdecimal():  # "max", or the group at the root, which has none
        return float("inf")
    return int(limit) - int(used or 0) + _number(reclaimed, stat)


def _number(key: str, text: str) -> int:
    found = re.search(rf"^{key}\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0
