"""Buffers of DeepSpeed's CPU collectives go when their processes have gone, and not before."""

import mmap
import os

import pytest

from glm4v_patched.engine.deepspeed import shared_memory


@pytest.mark.skipif(not shared_memory.SHARED_MEMORY.is_dir(), reason="no /dev/shm: not a Linux")
def test_only_what_nobody_uses_is_removed(monkeypatch):
    start = f"test_of_{os.getpid()}_"
    monkeypatch.setattr(shared_memory, "BUFFER", start)
    left, used = (shared_memory.SHARED_MEMORY / f"{start}{rank}" for rank in range(2))
    try:
        for buffer in (left, used):
            buffer.write_bytes(b"0" * mmap.PAGESIZE)
        assert shared_memory.remove_left_buffers() == []  # just made
        monkeypatch.setattr(shared_memory, "SECONDS_TO_MAP", -1)
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert shared_memory.remove_left_buffers() == [left]
            assert used.exists() and not left.exists()
        assert shared_memory.remove_left_buffers() == [used]
    finally:
        left.unlink(missing_ok=True)
        used.unlink(missing_ok=True)
