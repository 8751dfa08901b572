"""A checkpoint counts only if it was written to its end and is still all there."""

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from glm4v_patched.finetune.checkpoints import (
    MANIFEST,
    ROWS,
    Origin,
    Rows,
    changes_of_data,
    choose_checkpoint,
    find_faults,
    last_complete_checkpoint,
    require_same_settings,
    set_incomplete_aside,
    write_manifest,
)
from glm4v_patched.finetune.plan import settings_of
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.trainer import CompletionMarker
from glm4v_patched.finetune.worker import logging_steps
from tests.helpers.manifests import rewrite_manifest
from tests.helpers.recipes import recipe

FILES = {
    "config.json": b"{}",
    "latest": b"global_step",
    "rng_state_0.pth": b"0" * 40,
    "rng_state_1.pth": b"1" * 40,
    "global_step/rank_0_optim_states.pt": b"2" * 50,
    "global_step/rank_1_optim_states.pt": b"3" * 50,
}
SETTINGS = {"trainer.seed": 0, "processes": 2}
BASE = {"config.json": "a", "model.safetensors": "b"}
ROWS_THERE = Rows(("one", "two", "three"), (1, 2, 4))
ORIGIN = Origin(SETTINGS, BASE, ROWS_THERE)


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
        write_manifest(checkpoint, ORIGIN)
    return checkpoint


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" x")


