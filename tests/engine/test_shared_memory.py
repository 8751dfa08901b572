"""Buffers of DeepSpeed's CPU collectives go when their processes have gone, and not before."""

import mmap
import os

import pytest

from glm4v_patched.engine.deepspeed import shared_memory
from glm4v_patched.engine.deepspeed.shared_memory import remove_left_buffers, remove_own_buffer

pytestmark = pytest.mark.skipif(
    not shared_memory.SHARED_MEMORY.is_dir(), reason="no /dev/shm: not a Linux"
)


@pytest.fixture
def buffers(monkeypatch):
    """Of two ranks, by names that no training has."""
    monkeypatch.setattr(shared_memory, "BUFFER", f"test_of_{os.getpid()}")
    start = f"test_of_{os.getpid()}_{os.getuid()}_localhost_29500"
    ranks = [shared_memory.SHARED_MEMORY / f"{start}_{rank}" for rank in range(2)]
    for buffer in ranks:
        buffer.write_bytes(b"0" * mmap.PAGESIZE)
    yield ranks
    for buffer in ranks:
        buffer.unlink(missing_ok=True)


def test_only_what_nobody_uses_is_removed(buffers):
    left, used = buffers
    assert remove_left_buffers() == []  # just made
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_left_buffers(seconds=-1) == [left]
        assert used.exists() and not left.exists()
    assert remove_left_buffers(seconds=-1) == [used]


def test_a_process_removes_its_own(buffers, monkeypatch):
    mine, other = buffers
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    remove_own_buffer()  # of no training
    assert mine.exists()
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    remove_own_buffer()
    remove_own_buffer()
    assert other.exists() and not mine.exists()
