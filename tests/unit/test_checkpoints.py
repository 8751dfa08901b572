"""A checkpoint counts only if it was written to its end and is still all there."""

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from recipes import recipe
from transformers import TrainerControl, TrainerState

from glm4v_patched.finetune.checkpoints import (
    MANIFEST,
    CompletionMarker,
    choose_checkpoint,
    find_faults,
    last_complete_checkpoint,
    require_same_settings,
    set_incomplete_aside,
    write_manifest,
)
from glm4v_patched.finetune.trainer import logging_steps, settings_of

FILES = {
    "config.json": b"{}",
    "latest": b"global_step",
    "rng_state_0.pth": b"0" * 40,
    "rng_state_1.pth": b"1" * 40,
    "global_step/rank_0_optim_states.pt": b"2" * 50,
    "global_step/rank_1_optim_states.pt": b"3" * 50,
}
SETTINGS = {"trainer.seed": 0, "processes": 2}


def add_files(folder: Path, step: int) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    for name, content in FILES.items():
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return checkpoint


def add_checkpoint(folder: Path, step: int, complete: bool = True) -> Path:
    checkpoint = add_files(folder, step)
    if complete:
        write_manifest(checkpoint, SETTINGS)
    return checkpoint


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" x")


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", [shorten, empty, lengthen, os.unlink])
def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_taken(
    tmp_path, name, damage, caplog
):
    good, damaged = add_checkpoint(tmp_path, 4), add_checkpoint(tmp_path, 8)
    assert last_complete_checkpoint(tmp_path) == damaged
    damage(damaged / name)
    assert last_complete_checkpoint(tmp_path) == good
    assert str(damaged) in caplog.text and name in caplog.text
    assert damaged.is_dir()


def test_a_checkpoint_is_incomplete_until_its_manifest_is_made(tmp_path, monkeypatch):
    checkpoint = add_files(tmp_path, 4)
    assert find_faults(checkpoint)

    def die(source, target):
        assert json.loads(Path(source).read_text())["files"].keys() == FILES.keys()
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(OSError, match="power cut"):
            write_manifest(checkpoint, SETTINGS)
    assert find_faults(checkpoint)
    write_manifest(checkpoint, SETTINGS)
    assert find_faults(checkpoint) == []


def test_every_file_is_on_the_disk_before_the_manifest_is(tmp_path, monkeypatch):
    checkpoint = add_files(tmp_path, 4)
    flushed, replace = set(), os.replace
    monkeypatch.setattr(os, "fsync", lambda number: flushed.add(os.fstat(number).st_ino))

    def checked_replace(source, target):
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        assert {path.stat().st_ino for path in files} <= flushed
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked_replace)
    write_manifest(checkpoint, SETTINGS)


def test_the_last_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    for step in (9, 100, 10):
        add_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-200").write_text("a file")
    shutil.copytree(tmp_path / "checkpoint-9", tmp_path / "my-checkpoint-300")
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_a_folder_without_checkpoints_has_no_last_one(tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "none") is None


def test_a_copied_checkpoint_stays_complete(tmp_path):
    shutil.copytree(add_checkpoint(tmp_path, 4), tmp_path / "copy" / "checkpoint-4")
    assert find_faults(tmp_path / "copy" / "checkpoint-4") == []


def test_an_incomplete_checkpoint_that_is_asked_for_is_refused_with_both_sizes(tmp_path):
    checkpoint = add_checkpoint(tmp_path, 4)
    shorten(checkpoint / "rng_state_1.pth")
    (checkpoint / "latest").unlink()
    with pytest.raises(
        ValueError,
        match=r"(?s)checkpoint-4 is incomplete.*latest is missing: expected 11 bytes"
        r".*rng_state_1\.pth: expected 40 bytes, found 39.*--resume",
    ):
        choose_checkpoint(tmp_path, checkpoint)


def test_a_start_from_the_beginning_among_checkpoints_is_refused(tmp_path):
    assert choose_checkpoint(tmp_path, False) is None
    add_checkpoint(tmp_path, 4, complete=False)
    with pytest.raises(ValueError, match=r"holds checkpoint-4 of an earlier run; .*--resume.*out"):
        choose_checkpoint(tmp_path, False)


def test_nothing_to_resume_from_is_the_beginning(tmp_path):
    assert choose_checkpoint(tmp_path / "none", True) is None
    add_checkpoint(tmp_path, 4, complete=False)
    assert choose_checkpoint(tmp_path, True) is None


def test_a_checkpoint_before_others_that_are_complete_is_refused(tmp_path):
    checkpoint = add_checkpoint(tmp_path, 4)
    later = add_checkpoint(tmp_path, 8, complete=False)
    assert choose_checkpoint(tmp_path, checkpoint) == checkpoint
    write_manifest(later, SETTINGS)
    with pytest.raises(ValueError, match="checkpoint-4 would overwrite checkpoint-8; move"):
        choose_checkpoint(tmp_path, checkpoint)


