"""Text for terminals: commands to copy, sizes, lists, escaped names and errors, progress lines."""

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Seconds until the first line of show_progress, and between later lines.
FIRST_LINE_SECONDS, NEXT_LINE_SECONDS = 0.5, 5


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
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


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


_active: list[threading.Event] = []  # of running show_progress blocks, the innermost last


@contextmanager
def show_progress(activity: str, enabled: bool = True) -> Iterator[None]:
    """Print the activity to standard error if the block takes long, and then every few seconds.

    Of nested calls, only the innermost prints.

    Args:
        activity: What the block does, such as "loading the model".
        enabled: If False, nothing is printed.
    """
    ended = threading.Event()

    def report() -> None:
        start = time.monotonic()
        line, seconds = f"{activity} ...", FIRST_LINE_SECONDS
        while not ended.wait(seconds):
            if _active[-1:] == [ended]:
                print(line, file=sys.stderr, flush=True)
            line, seconds = f"{activity}: {time.monotonic() - start:.0f} s", NEXT_LINE_SECONDS

    if enabled:
        _active.append(ended)
        threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if enabled:
            _active.remove(ended)


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
