"""Recipes in real processes: saved weights, losses, and resuming.

Each job trains several recipes, one after the other: two jobs by default, and two in slow tests.
Two processes also end together if a training diverges or reads an unusable row, even if only one of
them sees it.
"""

import json
import math
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from glm4v_patched.finetune.checkpoints import (
    CHECKPOINT_MANIFEST,
    find_checkpoint_problems,
    rename_incomplete_checkpoints,
)
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.plan import find_start_checkpoint
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.cogagent import permuted, write_cogagent
from tests.helpers.processes import run_without_package
from tests.helpers.recipes import drawn_recipe, planned, train_here, train_in_processes
from tests.remote.inputs import assert_close

# fp32 sums in another order differ by some 1e-6, but the Trainer's history has four decimals.
ATOL = 2e-4

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
    outputs = {"on base": on_base.eval()(**inputs)}
    try:
        by_itself = GLM4V.from_pretrained(adapter, dtype=torch.float32)
    except ImportError as error:  # this transformers cannot do it
        assert "holds adapters, and transformers" in str(error), error
    else:
        assert type(by_itself).__module__.startswith("transformers_modules."), type(by_itself)
        outputs["by itself"] = by_itself.eval()(**inputs)
save_file({name: output.logits.contiguous() for name, output in outputs.items()}, out + "/logits")
"""

POLICIES = {"engine.tower": "attention", "engine.language": "selective"}
HALVES = {"trainer.per_device_train_batch_size": 1, "trainer.gradient_accumulation_steps": 2}
CHOICES: dict[str, dict] = {
    "twenty steps": {"trained": "lora_all", "trainer.max_steps": 20},
    "plain": {"trained": "lora_all"},
    "offloaded": {"trained": "lora_all", "engine.offload": True} | HALVES,
    "selective": {"trained": "lora_all", "trainer.save_steps": 2} | POLICIES,
    "compiled": {"trained": "lora_all", "engine.compile": True} | POLICIES,
    "full": {"trained": "full"},
}
ALONE = {"engine.zero_stage": 0}
IDS = torch.arange(20)[None]
ADAPTERS = {"trained": "lora_all", "lora.rank": 4}
BROKEN = "transformer.encoder.layers.1.mlp.dense_h_to_4h.weight"
# How runs end, by the names of their folders: plan_worker.py has what breaks them.
DIVERGED = {
    "reported": "NaN or infinite in 3 steps in a row, 2 to 4",
    "saved": f"have become NaN or infinite, in 1 tensor: {BROKEN}",
    "last": "the loss of the last batch is NaN or infinite with the weights of step 1",
    "evaluated": "exact match 0.0",  # rank 0's, for all
    "row": "rows.jsonl:6: ",
    "base": f"NaN or infinite before the first step, in 1 tensor: {BROKEN}",
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    return drawn_recipe(
        tmp_path_factory.mktemp("choices"), {"trainer.max_steps": 4, "trainer.learning_rate": 1e-2}
    )


def with_changes(recipe: Recipe, name: str, changes: Mapping) -> Recipe:
    return recipe.override({"out": str(Path(recipe.model).with_name(name)), **changes})


def train(*plans: Path, **options) -> None:
    ended = train_in_processes(*plans, **options)
    assert ended.status == 0, ended.output[-8000:]


def resumed(recipe: Recipe, changes: Mapping) -> tuple[Recipe, Path]:
    """Return a recipe with its own folder, and its checkpoint-2 that was copied there."""
    mine = with_changes(recipe, f"{Path(recipe.out).name}, resumed", changes)
    checkpoint = Path(mine.out, "checkpoint-2")
    return mine, shutil.copytree(Path(recipe.out, "checkpoint-2"), checkpoint)


@pytest.fixture(scope="module")
def trained(recipe, cogagent) -> dict[str, Recipe]:
    """Train each choice, and then continue some of them in new processes."""
    recipes = {name: with_changes(recipe, name, changes) for name, changes in CHOICES.items()}
    recipes["cogagent, full"] = with_changes(cogagent, "cogagent, full", CHOICES["full"])
    recipes["evaluated"] = evaluated(recipe)
    stopped = with_changes(recipe, "stopped", {"trained": "lora_all", "trainer.save_steps": 2})
    plans = [planned(mine, processes=2) for mine in recipes.values()]
    train(*plans, with_dropout=[planned(stopped, processes=2)])

    more = CHOICES["twenty steps"] | {"model": recipes["twenty steps"].out, "trainer.max_steps": 1}
    recipes["from its folder"] = with_changes(recipe, "from its folder", more)
    recipes["selective, resumed"], checkpoint = resumed(recipes["selective"], {})
    plans = [planned(recipes["selective, resumed"], checkpoint, processes=2)]
    plans.append(planned(recipes["from its folder"], processes=2))
    # From a checkpoint of another policy. (Not to a selective one, which uses torch's linear layers
    # instead of ZeRO-3's own.)
    every_2 = {"engine.tower": "none", "engine.language": "every 2"}
    again, checkpoint = resumed(stopped, every_2)
    train(*plans, with_dropout=[planned(again, checkpoint, processes=2)])
    return recipes | {"stopped": stopped, "stopped, resumed": again}


def history_of(recipe: Recipe) -> list[dict]:
    return json.loads(Path(recipe.out, "training.json").read_text())["history"]


def losses_of(recipe: Recipe) -> list[float]:
    return [entry["loss"] for entry in history_of(recipe)]


def saved_by(recipe: Recipe) -> dict[str, torch.Tensor]:
    (file,) = Path(recipe.out).glob("*model.safetensors")
    return load_file(file)


def assert_same_bits(actual: Recipe, expected: Recipe) -> None:
    assert history_of(actual) == history_of(expected)
    assert_close(saved_by(actual), saved_by(expected))


def logits_by_hand(recipe: Recipe) -> torch.Tensor:
    """Return the logits of :data:`IDS` with the adapters added to the weights of their base."""
    model = GLM4VForCausalLM.from_pretrained(recipe.model, dtype=torch.float32).eval()
    weights, adapters = model.state_dict(), saved_by(recipe)
    config = json.loads(Path(recipe.out, "adapter_config.json").read_text())
    with torch.no_grad():
        base = model(input_ids=IDS).logits
        for name in (name for name in adapters if name.endswith("lora_A.weight")):
            change = adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
            changed = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[changed] += config["lora_alpha"] / config["r"] * change
        logits = model(input_ids=IDS).logits
    assert (base - logits).abs().max() > 1e-2
    return logits


def assert_loads_without_package(recipe: Recipe, folder: Path) -> None:
    """The adapters, loaded on their base or by themselves, give the logits computed by hand."""
    save_file({"input_ids": IDS}, folder / "inputs.safetensors")
    run_without_package(SCRIPT, folder, recipe.model, recipe.out, str(folder))
    for name, logits in load_file(folder / "logits").items():
        torch.testing.assert_close(logits, logits_by_hand(recipe), rtol=0, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def cogagent(recipe) -> Recipe:
    """Return the recipe with the cogagent that computes the same as its model."""
    model = write_cogagent(Path(recipe.model), Path(recipe.model).with_name("cogagent's"))
    return recipe.override({"model": str(model)})


def make_diverging(recipe: Recipe) -> list[Recipe]:
    """Return a recipe for each entry of DIVERGED."""
    broken = Path(recipe.model).with_name("broken")
    shutil.copytree(recipe.model, broken)
    weights = load_file(broken / "model.safetensors")
    weights[BROKEN][-1, -1] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    # Process 1 reads every second row: this one is in its second batch.
    lines = Path(recipe.data.train).read_text().splitlines()
    lines[5] = "no row"
    rows = Path(recipe.data.train).with_name("rows.jsonl")
    rows.write_text("\n".join(lines))
    changes = {
        "reported": {"trainer.save_steps": 2},
        "saved": {"trainer.max_steps": 1},
        "last": {"trainer.max_steps": 1},
        "evaluated": {"data.eval": 0.2, "trainer.eval_steps": 1},
        "row": {"data.train": str(rows), "data.check": "first 4", "data.shuffle_buffer": 1},
        "base": {"model": str(broken), "trained": "lora_lm"},
    }
    slow_rate = {"trainer.learning_rate": 1e-3, "trainer.max_steps": 6}
    return [with_changes(recipe, name, slow_rate | changes[name]) for name in DIVERGED]


@pytest.fixture(scope="module")
def cut(recipe) -> Recipe:
    """Train with five steps an epoch; it is killed while it saves a checkpoint in epoch two.

    The diverging ones are trained before it.
    """
    changes = {"trainer.max_steps": 8, "trainer.save_steps": 3, "trainer.learning_rate": 1e-3}
    mine = with_changes(recipe, "cut", changes)
    # The last file that process 1 writes, when all shards exist and process 0 is done.
    name = "checkpoint-6/rng_state_1.pth"
    diverging = [planned(case, processes=2) for case in make_diverging(recipe)]
    plans = [planned(mine, processes=2)]
    ended = train_in_processes(diverging=diverging, with_dropout=plans, die_writing=name)
    assert ended.status, ended.output[-8000:]
    assert Path(mine.out, name).stat().st_size > 0, ended.output[-8000:]
    return mine


@pytest.fixture(scope="module")
def completed(recipe, cogagent, cut) -> dict[str, Recipe]:
    """Complete that run, train the same without a stop, and train adapters of both models."""
    recipes = {
        "adapters": with_changes(recipe, "adapters", ADAPTERS),
        "cogagent, adapters": with_changes(cogagent, "cogagent, adapters", ADAPTERS),
    }
    plans = [planned(mine, processes=2) for mine in recipes.values()]
    recipes["never stopped"] = with_changes(cut, "never stopped", {"trainer.save_steps": None})
    folder = Path(cut.out)
    # launch() does this before it starts the processes.
    rename_incomplete_checkpoints(folder, after_step=3)
    before = (folder / "checkpoint-3" / CHECKPOINT_MANIFEST).stat().st_mtime_ns
    with_dropout = [planned(recipes["never stopped"], processes=2)]
    with_dropout.append(planned(cut, folder / "checkpoint-3", processes=2))
    train(*plans, with_dropout=with_dropout)
    assert (folder / "checkpoint-3" / CHECKPOINT_MANIFEST).stat().st_mtime_ns == before, (
        "it started again"
    )
    return recipes


@pytest.mark.parametrize("case", DIVERGED)
def test_both_processes_end_with_one_message_and_leave_no_model(case, cut):
    folder = Path(cut.out).with_name(case)
    first, second = ((folder / f"outcome-{rank}.txt").read_text() for rank in (0, 1))
    assert DIVERGED[case] in first and first == second
    assert not [*folder.glob("*.safetensors")]
    assert {path.name for path in folder.glob("checkpoint-*")} <= {"checkpoint-2"}
    report = json.loads((folder / "training.json").read_text(), parse_constant=pytest.fail)
    assert report["error"] == first and not report["finished"]
    if case == "reported":  # the history contains what only one process has seen
        assert [entry["loss"] for entry in report["history"][1:]] == ["nan"] * 3
        assert all(0 < entry["grad_norm"] < 100 for entry in report["history"])


def test_a_run_cut_while_it_saves_continues_to_the_same_bits_as_one_never_stopped(
    cut, caplog, request
):
    folder = Path(cut.out)
    assert find_checkpoint_problems(folder / "checkpoint-6")
    assert find_start_checkpoint(resolve_recipe(cut), 2, True) == folder / "checkpoint-3"
    assert str(folder / "checkpoint-6") in caplog.text
    completed = request.getfixturevalue("completed")
    assert len(losses_of(cut)) == 8
    assert_same_bits(cut, completed["never stopped"])
    assert find_checkpoint_problems(folder / "checkpoint-6") == []

    # A checkpoint is a model, too, with the config of the original.
    config = GLM4VForCausalLM.from_pretrained(folder / "checkpoint-6").config
    assert config.eos_token_id == GLM4VForCausalLM.from_pretrained(cut.model).config.eos_token_id
    assert not config.skip_logits


def test_adapters_of_zero_3_learn_and_load_on_their_base_with_their_code(completed):
    mine = completed["adapters"]
    losses, adapters = losses_of(mine), saved_by(mine)
    assert losses[-1] < losses[0] - 0.1
    assert len(adapters) == 8 and all(4 in tensor.shape for tensor in adapters.values())
    assert all(tensor.any() for tensor in adapters.values())
    base = GLM4VForCausalLM.from_pretrained(mine.model, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, mine.out).eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits, logits_by_hand(mine), rtol=0, atol=1e-5)
    assert Path(mine.out, "modeling_chatglm.py").is_file()


@pytest.mark.slow
def test_adapters_of_zero_3_load_in_a_process_without_the_package(trained, tmp_path):
    assert_loads_without_package(trained["plain"], tmp_path)


@pytest.mark.parametrize(
    ("name", "job"),
    [("adapters", "completed"), pytest.param("full", "trained", marks=pytest.mark.slow)],
)
def test_a_cogagent_is_trained_to_the_permuted_weights(name, job, request):
    """On two processes with ZeRO-3, tower included."""
    recipes = request.getfixturevalue(job)
    expected, actual = recipes[name], recipes[f"cogagent, {name}"]
    assert losses_of(actual) == pytest.approx(losses_of(expected), abs=ATOL)
    assert losses_of(actual)[-1] < losses_of(actual)[0] - 0.1
    folder = actual.out if name == "full" else actual.model
    config = ChatGLMConfig.from_pretrained(folder)
    assert config.original_rope is False
    weights, start = saved_by(actual), load_file(Path(actual.model, "model.safetensors"))
    for key, weight in permuted(saved_by(expected), config).items():
        change = (weight - start.get(key, 0)).norm()
        assert (weights[key] - weight).norm() <= 0.02 * change, key


@pytest.mark.slow
def test_adapters_go_on_under_zero_3_from_a_folder(recipe, trained):
    """Their first loss is far below that of new adapters on the same batch."""
    losses, continued = (losses_of(trained[name]) for name in ("twenty steps", "from its folder"))
    assert losses[-1] < losses[0] - 1
    # Both runs have the same seed and data, so both begin with the same batch.
    assert continued[0] < losses[0] - 1
    config = json.loads(Path(trained["from its folder"].out, "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == recipe.model


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs pip install bitsandbytes")
def test_qlora_continues_to_the_same_bits_and_loads_without_the_package(recipe, tmp_path):
    changes = ALONE | {"trained": "qlora", "trainer.save_steps": 2}
    train_here(uninterrupted := with_changes(recipe, "qlora", changes))
    again, checkpoint = resumed(uninterrupted, {})
    train_here(again, checkpoint)
    assert_same_bits(again, uninterrupted)
    assert_loads_without_package(uninterrupted, tmp_path)


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_bits_with_another_policy(trained):
    assert_same_bits(trained["stopped, resumed"], trained["stopped"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["offloaded", "selective", "selective, resumed", "compiled"])
def test_all_choices_have_the_losses_of_plain_layers_under_zero_3(name, trained):
    """With a selective policy each layer is gathered at once. Otherwise the recomputation would run
    a collective that forward did not: after resuming, tiny weights do not stay gathered. Compiled
    layers, with inductor's kernels, round differently. The losses fall by about 0.5."""
    assert losses_of(trained[name]) == pytest.approx(losses_of(trained["plain"]), abs=ATOL)


