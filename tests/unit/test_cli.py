"""The command line says what is wrong before it starts."""

import importlib.util
import shutil
import sys

import pytest
import torch

from glm4v_patched.cli import main
from glm4v_patched.training.zero import path_of_processes, require_deepspeed


def test_a_cpu_without_a_compiler_is_told_how_to_get_one(monkeypatch):
    monkeypatch.setattr(
        shutil, "which", lambda name, path=None: None if "+" in name else f"/bin/{name}"
    )
    with pytest.raises(RuntimeError, match="C.. compiler.*apt-get install g.."):
        require_deepspeed(on_cpu=True)
    require_deepspeed(on_cpu=False)


def test_missing_ninja_and_deepspeed_are_named_together(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"(?s)glm4v-patched\[train\].*g\+\+.*pip install ninja"):
        require_deepspeed(on_cpu=True)


@pytest.mark.parametrize("option", ["--steps", "--processes"])
def test_less_than_one_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["demo", option, "0"])
    assert "0 is less than 1" in capsys.readouterr().err


def test_a_data_file_that_is_not_there_ends_with_its_name(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--data", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_one_conversation_cannot_be_split(tmp_path, capsys):
    data = tmp_path / "one.jsonl"
    data.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    assert main(["demo", "--out", str(tmp_path), "--data", str(data)]) == 1
    assert "1 conversations; at least 2 are needed" in capsys.readouterr().err


def test_the_demo_checks_before_it_writes_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert main(["demo", "--out", str(tmp_path / "new")]) == 1
    assert "apt-get install g++" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_ninja_of_an_environment_that_is_not_activated_is_found(tmp_path, monkeypatch):
    for name in ("python", "ninja", "g++"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert shutil.which("ninja", path=path_of_processes()) == str(tmp_path / "ninja")
