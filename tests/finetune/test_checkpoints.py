"""A checkpoint counts only if it was written to its end and is still all there."""

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from glm4v_patched.finetune.checkpoints import (
    CHECKPOINT_MANIFEST,
    ResumeFingerprint,
    RowDigests,
    data_changes,
    find_checkpoint_problems,
    last_complete_checkpoint,
    rename_incomplete_checkpoints,
    require_checkpoint,
    require_same_run,
    write_checkpoint_manifest,
)
from glm4v_patched.finetune.trainer import CheckpointCallback

FILES = {
    "config.json": b"{}",
    "latest": b"global_step",
    "global_step/rank_0_optim_states.pt": b"2" * 50,
    "global_step/rank_1_optim_states.pt": b"3" * 50,
}
SETTINGS = {"trainer.seed": 0, "processes": 2}
BASE = {"config.json": "a", "model.safetensors": "b"}
ORIGIN = ResumeFingerprint(SETTINGS, BASE, RowDigests(3, "a"))


def add_checkpoint(folder: Path, step: int, complete: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    for name, content in FILES.items():
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if complete:
        write_checkpoint_manifest(checkpoint, ORIGIN)
    return checkpoint


@pytest.mark.parametrize(
    "name", ["latest", "global_step/rank_1_optim_states.pt", CHECKPOINT_MANIFEST]
)
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_taken(
    tmp_path, name, damage, caplog
):
    good, damaged = add_checkpoint(tmp_path, 4), add_checkpoint(tmp_path, 8)
    assert last_complete_checkpoint(tmp_path) == damaged
    content = (damaged / name).read_bytes()
    if damage == "gone":
        (damaged / name).unlink()
    else:
        (damaged / name).write_bytes(content[:-1] + (b"?" if damage == "changed" else b""))
    assert last_complete_checkpoint(tmp_path) == good
    assert str(damaged) in caplog.text and name in caplog.text
    with pytest.raises(ValueError, match=f"(?s)checkpoint-8 is incomplete.*{name}.*--resume"):
        require_checkpoint(tmp_path, damaged)
    assert damaged.is_dir()


def test_files_are_on_the_disk_before_the_manifest_has_its_name_and_that_is_after_it(
    tmp_path, monkeypatch
):
    """Whenever the power is cut, a checkpoint with a manifest is whole."""
    checkpoint = add_checkpoint(tmp_path, 4, complete=False)
    assert find_checkpoint_problems(checkpoint)
    flushed, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.fstat(number).st_ino))

    def cut(source, target):
        assert {path.stat().st_ino for path in checkpoint.rglob("*")} <= {*flushed}
        flushed.clear()
        if cuts:
            raise OSError(cuts.pop())
        replace(source, target)

    cuts = ["power cut"]
    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(OSError, match="power cut"):
        write_checkpoint_manifest(checkpoint, ORIGIN)
    assert find_checkpoint_problems(checkpoint)
    write_checkpoint_manifest(checkpoint, ORIGIN)
    assert flushed == [checkpoint.stat().st_ino] and find_checkpoint_problems(checkpoint) == []


def test_the_last_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    for step in (9, 100, 10):
        add_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-200").write_text("a file")
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_a_start_elsewhere_or_before_others_that_are_complete_is_refused(tmp_path, words):
    assert last_complete_checkpoint(tmp_path / "none") is None
    later = add_checkpoint(tmp_path, 8, complete=False)
    assert last_complete_checkpoint(tmp_path) is None
    checkpoint = add_checkpoint(tmp_path, 4)
    require_checkpoint(tmp_path, checkpoint)
    write_checkpoint_manifest(later, ORIGIN)
    with words.refused(ValueError, "checkpoint-4", "checkpoint-8"):
        require_checkpoint(tmp_path, checkpoint)
    with words.refused(ValueError, str(checkpoint), str(tmp_path / "out")):
        require_checkpoint(tmp_path / "out", checkpoint)


def test_a_checkpoint_is_of_its_folder_however_both_are_spelled(tmp_path, monkeypatch):
    add_checkpoint(tmp_path / "out", 4)
    add_checkpoint(tmp_path / "out-2", 4)
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path)
    folders = [Path("out"), tmp_path / "out", Path("link"), Path("link/../out")]
    for folder in folders:
        for same in folders:
            require_checkpoint(folder, same / "checkpoint-4")
        with pytest.raises(ValueError, match="is not a checkpoint in"):
            require_checkpoint(folder, Path("out-2/checkpoint-4"))


def test_incomplete_checkpoints_in_the_way_are_renamed_and_lose_nothing(tmp_path, caplog):
    for step, complete in ((2, False), (4, True), (6, True), (8, False)):
        add_checkpoint(tmp_path, step, complete)
    rename_incomplete_checkpoints(tmp_path, after_step=4)
    for _ in range(2):
        add_checkpoint(tmp_path, 8, complete=False)
        rename_incomplete_checkpoints(tmp_path, after_step=4)
    aside = {f"incomplete-checkpoint-8{suffix}" for suffix in ("", "-2", "-3")}
    assert {*os.listdir(tmp_path)} == {"checkpoint-2", "checkpoint-4", "checkpoint-6", *aside}
    for name in aside:
        assert name in caplog.text
        assert all((tmp_path / name / file).is_file() for file in FILES)


