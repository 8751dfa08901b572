"""Entry point of a training process: ``python -m glm4v_patched.finetune.process PLAN``.

``PLAN`` is the file of a :class:`plan.Plan`. :mod:`launch` starts this module; on several machines,
:mod:`__main__` calls it. Slow imports are inside of functions: before them, the process makes sure
that it ends together with its parent.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from ..engine.environment import exit_when_stdin_closes
from ..terminal_text import show_progress


def main() -> NoReturn:
    exit_when_stdin_closes()
    exit_process(run(Path(sys.argv[1])))


def run(plan: Path) -> int:
    """Train by a plan, and return the exit status.

    If the training ends without a model, the exit status is 1, and the launcher prints the error
    from the training's report.
    """
    with show_progress(
        "loading torch and transformers", enabled=os.environ.get("RANK", "0") == "0"
    ):
        from .divergence import NoResult
        from .plan import Plan
        from .worker import train
    try:
        train(Plan.read(plan))
    except NoResult:
        return 1
    return 0


def exit_process(status: int = 0) -> NoReturn:
    """End this process without waiting for threads of DeepSpeed and inductor.

    Call this after everything is saved. Python's own shutdown may kill such a thread while it runs,
    which aborts the process.
    """
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
