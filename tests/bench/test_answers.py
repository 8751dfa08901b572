"""``glm4v-patched bench --answers``: the speed of the command answer."""

import json

import pytest

from glm4v_patched.bench import answers
from glm4v_patched.cli import main
from glm4v_patched.inference.answer import describe_speed
from tests.helpers.tiny import golden_json


def test_a_row_has_what_the_second_start_of_answer_printed(tmp_path, monkeypatch, capsys):
    started = []

    def run(command, folder, environment, timeout):
        if "glm4v_patched.bench.samples" in command:  # writes the questions
            return ""
        started.append(command)
        first = len(started) + 0.5
        (folder / "printed.txt").write_text(describe_speed(64, first + 14, first))
        (folder / "answers.jsonl").write_text("the first answers")
        return ""

    monkeypatch.setattr(answers, "run_and_log", run)
    out = tmp_path / "rows.json"
    arguments = ["--answers", "56x56", "--device", "cpu", "--batch", "8", "--new-tokens", "4"]
    assert not main(["bench", *arguments, "--config", "none.json", "--out", str(out)])
    [row] = json.loads(out.read_text())
    assert row["answers_per_s"] == 4 and row["first_answer_s"] == 2.5
    assert (row["batch"], row["rows"], row["new_tokens"]) == (8, 64, 4)
    assert row["weights"] == "bf16"
    first, second = started
    assert first == second and "--batch-size 8 --max-new-tokens 4 --cache auto" in " ".join(first)
    capsys.readouterr()
    assert not main(["bench", "--rows", str(out)])
    table = capsys.readouterr().out
    assert "| 1 | cpu | bf16 | 56x56 | 8 | 64 x 4 | 4 | 2.5 |" in table


@pytest.mark.slow
def test_answers_from_files_are_measured_at_tiny_size(tmp_path):
    config, out = tmp_path / "config.json", tmp_path / "rows.json"
    config.write_text(json.dumps(golden_json("config.json")))
    arguments = ["--answers", "56x56", "--device", "cpu", "--batch", "2", "--answer-rows", "6"]
    arguments += ["--new-tokens", "4", "--config", str(config), "--out", str(out)]
    assert not main(["bench", *arguments])
    [row] = json.loads(out.read_text())
    assert row["answers_per_s"] > 0 and row["command_s"] > row["first_answer_s"] > 0
