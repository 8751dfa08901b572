"""The task of reading lines: what it draws, what it makes of figures, and all of it, tiny, without
the demand that something was learned."""

import json
import random
from pathlib import Path

import pytest

from tests.distributed import reading_runs, reading_task
from tests.distributed.reading_lines import (
    SCRIPTS,
    Share,
    draw_line,
    draw_set,
    font_files,
    is_held_out,
    make_text,
)
from tests.distributed.reading_runs import SIZES, Task
from tests.distributed.reading_task import LARGEST_PICTURE, PHASES, main, verdict
from tests.helpers.processes import cpu_environment


def texts(file: Path) -> list[str]:
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    for user, _ in rows:
        assert (file.parent / user["image"]).is_file()
    return [answer["content"] for _, answer in rows]


def test_held_out_lines_are_not_among_those_that_are_learned(tmp_path):
    draw_set(tmp_path / "train.jsonl", [Share(300, "latin", 1, 8)], 0, 28, 1)
    draw_set(tmp_path / "held_out.jsonl", [Share(20, "latin", 5, 8, held_out=True)], 1, 28, 1)
    learned, held_out = texts(tmp_path / "train.jsonl"), texts(tmp_path / "held_out.jsonl")
    assert len(learned) == 300 and len(held_out) == 20
    assert not any(map(is_held_out, learned)) and all(map(is_held_out, held_out))
    assert {len(text) for text in learned} == {*range(1, 9)}


def test_lines_too_short_to_be_held_out_are_refused(tmp_path):
    with pytest.raises(ValueError, match="lines of 4 .* at least 5"):
        draw_set(tmp_path / "a.jsonl", [Share(5, "latin", 4, 8, held_out=True)], 0, 28, 1)


def test_a_set_is_drawn_again_to_the_byte(tmp_path):
    shares = [Share(20, "latin", 2, 8), Share(10, "greek", 1, 1, plain=0.5)]
    for name in ("a", "b"):
        draw_set(tmp_path / name / "rows.jsonl", shares, 0, 28, 1)
    first, second = (sorted((tmp_path / name).rglob("*.*")) for name in ("a", "b"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_every_font_has_every_character(script):
    """One that is missing is drawn as the box of those that are missing."""
    from PIL import ImageFont

    assert len(font_files()) == 12
    for path in font_files():
        face = ImageFont.truetype(path, 30)
        shapes = {bytes(face.getmask(letter)) for letter in script.characters}
        assert bytes(face.getmask("\uffff")) not in shapes
        assert len(shapes) == len(script.characters)


@pytest.mark.parametrize("length", [1, 8])
def test_lines_lie_in_their_pictures(length):
    """Of plain ones, whose paper is white, there is ink, and none at the edges."""
    rng = random.Random(0)
    for _ in range(50):
        image = draw_line(make_text(SCRIPTS["latin"], length, rng), 112, rng, plain=True)
        left, top, right, bottom = image.point(lambda grey: 255 - grey).getbbox()
        assert min(left, top) > 0 and max(right, bottom) < 112


def scores(right: float, swapped: float = 0.0) -> dict:
    return {"exact_match": right, "exact_match_swapped": swapped}


def test_verdict():
    accuracy = {"latin": scores(0.95), "greek_before_lora": scores(0.0), "greek": scores(0.93)}
    assert verdict({"accuracy": accuracy, "phases": {}}) == []
    phases = {"merge": {"equal_answers": 0.99}, "fp32": {"equal_answers": 1.0}}
    assert verdict({"accuracy": accuracy, "phases": phases}) == []
    phases["fp32"] = {"equal_answers": 0.99}
    wrong = {"latin": scores(0.9), "greek": scores(0.93, 0.05)}
    assert verdict({"accuracy": wrong, "phases": phases}) == [
        "latin: 0.900 of lines are read, not 0.9",
        "greek: 0.050 with swapped pictures",
        "fp32: 0.990 of the answers are equal, not 1",
    ]


def test_a_folder_goes_on_with_its_own_task_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reading_task, "PHASES", dict.fromkeys(PHASES, lambda task: {"done": 1}))
    monkeypatch.setattr(reading_task, "draw_pictures", lambda task: None)
    task = ["--out", str(tmp_path), "--device", "cpu", "--size", "tiny"]
    assert main([*task, "--phase", "draw"]) == 0
    assert main([*task, "--phase", "draw", "build"]) == 0
    assert "draw: is done" in capsys.readouterr().out
    report = json.loads((tmp_path / "reading_task.json").read_text())
    assert [*report["phases"]] == ["draw", "build"]
    assert str(tmp_path) not in report["command"]
    assert main([*task, "--steps", "8"]) == 2
    assert "give another --out" in capsys.readouterr().err


@pytest.mark.slow
def test_the_task_runs_from_pictures_to_a_merged_model(tmp_path, programs, monkeypatch):
    """All commands but the one that gets Ctrl-C are forks."""
    start = Task.start

    def start_fork(task, name, *arguments, **options):
        with monkeypatch.context() as patch:
            if name != "train_1":
                patch.setattr(reading_runs, "PYTHON", str(programs / "python"))
            return start(task, name, *arguments, **options)

    monkeypatch.setattr(Task, "start", start_fork)
    monkeypatch.setattr(reading_runs, "gpu_environment", cpu_environment)
    task = ["--out", str(tmp_path), "--device", "cpu", "--size", "tiny"]
    assert main(task) == 0
    text = (tmp_path / "reading_task.json").read_text()
    report, tiny = json.loads(text), SIZES["tiny"]
    assert [*report["phases"]] == [*PHASES]
    # Stopped by Ctrl-C, and the losses of both parts are there.
    assert report["stopped"]["status"] == 130
    train, lora = report["phases"]["train"], report["phases"]["lora"]
    assert train["steps"] == tiny.steps and lora["steps"] == tiny.lora_steps
    assert train["history"][0]["step"] <= tiny.steps // 2 < train["history"][-1]["step"]
    assert train["history"][-1]["loss"] < train["history"][0]["loss"]
    assert train["evaluations"] and train["samples_per_second"] > 0
    assert [*report["accuracy"]] == ["latin", "greek_before_lora", "greek"]
    for of_rows in report["accuracy"].values():
        assert of_rows["rows"] == tiny.held_out
        assert 0 <= of_rows["exact_match_swapped"] <= 1
    # In fp32 merging hardly rounds.
    assert report["phases"]["merge"]["equal_answers"] == 1
    for name in ("reading_loss.png", "reading_sheet.png"):
        assert 0 < (tmp_path / name).stat().st_size < LARGEST_PICTURE
    assert str(tmp_path) not in text

    # Called again, it starts no command.
    before = sorted((tmp_path / "logs").iterdir())
    sizes = [log.stat().st_size for log in before]
    assert main(task) == 0
    assert sorted((tmp_path / "logs").iterdir()) == before
    assert [log.stat().st_size for log in before] == sizes
