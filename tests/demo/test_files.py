"""The demo writes over nothing but what a demo wrote, and never to the reader's data."""

import json
import os
import shutil
from pathlib import Path

import pytest

from glm4v_patched.data.rows import write_conversations
from glm4v_patched.demo import command as demo
from glm4v_patched.demo.command import run_demo
from glm4v_patched.demo.pictures import COLOURS, QUESTIONS, SHAPES, draw_data_set
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.models import placement
from glm4v_patched.models.placement import Placement


@pytest.fixture
def ran(monkeypatch) -> list[Path]:
    """Folders that a demo was run in, which wrote its files of data there."""
    folders = []

    def run(out, placement, steps, data, conversations):
        demo._prepare_data(out, data, conversations)
        folders.append(out)

    monkeypatch.setattr(demo, "_run", run)
    monkeypatch.setattr(demo, "NUM_TRAIN", 4)
    monkeypatch.setattr(demo, "NUM_HELD_OUT", 2)
    return folders


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "mine"
    write_conversations(folder / "train.jsonl", draw_data_set(folder / "pictures", 4, 0, 56))
    return folder / "train.jsonl"


def start(out: Path, data: Path | None = None) -> None:
    run_demo(out, Placement(1, on_cpu=True), 1, data)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(out: Path, data: Path | None, message: str) -> None:
    """Nothing is written, and the message has words that match."""
    before = contents(out.parent)
    with pytest.raises(ValueError, match=message):
        start(out, data)
    assert contents(out.parent) == before


def test_data_in_the_demo_s_folder_is_not_written_to(data, ran, tmp_path):
    refused(data.parent, data, "holds train.jsonl, which no demo has written")
    out = tmp_path / "out"
    start(out)
    shutil.copytree(data.parent, out, dirs_exist_ok=True)
    refused(out, out / "train.jsonl", "--data has .* demo would replace .*train.jsonl")
    # What a demo drew is data as any other, and not written to when it is given.
    before = contents(out / "data")
    (out / "train.jsonl").unlink()
    start(out, out / "data" / "train.jsonl")
    start(out, out / "data" / "train.jsonl")
    assert contents(out / "data") == before and len(ran) == 3


def test_links_to_the_data_and_pictures_there_are_not_written_through(data, ran, tmp_path):
    out = tmp_path / "out"
    start(out, data)
    for link in (os.link, os.symlink):
        (out / "train.jsonl").unlink()
        link(data, out / "train.jsonl")
        refused(out, data, "--data has|is a link, and would be written through")
    (out / "train.jsonl").unlink()
    picture, before = next(data.parent.glob("pictures/*")), data.read_text()
    (out / "initial").mkdir()
    for name in ("answers.png", "initial/a.png"):
        shutil.copy(picture, out / name)
        data.write_text(before.replace(f"pictures/{picture.name}", str(out / name)))
        refused(out, data, f"--data has .*{name}, and the demo would replace")


def test_all_pictures_are_decoded_before_anything_is_written(data, ran, tmp_path):
    """Of held-out rows too, which no check of the rows to train on sees."""
    out = tmp_path / "out"
    for number, line in enumerate(data.read_text().splitlines(), start=1):
        [picture] = (m["image"] for m in json.loads(line)["messages"] if "image" in m)
        picture = data.parent / picture
        content = picture.read_bytes()
        picture.write_bytes(content[: len(content) // 2])
        refused(out, data, rf"1 of 4 rows .*\n.*train.jsonl:{number}: .* cannot be decoded")
        picture.write_bytes(content)
    start(out, data)
    assert ran == [out]


def test_a_folder_with_other_things_a_held_one_and_a_lost_one_are_refused(
    ran, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("data", "metrics.json"):
        (out / name).touch()
        refused(out, None, f"holds {name}, which no demo has written")
        (out / name).rename(out / "other")
    (tmp_path / "link").symlink_to(out)
    start(tmp_path / "link")
    assert (out / "other").exists() and ran == [out]
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(
        tmp_path / "dangling",
        None,
        "dangling cannot be used: no folder, but a file or a link to nothing",
    )

    def run(out, *arguments):
        with pytest.raises(ValueError, match="another run writes to"):
            start(out)
        ran.append(out)

    monkeypatch.setattr(demo, "_run", run)
    start(out)
    assert ran == [out] * 2


def test_each_answer_says_what_its_question_asks_for(tmp_path):
    pairs = {f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES}
    right = dict(zip(QUESTIONS, ({*COLOURS}, {*SHAPES}, pairs), strict=True))
    for question, answer in draw_data_set(tmp_path, 30, seed=0, side=56):
        assert answer["content"] in right[question["content"]]


@pytest.mark.parametrize(
    ("gpus", "device", "placed"),
    [
        (0, None, Placement(2, on_cpu=True)),
        (1, "cpu", Placement(2, on_cpu=True)),
        (1, None, Placement(1)),
        (4, None, Placement(2)),
    ],
)
def test_two_processes_run_where_there_is_not_one_gpu_alone(monkeypatch, gpus, device, placed):
    found = Gpus((Gpu("NVIDIA H200", 150_000_000_000, (9, 0)),) * gpus, "none is here")
    for module in (demo, placement):
        monkeypatch.setattr(module, "find_gpus", lambda: found)
    assert demo.place_demo(None, device) == placed
