"""Recipes that train a part of the weights, in real processes: what they save, and how they go on
after a stop."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.fresh_process import run_without_package
from tests.helpers.processes import WORKERS, run_warm
from tests.helpers.recipes import drawn_recipe, launch_warm, planned

SECONDS_TO_RUN = 300
# fp32 sums in another order differ by some 1e-6, but the Trainer's history has four decimals.
ATOL = 2e-4
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes, which is no requirement of ours: pip install bitsandbytes",
)

SCRIPT = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoProcessor
from transformers.dynamic_module_utils import get_class_from_dynamic_module

base, adapter, out = sys.argv[1:]
inputs = load_file(out + "/inputs.safetensors")
on_base = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True, dtype=torch.float32)
on_base = PeftModel.from_pretrained(on_base, adapter)
GLM4V = get_class_from_dynamic_module("modeling_chatglm.GLM4VForCausalLM", adapter)
AutoProcessor.from_pretrained(adapter, trust_remote_code=True)
with torch.no_grad():
    found = {"on base": on_base.eval()(**inputs)}
    try:
        by_itself = GLM4V.from_pretrained(adapter, dtype=torch.float32)
    except ImportError as error:  # of a transformers that cannot
        assert "holds adapters, and transformers" in str(error), error
    else:
        assert type(by_itself).__module__.startswith("transformers_modules."), type(by_itself)
        found["by itself"] = by_itself.eval()(**inputs)
save_file({name: output.logits.contiguous() for name, output in found.items()}, out + "/logits")
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    return drawn_recipe(
        tmp_path_factory.mktemp("choices"), {"trainer.max_steps": 4, "trainer.learning_rate": 1e-2}
    )


def train(recipe: Recipe, resume: bool = False) -> list[float]:
    """On two processes or, without ZeRO, on one; the losses."""
    launch_warm(recipe, resume)
    return losses_of(recipe)


def losses_of(recipe: Recipe) -> list[float]:
    history = json.loads(Path(recipe.out, "training.json").read_text())["history"]
    return [entry["loss"] for entry in history]


def adapters_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(Path(recipe.out, "adapter_model.safetensors"))


def merged(recipe: Recipe) -> GLM4VForCausalLM:
    """The base with what the saved adapters add, by hand."""
    model = GLM4VForCausalLM.from_pretrained(recipe.model, dtype=torch.float32).eval()
    weights, adapters = model.state_dict(), adapters_of(recipe)
    config = json.loads(Path(recipe.out, "adapter_config.json").read_text())
    for name, into in adapters.items():
        if name.endswith("lora_A.weight"):
            out = adapters[name.replace("lora_A", "lora_B")]
            base = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[base] += config["lora_alpha"] / config["r"] * (out @ into)
    return model


def assert_loads_without_package(recipe: Recipe, folder: Path) -> None:
    ids = torch.arange(20)[None]
    save_file({"input_ids": ids}, folder / "inputs.safetensors")
    run_without_package(SCRIPT, folder, recipe.model, recipe.out, str(folder))
    with torch.no_grad():
        want = merged(recipe)(input_ids=ids).logits
        base = GLM4VForCausalLM.from_pretrained(recipe.model, dtype=torch.float32).eval()
        assert (base(input_ids=ids).logits - want).abs().max() > 1e-2
    for name, logits in load_file(folder / "logits").items():
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5, msg=name)


def test_adapters_of_zero_3_load_with_their_base_in_a_process_without_the_package(recipe, tmp_path):
    mine = recipe.override({"out": str(tmp_path / "out"), "trained": "lora_all", "lora.rank": 4})
    losses = train(mine)
    assert losses[-1] < losses[0] - 0.1
    adapters = adapters_of(mine)
    assert len(adapters) == 8 and all(4 in tensor.shape for tensor in adapters.values())
    assert all(tensor.any() for tensor in adapters.values())
    assert not Path(mine.out, "model.safetensors").exists()
    assert_loads_without_package(mine, tmp_path)


@pytest.mark.slow
def test_adapters_go_on_under_zero_3_from_a_folder(recipe, tmp_path):
    """From what the first run loses in the end, and not from what new adapters do."""
    first = recipe.override({"out": str(tmp_path / "first"), "trained": "lora_all"})
    first = first.override({"trainer.max_steps": 20})
    losses = train(first)
    second = first.override({"model": first.out, "out": str(tmp_path / "second")})
    continued = train(second)
    assert losses[-1] < losses[0] - 1
    assert abs(continued[0] - losses[-1]) < 0.5
    config = json.loads(Path(second.out, "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == recipe.model


@pytest.mark.slow
def test_without_zero_a_recipe_loses_what_it_does_under_zero(recipe, tmp_path):
    """ZeRO-3, with the optimizer's states offloaded from what is a GPU elsewhere."""
    sharded = recipe.override(
        {"out": str(tmp_path / "sharded"), "trained": "lm", "trainer.learning_rate": 1e-3}
    )
    halves = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    sharded = sharded.override(
        {"engine.offload": True} | {f"trainer.{name}": value for name, value in halves.items()}
    )
    want = train(sharded)
    alone = sharded.override(
        {"out": str(tmp_path / "alone"), "engine.zero_stage": 0, "engine.offload": False}
    )
    alone = alone.override(
        {"trainer.per_device_train_batch_size": 4, "trainer.gradient_accumulation_steps": 1}
    )
    # The same four conversations a step; losses fall by a third.
    assert train(alone) == pytest.approx(want, abs=ATOL)
    assert want[-1] < want[0] - 0.5


