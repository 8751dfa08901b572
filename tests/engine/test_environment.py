"""Training processes have one environment, and import nothing from the folder they start in."""

import subprocess
import sys
from pathlib import Path

import pytest

from glm4v_patched.data.decoding import read_facts_of_all
from glm4v_patched.engine.environment import (
    ROOT,
    python_module,
    training_environment,
)


@pytest.fixture
def strange_folder(tmp_path, monkeypatch) -> Path:
    """The current one, with modules of names that others import."""
    for name in ("json", "numpy", "PIL", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"print('RAN {name}')\n")
    monkeypatch.chdir(tmp_path)
    # By which the package may be found; an empty place there would be the current folder.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def test_code_in_the_current_folder_is_not_run(strange_folder, monkeypatch):
    (strange_folder / "a.png").write_bytes(b"no picture")
    [facts] = read_facts_of_all(["a.png"], 1)
    assert "no picture of a kind that Pillow knows" in facts.fault
    assert python_module("a", "b") == [sys.executable, "-P", "-m", "a", "b"]
    # As torch's launcher starts processes.
    command = [sys.executable, "-u", "-m", "glm4v_patched.cli", "--version"]
    ended = subprocess.run(command, env=training_environment(1), capture_output=True, text=True)
    assert ended.returncode == 0 and "RAN" not in ended.stdout, ended
    # What lies beside the package is found where it is not installed.
    monkeypatch.chdir(ROOT)
    assert python_module("a") == [sys.executable, "-m", "a"]
    assert "PYTHONSAFEPATH" not in training_environment(1)


def test_what_the_reader_sets_stays(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    found = training_environment(2)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert found["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = training_environment(2, on_cpu=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found and found["OMP_NUM_THREADS"] == "1"
    assert (found["CUDA_VISIBLE_DEVICES"], found["DS_ACCELERATOR"]) == ("", "cpu")
