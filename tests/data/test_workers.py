"""Images that are decoded by workers: how many there are, and that nothing else changes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm4v_patched.data import workers
from glm4v_patched.data.workers import default_workers, loader_options, start_method
from glm4v_patched.finetune import training_arguments
from tests.helpers.recipes import drawn_recipe, train_here


@pytest.fixture
def machine(monkeypatch):
    def have(cores: int, shared_memory: float = 10**12) -> None:
        usage = SimpleNamespace(free=int(shared_memory))
        monkeypatch.setattr(workers, "count_cores", lambda: cores)
        monkeypatch.setattr(workers.shutil, "disk_usage", lambda path: usage)

    return have


def test_each_process_gets_its_share_of_the_cores_but_one(machine):
    for cores, processes, number in (
        (1, 1, 0),
        (2, 1, 1),
        (2, 2, 0),
        (6, 4, 0),
        (15, 4, 2),
        (32, 8, 3),
        (64, 2, 8),
    ):
        machine(cores)
        assert default_workers(processes, max_images=4, side=1120) == number


def test_batches_fit_into_half_of_the_shared_memory(machine):
    batch = 4 * 3 * 4 * 1120**2  # fp32
    machine(32, shared_memory=2 * 2 * 3 * 5 * batch)
    assert default_workers(2, max_images=4, side=1120) == 5
    machine(32, shared_memory=64 * 2**20)  # Docker's
    assert [default_workers(1, max_images=number, side=1120) for number in (4, 0)] == [0, 8]


def test_what_a_recipe_says_of_workers_is_done_and_left_where_none_can_be_had(machine):
    of_workers = {"dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}
    machine(32)
    assert loader_options(of_workers, 1, 4)["dataloader_prefetch_factor"] == 4
    config = {"dataloader_num_workers": 3}
    assert loader_options(config, 1, 4) == config | {"dataloader_prefetch_factor": 2}
    off = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": 4}
    assert loader_options(off, 1, 4) == {"dataloader_num_workers": 0}  # although 8 would fit
    machine(1)
    none = {"dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
    assert loader_options(of_workers, 1, 4) == none | {"dataloader_num_workers": 0}


def test_an_offloaded_optimizer_has_workers_without_its_memory_unless_a_recipe_says_otherwise():
    assert start_method(True) == start_method(True, {"dataloader_num_workers": 2}) == "spawn"
    assert start_method(False) is start_method("auto") is None
    config = {"dataloader_multiprocessing_context": "forkserver"}
    assert start_method(True, config) == start_method(False, config) == "forkserver"


@pytest.mark.newest  # torch's workers
def test_a_run_with_workers_is_one_without_to_the_bit(tmp_path, monkeypatch):
    """Two epochs, of which the second is drawn anew; LoRA's dropout draws random numbers, too.

    Forked workers would keep what an offloaded optimizer replaces, so others are started there.
    """
    changes = {"engine.zero_stage": 0, "trained": "lora_lm", "trainer.max_steps": 5}
    recipe = drawn_recipe(tmp_path, changes | {"data.max_samples": 6})
    results = []
    for number, start in ((0, None), (2, None), (1, "spawn")):
        monkeypatch.setattr(training_arguments, "start_method", lambda *_, start=start: start)
        of_workers = {"dataloader_num_workers": number}
        if start:  # a worker that is started imports all libraries: once for both epochs
            of_workers["dataloader_persistent_workers"] = True
        changes = {f"trainer.{name}": value for name, value in of_workers.items()}
        run = recipe.override(changes | {"out": str(tmp_path / f"{number} {start}")})
        history = train_here(run)["history"]
        weights = Path(run.out, "adapter_model.safetensors").read_bytes()
        results.append((json.dumps(history), weights, torch.get_rng_state().tolist()))
        assert len(history) == 5
    assert results[1] == results[0]
    assert results[2][:2] == results[0][:2]  # a worker that persists draws one number less
