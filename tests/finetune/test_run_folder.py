"""One run writes to a folder at a time, and over nothing that runs have not written."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from glm4v_patched.finetune.run_folder import (
    LOCK,
    RECORD,
    check_run_folder,
    close_record,
    locked,
    read_record,
    remove_weights,
    start_record,
)

MODEL = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
ADAPTERS = ["adapter_config.json", "adapter_model.safetensors", "README.md"]
TRAINING = ["training.json", "recipe.json", "data.json"]

HOLD = """
import sys, time
from pathlib import Path
from glm4v_patched.finetune.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def files(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"content of {name}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def usable(folder: Path, resume=False, overwrite=False) -> list[str]:
    return check_run_folder(folder, [], {"max_steps": 10}, True, resume, overwrite)


def begun_run(folder: Path, *names: str) -> Path:
    files(folder)
    start_record(folder, usable(folder))
    return files(folder, *names)


@pytest.mark.parametrize("names", [MODEL, ADAPTERS, TRAINING, ["modeling_chatglm.py"]])
def test_what_no_run_wrote_is_never_replaced(tmp_path, names):
    out = files(tmp_path / "out", *names, "notes.txt")
    before = contents(out)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"contains .*another folder \(out\)") as error:
            usable(out, overwrite=overwrite)
        assert not re.search(r"--overwrite\)|--resume\)", str(error.value))
    assert contents(out) == before


def test_no_file_that_a_run_reads_is_replaced_however_it_is_spelled(tmp_path):
    out = files(tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    for folder in (out, tmp_path / "link", tmp_path / "link" / ".." / "out"):
        for same in (out, tmp_path / "link", out / ".." / "out"):
            with pytest.raises(ValueError, match="would replace"):
                check_run_folder(folder, [same / "recipe.json"], {"max_steps": 10}, True)
        check_run_folder(folder, [tmp_path / "out-2" / "recipe.json"], {"max_steps": 10}, True)


def test_a_stopped_run_s_checkpoints_go_only_when_asked(tmp_path):
    """Its record is not closed, as after SIGKILL."""
    out = begun_run(tmp_path / "out")
    files(out / "checkpoint-4", "model.safetensors")
    files(out / "incomplete-checkpoint-8-2", "model.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint-4.*\(--overwrite\), or .* \(--resume\)"):
        usable(out)
    assert usable(out, resume=True) == []
    start_record(out, usable(out, overwrite=True))
    assert {*contents(out)} == {RECORD}


def test_a_run_that_was_stopped_before_it_had_a_checkpoint_is_in_nobody_s_way(tmp_path):
    out = begun_run(tmp_path / "out", "recipe.json", "data.json")
    (out / "training.json").write_text('{"finished": false}')
    assert usable(out) == usable(out, resume=True) == []
    start_record(out, [])
    assert not (out / "training.json").exists()


def test_a_damaged_record_says_nothing(tmp_path):
    out = begun_run(tmp_path / "out", *MODEL)
    close_record(out, adapters=True)
    for damage in ("", '{"written": 5}', "[" * 99_999):
        (out / RECORD).write_text(damage)
        with pytest.raises(ValueError, match="which no run has recorded"):
            usable(out, overwrite=True)


def test_what_peft_writes_is_a_run_s_only_where_adapters_are_trained(tmp_path):
    out = begun_run(tmp_path / "out", "README.md", "model.safetensors")
    close_record(out, adapters=False)
    assert read_record(out) == {"model.safetensors"}
    close_record(out, adapters=True)
    assert read_record(out) == {"model.safetensors", "README.md"}


def test_of_a_run_that_came_to_nothing_all_files_of_weights_go(tmp_path):
    out = files(tmp_path / "out", *MODEL, *ADAPTERS)
    remove_weights(out)
    assert {*contents(out)} == {"config.json", "adapter_config.json", "README.md"}


def test_links_in_a_folder_go_and_what_they_lead_to_stays(tmp_path):
    elsewhere = files(tmp_path / "elsewhere", "model.safetensors")
    out = begun_run(tmp_path / "out", "config.json")
    (out / "checkpoint-4").symlink_to(elsewhere)
    (out / "model.safetensors").symlink_to(elsewhere / "model.safetensors")
    start_record(out, usable(out, overwrite=True))
    assert {*contents(out)} == {RECORD}
    assert {*contents(elsewhere)} == {"model.safetensors"}


def test_a_second_run_is_refused_naming_the_first_until_that_was_killed(tmp_path):
    out, link = tmp_path / "new" / "out", tmp_path / "link"
    command = [sys.executable, "-c", HOLD, str(out)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert holder.stdout.readline() == b"held\n"
        link.symlink_to(out)
        for folder in (out, link):
            message = rf"process {holder.pid} on .*, since .*: .*-c"
            with pytest.raises(ValueError, match=message), locked(folder):
                pass
    finally:
        holder.kill()
        holder.wait()
    with locked(out):
        assert (out / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not (out / LOCK).exists()


def test_of_many_at_once_one_holds_a_folder(tmp_path):
    out, inside, most = tmp_path / "out", [], set()

    def work(_) -> None:
        for _ in range(200):
            with suppress(ValueError), locked(out):
                inside.append(None)
                most.add(len(inside))
                inside.pop()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert most == {1}


def test_an_empty_folder_stays_if_it_was_there_and_goes_if_it_was_made_for_the_lock(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("there", "made"):
        with locked(tmp_path / name):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_parents_that_were_made_for_the_lock_go_with_it_and_others_stay(tmp_path):
    with locked(tmp_path / "a" / "b" / "c"):
        (tmp_path / "a" / "other").mkdir()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["other"]


def test_places_that_cannot_be_a_folder_are_named(tmp_path, words):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file/out", "dangling", "dangling/out", "x" * 300):
        out = tmp_path / name
        with words.refused(ValueError, str(tmp_path / name.split("/")[0])), locked(out):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"file", "dangling"}
