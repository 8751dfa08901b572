"""The demo writes over nothing but what a demo wrote."""

from pathlib import Path

import pytest

from glm4v_patched.demo import command as demo
from glm4v_patched.demo.command import run_demo
from glm4v_patched.demo.images import COLORS, QUESTIONS, SHAPES, draw_data_set
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.models import placement
from glm4v_patched.models.placement import Placement


@pytest.fixture
def ran(monkeypatch) -> list[Path]:
    """Folders that a demo was run in, which wrote its files of data there."""
    folders = []

    def run(out, placement, steps):
        demo._draw(out / "data", "train", 4, 0)
        folders.append(out)

    monkeypatch.setattr(demo, "_run", run)
    return folders


def start(out: Path) -> None:
    run_demo(out, Placement(1, on_cpu=True), 1)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(out: Path, message: str) -> None:
    """Nothing is written, and the message has words that match."""
    before = contents(out.parent)
    with pytest.raises(ValueError, match=message):
        start(out)
    assert contents(out.parent) == before


def test_only_what_a_demo_wrote_is_replaced_and_nothing_behind_a_link(ran, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("data", "metrics.json"):
        (out / name).touch()
        refused(out, f"holds {name}, which no demo has written")
        (out / name).rename(out / "other")
    (tmp_path / "link").symlink_to(out)
    start(tmp_path / "link")
    start(out)
    assert (out / "other").exists() and ran == [out] * 2
    (out / "answers.png").symlink_to(out / "other")
    refused(out, "is a link, and would be written through")


def test_a_held_folder_and_a_lost_one_are_refused(ran, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "nowhere")
    refused(out, "out cannot be used: not a folder but a file or a broken link")
    out.unlink()

    def run(out, *arguments):
        with pytest.raises(ValueError, match="another run writes to"):
            start(out)
        ran.append(out)

    monkeypatch.setattr(demo, "_run", run)
    start(out)
    assert ran == [out]


def test_each_answer_says_what_its_question_asks_for(tmp_path):
    pairs = {f"a {color} {shape}" for color in COLORS for shape in SHAPES}
    right = dict(zip(QUESTIONS, ({*COLORS}, {*SHAPES}, pairs), strict=True))
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
