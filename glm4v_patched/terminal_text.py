"""What is printed: commands that run as printed, in an environment that is not activated too;
sizes; errors and names without what a terminal would obey."""

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SECONDS_TO_FIRST_WORD, SECONDS_BETWEEN_WORDS = 0.5, 5


def own_command(*arguments: str) -> str:
    """``glm4v-patched ARGUMENTS`` for the Python that runs now."""
    return shlex.join([*_program("glm4v-patched", "glm4v_patched"), *arguments])


def pip_install(*requirements: str) -> str:
    """``pip install REQUIREMENTS`` for the Python that runs now."""
    return shlex.join([*_program("pip", "pip"), "install", *requirements])


def format_bytes(number: float) -> str:
    """A size in the unit that suits it, of powers of 1,000: 28.0 GB, 1.5 MB, 512 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


def listed(names: Sequence[object], most: int = 3, between: str = ", ") -> str:
    """The first so many of them, and how many more there are.

    Args:
        between: What stands between two of them; with a line feed, the number has its own line.
    """
    shown = between.join(map(str, names[:most]))
    before = between if "\n" in between else " "
    return f"{shown}{before}and {len(names) - most:,} more" if len(names) > most else shown


def printable(text: str, allow: str = "") -> str:
    """With the code of each character that a terminal would obey or not show, but for ``kept``."""
    return "".join(c if c.isprintable() or c in allow else ascii(c)[1:-1] for c in text)


def shorten(text: str, most: int = 80) -> str:
    """One line of printable characters, with what is left out of a long text in its middle."""
    shown = text if text.isprintable() else repr(text)[1:-1]
    if len(shown) <= most:
        return shown
    half = (most - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"


def error_text(error: Exception) -> str:
    """What a command says of an error that it ends with."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{shorten(os.fsdecode(error.filename), 200)}: {error.strerror}"
    return printable(str(error), allow="\n\t")


@contextmanager
def show_progress(what: str, enabled: bool = True) -> Iterator[None]:
    """Say on standard error what is being done, if it is not done at once, and every few seconds.

    Args:
        tells: False, to say nothing.
    """
    ended = threading.Event()

    def tell() -> None:
        start = time.monotonic()
        if not ended.wait(SECONDS_TO_FIRST_WORD):
            print(f"{what} ...", file=sys.stderr, flush=True)
        while not ended.wait(SECONDS_BETWEEN_WORDS):
            print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    if enabled:
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _program(name: str, module: str) -> list[str]:
    """A program beside this Python, by its name if a shell finds it; or the module."""
    here = Path(sys.executable).parent
    beside = shutil.which(name, path=str(here))
    if beside is None:
        return [sys.executable, "-m", module]
    found = shutil.which(name)
    if found is not None and os.path.samefile(found, beside):
        return [name]
    # From the folder in which the command is printed, as .venv/bin/glm4v-patched.
    if here != Path.cwd() and here.is_relative_to(Path.cwd()):
        return [str(Path(beside).relative_to(Path.cwd()))]
    return [beside]
