"""``glm4v-patched evaluate``: scores with right and with swapped pictures."""

import json
import re
from pathlib import Path

import pytest

from glm4v_patched.cli import main
from glm4v_patched.inference import answer
from glm4v_patched.inference.answer_worker import Answer
from glm4v_patched.models import loading


@pytest.fixture
def looks(monkeypatch):
    """Answers come from who knows them by the picture, whichever row shows it."""

    def know(request, placement, base, questions):
        known = {q.prompt[0]["image"]: q.reference for q in questions if not q.swapped}
        for question in questions:
            yield question, Answer(known[question.prompt[0]["image"]], "stop")

    monkeypatch.setattr(answer, "answers", know)


def evaluate(files, data: Path, *options: str) -> int:
    given = ["evaluate", str(files.model), "--data", str(data), "--device", "cpu"]
    return main([*given, "--max-new-tokens", "4", *options])


def test_a_model_that_looks_is_right_only_with_the_right_pictures(
    files, referenced, looks, tmp_path, capsys, monkeypatch
):
    metric, out = tmp_path / "mine.py", tmp_path / "out"
    metric.write_text("def same(a, b): return 10 * (a == b)\n")
    assert evaluate(files, referenced, "--out", str(out), "--metric", f"{metric}:same") == 0
    report = json.loads((out / "metrics.json").read_text())
    assert (report["rows"], report["rows_swapped"], report["rows_cut"]) == (4, 4, 0)
    assert (report["exact_match"], report["exact_match_swapped"]) == (1, 0)
    assert (report["same"], report["same_swapped"]) == (10, 0)
    assert report["token_f1"] == 1 > report["token_f1_swapped"]
    assert report["settings"]["options"]["max_new_tokens"] == 4
    told = capsys.readouterr().out
    assert "exact_match          1.0000            0.0000" in told
    assert (out / "answers.png").is_file()
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert [line.get("swapped", False) for line in lines] == [False] * 4 + [True] * 4
    assert [line["right"] for line in lines] == [True] * 4 + [False] * 4
    assert all(Path(line["pictures"][0]).is_file() and line["question"] for line in lines)
    assert {line["pictures"][0] for line in lines[4:]} <= {line["pictures"][0] for line in lines}
    assert re.search(r"8 rows answered in [\d.]+ s", told)
    # Nothing is written without --out.
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert evaluate(files, referenced) == 0 and list(Path.cwd().iterdir()) == []


def test_a_tiny_model_is_evaluated_and_its_answers_are_kept(
    files, referenced, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    assert evaluate(files, referenced, "--out", str(out)) == 0
    first = json.loads((out / "metrics.json").read_text())
    assert first["rows_cut"] == 4 and "cut at --max-new-tokens" in capsys.readouterr().out
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    assert evaluate(files, referenced, "--out", str(out)) == 0
    assert json.loads((out / "metrics.json").read_text()) == first
    assert evaluate(files, referenced, "--out", str(out), "--seed", "1") == 1
    assert "options.seed: 0 there, 1 now" in capsys.readouterr().err


def test_a_mistake_is_told(files, referenced, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def bad(a, b): return None\n")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "metrics.json").write_text("mine")
    for options, named in (
        (["--metric", "mine.py:bad"], "the metric bad"),
        (["--out", "mine.py"], "--out mine.py"),
        (["--out", "others"], "others holds metrics.json"),
        (["--data", files.data], f"{files.data.name}:3: "),
    ):
        given = ["evaluate", files.model, "--data", referenced, "--device", "cpu"]
        refused([*given, *options], named)
    assert (tmp_path / "others" / "metrics.json").read_text() == "mine"
