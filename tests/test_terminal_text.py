"""Printed commands run as printed, whether or not an environment is activated."""

import os
import re
import shlex
import sys
import time
from pathlib import Path

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


def test_what_takes_long_is_said_and_said_again(monkeypatch, capsys):
    monkeypatch.setattr(terminal_text, "FIRST_LINE_SECONDS", 0.1)
    monkeypatch.setattr(terminal_text, "NEXT_LINE_SECONDS", 0.02)
    with show_progress("reading"):
        pass
    with show_progress("reading", enabled=False):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
    with show_progress("reading"):
        time.sleep(0.5)
    assert capsys.readouterr().err.startswith("reading ...\nreading: 0 s\nreading: 0 s\n")
    with show_progress("merging"), show_progress("loading"):  # the inner one alone
        time.sleep(0.3)
    assert "merging" not in capsys.readouterr().err


def test_a_number_has_its_noun_in_singular_or_plural():
    numbers = [pluralize(number, "row") for number in (0, 1, 2, 1000)]
    assert numbers == ["0 rows", "1 row", "2 rows", "1,000 rows"]
    assert pluralize(2, "process") == "2 processes"


def test_nothing_that_is_printed_moves_a_terminal():
    odd = "a\x1b[2J\u202eb\n\tc\udc80"
    assert printable(odd) == r"a\x1b[2J\u202eb\n\tc\udc80"
    assert printable(odd, allow="\n\t") == "a\\x1b[2J\\u202eb\n\tc\\udc80"


def test_a_count_has_its_total_and_an_inner_activity_is_followed_by_the_outer(monkeypatch, capsys):
    for name in ("FIRST_LINE_SECONDS", "NEXT_LINE_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(terminal_text, name, 0.02)
    with show_progress("answering", total=4) as progress:
        progress.update()
        time.sleep(0.1)
        progress.update()
        time.sleep(0.1)
        with no_progress():
            capsys.readouterr()
            time.sleep(0.1)
            assert capsys.readouterr().err == ""
        with show_progress("reading"):
            time.sleep(0.1)
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert "reading ..." in lines
    assert re.fullmatch(r"answering: 2 of 4 rows, 0:00:0\d left", lines[-1])
