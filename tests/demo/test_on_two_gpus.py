"""The demo on two GPUs; on a CPU it is run by tests/noxfile.py, as README's first command."""

import json

import pytest
import torch

from glm4v_patched.cli import main


@pytest.mark.two_gpu
def test_demo_learns_to_look_on_two_gpus(tmp_path):
    assert torch.cuda.device_count() >= 2
    assert main(["demo", "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["accuracy_before"] <= 0.2
    assert metrics["accuracy_after"] >= 0.95
    assert metrics["accuracy_swapped"] <= 0.2