def evaluated(recipe: Recipe) -> Recipe:
    """Return a recipe whose evaluation has three batches: the second process has a text and then
    nothing, the first has images. Training goes on after weights were gathered to answer."""
    lines = Path(recipe.data.train).read_text().splitlines()
    without = json.loads(lines[0])
    del without["messages"][0]["image"]
    rows = Path(recipe.data.train).with_name("eval.jsonl")
    rows.write_text("\n".join([lines[1], json.dumps(without), lines[2]]))
    changes = {"trained": "lora_lm", "data.eval": str(rows), "trainer.learning_rate": 1e-30}
    changes |= {"trainer.max_steps": 2, "trainer.eval_steps": 1}
    return with_changes(recipe, "evaluated", changes | {"trainer.per_device_eval_batch_size": 1})


@pytest.mark.slow
def test_two_sharded_processes_evaluate_to_the_loss_of_one(trained):
    two = trained["evaluated"]
    one = train_here(with_changes(two, "evaluated by one", ALONE))["evaluations"]
    both = json.loads(Path(two.out, "training.json").read_text())["evaluations"]
    assert len(one) == len(both) == 2
    for entry in one + both:
        assert entry["eval_loss"] == pytest.approx(one[0]["eval_loss"], rel=1e-5)
        assert entry["eval_tokens"] == one[0]["eval_tokens"]
        assert entry["eval_exact_match"] == one[0]["eval_exact_match"]
    assert Path(two.out, "answers.png").is_file()
