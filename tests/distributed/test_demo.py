"""The demo from end to end, with too few steps to learn to look, but enough to learn to answer."""

import json

import pytest
import torch

from glm4v_patched.cli import main
from tests.helpers.processes import on_the_cpu

FILES = ["loss.png", "answers.png", "metrics.json", "data/train.jsonl", "trained/model.safetensors"]


@pytest.mark.slow
def test_demo_trains_on_two_processes_and_a_fresh_process_judges_it(tmp_path, capsys, monkeypatch):
    """And DeepSpeed compiles nothing for it."""
    extensions = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    options = ["--steps", "20", "--processes", "2", "--device", "cpu"]
    with on_the_cpu():
        assert main(["demo", "--out", str(tmp_path), *options]) == 0
    assert not extensions.exists()
    assert [name for name in FILES if not (tmp_path / name).is_file()] == []
    # What the demo says it does must not depend on the memory of a GPU.
    engine = json.loads((tmp_path / "trained" / "recipe.json").read_text())["engine"]
    assert engine["tower"] == engine["language"] == "full" and engine["offload"] is False
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["world_size"] == 2 and metrics["zero_stage"] == 3
    assert metrics["accuracy_before"] <= 0.2
    assert metrics["loss_last"] < 0.5 * metrics["loss_first"]
    assert f"{metrics['accuracy_after']:.3f}" in capsys.readouterr().out
    # Weights may be read by whom the other files may.
    mode = (tmp_path / "metrics.json").stat().st_mode & 0o777
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "trained").iterdir()} == {mode}


@pytest.mark.two_gpu
def test_demo_learns_to_look_on_two_gpus(tmp_path):
    assert torch.cuda.device_count() >= 2
    assert main(["demo", "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["accuracy_before"] <= 0.2
    assert metrics["accuracy_after"] >= 0.95
    assert metrics["accuracy_swapped"] <= 0.2
