"""Run a function in several forked processes, each of which does its share of the work."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import Synchronized
from typing import Any

POLL_SECONDS = 0.5

Work = Callable[[int, Callable[[int], None]], None]


def run_forked(work: Work, processes: int, advance: Callable[[int], Any]) -> None:
    """Run ``work(number, report)`` in ``processes`` forked processes, and wait for all.

    A forked process starts with everything that this process has imported and loaded, whereas a new
    interpreter would import torch first. Threads are not copied, so ``work`` must not need any.

    Args:
        work: Takes the number of its process, from 0, and a function to which it passes how many
            more items it has finished.
        advance: Called in this process with the number of items finished since the last call.

    Raises:
        OSError, RuntimeError, ValueError: The first of these errors that a process raised.
        RuntimeError: A process was killed, or ended by another error, which it has printed.
    """
    context = multiprocessing.get_context("fork")
    num_finished = context.Value("q", 0)
    children = []
    try:
        for number in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(work, number, num_finished, sender), daemon=True
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
            "done; if it was killed for memory, give data.max_samples, or data.stream: true"
        ) from None
    process.join()
    if error is not None:
        raise error


def _run(work: Work, number: int, num_finished: "Synchronized[int]", sender: Any) -> None:
    # There is one process per core, so threads of tokenizers would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # garbage collection would write to the parent's objects and copy their pages

    def report(items: int) -> None:
        with num_finished.get_lock():
            num_finished.value += items

    error: Exception | None = None
    try:
        work(number, report)
    except (OSError, RuntimeError, ValueError) as caught:
        # Raised in the parent as a built-in class: pickles of other error classes may not load.
        kind = next(kind for kind in type(caught).__mro__ if kind.__module__ == "builtins")
        error = caught if type(caught) is kind else kind(str(caught))
    sender.send(error)
