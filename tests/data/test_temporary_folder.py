"""The folder of a check: gone with it, or with the next one if it was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm4v_patched.data.temporary_folder import make_workplace

HOLD = """
import time
from glm4v_patched.data.temporary_folder import make_workplace
workplace = make_workplace()
print(workplace.name, flush=True)
time.sleep(100)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "glm4v-patched"


def hold() -> tuple[subprocess.Popen, Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_check_left_is_removed_and_what_is_held_is_not(cache):
    (killed, left), (alive, held) = hold(), hold()
    try:
        assert left.parent == held.parent == cache
        (left / "read0.arrow").write_text("rows")
        killed.kill()
        killed.wait()
        assert left.is_dir()
        mine = make_workplace()
        assert {*cache.glob("checking-*")} == {held, Path(mine.name)}
        other = make_workplace()  # by the same process
        assert {*cache.glob("checking-*")} == {held, Path(mine.name), Path(other.name)}
        mine.cleanup()
        del other
        assert {*cache.glob("checking-*")} == {held}
    finally:
        for process in (killed, alive):
            process.send_signal(signal.SIGKILL)
            process.communicate()


def test_without_a_lock_only_what_is_old_is_removed(cache):
    for name, age in (("checking-new", 0), ("checking-old", 2 * 24 * 3600)):
        (cache / name).mkdir(parents=True)
        (cache / name / "read0.arrow").touch()
        os.utime(cache / name, (time.time() - age,) * 2)
    mine = make_workplace()
    assert {*cache.glob("checking-*")} == {cache / "checking-new", Path(mine.name)}
    assert (cache / "checking-new" / "read0.arrow").exists()
