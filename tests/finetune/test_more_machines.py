"""How the processes of several machines begin: one checks, all others wait for it and see the same
disk. Here they are threads with a store between them; tests/distributed has real ones."""

import json
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from glm4v_patched.finetune import __main__ as machines
from glm4v_patched.finetune.__main__ import LAUNCHER_VARIABLES, main
from glm4v_patched.models.placement import Placement
from tests.helpers.recipes import recipe, write_recipe

OPTIONS = {
    "recipe": Path("r.json"),
    "overrides": [],
    "device": "cpu",
    "resume": False,
    "resume_from": None,
}
OPTIONS |= {"overwrite": False, "accept_changed_data": False}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Three processes, of which the first prepares a folder, or fails; what each ended with, and
    what was trained."""
    store, trained, out = HashStore(), [], tmp_path / "out"
    run_recipe = recipe({"out": str(out)})

    def run(rank: int):
        try:
            if rank:
                return machines._run_other_process(rank, store)
            return machines._run_process_0(Namespace(**OPTIONS), Placement(3, True, 1), store)
        except SystemExit as end:
            return end.code
        except Exception as error:
            return error

    def start(fault: Exception | None = None) -> tuple[list, list]:
        @contextmanager
        def prepared(*_, **__):
            if fault is not None:
                raise fault
            out.mkdir()
            write_recipe(run_recipe, out / "recipe.json")
            (out / "plan.json").write_text("{}")
            # Not by run, which is called by three threads here: one would read what another writes.
            (out / "training.json").write_text('{"error": "training diverged: in step 7"}')
            yield SimpleNamespace(path=out / "plan.json", recipe=run_recipe)

        monkeypatch.setattr(machines, "prepared", prepared)
        with ThreadPoolExecutor(3) as threads:
            return [*threads.map(run, range(3))], trained

    monkeypatch.setattr(machines, "validate_recipe", lambda *_, **__: (run_recipe, None))
    monkeypatch.setattr(machines, "run", lambda plan: trained.append(plan) or 0)
    monkeypatch.setattr(machines, "describe_end", lambda recipe, on_cpu: f"saved {recipe.out}")
    monkeypatch.setattr(machines, "exit_process", sys.exit)
    return start


def test_all_begin_when_the_first_has_prepared_with_its_plan(world, capsys):
    ended, trained = world()
    assert ended == [0, 0, 0] and [path.name for path in trained] == ["plan.json"] * 3
    assert capsys.readouterr().out.count("saved ") == 1


def test_a_run_that_came_to_nothing_is_told_by_the_first_process_alone(world, monkeypatch, capsys):
    monkeypatch.setattr(machines, "run", lambda plan: 1)
    ended, _ = world()
    assert ended == [1, 1, 1]
    assert capsys.readouterr().err.count("training diverged: in step 7") == 1


def test_none_begins_where_the_first_finds_a_fault(world, capsys):
    ended, trained = world(ValueError("the data cannot be used"))
    assert str(ended[0]) == "the data cannot be used" and ended[1:] == [1, 1]
    assert trained == [] and capsys.readouterr().err.count("see the error of process 0") == 2


def test_a_disk_that_not_all_see_is_refused_by_all(world, monkeypatch):
    seen = iter(["what the first has written", None, "another file"])
    monkeypatch.setattr(machines, "_text_or_none", lambda file: next(seen))
    ended, trained = world()
    assert "out has to be on a disk that all machines see" in str(ended[0])
    assert ended[1:] == [1, 1] and trained == []


def test_without_a_launcher_it_is_told_how_to_start_and_faults_by_the_first_process(
    monkeypatch, capsys, tmp_path
):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert main(["recipe.yaml"]) == 1
    error = capsys.readouterr().err
    assert "RANK, WORLD_SIZE" in error and "glm4v-patched train RECIPE" in error
    (tmp_path / "r.json").write_text(json.dumps({"trained": "all"}))
    run_options = Namespace(**OPTIONS | {"recipe": tmp_path / "r.json"})
    with pytest.raises(ValueError, match='trained is "all"'):
        machines._run_process_0(run_options, Placement(2, True, 1), HashStore())


def test_each_launcher_s_variables_and_arguments_are_understood(monkeypatch):
    for name, value in zip(LAUNCHER_VARIABLES, ("3", "4", "1", "node0", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert machines._rank_and_placement(True) == (3, Placement(4, True, 4))
    monkeypatch.setenv("LOCAL_SIZE", "2")  # DeepSpeed's
    assert machines._rank_and_placement(True) == (3, Placement(4, True, 2))
    # DeepSpeed's launcher adds this to every process's arguments.
    options = machines._parse_arguments(["r.yaml", "--local_rank=1", "engine.compile=true"])
    assert options.overrides == ["engine.compile=true"]
    for arguments in (
        ["--overwrite", "--resume"],
        ["--overwriting"],
        ["--resume", "--resume-from=c"],
    ):
        with pytest.raises(SystemExit):
            machines._parse_arguments(["r.yaml", *arguments])