def test_a_checkpoint_elsewhere_is_refused(tmp_path):
    elsewhere = add_checkpoint(tmp_path / "elsewhere", 4)
    with pytest.raises(ValueError, match="not a checkpoint in .*out, which holds no checkpoint"):
        choose_checkpoint(tmp_path / "out", elsewhere)


def test_incomplete_checkpoints_in_the_way_are_renamed_and_lose_nothing(tmp_path, caplog):
    for step, complete in ((2, False), (4, True), (8, False)):
        add_checkpoint(tmp_path, step, complete)
    set_incomplete_aside(tmp_path, after_step=4)
    add_checkpoint(tmp_path, 8, complete=False)
    set_incomplete_aside(tmp_path, after_step=4)
    names = {path.name for path in tmp_path.iterdir()}
    aside = {"incomplete-checkpoint-8", "incomplete-checkpoint-8-2"}
    assert names == {"checkpoint-2", "checkpoint-4", *aside}
    for name in aside:
        assert name in caplog.text
        assert {p for p in (tmp_path / name).rglob("*") if p.is_file()} == {
            tmp_path / name / file for file in FILES
        }


def test_another_run_s_checkpoint_is_refused_with_both_values(tmp_path):
    checkpoint = add_checkpoint(tmp_path, 4)
    require_same_settings(checkpoint, SETTINGS)
    with pytest.raises(ValueError, match=r"(?s)processes: 2 there, 4 now.*another folder"):
        require_same_settings(checkpoint, SETTINGS | {"processes": 4})


class Ranks:
    """``distributed_state`` of one process whose others do, or do not, arrive."""

    def __init__(self, others_arrive: bool):
        self.others_arrive = others_arrive

    def wait_for_everyone(self) -> None:
        if not self.others_arrive:
            raise RuntimeError("connection closed by peer")


def save(folder: Path, step: int, rank: int = 0, others_arrive: bool = True, keep=None) -> None:
    CompletionMarker(SETTINGS, keep).on_save(
        SimpleNamespace(output_dir=str(folder), distributed_state=Ranks(others_arrive)),
        TrainerState(global_step=step, is_world_process_zero=rank == 0),
        TrainerControl(),
    )


def test_rank_0_marks_a_checkpoint_after_all_ranks_have_written(tmp_path):
    checkpoint = add_files(tmp_path, 4)
    with pytest.raises(RuntimeError, match="connection closed"):
        save(tmp_path, 4, others_arrive=False)
    save(tmp_path, 4, rank=1)
    assert find_faults(checkpoint)
    save(tmp_path, 4)
    assert find_faults(checkpoint) == []


def test_the_newest_complete_checkpoints_are_kept_and_incomplete_ones_too(tmp_path, caplog):
    for step in (2, 4, 8):
        add_checkpoint(tmp_path, step)
    add_checkpoint(tmp_path, 6, complete=False)
    add_files(tmp_path, 10)
    with caplog.at_level(logging.WARNING):
        save(tmp_path, 10, keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {
        "checkpoint-6",
        "checkpoint-8",
        "checkpoint-10",
    }


def test_an_old_checkpoint_stays_until_the_new_one_is_complete(tmp_path):
    add_checkpoint(tmp_path, 4)
    add_files(tmp_path, 8)
    with pytest.raises(RuntimeError):
        save(tmp_path, 8, others_arrive=False, keep=1)
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


def test_the_last_step_saves_the_model_and_no_checkpoint():
    marker = CompletionMarker(SETTINGS)
    for step, saves in ((9, True), (10, False)):
        control = TrainerControl(should_save=True)
        marker.on_step_end(None, TrainerState(global_step=step, max_steps=10), control)
        assert control.should_save == saves


@pytest.mark.parametrize(
    ("steps", "save_steps"), [(10, 4), (300, None), (300, 50), (300, 7), (5000, 250), (5000, 99)]
)
def test_no_entry_of_the_loss_history_spans_a_checkpoint(steps, save_steps):
    chosen = logging_steps(recipe({"trainer.max_steps": steps, "trainer.save_steps": save_steps}))
    assert 1 <= chosen <= max(steps // 50, 1)
    assert save_steps is None or save_steps % chosen == 0


def test_folders_may_move_and_the_data_may_not_change_between_start_and_continuation(tmp_path):
    data, moved = tmp_path / "data.jsonl", tmp_path / "moved.jsonl"
    data.write_text("a line\n")
    shutil.copy(data, moved)
    settings = settings_of(recipe({"data.train": str(data), "trainer.save_steps": 4}), 2)
    assert (
        settings_of(
            recipe({"data.train": str(moved), "model": "n", "out": "p", "trainer.save_steps": 5}), 2
        )
        == settings
    )
    moved.write_text("another line\n")
    for other in (
        settings_of(recipe({"data.train": str(moved)}), 2),
        settings_of(recipe({"data.train": str(data), "trainer.learning_rate": 2.0}), 2),
        settings_of(recipe({"data.train": str(data), "data.pack_to": 100}), 2),
        settings_of(recipe({"data.train": str(data)}), 1),
    ):
        assert len(other.items() ^ settings.items()) == 2
