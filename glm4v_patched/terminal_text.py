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

# Seconds until the first line of show_progress, and between later lines.
FIRST_LINE_SECONDS, NEXT_LINE_SECONDS, POLL_SECONDS = 0.5, 4.5, 0.1
ERASE_LINE = "\r\x1b[2K"


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
        self.start, self.ended = time.perf_counter(), threading.Event()
        self._first: tuple[float, int] | None = None  # when something was done, and how much

    def update(self, number: int = 1) -> None:
        """Count what has been done since the last call."""
        self.done += number
        self._first = self._first or (time.perf_counter(), self.done)

    def __str__(self) -> str:
        now = time.perf_counter()
        if self.total is None:
            return f"{self.activity}: {now - self.start:.0f} s"
        text = f"{self.activity}: {self.done:,} of {pluralize(self.total, self.unit)}"
        # What comes before the first unit, such as loading a model, would falsify the estimate.
        if self._first is not None and self.done > self._first[1]:
            seconds = (now - self._first[0]) / (self.done - self._first[1])
            text += f", {timedelta(seconds=round(seconds * (self.total - self.done)))} left"
        return text

    def run(self) -> None:
        """Print the line from time to time, until the activity has ended."""
        global _last_printed
        line, seconds = f"{self.activity} ...", FIRST_LINE_SECONDS
        while not self.ended.wait(seconds):
            is_due = line or time.perf_counter() - _last_printed >= NEXT_LINE_SECONDS
            if _active[-1:] == [self] and is_due:
                is_terminal = sys.stderr.isatty()
                # In a terminal, the next line overwrites this one.
                text = f"{ERASE_LINE}{line or self}\r" if is_terminal else f"{line or self}\n"
                print(text, end="", file=sys.stderr, flush=True)
                line, _last_printed = "", time.perf_counter()
            seconds = max(_last_printed + NEXT_LINE_SECONDS - time.perf_counter(), POLL_SECONDS)


_active: list[Activity | None] = []  # of running blocks, the innermost last; None prints nothing
_last_printed = 0.0  # time.perf_counter() of the last line


@contextmanager
def show_progress(
    activity: str, enabled: bool = True, total: int | None = None, unit: str = "row", done: int = 0
) -> Iterator[Activity]:
    """Print the activity to standard error if the block takes long, and then every few seconds.

    Of nested calls, only the innermost prints.

    Args:
        activity: What the block does, such as "loading the model".
        enabled: If False, nothing is printed.
        total: How much there is to do, in units; the block calls :meth:`Activity.update`. None if
            it is not known: seconds are printed instead.
        done: Units that are done already.
    """
    progress = Activity(activity, total, unit, done)
    if enabled:
        _active.append(progress)
        threading.Thread(target=progress.run, daemon=True).start()
    try:
        yield progress
    finally:
        progress.ended.set()
        if enabled:
            _active.remove(progress)
            if sys.stderr.isatty():
                print(ERASE_LINE, end="", file=sys.stderr, flush=True)


@contextmanager
def no_progress() -> Iterator[None]:
    """Print no progress during the block: other processes print theirs."""
    _active.append(None)
    try:
        yield
    finally:
        _active.remove(None)


def write_line(text: str) -> None:
    """Print a line to standard output; the next progress line is due some seconds later."""
    global _last_printed
    if _active and sys.stderr.isatty():
        print(ERASE_LINE, end="", file=sys.stderr, flush=True)
    print(text, flush=True)
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
