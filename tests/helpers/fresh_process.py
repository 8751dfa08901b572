"""A process with its own caches that finds neither this package's folder nor a network."""

import os
from pathlib import Path

from tests.helpers import warm


def run_without_package(code: str, folder: Path, *arguments: str, **variables: str) -> str:
    """Run Python code in ``folder``, for 300 s at most; return what it printed, or fail with that.

    It is a fork of a process that has imported torch (:mod:`warm`), and nothing that reads where
    caches are or that has to do with models.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {
        "HF_HOME": str(folder / "home"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    status, printed = warm.run_code(code, [*arguments], folder, environment | variables, 300)
    assert status == 0, printed[-4000:]
    # Triton 3.9 lists at the end of a process what it has not freed.
    return printed.partition("nanobind: leaked")[0]