def change(path: Path) -> None:
    """A byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", ["latest", "global_step/rank_1_optim_states.pt", ROWS, MANIFEST])
@pytest.mark.parametrize("damage", [shorten, lengthen, change, loop, os.unlink])
def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_taken(
    tmp_path, name, damage, caplog
):
    good, damaged = add_checkpoint(tmp_path, 4), add_checkpoint(tmp_path, 8)
    assert last_complete_checkpoint(tmp_path) == damaged
    damage(damaged / name)
    assert last_complete_checkpoint(tmp_path) == choose_checkpoint(tmp_path, True) == good
    assert str(damaged) in caplog.text and name in caplog.text
    with pytest.raises(ValueError, match=f"(?s)checkpoint-8 is incomplete.*{name}.*--resume"):
        choose_checkpoint(tmp_path, damaged)
    assert damaged.is_dir()


LONG = "[" * 100_000


@pytest.mark.parametrize("text", [LONG, "\ufeff{}", "{}", "null", '{"files": {"a": 1}}'])
def test_a_manifest_of_another_form_is_damaged(tmp_path, text):
    checkpoint = add_checkpoint(tmp_path, 4)
    (checkpoint / MANIFEST).write_text(text)
    (fault,) = find_faults(checkpoint)
    assert fault.startswith("complete.json is damaged")


@pytest.mark.parametrize("name", ["../checkpoint-4/latest", "/etc/passwd", "a/../../b", "", None])
def test_a_manifest_that_lists_what_is_not_in_the_checkpoint_or_nothing_is_damaged(tmp_path, name):
    checkpoint = add_checkpoint(tmp_path, 4)

    def list_other(content: dict) -> None:
        files = content["files"]
        content["files"] = {} if name is None else {**files, name: files["latest"]}

    rewrite_manifest(checkpoint, list_other)
    (fault,) = find_faults(checkpoint)
    told = "files: " if name is None else f"it lists {name!r}, which is not in it"
    assert fault.startswith(f"complete.json is damaged: {told}")


def test_a_checkpoint_is_incomplete_until_its_manifest_is_made(tmp_path, monkeypatch):
    checkpoint = add_files(tmp_path, 4)
    assert find_faults(checkpoint)

    def die(source, target):
        assert json.loads(Path(source).read_text())["files"].keys() == FILES.keys() | {ROWS}
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(OSError, match="power cut"):
            write_manifest(checkpoint, ORIGIN)
    assert find_faults(checkpoint)
    write_manifest(checkpoint, ORIGIN)
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
    write_manifest(checkpoint, ORIGIN)


def test_the_last_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    for step in (9, 100, 10):
        add_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-200").write_text("a file")
    shutil.copytree(tmp_path / "checkpoint-9", tmp_path / "my-checkpoint-300")
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


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
    write_manifest(later, ORIGIN)
    with pytest.raises(ValueError, match="checkpoint-4 would overwrite checkpoint-8; move"):
        choose_checkpoint(tmp_path, checkpoint)


def test_a_checkpoint_elsewhere_is_refused(tmp_path):
    elsewhere = add_checkpoint(tmp_path / "elsewhere", 4)
    with pytest.raises(ValueError, match="not a checkpoint in .*out, which holds no checkpoint"):
        choose_checkpoint(tmp_path / "out", elsewhere)


def test_incomplete_checkpoints_in_the_way_are_renamed_and_lose_nothing(tmp_path, caplog):
    for step, complete in ((2, False), (4, True), (6, True), (8, False)):
        add_checkpoint(tmp_path, step, complete)
    set_incomplete_aside(tmp_path, after_step=4)
    add_checkpoint(tmp_path, 8, complete=False)
    set_incomplete_aside(tmp_path, after_step=4)
    names = {path.name for path in tmp_path.iterdir()}
    aside = {"incomplete-checkpoint-8", "incomplete-checkpoint-8-2"}
    assert names == {"checkpoint-2", "checkpoint-4", "checkpoint-6", *aside}
    for name in aside:
        assert name in caplog.text
        assert {p for p in (tmp_path / name).rglob("*") if p.is_file()} == {
            tmp_path / name / file for file in FILES
        }


NEW = {"trainer.new": 7}


@pytest.mark.parametrize(
    ("settings", "base", "defaults", "told"),
    [
        (SETTINGS, BASE, {}, None),
        (SETTINGS | {"processes": 4}, BASE, {}, r"processes: 2 there, 4 now"),
        (SETTINGS, BASE | {"model.safetensors": "c"}, {}, "of the model, .*: b there, c now"),
        (SETTINGS, {"model.safetensors": "b"}, {}, "model, config.json: a there, absent now"),
        (SETTINGS | NEW, BASE, {}, "trainer.new: absent there, 7 now"),
        # An older checkpoint did what is the default today.
        (SETTINGS | NEW, BASE, NEW, None),
        (SETTINGS | {"trainer.new": 8}, BASE, NEW | {"x": 1}, "trainer.new: 7 there, 8 now"),
        ({"trainer.seed": 0}, BASE, {"processes": 2}, "processes: 2 there, absent now"),
    ],
)
def test_another_run_s_checkpoint_is_refused_with_what_differs(
    tmp_path, settings, base, defaults, told
):
    checkpoint = add_checkpoint(tmp_path, 4)
    if told is None:
        require_same_settings(checkpoint, settings, base, defaults)
        return
    with pytest.raises(ValueError, match=f"(?s){told}.*another folder"):
        require_same_settings(checkpoint, settings, base, defaults)


def test_changed_rows_are_refused_or_accepted_and_said(tmp_path):
    checkpoint = add_checkpoint(tmp_path, 4)
    assert changes_of_data(checkpoint, ROWS_THERE, accept=False) == []
    mended = Rows(("one", "two, mended", "three"), (1, 2, 4))
    with pytest.raises(ValueError, match=r"1 differ \(line 2\)\n.*--accept-changed-data"):
        changes_of_data(checkpoint, mended, accept=False)
    assert changes_of_data(checkpoint, mended, accept=True) == [
        "rows: 3 there and now, 1 differ (line 2)"
    ]


def require_noticed(checkpoint: Path, damaged: bytes, was: dict) -> None:
    (checkpoint / MANIFEST).write_bytes(damaged)
    faults = find_faults(checkpoint)
    if faults:
        assert all(MANIFEST in fault for fault in faults)
    else:  # white space, or an escape for the same character
        assert json.loads(damaged) == was


def damage_in_every_way(checkpoint: Path, examples: int) -> None:
    good = (checkpoint / MANIFEST).read_bytes()
    was = json.loads(good)
    places = st.integers(0, len(good))
    options = settings(max_examples=examples, derandomize=True, deadline=None, database=None)

    @options
    @given(places, places, st.binary(max_size=4))
    def replace_bytes(begin, end, put):
        require_noticed(checkpoint, good[:begin] + put + good[end:], was)

    @options
    @given(json_values())
    def replace_all(value):
        require_noticed(checkpoint, json.dumps(value).encode(), was)

    @options
    @given(st.data())
    def replace_a_value(data):
        content = json.loads(good)
        place, path = content, []
        while isinstance(place, dict) and place and (not path or data.draw(st.booleans())):
            path.append(data.draw(st.sampled_from(sorted(place))))
            parent, place = place, place[path[-1]]
        parent[path[-1]] = data.draw(json_values())
        require_noticed(checkpoint, json.dumps(content).encode(), was)

    replace_bytes()
    replace_all()
    replace_a_value()


def json_values():
    simple = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    keys = st.sampled_from(["settings", "base", "files", "sha256", "bytes"]) | st.text(max_size=3)
    return st.recursive(
        simple,
        lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=4),
        max_leaves=8,
    )


@pytest.mark.parametrize("examples", [80, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_random_damage_to_a_manifest_is_noticed_and_named(tmp_path, examples):
    damage_in_every_way(add_checkpoint(tmp_path, 4), examples)


def test_an_old_checkpoint_that_is_a_link_stays_and_the_run_goes_on(tmp_path):
    elsewhere = add_checkpoint(tmp_path / "elsewhere", 2)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "checkpoint-2").symlink_to(elsewhere)
    for step in (4, 6):
        add_files(folder, step)
        save(folder, step, keep=1)
    assert {path.name for path in folder.iterdir()} == {"checkpoint-2", "checkpoint-6"}
    assert find_faults(elsewhere) == []


class Ranks:
    """``distributed_state`` of one process whose others do, or do not, arrive."""

    def __init__(self, others_arrive: bool):
        self.others_arrive = others_arrive

    def wait_for_everyone(self) -> None:
        if not self.others_arrive:
            raise RuntimeError("connection closed by peer")


def save(folder: Path, step: int, rank: int = 0, others_arrive: bool = True, keep=None) -> None:
    CompletionMarker(ORIGIN, keep).on_save(
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
    marker = CompletionMarker(ORIGIN)
    for step, saves in ((9, True), (10, False)):
        control = TrainerControl(should_save=True)
        marker.on_step_end(None, TrainerState(global_step=step, max_steps=10), control)
        assert control.should_save == saves


@pytest.mark.parametrize(
    ("steps", "save_steps"), [(10, 4), (300, None), (300, 50), (300, 7), (5000, 250), (5000, 99)]
)
def test_no_entry_of_the_loss_history_spans_a_checkpoint(steps, save_steps):
    chosen = logging_steps(recipe({"trainer.save_steps": save_steps}), steps)
    assert 1 <= chosen <= max(steps // 50, 1)
    assert save_steps is None or save_steps % chosen == 0


def test_folders_may_move_between_start_and_continuation():
    settings = settings_of(recipe({"trainer.save_steps": 4}), 2)
    free = {"data.train": "e", "model": "n", "out": "p", "trainer.save_steps": 5}
    assert settings_of(recipe(free | {"max_nonfinite_steps": 9}), 2) == settings
    for other in (
        settings_of(recipe({"trainer.learning_rate": 2.0}), 2),
        settings_of(recipe({"data.pack_to": 100}), 2),
        settings_of(recipe(), 1),
    ):
        assert len(other.items() ^ settings.items()) == 2


def test_a_setting_newer_than_a_checkpoint_has_the_default_of_its_field():
    defaults = Recipe.defaults()
    assert defaults["lora.rank"] == 8 and defaults["engine.compile"] == "auto"
    assert "trainer.per_device_train_batch_size" not in defaults and "lora" not in defaults


def rows(*digests: str) -> Rows:
    return Rows(digests, tuple(range(10, 10 + len(digests))))


def test_what_changes_in_rows_is_said_with_their_lines():
    assert rows(*"abc").changes_to(Rows(("a", "b", "c"), (1, 5, 6))) == []
    assert rows(*"abc").changes_to(rows(*"axc")) == ["rows: 3 there and now, 1 differ (line 11)"]
    assert rows(*"abc").changes_to(rows(*"acb")) == [
        "rows: the same 3, in another order from line 11 on"
    ]
    assert rows(*"abc").changes_to(rows(*"abcde")) == [
        "rows: 3 there, 5 now; 0 are gone; 2 are new (lines 13, 14)"
    ]
    assert rows(*"aabc").changes_to(rows(*"abc")) == [
        "rows: 4 there, 3 now; 1 are gone (line 11); 0 are new"
    ]
    (change,) = rows(*"abcdefgh").changes_to(rows(*"ABCDEFGH"))
    assert change == "rows: 8 there and now, 8 differ (lines 10, 11, 12, 13, 14, ...)"


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_rows_change_exactly_when_their_digests_do(there, now):
    assert (rows(*there).changes_to(rows(*now)) == []) == (there == now)
