"""Processes that answer questions: a line of JSON on their standard input, one on their output.

They end when their input does, and so with the process that started them, even if it is killed.
``multiprocessing`` is not used: its processes import the caller's script again, and outlive a
caller that is killed. Needs no torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple

READY = "ready"
QUESTIONS_AT_ONCE = 4096


class Ended(NamedTuple):
    """In place of an answer: the question ended the process."""

    status: int


def ask_all(
    command: Sequence[str],
    questions: Iterable[Any],
    processes: int,
) -> Generator[Any, None, None]:
    """The answer to each question, in order; an :class:`Ended` process is replaced.

    Args:
        command: Of a process that calls :func:`answer_until_input_ends`.

    Raises:
        RuntimeError: the process does not start.
    """
    workers: list[_Worker] = []
    free: SimpleQueue[_Worker] = SimpleQueue()
    pool = ThreadPoolExecutor(processes)

    def ask(question: Any) -> Any:
        worker = free.get()
        try:
            return worker.ask(question)
        finally:
            free.put(worker)

    try:
        for _ in range(processes):
            workers.append(_Worker(command))
            free.put(workers[-1])
        questions = iter(questions)
        while some := list(islice(questions, QUESTIONS_AT_ONCE)):
            yield from pool.map(ask, some)
    finally:
        for worker in workers:
            worker.end()
        pool.shutdown(cancel_futures=True)


def answer_until_input_ends(answer: Callable[[Any], Any]) -> None:
    """Answer each question."""
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


class _Worker:
    def __init__(self, command: Sequence[str]):
        # As many processes as cores; threads of each would be in each other's way.
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.command = command
        self.has_ended = False
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=self.environment,
            start_new_session=True,  # Ctrl-C is ours to answer
        )
        assert self.process.stdin is not None and self.process.stdout is not None  # pipes
        self.questions, self.answers = self.process.stdin, self.process.stdout
        self.is_ready = False

    def ask(self, question: Any) -> Any:
        if not self.is_ready:
            self._wait_until_ready()
        answer = ""
        with suppress(OSError):  # it has ended
            print(json.dumps(question), file=self.questions, flush=True)
            answer = self.answers.readline()
        if answer:
            return json.loads(answer)
        status = self.process.wait()
        if not self.has_ended:
            self._close()
            self._start()
        return Ended(status)

    def _wait_until_ready(self) -> None:
        # Else one that cannot even start would be blamed on questions.
        if self.answers.readline().strip() != READY:
            raise RuntimeError(
                f"{' '.join(self.command[:4])} ended as it started, with exit status "
                f"{self.process.wait()}; the error above says why"
            )
        self.is_ready = True

    def end(self) -> None:
        self.has_ended = True
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self.answers.close()
        with suppress(OSError):  # what was not written yet has nobody to read it
            self.questions.close()
