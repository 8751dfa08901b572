"""A process with its own caches that finds neither this package's folder nor a network."""

import os
import sys
from pathlib import Path

from tests.helpers.processes import run_with_limit


def run_without_package(code: str, folder: Path, *arguments: str, **variables: str) -> str:
    """Run Python code in a folder, for 300 s at most; return what it printed, or fail with that."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {
        "HF_HOME": str(folder / "home"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", code, *arguments]
    ended = run_with_limit(command, 300, environment | variables, folder)
    assert ended.status == 0, ended.output[-4000:]
    # Triton 3.9 lists at the end of a process what it has not freed.
    return ended.output.partition("nanobind: leaked")[0]