def test_another_run_s_checkpoint_is_refused_with_what_differs(tmp_path):
    checkpoint = add_checkpoint(tmp_path, 4)
    require_same_run(checkpoint, SETTINGS, BASE)
    for now, base, message in (
        (SETTINGS | {"processes": 4}, BASE, "- processes: 2 then, 4 now"),
        (SETTINGS, {"model.safetensors": "b"}, "of the model, config.json: a then, absent"),
        (SETTINGS | {"trainer.new": 8}, BASE, "trainer.new: absent then, 8 now"),
        (SETTINGS | {"trainer.new": None}, BASE, "trainer.new: absent then, None now"),
    ):
        with pytest.raises(
            ValueError, match=f"(?s)checkpoint-4 was saved .*{message}.*another folder"
        ):
            require_same_run(checkpoint, now, base)


@pytest.mark.parametrize("examples", [80, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_random_damage_to_a_manifest_is_noticed_and_named(tmp_path, examples):
    checkpoint = add_checkpoint(tmp_path, 4)
    good = (checkpoint / CHECKPOINT_MANIFEST).read_bytes()
    places = st.integers(0, len(good))

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(places, places, st.binary(max_size=4))
    def replace_bytes(begin, end, put):
        damaged = good[:begin] + put + good[end:]
        (checkpoint / CHECKPOINT_MANIFEST).write_bytes(damaged)
        faults = find_checkpoint_problems(checkpoint)
        if faults:
            assert all(CHECKPOINT_MANIFEST in fault for fault in faults)
        else:  # white space, or an escape for the same character
            assert json.loads(damaged) == json.loads(good)

    replace_bytes()


OTHER = {"bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    "files",
    [{}, [], None, {"latest": {"sha256": ""}}, {"../a": OTHER}, {"/a": OTHER}, {"a\0": OTHER}],
    ids=repr,
)
def test_a_manifest_that_lists_no_files_or_not_as_expected_is_damaged(tmp_path, files):
    checkpoint = add_checkpoint(tmp_path, 4)
    manifest = json.loads((checkpoint / CHECKPOINT_MANIFEST).read_text()) | {"files": files}
    del manifest["sha256"]
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / CHECKPOINT_MANIFEST).write_text(json.dumps(manifest))
    [fault] = find_checkpoint_problems(checkpoint)
    assert fault.startswith(f"{CHECKPOINT_MANIFEST} is damaged: "), fault
    (checkpoint / CHECKPOINT_MANIFEST).unlink()
    os.mkfifo(checkpoint / CHECKPOINT_MANIFEST)  # which is not waited for
    [fault] = find_checkpoint_problems(checkpoint)
    assert fault.startswith(f"{CHECKPOINT_MANIFEST} is damaged: ") and "not a regular file" in fault


def save(folder: Path, step: int, rank: int = 0, wait=lambda: None, keep=None, best=None) -> None:
    processes = SimpleNamespace(wait_for_everyone=wait)
    CheckpointCallback(ORIGIN, keep).on_save(
        SimpleNamespace(output_dir=str(folder), distributed_state=processes),
        TrainerState(global_step=step, is_world_process_zero=rank == 0, best_model_checkpoint=best),
        TrainerControl(),
    )


def test_rank_0_marks_a_checkpoint_after_all_have_written_and_only_then_an_old_one_goes(tmp_path):
    old = add_checkpoint(tmp_path, 4)
    checkpoint = add_checkpoint(tmp_path, 8, complete=False)
    with pytest.raises(RuntimeError, match="connection closed"):
        save(tmp_path, 8, wait=Mock(side_effect=RuntimeError("connection closed")), keep=1)
    save(tmp_path, 8, rank=1, keep=1)
    assert find_checkpoint_problems(checkpoint) and find_checkpoint_problems(old) == []
    save(tmp_path, 8, keep=1)
    assert find_checkpoint_problems(checkpoint) == [] and not old.exists()


def test_the_newest_complete_checkpoints_are_kept_and_incomplete_ones_and_links_too(tmp_path):
    elsewhere = add_checkpoint(tmp_path / "elsewhere", 1)
    out = tmp_path / "out"
    for step in (2, 3, 4, 8, 6, 10):
        add_checkpoint(out, step, complete=step not in (6, 10))
    (out / "checkpoint-1").symlink_to(elsewhere)
    save(out, 10, keep=2, best="/moved/checkpoint-3")
    assert {*os.listdir(out)} == {f"checkpoint-{step}" for step in (1, 3, 6, 8, 10)}
    assert find_checkpoint_problems(elsewhere) == []


def test_other_rows_are_refused_unless_they_are_accepted(tmp_path):
    checkpoint = add_checkpoint(tmp_path, 4)
    assert data_changes(checkpoint, RowDigests(3, "a"), accept=False) == []
    for number in (3, 5):
        now = RowDigests(number, "b")
        message = f"rows: 3 then, {number} now; their contents or their order differ"
        assert data_changes(checkpoint, now, accept=True) == [message]
        with pytest.raises(
            ValueError, match=f"(?s)checkpoint-4 was saved .*{message}.*--accept-changed"
        ):
            data_changes(checkpoint, now, accept=False)
