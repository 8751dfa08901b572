"""Trainings whose rows are read while they are learned."""

import json
import os
import re
import shutil
from itertools import islice, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.data.stream import StreamDataset
from glm4v_patched.finetune.bad_rows import BadRow, BadRowTracker
from glm4v_patched.finetune.divergence import NoResult
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.launch import launch
from glm4v_patched.finetune.plan import check_data, find_start_checkpoint, make_plan
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.models.placement import Placement
from tests.helpers.recipes import planned, recipe, train_here, train_in_processes

STREAM = {
    "data.check": "first 4",
    "data.shuffle_buffer": 6,
    "trainer.max_steps": 6,
    "trainer.save_steps": 2,
    "trainer.gradient_accumulation_steps": 2,
    "lora.dropout": 0.1,
}


@pytest.fixture
def stream_recipe(base_recipe, tmp_path) -> Recipe:
    """Rows and images of its own, which tests change."""
    data = shutil.copytree(Path(base_recipe.data.train).parent, tmp_path / "drawn")
    places = {"data.train": str(data / "train.jsonl"), "out": str(tmp_path / "out")}
    return base_recipe.override(STREAM | places)


def cut(run_recipe: Recipe, row: int) -> str:
    """Cut the image of a row; its place."""
    data = Path(run_recipe.data.train)
    [name] = re.findall(r'"image": "(.*?)"', data.read_text().splitlines()[row - 1])
    os.truncate(data.parent / name, 100)
    return f"{data}:{row}: "


def test_a_continued_stream_ends_in_the_same_bits_with_any_number_of_readers(
    stream_recipe, tmp_path, capfd
):
    whole = train_here(stream_recipe)["history"]
    assert re.search(r"^step 1/6 loss", capfd.readouterr().out, re.M), "without an epoch"
    weights = load_file(Path(stream_recipe.out, "adapter_model.safetensors"))
    readers = {"out": str(tmp_path / "stopped"), "trainer.dataloader_num_workers": 2}
    stopped = stream_recipe.override(readers)
    shutil.copytree(Path(stream_recipe.out, "checkpoint-4"), Path(stopped.out, "checkpoint-4"))
    checkpoint = find_start_checkpoint(resolve_recipe(stopped), 1, True)
    assert train_here(stopped, checkpoint)["history"] == whole
    for name, weight in load_file(Path(stopped.out, "adapter_model.safetensors")).items():
        assert torch.equal(weight, weights[name]), name


