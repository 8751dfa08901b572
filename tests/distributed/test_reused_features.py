"""Reused features under ZeRO-3: processes with unlike batches agree, step by step, and never wait.

Two real processes; see PICTURES in feature_worker.py. A step reuses features only if both have
those of their pictures. FSDP2 has to agree as well, DDP has not.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.data.feature_cache import digest_weights
from tests.helpers.processes import run_two_processes
from tests.helpers.recipes import drawn_recipe, planned, train_in_processes
from tests.helpers.tiny import tiny_model

# In how many steps of AB AB C- C- AD CD -- -D BA the tower runs, on each rank; without an image it
# runs for the blank one.
ALWAYS = [1, 1, 1, 1, 1, 1, 1, 1, 1]
NEW_FOR_ONE_OF_THEM = [1, 0, 1, 0, 1, 0, 0, 0, 1]
NEW_TO_THE_FOLDER = [1, 0, 1, 0, 1, 0, 0, 0, 0]
FIRST_STEP = [1, 0, 0, 0, 0, 0, 0, 0, 0]
RUNS = {
    ("zero3", "memory"): [NEW_FOR_ONE_OF_THEM] * 2,
    ("zero3", "folder"): [NEW_TO_THE_FOLDER] * 2,
    ("zero3", "folder, second run"): [FIRST_STEP] * 2,
    ("fsdp2", "memory"): [NEW_FOR_ONE_OF_THEM] * 2,
    ("fsdp2", "zero3's folder"): [FIRST_STEP] * 2,
    ("ddp", "memory"): [[1, 0, 1, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0, 0, 0, 1]],
}
WITHOUT = {"zero3": [ALWAYS] * 2, "fsdp2": [ALWAYS] * 2}
WITHOUT["ddp"] = [[1, 1, 1, 1, 1, 1, 0, 0, 1], [1, 1, 0, 0, 1, 1, 0, 1, 1]]


def run(weights: str, strategy: str, keep: str | None) -> dict:
    # One folder for both kinds of training: the tower is the same.
    place = "features" if keep is not None and "folder" in keep else keep
    name = f"{weights}-{strategy}-{keep}"
    return {"name": name, "weights": weights, "strategy": strategy, "keep": place}


ALL_RUNS = [run("frozen_vision", strategy, None) for strategy in WITHOUT]
ALL_RUNS += [run("frozen_vision", *how) for how in RUNS]
ALL_RUNS += [run("lora_language", "zero3", keep) for keep in (None, "memory", "zero3's folder")]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    tiny_model().save_pretrained(folder / "model")
    (folder / "runs.json").write_text(json.dumps(ALL_RUNS))
    output = run_two_processes("feature_worker.py", str(folder), seconds=300)
    (folder / "output.txt").write_text(output)
    return folder


def result(results: Path, *of_run) -> dict:
    return torch.load(results / f"{run(*of_run)['name']}.pt")


def assert_same(got: dict, want: dict) -> None:
    assert got["losses"] == want["losses"]
    for step, (gradients, wanted) in enumerate(
        zip(got["gradients"], want["gradients"], strict=True)
    ):
        assert gradients.keys() == wanted.keys() and len(wanted) > 1
        apart = [name for name in wanted if not torch.equal(gradients[name], wanted[name])]
        assert apart == [], f"step {step}"


@pytest.mark.parametrize("strategy, keep", RUNS)
def test_reuse_changes_no_bit_and_spares_the_tower_of_both_processes(strategy, keep, results):
    want = result(results, "frozen_vision", strategy, None)
    got = result(results, "frozen_vision", strategy, keep)
    assert_same(got, want)
    assert want["runs"] == WITHOUT[strategy]
    assert got["runs"] == RUNS[strategy, keep]


@pytest.mark.parametrize(
    "keep, runs", [("memory", NEW_FOR_ONE_OF_THEM), ("zero3's folder", FIRST_STEP)]
)
def test_reuse_changes_no_bit_with_adapters(keep, runs, results):
    got = result(results, "lora_language", "zero3", keep)
    assert_same(got, result(results, "lora_language", "zero3", None))
    assert got["runs"] == [runs] * 2


def test_the_weights_have_one_digest_however_they_are_spread(results):
    want = digest_weights(tiny_model().transformer.vision)
    for strategy in WITHOUT:
        assert result(results, "frozen_vision", strategy, None)["digest"] == want
    assert len(list((results / "features").iterdir())) == 1


def test_weights_that_cannot_be_read_whole_have_no_folder(results):
    refusal = (results / "fsdp1.txt").read_text()
    assert "1 parts of the tower are wrapped by FullyShardedDataParallel" in refusal
    assert "use ZeRO-3 or fully_shard, or no folder" in refusal
    assert not (results / "unused").exists()


def test_processes_are_told_that_memory_is_each_ones_own(results):
    output = (results / "output.txt").read_text()
    in_memory = sum(of_run["keep"] == "memory" for of_run in ALL_RUNS)
    assert output.count("kept in the memory of 2 processes") == 2 * in_memory


@pytest.mark.slow
def test_a_recipe_reuses_features_of_all_processes_and_no_bit_changes(tmp_path):
    """Five steps an epoch, in another order each, so that pictures change processes."""
    drawn = drawn_recipe(tmp_path, {"trainer.max_steps": 12})
    recipes = [
        drawn.override(
            {
                "out": str(tmp_path / f"{trained}-{bool(reuse)}"),
                "trained": trained,
                "data.reuse_features": reuse,
            }
        )
        for trained in ("lm", "lora_lm")
        for reuse in (False, str(tmp_path / f"features of {trained}"))
    ]
    ended = train_in_processes(*(planned(recipe, processes=2) for recipe in recipes))
    assert ended.status == 0, ended.output[-8000:]
    # In 12 steps, and for the loss that the last weights have.
    runs = [int(Path(recipe.out, "tower.txt").read_text()) for recipe in recipes]
    assert runs == [13, 5] * 2
    saved = [load_file(*Path(recipe.out).glob("*model.safetensors")) for recipe in recipes]
    for plain, reusing in (saved[:2], saved[2:]):
        assert [name for name in plain if not torch.equal(reusing[name], plain[name])] == []
