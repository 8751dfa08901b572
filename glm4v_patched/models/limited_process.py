"""Renders chat templates and compares patterns of others, in a process with limits.

A template is a program, and a regular expression can take for ever: no look at one, and no trial of
it, says what it does with the next message. So each is run where memory and time are limited by the
operating system, which ends that process and no other. It starts when the first is to be run,
answers one request after the other, and ends with the process that started it. Run as a module,
this file is that process; it imports no torch.
"""

import atexit
import io
import json
import os
import re
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.environment import python_module_command
from ..terminal_text import format_bytes, shorten

STATUS = Path("/proc/self/statm")  # of Linux; elsewhere memory has no limit
SECONDS, BYTES, CHARACTERS = 20, 2**30, 2**22  # of one request, and more of a long one


class Limits(NamedTuple):
    """Of one request: by the clock, of memory beside what the process takes, of its answer."""

    seconds: float
    memory: int
    answer: int

    @classmethod
    def of(cls, size: int) -> "Limits":
        """Those of a request of so many bytes."""
        return cls(SECONDS + size / 10**6, BYTES + 64 * size, CHARACTERS + 16 * size)


class LimitExceeded(ValueError):
    """What was run took more time or memory than it may, or made too long a text."""


class Failed(Exception):
    """What was run raised an error, of the class that ``kind`` names."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class LimitedProcess:
    """The process, as whoever asks sees it; for threads, and for processes that were forked."""

    _process: subprocess.Popen | None
    _replies: io.BufferedReader
    _lock: threading.Lock

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._stop)

    def run(self, task: str, *arguments: Any) -> Any:
        """Return what that function of :data:`TASKS` returns. Raises :class:`LimitExceeded` and
        :class:`Failed`."""
        body = _as_line([task, *arguments])
        with self._lock:
            try:
                reply = self._ask(body, Limits.of(len(body)))
            except BaseException:  # a half-read answer would be the next one's
                self._stop()
                raise
        if reply.get("kind") == LimitExceeded.__name__:
            raise LimitExceeded(reply["text"])
        if "kind" in reply:
            raise Failed(reply["kind"], reply["text"])
        return reply["value"]

    def _ask(self, body: bytes, limits: Limits) -> dict:
        if (process := self._process) is None:
            command, pipe = python_module_command("glm4v_patched.models.limited_process"), subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)
            self._process, self._replies = process, io.BufferedReader(process.stdout)  # type: ignore
        left = memoryview(_as_line(limits) + body)
        try:
            while left:
                left = left[process.stdin.write(left) :]  # type: ignore[union-attr]
            line = self._replies.readline()
        except BrokenPipeError:
            line = b""
        if line:
            return json.loads(line)
        if (status := process.wait()) == -signal.SIGALRM:
            raise LimitExceeded(f"took more than {limits.seconds:.3g} s")
        raise LimitExceeded(f"ended the process that ran it, with status {status}")

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _forget(self) -> None:
        """In a process that was forked: the other one's answers are not its own."""
        self._process, self._lock = None, threading.Lock()


PROCESS = LimitedProcess()


def _as_line(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _plain(value: Any) -> Any:
    """What is no JSON, such as an image, as transformers shows it to templates."""
    is_number = type(value).__module__ == "numpy" and not getattr(value, "shape", True)
    return value.item() if is_number else f"<{type(value).__name__}>"


def render(options: dict[str, Any]) -> Any:
    """What transformers' ``render_jinja_template`` returns."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template(**options)


def match(patterns: Sequence[tuple[str, str]], names: Sequence[str]) -> None:
    """Compare patterns with names, each by the function of ``re`` that stands before it."""
    for function, pattern in patterns:
        compiled = re.compile(pattern)
        for name in names:
            getattr(compiled, function)(name)


TASKS: dict[str, Callable[..., Any]] = {"render": render, "match": match}


def _answer(body: bytes, limits: Limits) -> bytes:
    task, *arguments = json.loads(body.decode("utf-8", "surrogatepass"))
    try:
        reply = _as_line({"value": TASKS[task](*arguments)})
        if len(reply) > limits.answer:
            problem = f"made a text of {format_bytes(len(reply))}"
            raise LimitExceeded(f"{problem}, of {format_bytes(limits.answer)} at most")
    except MemoryError:
        text = f"took more than {format_bytes(limits.memory)} of memory"
        reply = _as_line({"kind": LimitExceeded.__name__, "text": text})
    except Exception as error:
        reply = _as_line({"kind": type(error).__name__, "text": shorten(str(error), 500)})
    return reply


def main() -> None:
    # What libraries print is not read as an answer.
    replies, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(0, "rb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever is asked to end ends this one
    # The system's way: within a single operation, Python calls no function of its own.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    used, (_, hard) = 0, resource.getrlimit(resource.RLIMIT_AS)
    while head := requests.readline():
        limits, body = Limits(*json.loads(head)), requests.readline()
        if body.startswith(b'["render"'):
            import transformers.utils.chat_template_utils  # noqa: F401  # before the clock starts
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        if STATUS.exists():
            used = used or int(STATUS.read_text().split()[0]) * resource.getpagesize()
            most = used + limits.memory
            if hard != resource.RLIM_INFINITY:
                most = min(most, hard)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        reply = _answer(body, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(reply)
        replies.flush()


if __name__ == "__main__":
    main()