@pytest.mark.slow
def test_in_bf16_without_zero_what_is_saved_is_bf16(recipe, tmp_path):
    mine = recipe.override(
        {
            "out": str(tmp_path / "out"),
            "trained": "lm",
            "engine.zero_stage": 0,
            "engine.precision": "bf16",
        }
    )
    mine = mine.override({"trainer.learning_rate": 1e-3})
    losses = train(mine)
    assert losses[-1] < losses[0] - 0.5
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


@needs_bitsandbytes
def test_qlora_trains_adapters_that_load_without_the_package(recipe, tmp_path):
    mine = recipe.override(
        {"out": str(tmp_path / "out"), "trained": "qlora", "engine.zero_stage": 0}
    )
    losses = train(mine)
    assert losses[-1] < losses[0] - 0.1
    assert_loads_without_package(mine, tmp_path)


CHOICES = [
    pytest.param({"trained": "lora_all"}, id="lora_all, ZeRO-3", marks=pytest.mark.slow),
    pytest.param(
        {"trained": "lora_lm", "engine.zero_stage": 0},
        id="lora_lm, no ZeRO",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"engine.zero_stage": 0, "trainer.learning_rate": 1e-3},
        id="full, no ZeRO",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"trained": "qlora", "engine.zero_stage": 0}, id="qlora, no ZeRO", marks=needs_bitsandbytes
    ),
    pytest.param(
        {"engine.optimizer": "adamw_8bit"}, id="8-bit AdamW, ZeRO-3", marks=needs_bitsandbytes
    ),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_stopped_run_continues_to_the_same_bits(choice, recipe, tmp_path):
    """With another policy, from a checkpoint of the days when there was no choice. (Not to a
    selective one under ZeRO-3, which then takes torch's linear layers in place of its own.)"""

    def run(mine: Recipe, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
        processes = 2 if mine.engine.zero_stage else 1
        plan = planned(mine, checkpoint, processes=processes)
        worker = [str(WORKERS / "fault_worker.py"), str(plan)]
        alone = None if processes == 1 else processes
        ended = run_warm(*worker, seconds=SECONDS_TO_RUN, processes=alone)
        assert ended.status == 0, ended.output[-8000:]
        (file,) = Path(mine.out).glob("*model.safetensors")
        return load_file(file)

    (tmp_path / "whole").mkdir()
    whole = recipe.override({"out": str(tmp_path / "whole"), "trainer.save_steps": 2, **choice})
    want = run(whole)
    (tmp_path / "resumed").mkdir()
    resumed = whole.override({"out": str(tmp_path / "resumed"), "engine.tower": "none"})
    resumed = resumed.override(
        {"engine.language": "every 2" if whole.engine.zero_stage else "selective"}
    )
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    got = run(resumed, tmp_path / "resumed" / "checkpoint-2")
    assert losses_of(resumed) == losses_of(whole)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.slow
def test_selective_policies_survive_zero_3_without_compilation(recipe, tmp_path):
    """Each layer is gathered whole; else torch misses collectives in the recomputation, which tiny
    weights take after a resumption (otherwise they stay gathered)."""
    plain = recipe.override(
        {"out": str(tmp_path / "plain"), "trained": "lora_all", "trainer.save_steps": 2}
    )
    policies = {"engine.tower": "attention", "engine.language": "selective"}
    selective = plain.override({"out": str(tmp_path / "selective"), **policies})
    want = train(plain)
    assert train(selective) == pytest.approx(want, abs=ATOL)
    resumed = selective.override({"out": str(tmp_path / "resumed")})
    shutil.copytree(Path(selective.out, "checkpoint-2"), Path(resumed.out, "checkpoint-2"))
    assert train(resumed, resume=True) == pytest.approx(want, abs=ATOL)


@pytest.mark.slow
def test_compiled_layers_lose_what_plain_ones_do(recipe, tmp_path):
    """Policies included, with the kernels of inductor; test_bench_command.py has ``full``."""
    policies = {"engine.tower": "attention", "engine.language": "selective"}
    plain = recipe.override({"out": str(tmp_path / "plain"), "trained": "lora_all", **policies})
    compiled = plain.override({"out": str(tmp_path / "compiled"), "engine.compile": True})
    # fp32: the layers round differently; the losses fall by some 0.5.
    assert train(compiled) == pytest.approx(train(plain), abs=ATOL)
