"""Processes that tests fork end with the tests that asked for them."""

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import warm
from tests.helpers.processes import run_warm


def test_what_an_interrupted_test_forked_is_killed_with_its_children(tmp_path, monkeypatch):
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "with open(sys.argv[1] + '_', 'w') as file:\n"
        "    print(os.getpid(), child.pid, file=file)\n"
        "os.rename(sys.argv[1] + '_', sys.argv[1])\n"
        "time.sleep(100)\n"
    )
    told = tmp_path / "told"

    def interrupted(running, end):
        while not told.exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(warm, "_wait", interrupted)
        run_warm(str(script), str(told), seconds=100, processes=None)
    pids = [int(pid) for pid in told.read_text().split()]
    _, alive = psutil.wait_procs(map(psutil.Process, filter(psutil.pid_exists, pids)), timeout=20)
    assert alive == []
    script.write_text("import os; print(os.getcwd())")
    ended = run_warm(str(script), seconds=100, processes=None)
    assert ended.status == 0 and Path(ended.output.strip()) == Path(os.getcwd())