def test_the_order_of_a_stream_depends_on_data_seed_also_if_it_is_0(stream_recipe, tmp_path):
    losses = []  # of the first step; adapters begin at 0, so only rows change it
    for number, seeds in enumerate(({}, {"seed": 5, "data_seed": 0}, {"data_seed": 5})):
        changes = {f"trainer.{name}": seed for name, seed in (seeds | {"max_steps": 1}).items()}
        run_recipe = stream_recipe.override(changes | {"out": str(tmp_path / str(number))})
        losses.append(train_here(run_recipe)["history"][0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_a_row_that_cannot_be_used_ends_the_run_with_a_checkpoint_to_continue(stream_recipe):
    place = cut(stream_recipe, 13)
    stream_recipe = stream_recipe.override({"trainer.save_steps": None})
    with pytest.raises(BadRow) as stopped:
        train_here(stream_recipe)
    assert place in str(stopped.value)
    report = json.loads(Path(stream_recipe.out, "training.json").read_text())
    assert not report["finished"] and place in report["error"]
    skips = stream_recipe.override({"data.on_bad": "skip"})
    checkpoint = find_start_checkpoint(resolve_recipe(skips), 1, True)
    assert f"the training so far is in {checkpoint.name}" in report["error"]
    assert train_here(skips, checkpoint)["steps"]["done"] == 6


def test_a_row_that_is_left_out_is_told_once_however_often_it_comes(stream_recipe, capfd):
    place, data = cut(stream_recipe, 3), Path(stream_recipe.data.train)
    data.write_text("\n".join(data.read_text().splitlines()[:5]))
    report = train_here(stream_recipe.override({"data.on_bad": "skip", "data.shuffle_buffer": 1}))
    assert report["finished"] and report["left_out"] == 1
    assert "".join(capfd.readouterr()).count(f"skipped: {place}") == 1


def test_a_stream_of_which_no_row_can_be_learned_from_has_no_result(stream_recipe, monkeypatch):
    """The first four rows, which are checked before, are usable, but the stream skips them."""
    rows = range(1, 21)
    for row in rows[4:]:
        cut(stream_recipe, row)
    read = StreamDataset.__iter__
    monkeypatch.setattr(StreamDataset, "__iter__", lambda self: islice(read(self), 4, None))
    skips = {"data.on_bad": "skip", "data.shuffle_buffer": 1, "trainer.max_steps": 2}
    stream_recipe = stream_recipe.override(skips | {"trainer.save_steps": None})
    with pytest.raises(NoResult, match="the loss and the gradients of all 2 steps were 0"):
        train_here(stream_recipe)
    assert not [*Path(stream_recipe.out).glob("*.safetensors")]


def test_no_row_is_read_before_the_first_step_but_those_that_are_checked(stream_recipe, capsys):
    with Path(stream_recipe.data.train).open("a") as file:
        file.write("no row\n")
    checked = check_data(resolve_recipe(stream_recipe))
    assert checked.counts.samples == 4 and checked.skipped == 0 and checked.files == ()
    plan = make_plan(resolve_recipe(stream_recipe), Placement(1, on_cpu=True), checked)
    assert plan.steps == 6 and plan.batch.sequence_length == max(checked.column("tokens")) * 5 // 4
    launch(resolve_recipe(stream_recipe), Placement(1, on_cpu=True), dry_run=True)
    output = capsys.readouterr().out
    assert "a stream; checked before training: 4 samples" in output and "epoch" not in output


def test_of_many_rows_that_are_left_out_twenty_are_told(capsys):
    tracker = BadRowTracker(ends_run=False)
    for last in (15, 50, 90):
        tracker.record([f"row {number}" for number in range(last)], [])
    tracker.conclude(step=3)
    assert capsys.readouterr().out.count("skipped: row") == 20 and tracker.num_skipped == 90


def test_so_many_rows_are_looked_at_as_the_recipe_says_and_some_for_their_length():
    for check, first in ((None, 1000), ("first 7", 7), ("none", 20)):
        assert recipe({"data.stream": True, "data.check": check}).data.num_checked == first


@pytest.mark.slow
def test_a_bad_row_of_one_process_ends_both_under_zero_3(stream_recipe, tmp_path):
    """Also where that process has nothing to learn in a step: the other is not left waiting."""
    place = cut(stream_recipe, 14)
    changes = {"engine.zero_stage": 3, "trainer.max_steps": 12, "trainer.save_steps": 100}
    changes |= {"trainer.gradient_accumulation_steps": 1}
    runs = []
    for rows in (1, 2):
        more = {"trainer.per_device_train_batch_size": rows, "out": str(tmp_path / f"out_{rows}")}
        runs.append(stream_recipe.override(changes | more))
    ended = train_in_processes(diverging=[planned(run, processes=2) for run in runs])
    assert not ended.status, ended.output[-8000:]
    for run, rank in product(runs, "01"):
        assert place in Path(run.out, f"outcome-{rank}.txt").read_text()
    plans = []
    for run in runs:
        skipping = run.override({"data.on_bad": "skip"})
        checkpoint = find_start_checkpoint(resolve_recipe(skipping), 2, True)
        plans.append(planned(skipping, checkpoint, processes=2))
    ended = train_in_processes(*plans)
    assert not ended.status, ended.output[-8000:]
    for run in runs:
        report = json.loads(Path(run.out, "training.json").read_text())
        assert report["finished"] and all(float(step["loss"]) < 99 for step in report["history"])
