"""A run is decided once: what is printed before its first step is what every process does. Values
that are allowed and most likely mistakes are named."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from glm4v_patched.cli import main
from glm4v_patched.data.checked_data import CheckedData
from glm4v_patched.engine.memory_plan import GIB, NON_TORCH_BYTES, BatchShape
from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune import plan as planning
from glm4v_patched.finetune import summary, worker
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.plan import Plan, check_data, digest_data, make_plan
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.run_folder import LOCK, locked, start_record
from glm4v_patched.finetune.summary import (
    describe_engine,
    describe_memory,
    find_warnings,
    show_sample,
)
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.recipes import arguments_of, planned, recipe, write_recipe


def test_a_plan_reads_back_as_it_was_written(mine, tmp_path):
    recipe = mine.override({"out": str(tmp_path), "lora.targets": ["dense"]})
    for placement in (Placement(1, on_cpu=True), Placement(4, local_processes=2, on_cpu=True)):
        plan = make_plan(resolve_recipe(recipe), placement, check_data(resolve_recipe(recipe)))
        plan = replace(plan, checkpoint=tmp_path / "checkpoint-4", changes=("rows: others",))
        plan.write()
        assert Plan.read(plan.path) == plan
    assert json.loads(plan.path.read_text())["options"]["lora"]["targets"] == ["dense"]


def test_a_plan_is_for_its_rows_as_they_are_packed_and_for_those_of_evaluation(base_recipe):
    every = check_data(resolve_recipe(base_recipe))
    checked = check_data(resolve_recipe(base_recipe.override({"data.eval": 0.2})))
    others = [replace(checked, **change) for change in ({"pack_to": 100}, {"eval": None})]
    others += [every, replace(checked, eval=every)]
    assert len({digest_data(data) for data in (checked, *others)}) == 5


def test_a_plan_is_decided_by_what_is_free_and_not_by_what_a_gpu_has(mine, monkeypatch):
    """The model has the real size, and other programs use some of the GPUs' memory."""
    recipe = mine.override({"engine.language": "auto"})
    checked = check_data(resolve_recipe(recipe))
    real = ChatGLMConfig()
    monkeypatch.setattr(planning, "load_model_config", lambda base: real)
    batch = BatchShape(num_sequences=4, sequence_length=2114, processes=1)
    monkeypatch.setattr(planning, "largest_batch", lambda *_: batch)
    policies = []
    for free in (140 * GIB, 75 * GIB):
        monkeypatch.setattr(
            planning, "free_bytes_per_gpu", lambda number, free=free: [free] * number
        )
        plan = make_plan(resolve_recipe(recipe), Placement(1), checked)
        assert plan.free_bytes == free >= plan.needed_bytes
        policies.append(plan.options.language)
    assert policies[0] != policies[1]
    monkeypatch.setattr(
        planning, "free_bytes_per_gpu", lambda number: [140 * GIB, 75 * GIB][:number]
    )
    for local, least in ((2, 75), (1, 140)):  # on two machines, the second GPU is of no process
        placement = Placement(2, local_processes=local)
        assert make_plan(resolve_recipe(recipe), placement, checked).free_bytes == least * GIB
    limited = recipe.override({"engine.memory_limit": 75.0})
    assert make_plan(resolve_recipe(limited), Placement(1), checked).free_bytes < 80 * GIB
    # Memory outside of torch is not free.
    assert "may not suffice" not in describe_memory(
        replace(plan, needed_bytes=free - NON_TORCH_BYTES)
    )
    assert "may not suffice" in describe_memory(
        replace(plan, needed_bytes=free - NON_TORCH_BYTES + GIB)
    )


def test_memory_outside_of_torch_is_left_out_of_what_is_shown_as_free():
    plan = SimpleNamespace(
        free_bytes=20 * GIB + NON_TORCH_BYTES, needed_bytes=5 * GIB, is_tight=False
    )
    assert describe_memory(plan) == "5.0 GiB on each GPU, of 20.0 GiB that are free"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_memory_is_planned_for_accumulated_gradients_where_there_are_some(mine, accumulation):
    job = resolve_recipe(mine.override({"trainer.gradient_accumulation_steps": accumulation}))
    plan = make_plan(job, Placement(1, on_cpu=True), check_data(job))
    assert plan.batch.accumulates_gradients is (accumulation > 1)


