"""Text for terminals: commands to copy, sizes, lists, escaped names and errors, progress lines."""

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TextIO

# Seconds until the first line of show_progress, and between later lines.
FIRST_LINE_SECONDS, NEXT_LINE_SECONDS, POLL_SECONDS = 0.4, 4.5, 0.1
ERASE_LINE = "\r\x1b[2K"
# Without wrapping, a terminal cuts off a line that is wider than itself.
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"


def own_command(*arguments: str) -> str:
    """Return ``glm4v-patched ARGUMENTS`` as a command that runs with this Python."""
    return shlex.join([*_program("glm4v-patched", "glm4v_patched"), *arguments])


def pip_install(*requirements: str) -> str:
    """Return ``pip install REQUIREMENTS`` for the Python that runs now."""
    return shlex.join([*_program("pip", "pip"), "install", *requirements])


def format_bytes(number: float) -> str:
    """Return a size in powers of 1,000: 28.0 GB, 1.5 MB, 512 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


def pluralize(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 process", "1,000 samples"."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun if number == 1 else plural or noun + ending}"


def listed(names: Sequence[object], limit: int = 3, separator: str = ", ") -> str:
    """Join the first ``limit`` names, and say how many more there are.

    Args:
        separator: Text between two names. If it has a line feed, "and N more" gets its own line.
    """
    text = separator.join(map(str, names[:limit]))
    before = separator if "\n" in separator else " "
    return f"{text}{before}and {len(names) - limit:,} more" if len(names) > limit else text


def printable(text: str, allow: str = "") -> str:
    """Escape all characters that a terminal would obey or hide, except those in ``allow``."""
    return "".join(c if c.isprintable() or c in allow else ascii(c)[1:-1] for c in text)


def shorten(text: str, limit: int = 80) -> str:
    """Return text as one line of printable characters; the middle of a longer text is cut out."""
    line = text if text.isprintable() else repr(text)[1:-1]
    if len(line) <= limit:
        return line
    half = (limit - 3) // 2
    return f"{line[:half]}...{line[-half:]}"


def error_text(error: Exception) -> str:
    """Return the line that a command prints when it ends with an error."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{shorten(os.fsdecode(error.filename), 200)}: {error.strerror}"
    return printable(str(error), allow="\n\t")


class Activity:
    """An activity, and how much of it is done; :func:`show_progress` prints it as a line."""

    def __init__(self, activity: str, total: int | None, unit: str, done: int):
        self.activity, self.total, self.unit, self.done = activity, total, unit, done
        self.start, self.is_printed = time.perf_counter(), False
        self._first: tuple[float, int] | None = None  # time of the first update, and done after it

    def update(self, number: int = 1) -> None:
        """Count what has been done since the last call."""
        self.done += number
        self._first = self._first or (time.perf_counter(), self.done)

    def __str__(self) -> str:
        now = time.perf_counter()
        if self.total is None:
            return f"{self.activity}: {now - self.start:.0f} s"
        text = f"{self.activity}: {self.done:,} of {pluralize(self.total, self.unit)}"
        # The time before the first unit, such as loading a model, would falsify the estimate.
        if self._first is not None and self.done > self._first[1]:
            seconds = (now - self._first[0]) / (self.done - self._first[1])
            text += f", {timedelta(seconds=round(seconds * (self.total - self.done)))} left"
        return text


_active: list[Activity | None] = []  # one for each running block, the innermost last
# The innermost activity at the last tick, and the time of the first tick at which it was that.
_innermost: tuple[Activity | None, float] = None, 0.0
_last_printed = time.perf_counter()  # time of the last line; at first, of this import
_ticker = threading.Thread()  # the thread that prints activities; show_progress starts it


def _tick(now: float) -> None:
    """Print the innermost activity, if it is new or nothing has been printed for seconds.

    So something is also printed during a sequence of short activities.
    """
    global _innermost, _last_printed
    [activity] = _active[-1:] or [None]
    if activity is not _innermost[0]:
        _innermost = activity, now
    if activity is None or sys.stderr is None:  # the shell's 2>&- makes stderr None
        return
    is_new = not activity.is_printed and now - _innermost[1] >= FIRST_LINE_SECONDS
    if is_new or now - _last_printed >= NEXT_LINE_SECONDS:
        line = str(activity) if activity.is_printed else f"{activity.activity} ..."
        # In a terminal, the next line overwrites this one.
        text = f"{ERASE_LINE}{NO_WRAP}{line}{WRAP}\r" if _overwrites_lines() else f"{line}\n"
        print(text, end="", file=sys.stderr, flush=True)
        activity.is_printed, _last_printed = True, now


def _tick_forever() -> None:
    while True:
        time.sleep(POLL_SECONDS)
        _tick(time.perf_counter())


def _overwrites_lines() -> bool:
    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    return has_terminal and os.environ.get("TERM") != "dumb"


def _erase_line() -> None:
    if _overwrites_lines():
        print(ERASE_LINE, end="", file=sys.stderr, flush=True)


@contextmanager
def show_progress(
    activity: str, enabled: bool = True, total: int | None = None, unit: str = "row", done: int = 0
) -> Iterator[Activity]:
    """Print the activity to standard error if the block takes long, and then every few seconds.

    Of nested calls, only the innermost prints.

    Args:
        activity: What the block does, such as "loading the model".
        enabled: If False, nothing is printed.
        total: Number of units to do; the block calls :meth:`Activity.update`. If it is None,
            seconds are printed instead.
        done: Units that are done already.
    """
    global _ticker
    progress = Activity(activity, total, unit, done)
    if enabled:
        _active.append(progress)
        if not _ticker.is_alive():  # not started yet, or this process was forked
            _ticker = threading.Thread(target=_tick_forever, daemon=True)
            _ticker.start()
    try:
        yield progress
    finally:
        if enabled:
            _active.remove(progress)
            _erase_line()


@contextmanager
def no_progress() -> Iterator[None]:
    """Print no progress during the block, e.g. while other processes print theirs."""
    _active.append(None)
    _erase_line()
    try:
        yield
    finally:
        _active.remove(None)


def write_line(text: str, file: TextIO | None = None) -> None:
    """Print a line, by default to standard output; progress pauses for seconds after it."""
    global _last_printed
    if _active:
        _erase_line()
    print(text, file=file, flush=True)
    _last_printed = time.perf_counter()


def _program(name: str, module: str) -> list[str]:
    """Return the command of a program installed beside this Python, by its bare name if PATH finds
    it; without such a program, return ``python -m MODULE``."""
    bin_folder = Path(sys.executable).parent
    installed = shutil.which(name, path=str(bin_folder))
    if installed is None:
        return [sys.executable, "-m", module]
    on_path = shutil.which(name)
    if on_path is not None and os.path.samefile(on_path, installed):
        return [name]
    # Show a path relative to the current folder, such as .venv/bin/glm4v-patched.
    if bin_folder != Path.cwd() and bin_folder.is_relative_to(Path.cwd()):
        return [str(Path(installed).relative_to(Path.cwd()))]
    return [installed]
