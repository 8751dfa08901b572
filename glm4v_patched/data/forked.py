"""Run one piece of work in several forked processes, each with its share."""

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

    A forked process starts with all that this process has imported and loaded; a new interpreter
    would import torch first. A fork does not copy threads, and the work needs none of this process.

    Args:
        work: Takes the number of its process, from 0, and a function that counts finished items.
        advance: Function that this process calls with the number of items finished since its last
            call.

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
    gc.freeze()  # the parent's objects are not searched for garbage, so their pages stay shared

    def report(items: int) -> None:
        with num_finished.get_lock():
            num_finished.value += items

    error: Exception | None = None
    try:
        work(number, report)
    except (OSError, RuntimeError, ValueError) as caught:
        # Pickles of errors of other classes may not load.
        kind = next(kind for kind in type(caught).__mro__ if kind.__module__ == "builtins")
        error = caught if type(caught) is kind else kind(str(caught))
    sender.send(error)
