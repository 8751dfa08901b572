"""The memory of a machine that processes may take, as the kernel tells it."""

from pathlib import Path

import psutil

from glm4v_patched.engine.ram import free_ram


def test_free_memory_is_within_the_limits_of_control_groups(monkeypatch):
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
        monkeypatch.delitem(files, file)
        files.pop(file, None)


def test_free_memory_of_this_machine_is_no_more_than_it_has():
    assert 0 < free_ram() <= psutil.virtual_memory().total
