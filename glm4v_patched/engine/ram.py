"""Free memory (RAM) of this machine. Needs no torch."""

import re
from pathlib import Path


def free_ram() -> float:
    """Return the bytes that processes can allocate before the kernel kills some.

    That is the machine's free memory, or less if a memory limit of this process's control groups
    (cgroups, which containers set) leaves less.
    """
    free_bytes = [1024.0 * _read_number("MemAvailable:", Path("/proc/meminfo").read_text())]
    # In a container, the group's folder may be mounted as /sys/fs/cgroup itself.
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # cgroup v2
            names = "memory.max", "memory.current", "inactive_file"
            folders = [f"/sys/fs/cgroup{group}", "/sys/fs/cgroup"]
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            folders = [f"/sys/fs/cgroup/memory{group}", "/sys/fs/cgroup/memory"]
        else:
            continue
        free_bytes += [_free_in_group(Path(folder), *names) for folder in folders]
    return max(min(free_bytes), 0)


def _free_in_group(folder: Path, limit_file: str, used_file: str, cache_key: str) -> float:
    """Return the free bytes of a control group, infinity without a limit.

    The file cache of the group counts as free.

    Args:
        cache_key: Name of the number of cached bytes in the file ``memory.stat``.
    """
    limit, used, stat = (
        path.read_text().strip() if (path := folder / name).is_file() else ""
        for name in (limit_file, used_file, "memory.stat")
    )
    if not limit.isdecimal():  # "max", or the root group, which has no limit
        return float("inf")
    return int(limit) - int(used or 0) + _read_number(cache_key, stat)


def _read_number(key: str, text: str) -> int:
    match = re.search(rf"^{key}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0
