"""Printed commands run as printed, whether or not an environment is activated."""

import io
import os
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import glm4v_patched
from glm4v_patched import terminal_text
from glm4v_patched.terminal_text import (
    format_bytes,
    no_progress,
    own_command,
    pip_install,
    pluralize,
    printable,
    show_progress,
)
from tests.helpers.processes import in_plain_shell

VERSION = f"glm4v-patched {glm4v_patched.__version__}"


def add_program(path: Path, *command: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """The folder of an environment's programs, that of the Python that runs now."""
    folder = tmp_path / "an environment" / "bin"
    add_program(folder / "python", sys.executable)
    add_program(folder / "glm4v-patched", sys.executable, "-m", "glm4v_patched")
    add_program(folder / "pip", "echo", "pip")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", os.defpath)
    return folder


def test_without_a_program_beside_it_the_python_is_printed(programs):
    (programs / "glm4v-patched").unlink()
    assert own_command("--version") == f"'{programs}/python' -m glm4v_patched --version"
    assert in_plain_shell(own_command("--version")).output.startswith(VERSION)


def test_a_program_is_printed_by_its_path_where_the_path_does_not_find_it(
    programs, monkeypatch, tmp_path
):
    add_program(tmp_path / "other" / "glm4v-patched", "echo", "another")
    for others in ([], [str(tmp_path / "other")]):
        monkeypatch.setenv("PATH", os.pathsep.join([*others, os.defpath]))
        monkeypatch.chdir(programs.parent)
        assert own_command("--version") == "bin/glm4v-patched --version"
        assert in_plain_shell(own_command("--version")).output.startswith(VERSION)
        monkeypatch.chdir(Path(__file__).parent)
        assert own_command() == shlex.quote(f"{programs}/glm4v-patched")
        assert in_plain_shell(pip_install("x")).output == "pip install x\n"
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), os.defpath]))
    assert own_command("train", "my recipe.yaml") == "glm4v-patched train 'my recipe.yaml'"
    assert pip_install("liger-kernel") == "pip install liger-kernel"


def test_sizes_have_the_unit_that_suits_them():
    sizes = (27.8e9, 10**9, 512.7e6, 24_600, 999, 0)
    expected = ["27.8 GB", "1.0 GB", "512.7 MB", "24.6 kB", "999 bytes", "0 bytes"]
    assert [format_bytes(size) for size in sizes] == expected


def test_a_number_has_its_noun_in_singular_or_plural():
    numbers = [pluralize(number, "row") for number in (0, 1, 2, 1000)]
    assert numbers == ["0 rows", "1 row", "2 rows", "1,000 rows"]
    assert pluralize(2, "process") == "2 processes"


def test_nothing_that_is_printed_moves_a_terminal():
    odd = "a\x1b[2J\u202eb\n\tc\udc80"
    assert printable(odd) == r"a\x1b[2J\u202eb\n\tc\udc80"
    assert printable(odd, allow="\n\t") == "a\\x1b[2J\\u202eb\n\tc\\udc80"


@pytest.fixture
def printed_after(monkeypatch, capsys):
    """Let the ticker tick by a clock of the test, and return what it prints.

    The thread does not start; a tick comes every tenth of a second, as in a process.
    """
    for name, seconds in (("FIRST_LINE_SECONDS", 0.4), ("NEXT_LINE_SECONDS", 4.5)):
        monkeypatch.setattr(terminal_text, name, seconds)
    monkeypatch.setattr(terminal_text, "_ticker", SimpleNamespace(is_alive=lambda: True))
    monkeypatch.setattr(terminal_text, "_last_printed", 1000.0)
    now = [1000.0]
    monkeypatch.setattr(terminal_text.time, "perf_counter", lambda: now[0])

    def pass_time(seconds: float) -> list[str]:
        for _ in range(round(seconds * 10)):
            now[0] += 0.1
            terminal_text._tick(now[0])
        return capsys.readouterr().err.splitlines()

    return pass_time


def test_what_takes_long_is_printed_and_printed_again(printed_after):
    with show_progress("reading"):
        assert printed_after(0.3) == []
        assert printed_after(0.5) == ["reading ..."]
        assert printed_after(4.0) == []
        assert printed_after(8.0) == ["reading: 5 s", "reading: 10 s"]
    assert printed_after(20) == []
    with show_progress("reading", enabled=False):
        assert printed_after(20) == []


def test_no_five_seconds_pass_without_a_line_however_short_the_activities(printed_after):
    for seconds in (0.1, 0.3, 0.6, 4.4):
        silence = longest = 0.0
        with show_progress("writing"):
            for _ in range(round(30 / seconds)):
                with show_progress("hashing"):
                    for _ in range(round(seconds * 10)):
                        silence = 0.0 if printed_after(0.1) else silence + 0.1
                        longest = max(longest, silence)
        assert 0 < longest < 5, seconds


def test_of_nested_activities_only_the_innermost_is_printed(printed_after):
    with show_progress("merging"), show_progress("loading"):
        assert printed_after(6) == ["loading ...", "loading: 5 s"]
    with show_progress("merging"):
        with show_progress("loading"):
            printed_after(2)
        assert printed_after(0.2) == []  # too short to be worth a line of its own
        assert printed_after(1) == ["merging ..."]
        with no_progress():
            assert printed_after(20) == []


def test_a_count_has_its_total_its_unit_and_the_time_left(printed_after):
    with show_progress("answering", total=4) as progress:
        printed_after(5)  # loading the model, say, which does not count
        progress.update()
        printed_after(10)
        progress.update()
        # Lines come after 0.5, 5, 9.5, 14 and 18.5 s: 13.5 s for a row after the first.
        assert printed_after(4.5)[-1] == "answering: 2 of 4 rows, 0:00:27 left"
    with show_progress("merging", total=1, unit="file"):
        assert printed_after(5.5)[-1] == "merging: 0 of 1 file"


def test_the_lines_come_by_themselves_while_the_program_works(monkeypatch, capsys):
    for name in ("FIRST_LINE_SECONDS", "NEXT_LINE_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(terminal_text, name, 0.01)
    end, lines = time.monotonic() + 60, ""
    with show_progress("reading"):
        while lines.count("reading") < 3:
            assert time.monotonic() < end, "the ticker's thread does not print"
            lines += capsys.readouterr().err
    assert lines.startswith("reading ...\nreading: 0 s\n")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_is_erased(printed_after, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress("x" * 500):
        printed_after(6)
        lines = [f"\r\x1b[2K\x1b[?7l{'x' * 500}{end}\x1b[?7h\r" for end in (" ...", ": 5 s")]
        assert screen.getvalue() == "".join(lines)  # ?7l: cut off where the terminal ends
        screen.truncate(0)
        terminal_text.write_line("a result")
        assert screen.getvalue().lstrip("\0") == terminal_text.ERASE_LINE
        screen.truncate(0)
        with no_progress():  # a person may type here
            assert screen.getvalue().lstrip("\0") == terminal_text.ERASE_LINE
    monkeypatch.setenv("TERM", "dumb")
    screen.truncate(0)
    with show_progress("reading"):
        printed_after(1)
    assert screen.getvalue().lstrip("\0") == "reading ...\n"


def test_a_closed_standard_error_disturbs_nothing(printed_after, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it after 2>&-
    with show_progress("reading"), no_progress(), show_progress("writing"):
        assert printed_after(20) == []
