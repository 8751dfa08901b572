"""Pictures that are decoded by workers: how many there are, and that nothing else changes."""

import json
import multiprocessing
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from glm4v_patched.data import loading
from glm4v_patched.data.loading import default_workers, loader_options, worker_start
from glm4v_patched.data.stored_rows import Conversations
from glm4v_patched.finetune import evaluation, worker
from tests.helpers.recipes import drawn_recipe, stored, train_here

START = "multiprocessing_context"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(monkeypatch):
    def have(cores: int, shared_memory: float = 10**12) -> None:
        monkeypatch.setattr(loading, "cores", lambda: cores)
        monkeypatch.setattr(
            loading.shutil, "disk_usage", lambda path: Usage(0, 0, int(shared_memory))
        )

    return have


@pytest.mark.parametrize(
    ("cores", "processes", "workers"),
    [(1, 1, 0), (2, 1, 1), (2, 2, 0), (32, 2, 8), (32, 8, 3), (8, 2, 3), (4, 8, 0)],
)
def test_each_process_gets_its_share_of_the_cores_but_one(machine, cores, processes, workers):
    machine(cores)
    assert default_workers(processes, pictures=4, side=1120) == workers


def test_batches_fit_into_shared_memory(machine):
    batch = 4 * 3 * 4 * 1120**2  # fp32
    machine(32, shared_memory=2 * 2 * 3 * 5 * batch)
    assert default_workers(2, pictures=4, side=1120) == 5
    machine(32, shared_memory=64 * 2**20)  # Docker's
    assert default_workers(1, pictures=4, side=1120) == 0
    assert default_workers(1, pictures=0, side=1120) == 8


def test_evaluation_s_workers_fit_beside_those_of_training(tmp_path, machine, monkeypatch):
    """With more pictures in a batch, and all that training's workers may hold."""
    picture, total = 12 * 1120**2, 2**30
    machine(8, shared_memory=total)
    training = default_workers(1, pictures=2, side=1120) * 3 * 2 * picture
    rows = Conversations(stored(*({"images": images} for images in (1, 0, 2, 1))), np.arange(4))
    started = []

    def watched(*arguments, **options):
        started.append(tuple(map(options.pop, ("num_workers", "prefetch_factor", START))))
        return DataLoader(*arguments, **options)

    monkeypatch.setattr(evaluation, "DataLoader", watched)
    collate = lambda batch: {"labels": torch.zeros(len(batch), 2, dtype=torch.long)}  # noqa: E731
    cpu = torch.device("cpu")
    for free in (total - training, 2**20):
        machine(8, shared_memory=free)
        loss_of = lambda _: torch.ones(())  # noqa: E731
        evaluation.mean_loss(torch.nn.Identity(), rows, collate, 2, cpu, loss_of, 7, "spawn")
    (workers, ahead, start), none = started
    assert 1 <= workers < 7 and training + workers * (ahead + 1) * 2 * 2 * picture <= total
    assert start == "spawn" and none == (0, None, None)


def test_an_offloaded_optimizer_has_workers_without_its_memory():
    assert worker_start(True) == "spawn"
    assert worker_start(False) is worker_start("auto") is None


def test_what_a_recipe_says_of_workers_is_left_where_none_can_be_had(machine):
    of_workers = {"dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}
    machine(32)
    assert loader_options(of_workers, 1, 4)["dataloader_prefetch_factor"] == 4
    machine(1)
    none = {"dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
    assert loader_options(of_workers, 1, 4) == none | {"dataloader_num_workers": 0}


def test_a_recipe_may_say_how_workers_start():
    asked = {"dataloader_multiprocessing_context": "forkserver"}
    assert worker_start(True, asked) == worker_start(False, asked) == "forkserver"
    assert worker_start(True, {"dataloader_num_workers": 2}) == "spawn"


def test_a_recipe_may_say_how_many(machine):
    machine(32)
    assert loader_options({"dataloader_num_workers": 0}, 1, 4) == {"dataloader_num_workers": 0}
    assert loader_options({"dataloader_num_workers": 3}, 1, 4) == {
        "dataloader_num_workers": 3,
        "dataloader_prefetch_factor": 2,
    }


@pytest.mark.newest  # torch's workers
def test_a_run_with_workers_is_one_without_to_the_bit(tmp_path, monkeypatch):
    """Two epochs, of which the second is drawn anew; LoRA's dropout draws random numbers, too.

    Forked workers would keep what an offloaded optimizer replaces, so others are started there.
    """
    started, plain = set(), DataLoader.__iter__

    def watched(loader):
        started.add(loader.num_workers and loader.multiprocessing_context)
        return plain(loader)

    monkeypatch.setattr(DataLoader, "__iter__", watched)
    changes = {"engine.zero_stage": 0, "trained": "lora_lm", "trainer.max_steps": 14}
    results = []
    for workers, start in ((0, None), (2, None), (1, "spawn")):
        monkeypatch.setattr(worker, "worker_start", lambda *_, start=start: start)
        folder = tmp_path / f"{workers} {start}"
        folder.mkdir()
        recipe = drawn_recipe(folder, changes | {"trainer.dataloader_num_workers": workers})
        history = train_here(recipe)["history"]
        weights = Path(recipe.out, "adapter_model.safetensors").read_bytes()
        results.append((json.dumps(history), weights, torch.get_rng_state().tolist()))
        assert len(history) == 14
    assert results[1] == results[0] and results[2] == results[0]
    assert started == {0, None, multiprocessing.get_context("spawn")}
