"""A recipe with fp8: what is refused, and when; what is saved; how it goes on after a stop."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.engine import fp8
from glm4v_patched.finetune.preflight import examine
from tests.helpers.recipes import LEAST, drawn_recipe, train_here


def test_a_device_that_cannot_is_told_before_anything_starts(tmp_path, has_gpus):
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(LEAST | {"engine": {"fp8": True}}))
    for capabilities, device, told in (
        ([(8, 9), (9, 0)], "cuda", None),
        ([(8, 9), (8, 0)], "cuda", "capability 8.9 or newer (Ada, Hopper), and NVIDIA H200 has 8"),
        ([], "cuda", None),  # of which another fault tells
        ([], "cpu", "engine.fp8 is true, which runs on a GPU, and --device is cpu"),
    ):
        has_gpus(len(capabilities), capabilities=capabilities)
        _, _, error = examine(file, device=device)
        faults = [line for line in str(error).split("\n") if "fp8" in line]
        assert len(faults) == (told is not None) and (not told or told in faults[0])


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["lora_all", "lm"])
def test_a_stopped_run_goes_on_to_the_bit_and_saves_bf16(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(fp8, "_on_cpu", True)
    asked = {"engine": {"fp8": True, "zero_stage": 0}, "trained": trained, "lora.rank": 4}
    asked |= {"trainer.max_steps": 4, "trainer.learning_rate": 1e-2, "trainer.save_steps": 2}
    whole = drawn_recipe(tmp_path, asked)
    plain = whole.override({"engine.fp8": False, "out": str(tmp_path / "plain")})
    stopped = whole.override({"out": str(tmp_path / "stopped")})
    history = train_here(whole)["history"]
    assert history[-1]["loss"] < history[0]["loss"] and train_here(plain)["history"] != history
    shutil.copytree(whole.out, stopped.out)
    assert train_here(stopped, Path(stopped.out, "checkpoint-2"))["history"][-2:] == history[-2:]
    saved, of_bf16, again = (
        load_file(next(Path(run.out).glob("*.safetensors"))) for run in (whole, plain, stopped)
    )
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert {name: t.shape for name, t in saved.items()} == {n: t.shape for n, t in of_bf16.items()}
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    if trained == "lm":  # the frozen tower is what it was
        tower = [name for name in saved if ".vision." in name]
        assert tower and all(torch.equal(saved[name], of_bf16[name]) for name in tower)
