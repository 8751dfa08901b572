"""Run a script as each rank of a job: ``ranks.py VARIABLES SCRIPT [ARGUMENT ...]``.

VARIABLES is JSON: the environment variables of each rank. The ranks are forked from this process,
so what the script imports, which takes seconds, is imported once. If a rank fails, the others have
SECONDS_TO_END; the exit status is that of the first one that failed.
"""

import json
import os
import runpy
import signal
import sys

SECONDS_TO_END = 10


def start(variables: dict[str, str], script: str) -> int:
    """Fork a rank and return its PID."""
    if pid := os.fork():
        return pid
    os.environ |= variables
    runpy.run_path(script, run_name="__main__")
    sys.exit()


def wait_for(ranks: set[int]) -> int:
    """Return the status of the first rank that failed, or 0, after all have ended."""

    def kill(*_) -> None:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    failed = 0
    while ranks:
        rank, status = os.wait()
        ranks.remove(rank)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            signal.alarm(SECONDS_TO_END)
    return failed


if __name__ == "__main__":
    ranks, script = json.loads(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_path(script, run_name="imported")
    sys.exit(wait_for({start(variables, script) for variables in ranks}))
