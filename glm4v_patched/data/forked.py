"""Run a function in several forked processes, each of which does a part of the work."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import Synchronized
from typing import Any

POLL_SECONDS = 0.5  # between updates of the progress

Work = Callable[[int, Callable[[int], None]], None]
"""A function of the process's number (from 0) and of ``report``. It calls ``report(n)`` when it has
finished n more items."""


def run_forked(work: Work, processes: int, advance: Callable[[int], Any]) -> None:
    """Run ``work(number, report)`` in ``processes`` forked processes, and wait for all of them.

    A forked process has everything that this process has imported and loaded; a new interpreter
    would have to import torch. Threads are not copied, so ``work`` must not need threads of this
    process.

    Args:
        advance: Called in this process with the number of items that all processes together have
            finished since its last call.

    Raises:
        OSError, RuntimeError, ValueError: An error of ``work``; the first one if several processes
            raised one.
        RuntimeError: A process was killed, or ``work`` raised another error, which was printed.
    """
    context = multiprocessing.get_context("fork")
    num_finished = context.Value("q", 0)
    children = []
    try:
        for number in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_work, args=(work, number, num_finished, sender), daemon=True
            )
            process.start()
            sender.close()
            children.append((process, receiver))
        num_reported = 0
        running: dict[Any, Any] = {receiver: process for process, receiver in children}
        while running:
            ready: list[Any] = wait(list(running), POLL_SECONDS)
            for receiver in ready:
                _join(running.pop(receiver), receiver)
            current = num_finished.value
            advance(current - num_reported)
            num_reported = current
    finally:
        for process, _ in children:
            process.kill()
            process.join()


def _join(process: Any, receiver: Any) -> None:
    """Wait for a process that has ended or is ending; raise its error, if any."""
    try:
        error = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"a process that reads rows ended with exit code {process.exitcode} before it was "
            "done; if it was killed because memory ran out, set data.max_samples, or data.stream: "
            "true"
        ) from None
    process.join()
    if error is not None:
        raise error


def _run_work(work: Work, number: int, num_finished: "Synchronized[int]", sender: Any) -> None:
    # There is one process per core, so threads of tokenizers would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Garbage collection would write to objects from before the fork, and so copy their pages.
    gc.freeze()

    def report(items: int) -> None:
        with num_finished.get_lock():
            num_finished.value += items

    error: Exception | None = None
    try:
        work(number, report)
    except (OSError, RuntimeError, ValueError) as work_error:
        # Only built-in classes are sent, because pickles of other error classes may not load.
        bases = type(work_error).__mro__
        builtin_class = next(base for base in bases if base.__module__ == "builtins")
        is_builtin = type(work_error) is builtin_class
        error = work_error if is_builtin else builtin_class(str(work_error))
    sender.send(error)
