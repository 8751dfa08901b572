"""Files that hold either what they held or all that is written."""

import errno
import fcntl
import json
import os

import pytest

from glm4v_patched.atomic import apply_umask, require_copyable, require_file, write_atomically
from glm4v_patched.data.image_files import ImageFiles
from glm4v_patched.data.source import DataSource
from glm4v_patched.data.stored_rows import SCHEMA, store_rows, write_stored
from glm4v_patched.finetune.run_folder import RECORD, locked, start_record
from glm4v_patched.inference.answers_file import open_answers
from glm4v_patched.models.base import TRAINING_REPORT
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.recipes import recipe, write_recipe

ROW = {name: 0 for name in SCHEMA.names} | {"images": [], "text_digest": bytes(32), "problem": None}
ROW["messages"] = "[]" * 5000

WRITERS = {
    "content": lambda out: write_atomically(out / "a", b"x" * 9000),
    "rows": lambda out: write_stored(store_rows([[ROW]], None), out / "data.arrow"),
    "image": lambda out: ImageFiles("", store=out).path_of(b"x" * 9000),
    "recipe": lambda out: write_recipe(recipe({"model": "m" * 9000}), out / "recipe.json"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_leaves_what_was_there_and_nothing_beside_it(kind, tmp_path):
    for name in ("recipe.json", "a"):
        (tmp_path / name).write_text("of an earlier run")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises((OSError, RuntimeError)), files_of_at_most(4000):
        WRITERS[kind](tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    WRITERS[kind](tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} != before


def test_what_has_the_name_of_a_file_and_is_none_is_not_written_to(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    makers = {
        "is a link to b": lambda: path.symlink_to("b"),
        "is a folder": path.mkdir,
        "is a pipe": lambda: os.mkfifo(path),
    }
    for message, make in makers.items():
        make()
        with pytest.raises(ValueError, match=f"{path} {message}.* neither followed nor replaced"):
            require_file(path)
        path.rename(tmp_path / message)
    require_file(path)  # nothing is there
    path.touch()
    require_file(path, refuse_hard_links=True)
    os.link(path, other)
    require_file(path)
    with pytest.raises(ValueError, match="a file with 2 names"):  # to be written in place
        require_file(path, refuse_hard_links=True)


def test_what_a_killed_run_wrote_half_is_removed_by_the_next(tmp_path):
    partial_files = [
        f"{name}.{'0a' * 16}.partial" for name in ("data.json", RECORD, TRAINING_REPORT)
    ]
    for name in (*partial_files, "mine.partial", "data.json.partial"):
        (tmp_path / name).touch()
    start_record(tmp_path, [])
    remaining = {"mine.partial", "data.json.partial", RECORD}
    assert {path.name for path in tmp_path.iterdir()} == remaining
    assert json.loads((tmp_path / RECORD).read_text()) == {"written": None}


def test_the_umask_gives_weights_their_mode_and_stays_as_it_is(tmp_path):
    for name in ("a.safetensors", "linked.safetensors"):
        (tmp_path / name).touch(0o600)
    os.link(tmp_path / "linked.safetensors", tmp_path / "elsewhere")
    before = os.umask(0o027)
    try:
        apply_umask(tmp_path)
    finally:
        after = os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert after == 0o027
    assert modes == {"a.safetensors": 0o640, "linked.safetensors": 0o600, "elsewhere": 0o600}


def test_a_folder_s_files_are_not_those_of_one_whose_name_begins_alike(tmp_path):
    model, beside = tmp_path / "model", tmp_path / "model-private"
    for folder in (model, beside):
        folder.mkdir()
        (folder / "key").write_text(folder.name)
    (model / "own").symlink_to("key")
    (model / "theirs").symlink_to("../model-private/key")
    (tmp_path / "link").symlink_to("model")
    for folder in (model, tmp_path / "link", tmp_path / "model-private" / ".." / "model"):
        require_copyable(folder / "own", folder)
        with pytest.raises(ValueError, match="outside the model's folder"):
            require_copyable(folder / "theirs", folder)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_as_that(code, tmp_path, monkeypatch):
    """It was told as a folder that cannot be written to."""

    def flock(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    answers = tmp_path / "a.jsonl", [], {}, DataSource(str(tmp_path / "rows.jsonl"))
    for take in (locked(tmp_path / "run"), open_answers(*answers)):
        with pytest.raises(ValueError, match="without locks, .*; give a path on a local disk"):
            take.__enter__()
