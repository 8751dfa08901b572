"""Printed commands run as printed, whether or not an environment is activated."""

import os
import shlex
import sys
from pathlib import Path

import glm4v_patched
from glm4v_patched.printed import own_command, pip_install
from tests.helpers.processes import in_plain_shell

HERE = str(Path(sys.executable).parent)
VERSION = f"glm4v-patched {glm4v_patched.__version__}"


def test_in_an_activated_environment_names_suffice(monkeypatch):
    monkeypatch.setenv("PATH", os.pathsep.join([HERE, os.defpath]))
    assert own_command("train", "my recipe.yaml") == "glm4v-patched train 'my recipe.yaml'"
    assert pip_install("liger-kernel") == "pip install liger-kernel"


def test_elsewhere_the_path_is_printed_from_where_one_is(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.defpath)
    for folder, program in (
        (tmp_path, f"{HERE}/glm4v-patched"),
        (Path(HERE).parent, f"{Path(HERE).name}/glm4v-patched"),
    ):
        monkeypatch.chdir(folder)
        assert own_command("--version") == shlex.join([program, "--version"])
        assert in_plain_shell(own_command("--version")).stdout.startswith(VERSION)
    assert "pip install" in in_plain_shell(pip_install("--help")).stdout


def test_without_a_program_beside_it_the_python_is_printed(monkeypatch, tmp_path):
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert own_command("--version") == f"'{python}' -m glm4v_patched --version"
    assert in_plain_shell(own_command("--version")).stdout.startswith(VERSION)


def test_a_program_of_another_environment_is_not_taken_for_this_one(monkeypatch, tmp_path):
    other = tmp_path / "glm4v-patched"
    other.write_text("#!/bin/sh\necho another\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.defpath]))
    assert in_plain_shell(own_command("--version")).stdout.startswith(VERSION)
