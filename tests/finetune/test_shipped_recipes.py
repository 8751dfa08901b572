"""Each recipe that ships trains, at tiny size; a name that does not ship is answered at once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from glm4v_patched.cli import main
from glm4v_patched.engine.memory_plan import (
    GIB,
    BatchShape,
    apply_memory_limit,
    decide_options,
    estimate_peak_bytes,
)
from glm4v_patched.engine.options import is_lora
from glm4v_patched.finetune.plan import Plan
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.recipe.shipped import FOLDER, find_recipe, shipped_names
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.recipes import planned, train_here

NAMES = [
    "cogagent_1x80gb",
    "full_2x141gb",
    "full_2x80gb_offload",
    "lm_2x141gb",
    "lora_1x80gb",
    "lora_2x24gb",
]
NAMES += ["lora_all_2x80gb", "qlora_1x24gb"]
WHERE = ["data.train=my.jsonl", "out=trained"]
REAL = ChatGLMConfig()


def shipped(name: str, *overrides: str) -> Recipe:
    return Recipe.read(find_recipe(Path(name)), [*WHERE, *overrides])


# One of each kind of trained weights; the others differ from these in numbers and in ZeRO.
TRAINED_HERE = ["full_2x141gb", "lm_2x141gb", "lora_1x80gb", "lora_all_2x80gb"]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_trains_or_is_planned_at_tiny_size(name, mine):
    """Without ZeRO and as one process, in 16 bits: what ZeRO does is under test elsewhere."""
    changes = {"model": mine.model, "data.train": mine.data.train, "out": mine.out}
    changes |= {"engine.zero_stage": 0, "engine.offload": False}
    changes |= {"trainer.max_steps": 1, "trainer.gradient_accumulation_steps": 2}
    changes |= {"trainer.per_device_train_batch_size": 1}
    if name == "qlora_1x24gb":  # layers of 4 bits need a GPU
        changes["trained"] = "lora_lm"
    run_recipe = shipped(name).override(changes)
    if name not in TRAINED_HERE:
        assert run_recipe.trained in {shipped(other).trained for other in TRAINED_HERE}
        assert Plan.read(planned(run_recipe)).steps == 1
        return
    report = train_here(run_recipe)
    assert report["finished"] and len(report["history"]) == 1
    saved = "adapter_model.safetensors" if is_lora(run_recipe.trained) else "model.safetensors"
    assert Path(mine.out, saved).is_file()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_fits_the_gpus_that_its_name_says(name):
    run_recipe = shipped(name)
    number, size = name.removesuffix("_offload").split("_")[-1].removesuffix("gb").split("x")
    # Free GiB of a GPU by its GB.
    free = {"24": 23.5, "80": 79, "141": 139}[size] * GIB
    batch_size = run_recipe.trainer.per_device_train_batch_size
    batch = BatchShape(num_sequences=batch_size, sequence_length=2114, processes=int(number))
    options = decide_options(REAL, run_recipe.engine_options(), batch, free)
    assert estimate_peak_bytes(REAL, options, batch) < free - 2 * GIB
    assert (options.offload is True) == name.endswith("_offload")
    rows = batch_size * batch.processes * run_recipe.trainer.gradient_accumulation_steps
    assert 16 <= rows <= 32
    assert f"Effective batch: {rows}" in (FOLDER / f"{name}.yaml").read_text()
    assert run_recipe.engine.zero_stage > 0 or number == "1"


MEASURED = Path(__file__).parents[2] / "docs" / "benchmarks" / "recipes_h200_x2.json"


@pytest.mark.parametrize("row", json.loads(MEASURED.read_text()), ids=lambda row: row["recipe"])
def test_memory_of_the_real_size_is_what_was_predicted(row):
    options = row["command"].split()
    changes = [text for text in options if text.startswith(("engine.", "trainer."))]
    # Measured when the recipe had its first name.
    recipe = shipped(row["recipe"].replace("lora_both", "lora_all"), *changes)
    rows = recipe.trainer.per_device_train_batch_size
    batch = BatchShape(num_sequences=rows, sequence_length=2114, processes=row["gpus"])
    # An H200's memory, less what the driver has of it.
    free = apply_memory_limit(139.8 * GIB, recipe.engine.memory_limit)
    chosen = decide_options(REAL, replace(recipe.engine_options(), **row["policies"]), batch, free)
    predicted = estimate_peak_bytes(REAL, chosen, batch) / GIB
    assert predicted == pytest.approx(row["peak_allocated_gib"], rel=0.15)


@pytest.mark.parametrize("command", [["train", *WHERE], ["recipe"]])
def test_a_name_that_does_not_ship_is_answered_with_those_that_do(command, capsys, tmp_path):
    assert main([command[0], "lora_1x80g", *command[1:]]) == 1
    error = capsys.readouterr().err
    assert '"lora_1x80g" is ' in error and "did you mean lora_1x80gb?" in error
    assert all(name in error for name in NAMES)


def test_a_printed_recipe_is_the_one_that_ships_with_places_for_what_is_yours(capsys, tmp_path):
    assert main(["recipe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped_names() == NAMES
    for name in NAMES:
        assert main(["recipe", name]) == 0
        (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
        assert Recipe.read(tmp_path / "mine.yaml") == shipped(name)


def test_a_file_of_that_name_comes_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("lora_1x80gb").mkdir()
    Path("lm_2x141gb").touch()
    assert find_recipe(Path("lm_2x141gb")) == Path("lm_2x141gb")
    assert find_recipe(Path("lora_1x80gb")) == FOLDER / "lora_1x80gb.yaml"
    assert find_recipe(Path("my/lm_2x141gb")) == Path("my/lm_2x141gb")
