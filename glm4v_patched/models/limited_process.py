"""Run other people's chat templates and regular expressions in a process with limits.

A template is a program, and a regular expression can run for ever. Nobody can see how long they
take without running them. So a child process runs them, and the operating system limits the memory
and time of this child. The child starts with the first request, handles one request after the
other, and ends with the process that started it. It runs this file as a module, and imports no
torch.
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

MEMORY_STATUS = Path("/proc/self/statm")  # on Linux; elsewhere memory is not limited
# Limits of an empty request: seconds, bytes of memory, and bytes of the reply. The limits of other
# requests grow with the size of the request (ProcessLimits.for_request).
BASE_SECONDS, BASE_BYTES, BASE_REPLY = 20, 2**30, 2**22


class ProcessLimits(NamedTuple):
    """Limits of one request.

    Attributes:
        seconds: Wall-clock time.
        memory: Bytes of memory in addition to what the process used when its first request began.
        reply: Bytes of the reply.
    """

    seconds: float
    memory: int
    reply: int

    @classmethod
    def for_request(cls, size: int) -> "ProcessLimits":
        """Return the limits of a request of ``size`` bytes."""
        return cls(BASE_SECONDS + size / 10**6, BASE_BYTES + 64 * size, BASE_REPLY + 16 * size)


class LimitExceeded(ValueError):
    """The task took too much time or memory, or its result is too long."""


class TaskFailed(Exception):
    """The task raised an error; ``kind`` is the name of its class."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class LimitedProcess:
    """The client of the limited process.

    Threads share one limited process; a forked process starts its own.
    """

    _process: subprocess.Popen | None
    _replies: io.BufferedReader
    _lock: threading.Lock

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self._stop)

    def run(self, task: str, *arguments: Any) -> Any:
        """Return the result of a function of :data:`TASKS`.

        Raises:
            LimitExceeded: The task exceeded a limit.
            TaskFailed: The task raised an error.
        """
        body = _as_line([task, *arguments])
        with self._lock:
            try:
                reply = self._request(body, ProcessLimits.for_request(len(body)))
            # After an interruption, the rest of this reply would be read as the next reply.
            except BaseException:
                self._stop()
                raise
        if reply.get("kind") == LimitExceeded.__name__:
            raise LimitExceeded(reply["text"])
        if "kind" in reply:
            raise TaskFailed(reply["kind"], reply["text"])
        return reply["value"]

    def _request(self, body: bytes, limits: ProcessLimits) -> dict:
        """Send a request to the limited process, which is started if needed; return the reply."""
        if (process := self._process) is None:
            command = python_module_command("glm4v_patched.models.limited_process")
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)
            self._process, self._replies = process, io.BufferedReader(process.stdout)  # type: ignore
        unsent = memoryview(_as_line(limits) + body)
        try:
            while unsent:
                unsent = unsent[process.stdin.write(unsent) :]  # type: ignore[union-attr]
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

    def _reset(self) -> None:
        """Forget the limited process; a forked process must not read its parent's replies."""
        self._process, self._lock = None, threading.Lock()


LIMITED_PROCESS = LimitedProcess()


def _as_line(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, default=_json_fallback)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _json_fallback(value: Any) -> Any:
    """Replace a value that JSON cannot represent.

    A numpy scalar is replaced by a number, any other object, such as an image, by its type's name.
    """
    is_number = type(value).__module__ == "numpy" and not getattr(value, "shape", True)
    return value.item() if is_number else f"<{type(value).__name__}>"


def render(options: dict[str, Any]) -> Any:
    """Return the result of transformers' ``render_jinja_template``."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template(**options)


def match_patterns(patterns: Sequence[tuple[str, str]], names: Sequence[str]) -> None:
    """Match all names with each pattern; the time that this takes is the only result.

    Args:
        patterns: Pairs of the name of a function in ``re`` and a regular expression.
    """
    for function, pattern in patterns:
        compiled = re.compile(pattern)
        for name in names:
            getattr(compiled, function)(name)


TASKS: dict[str, Callable[..., Any]] = {"render": render, "match": match_patterns}


def _run_task(body: bytes, limits: ProcessLimits) -> bytes:
    task, *arguments = json.loads(body.decode("utf-8", "surrogatepass"))
    try:
        reply = _as_line({"value": TASKS[task](*arguments)})
        if len(reply) > limits.reply:
            problem = f"made {format_bytes(len(reply))} of text"
            raise LimitExceeded(f"{problem}, and may make at most {format_bytes(limits.reply)}")
    except MemoryError:
        text = f"took more than {format_bytes(limits.memory)} of memory"
        reply = _as_line({"kind": LimitExceeded.__name__, "text": text})
    except Exception as error:
        reply = _as_line({"kind": type(error).__name__, "text": shorten(str(error), 500)})
    return reply


def main() -> None:
    # Text that libraries print goes to stderr, so that the client does not read it as a reply.
    replies, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(0, "rb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    # The system's default action ends the process; Python runs no handler during a long C call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    used, (_, hard) = 0, resource.getrlimit(resource.RLIMIT_AS)
    while limits_line := requests.readline():
        limits, body = ProcessLimits(*json.loads(limits_line)), requests.readline()
        if body.startswith(b'["render"'):
            import transformers.utils.chat_template_utils  # noqa: F401  # before the clock starts
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        if MEMORY_STATUS.exists():
            used = used or int(MEMORY_STATUS.read_text().split()[0]) * resource.getpagesize()
            soft = used + limits.memory
            if hard != resource.RLIM_INFINITY:
                soft = min(soft, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        reply = _run_task(body, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(reply)
        replies.flush()


if __name__ == "__main__":
    main()
