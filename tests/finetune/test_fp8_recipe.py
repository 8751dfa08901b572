"""A recipe with fp8: what is refused, and when; what is saved; how it goes on after a stop."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.engine import fp8
from glm4v_patched.finetune.preflight import examine
from glm4v_patched.finetune.recipe import Recipe
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
        faults = [
            fault.text for fault in examine(file, device=device).faults if "fp8" in fault.name
        ]
        assert len(faults) == (told is not None) and (not told or told in faults[0])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    asked = {"engine": {"fp8": True, "zero_stage": 0}, "trained": "lora_all", "lora.rank": 4}
    asked |= {"trainer.max_steps": 4, "trainer.learning_rate": 1e-2, "trainer.save_steps": 2}
    return drawn_recipe(tmp_path_factory.mktemp("fp8"), asked)


def weights(asked: Recipe) -> dict[str, torch.Tensor]:
    (file,) = Path(asked.out).glob("*.safetensors")
    return load_file(file)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["lora_all", "lm"])
def test_a_stopped_run_goes_on_to_the_bit_and_saves_bf16(drawn, tmp_path, monkeypatch, trained):
    monkeypatch.setattr(fp8, "_on_cpu", True)
    whole = drawn.override({"out": str(tmp_path / "whole"), "trained": trained})
    history = train_here(whole)["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    saved = weights(whole)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    plain = whole.override({"engine.fp8": False, "out": str(tmp_path / "plain")})
    assert train_here(plain)["history"] != history
    of_bf16 = weights(plain)
    assert {name: t.shape for name, t in saved.items()} == {n: t.shape for n, t in of_bf16.items()}
    if trained == "lm":  # the frozen tower is what it was
        tower = [name for name in saved if ".vision." in name]
        assert tower and all(torch.equal(saved[name], of_bf16[name]) for name in tower)

    stopped = whole.override({"out": str(tmp_path / "stopped")})
    shutil.copytree(whole.out, stopped.out)
    again = train_here(stopped, Path(stopped.out, "checkpoint-2"))["history"]
    assert again[-2:] == history[-2:]
    found = weights(stopped)
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_model_whose_sizes_do_not_fit_is_refused_before_it_is_loaded(
    drawn, tmp_path, monkeypatch
):
    monkeypatch.setattr(fp8, "_on_cpu", True)
    folder = tmp_path / "model"
    shutil.copytree(drawn.model, folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"ffn_hidden_size": 100}))
    asked = drawn.override({"model": str(folder), "out": str(tmp_path / "out")})
    with pytest.raises(ValueError, match="ffn_hidden_size 100: .* multiples of 16"):
        train_here(asked)