def test_workers_are_planned_for_all_images_of_a_batch_and_the_processes_of_this_machine(
    mine, monkeypatch
):
    sharing: list[tuple[int, int]] = []
    monkeypatch.setattr(
        planning, "loader_options", lambda _, *sizes: sharing.append(sizes[:2]) or {}
    )
    job = resolve_recipe(mine.override({"trainer.per_device_train_batch_size": 3}))
    for placement in (Placement(4, local_processes=2, on_cpu=True), Placement(4, on_cpu=True)):
        make_plan(job, placement, check_data(job))
    assert sharing == [(2, 3), (4, 3)]


def test_what_is_printed_is_what_runs(mine, tmp_path, monkeypatch, capsys):
    """The summary, --dry-run and doctor, and the engine of the process that trains."""
    write_recipe(mine, tmp_path / "recipe.json")
    command = [str(tmp_path / "recipe.json"), "--device", "cpu"]
    monkeypatch.setattr(launching, "_run_processes", lambda command, _: "")
    monkeypatch.setattr("glm4v_patched.finetune.ending.describe_end", lambda *_: "")
    outputs = []
    for run in (["train", *command, "--dry-run"], ["doctor", *command], ["train", *command]):
        main(run)
        outputs.append(" ".join(capsys.readouterr().out.split()))
    plan = Plan.read(Path(mine.out, "plan.json"))
    assert all(describe_engine(plan) in text for text in outputs)
    prepare = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(worker, "prepare_model", prepare)
    with pytest.raises(ZeroDivisionError):
        worker.train(plan)
    assert prepare.call_args.args[0] == plan.options


def test_a_process_that_finds_a_plan_untrue_stops_with_both_numbers(mine, monkeypatch, words):
    plan = Plan.read(planned(mine))
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        with words.refused(ValueError, "1 process", "3 take part"):
            plan.require_same_conditions()
    other = replace(plan, file_digests=plan.file_digests | {"model.safetensors": "another"})
    with pytest.raises(ValueError, match=r"model\.safetensors: another planned, [0-9a-f]+ here"):
        other.require_same_conditions()
    monkeypatch.setattr(planning, "min_free_gpu_memory", lambda limit: 40 * GIB)
    replace(plan, free_bytes=41 * GIB).require_same_conditions()
    with words.refused(RuntimeError, "78.0 GiB", "40.0 GiB"):
        replace(plan, free_bytes=78 * GIB).require_same_conditions()


@pytest.fixture
def saving(mine) -> Recipe:
    """Four steps an epoch of 13 or 14 rows; the others are held out."""
    epochs = {"trainer.max_steps": None, "trainer.num_train_epochs": 2.0, "data.eval": 0.2}
    return mine.override(
        epochs | {"trainer.gradient_accumulation_steps": 2, "trainer.save_steps": 3}
    )


def train(run_recipe: Recipe, *options: str) -> int:
    file = Path(run_recipe.out).parent / "recipe.json"
    write_recipe(run_recipe, file)
    return main(["train", str(file), "--device", "cpu", *options])


def tree(folder: Path) -> dict[str, tuple]:
    """All that can be seen to change: contents of files, modes and times."""
    contents = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        contents[str(path)] = state.st_mode, state.st_ino, state.st_mtime_ns, content
    return contents


def test_a_dry_run_leaves_the_disk_as_it_was(saving, tmp_path, monkeypatch, capsys):
    (tmp_path / "here" / "home").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "here" / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # which is for that
    stopped = tmp_path / "here" / "stopped"
    stopped.mkdir()
    start_record(stopped, [])
    (stopped / LOCK).write_text("process 1 on a machine that lost its power")
    write_recipe(saving, tmp_path / "here" / "recipe.json")
    command = ["train", "recipe.json", "--device", "cpu", "--dry-run"]
    data = Path(saving.model).parent
    before = tree(tmp_path / "here"), tree(data)
    for out in ("~/new/deep", "new/deep/out", "stopped"):
        assert main([*command, f"out={out}"]) == 0
        assert main([*command, f"out={out}", "trainer.learning_rate=no"]) == 1
    assert "(--dry-run)" in capsys.readouterr().out
    assert main([*command, "out=recipe.json/out"]) == main([*command, "out=$HOME/out"]) == 1
    assert (tree(tmp_path / "here"), tree(data)) == before
    with locked(stopped):
        assert main([*command, "out=stopped"]) == 1
        assert "another run writes to" in capsys.readouterr().err


