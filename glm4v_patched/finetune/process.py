"""One process of a training: ``python -m glm4v_patched.finetune.process PLAN``, where ``PLAN`` is a
file of :class:`plan.Plan`. :mod:`launch` starts it; on several machines, :mod:`__main__` calls it.

Nothing that takes long is imported before it is seen to that this process ends with whoever has
started it.
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
    """Train what was planned; the exit status. Of a training that has no result, whoever has
    planned it tells what is in the report."""
    with show_progress("loading torch and transformers", enabled=os.environ.get("RANK", "0") == "0"):
        from .divergence import NoResult
        from .plan import Plan
        from .worker import train
    try:
        train(Plan.read(plan))
    except NoResult:
        return 1
    return 0


def exit_process(status: int = 0) -> NoReturn:
    """End this process without waiting for threads of DeepSpeed and inductor, when all is saved:
    they may be killed by Python half-way at its end, which aborts a process that has done its
    work."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
