"""A fresh process with its own caches that finds neither this package's folder nor a network."""

import os
import subprocess
import sys
from pathlib import Path


def run_without_package(code: str, folder: Path, *arguments: str, **variables: str) -> str:
    """Run Python code in ``folder``, for 300 s at most; return its stderr, or fail with that."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {
        "HF_HOME": str(folder / "home"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stderr