def test_a_dry_run_says_all_and_writes_nothing(saving, capsys, monkeypatch):
    monkeypatch.setattr(CheckedData, "find_warnings", lambda checked: [f"{len(checked.rows)} lost"])
    before = sorted(Path(saving.model).parent.rglob("*"))
    assert train(saving, "--dry-run", "trainer.learning_rate=10") == 0
    output = capsys.readouterr().out
    counts = check_data(resolve_recipe(saving)).counts
    held_out = 20 - counts.samples  # by digests of the rows, which change with names of images
    assert counts.samples == counts.images and held_out in (6, 7)
    for line in [
        f"data        {counts.samples} samples, {counts.samples} images; {counts.tokens} tokens, "
        f"{counts.supervised} of them supervised",
        f"evaluation  every 4 steps and at the end, on {held_out} samples",
        "steps       8, 4 an epoch: 2.00 epochs; effective batch 4 (per_device_train_batch_size 2",
        "trained     lora_lm: 6,144 of 766,688 weights; learning rate 10",
        "device      1 x CPU, fp32, no ZeRO",
        "engine      recomputes everything (full) of the vision tower and everything (full) of the "
        "language model; offload false, compile false, for sequences of up to ",
        ", 2 checkpoints at once of ",
        "(4 image tokens)<|end_of_image|>W",
        "\nwarning     trainer.learning_rate is 10: ",
        f"\nwarning     {counts.samples} lost",
        "nothing was trained, and nothing written (--dry-run)",
    ]:
        assert line in output, output
    assert sorted(Path(saving.model).parent.rglob("*")) == before
    assert not Path(saving.out).exists()


def test_epochs_that_max_steps_overrides_are_reported(saving, capsys):
    overridden = "(max_steps overrides num_train_epochs, which is 2)"
    assert train(saving, "--dry-run") == 0 and overridden not in capsys.readouterr().out
    assert train(saving, "--dry-run", "trainer.max_steps=3") == 0
    assert overridden in capsys.readouterr().out
    assert train(saving, "--dry-run", "trainer.max_steps=3", "trainer.num_train_epochs=1.0") == 0
    assert "overrides" not in capsys.readouterr().out  # the default


def test_learned_turns_of_the_sample_are_marked_and_repeated_words_are_no_image(base_recipe):
    turns = [("user", "A ? ? ????"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    messages = [{"role": role, "content": text} for role, text in turns]
    sample = show_sample(ChatGLMProcessor.from_pretrained(base_recipe.model), messages)
    inside = [part.split("]]")[0] for part in sample.split("[[")[1:]]
    assert len(inside) == 2 and "B" in inside[0] and "D" in inside[1]
    assert not any(letter in "".join(inside) for letter in "AC")
    assert "A ? ? ????" in sample and "image tokens" not in sample


SANE = {
    "trained": "lora_lm",
    "trainer.learning_rate": 1e-3,
    "trainer.per_device_train_batch_size": 4,
    "trainer.gradient_accumulation_steps": 2,
}


def doubts(changes, rows=64, steps=100) -> list[str]:
    """Return the warnings for a run of two processes."""
    arguments = arguments_of(recipe(SANE | changes), steps)
    batch = 2 * 4 * arguments["gradient_accumulation_steps"]
    plan = SimpleNamespace(
        arguments=arguments, num_rows=rows, effective_batch=batch, is_streamed=False
    )
    return list(find_warnings(plan))


def test_what_is_most_likely_a_mistake_is_told_with_its_numbers(words):
    rates = {"tower": 1e-5, "projector": 2, "language_model": 1}
    messages = []
    for changes in [
        {"trained": "full", "trainer.learning_rate": rates},
        {"trainer.warmup_steps": 500},
        {"trainer.gradient_accumulation_steps": 9},
    ]:
        (doubt,) = doubts(changes)
        messages.append(doubt)
    words("\n".join(messages))


def test_nothing_is_said_of_what_people_do():
    for changes in (
        {"trainer.learning_rate": 1e-2, "trainer.warmup_steps": 99},
        {"trainer.warmup_steps": 500, "trainer.lr_scheduler_type": "constant"},
    ):
        assert doubts(changes) == []
    assert doubts({"trainer.max_steps": 1}, rows=16, steps=1) == []


def test_the_optimizer_s_memory_is_that_of_the_processes_on_this_machine(monkeypatch):
    monkeypatch.setattr(summary, "offloaded_bytes", lambda config, options: 40e9)
    plan = SimpleNamespace(options=None, placement=Placement(4, local_processes=1))
    assert summary._describe_offloaded(plan, None).startswith("10.0 GB of the machine's memory")
