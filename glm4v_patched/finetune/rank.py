"""What each training process of :mod:`launch` runs: ``python -m glm4v_patched.finetune.rank PLAN``,
where ``PLAN`` is a file of :class:`plan.Plan`.

Nothing that takes long is imported before it is seen to that this process ends with whoever has
started it.
"""

import argparse
import os
import sys
import threading
from pathlib import Path

from ..terminal_text import doing, error_text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--end-with-stdin", action="store_true")
    parser.add_argument("--require-gpu", action="store_true")
    options = parser.parse_args()
    if options.end_with_stdin:
        end_with_stdin()
    with doing("loading torch and transformers", tells=is_first()):
        from .divergence import Diverged
        from .plan import Plan
        from .worker import leave, require_gpu, train
    if options.require_gpu:
        require_gpu()
    try:
        train(Plan.read(options.plan))
    except Diverged:
        leave(1)  # the launcher prints what is in the report
    except RuntimeError as error:
        if "DataLoader worker" not in str(error) or "killed" not in str(error):
            raise
        told = f"{error_text(error)}. The system kills processes where memory is short: lower "
        print(f"{told}trainer.dataloader_num_workers, or free memory", file=sys.stderr)
        leave(1)
    leave()


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def end_with_stdin() -> None:
    """End this process when its standard input ends: when whoever holds the other end is gone.

    The kernel closes that end however the holder dies, which no handler and, outside Linux, no
    death signal can promise; and torch elastic gives each process a session of its own, so that no
    signal to a group reaches it.
    """

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


if __name__ == "__main__":
    main()
