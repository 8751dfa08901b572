"""Files that hold either what they held or all that is written."""

import json
import os
from pathlib import Path

import pytest

from glm4v_patched.atomic import fault_of_file, write_atomically
from glm4v_patched.data import checked_data
from glm4v_patched.data.checked_data import CheckedData
from glm4v_patched.data.pictures import PictureFiles
from glm4v_patched.data.stored_rows import write_stored
from glm4v_patched.finetune.run_folder import RECORD, begin, close_record
from glm4v_patched.models.base import REPORT
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.recipes import recipe, stored


def rows_of(folder: Path):
    return stored({"messages": "[]" * 5000})


def checked_of(folder: Path) -> CheckedData:
    return CheckedData((), (), None, rows_of(folder), (("x" * 5000, 0, 0),), 0)  # type: ignore


WRITERS = {
    "content": lambda out, apart: write_atomically(out / "a", b"x" * 9000),
    "rows": lambda out, apart: write_stored(rows_of(apart), out / "data.arrow"),
    "checked": lambda out, apart: checked_of(apart).write(out / "data.json"),
    "picture": lambda out, apart: PictureFiles("", store=out).path_of(b"x" * 9000),
    "record": lambda out, apart: close_record(out, adapters=True),
    "recipe": lambda out, apart: recipe({"model": "m" * 9000}).write(out / "recipe.json"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_leaves_what_was_there_and_nothing_beside_it(kind, tmp_path, monkeypatch):
    out, apart = tmp_path / "out", tmp_path / "apart"
    out.mkdir()
    apart.mkdir()
    if kind == "record":
        begin(out, [])
        for number in range(200):
            (out / f"model-{number:05d}.safetensors").touch()
    elif kind == "checked":
        checked_of(apart).write(out / "data.json")
    for name in ("recipe.json", REPORT):
        (out / name).write_text("of an earlier run")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    prepared = rows_of(apart) if kind in ("rows", "checked") else None
    if prepared is not None:  # the limit is of what comes after
        monkeypatch.setitem(globals(), "rows_of", lambda folder: prepared)
    if kind == "checked":
        # The rows are there already, so that it is the text which finds no room.
        monkeypatch.setattr(checked_data, "write_stored", lambda rows, path: rows)
    with pytest.raises((OSError, ValueError)), files_of_at_most(4000):
        WRITERS[kind](out, apart)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    WRITERS[kind](out, apart)
    assert {path.name: path.read_bytes() for path in out.iterdir()} != before or kind == "checked"


def test_a_file_with_a_second_name_is_none_to_write_in_place(tmp_path):
    (tmp_path / "a").touch()
    assert fault_of_file(tmp_path / "a", alone=True) is None
    os.link(tmp_path / "a", tmp_path / "b")
    assert "2 names" in str(fault_of_file(tmp_path / "a", alone=True))
    assert fault_of_file(tmp_path / "a") is None


def test_what_a_killed_run_wrote_half_is_removed_by_the_next(tmp_path):
    names = ("data.json", "data_eval.arrow", RECORD, REPORT)
    left = [f"{name}.{'0a' * 16}.partial" for name in names]
    for name in (*left, "mine.partial", "data.json.partial"):
        (tmp_path / name).touch()
    begin(tmp_path, [])
    assert {path.name for path in tmp_path.iterdir()} == {
        "mine.partial",
        "data.json.partial",
        RECORD,
    }
    assert json.loads((tmp_path / RECORD).read_text()) == {"written": None}
