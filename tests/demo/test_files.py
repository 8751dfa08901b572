"""The demo overwrites only files that a demo has written."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from glm4v_patched.demo import command as demo
from glm4v_patched.demo.command import run_demo
from glm4v_patched.demo.images import COLORS, QUESTIONS, SHAPES, draw_data_set
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.models import placement
from glm4v_patched.models.placement import Placement


@pytest.fixture
def demo_folders(monkeypatch) -> list[Path]:
    """The folders in which the demo ran; the test's demo writes the data files only."""
    folders = []

    def run(out, placement, steps, task):
        demo._write_data_set(out / "data", "train", 4, 0, task)
        folders.append(out)

    monkeypatch.setattr(demo, "_run_with_fresh_process", run)
    return folders


def start(out: Path) -> None:
    run_demo(out, Placement(1, on_cpu=True), 1)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(out: Path, message: str) -> None:
    """Check that the demo raises an error and writes nothing."""
    before = contents(out.parent)
    with pytest.raises(ValueError, match=message):
        start(out)
    assert contents(out.parent) == before


def test_only_files_of_a_demo_are_overwritten_and_no_target_of_a_link(demo_folders, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("data", "metrics.json"):
        (out / name).touch()
        refused(out, f"contains {name}, not written by a demo")
        (out / name).rename(out / "other")
    (tmp_path / "link").symlink_to(out)
    start(tmp_path / "link")
    start(out)
    assert (out / "other").exists() and demo_folders == [out] * 2
    (out / "answers.png").symlink_to(out / "other")
    refused(out, "is a symbolic link, whose target would be overwritten")


def test_a_locked_folder_and_a_dangling_link_are_refused(demo_folders, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "nowhere")
    refused(out, "out cannot be used: not a folder but a file or a broken link")
    out.unlink()

    def run(out, *arguments):
        with pytest.raises(ValueError, match="another run writes to"):
            start(out)
        demo_folders.append(out)

    monkeypatch.setattr(demo, "_run_with_fresh_process", run)
    start(out)
    assert demo_folders == [out]


def test_the_model_is_asked_about_other_images_than_it_learned(tmp_path, monkeypatch):
    images: dict[str, list[bytes]] = {}

    def draw(folder, name, number, seed, task):
        draw_data_set(folder / name, 8, seed, 28, task)
        images[name] = [path.read_bytes() for path in (folder / name).glob("*.png")]
        return folder / name

    monkeypatch.setattr(demo, "_write_data_set", draw)
    monkeypatch.setattr(demo, "read_conversations", lambda _: [])
    monkeypatch.setattr(demo, "build_from_scratch", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        demo._train_and_evaluate(tmp_path, Placement(1, on_cpu=True), 1, "shapes", Mock(), 0.0)
    assert images["train"] and not {*images["train"]} & {*images["held_out"]}


def test_each_answer_fits_its_question(tmp_path):
    pairs = {f"a {color} {shape}" for color in COLORS for shape in SHAPES}
    expected = dict(zip(QUESTIONS, ({*COLORS}, {*SHAPES}, pairs), strict=True))
    for question, answer in draw_data_set(tmp_path, 30, seed=0, side=56):
        assert answer["content"] in expected[question["content"]]


@pytest.mark.parametrize(
    ("num_gpus", "device", "placed"),
    [
        (0, None, Placement(2, on_cpu=True)),
        (1, "cpu", Placement(2, on_cpu=True)),
        (1, None, Placement(1)),
        (4, None, Placement(2)),
    ],
)
def test_the_default_is_two_processes_unless_there_is_a_single_gpu(
    monkeypatch, num_gpus, device, placed
):
    gpus = Gpus((Gpu("NVIDIA H200", 150_000_000_000, (9, 0)),) * num_gpus, "none is here")
    for module in (demo, placement):
        monkeypatch.setattr(module, "find_gpus", lambda: gpus)
    assert demo.place_demo(None, device) == placed
