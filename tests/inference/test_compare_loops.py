"""The command that compares the loops tells loops that agree from a fault in one."""

import json
from functools import wraps
from pathlib import Path

import pytest
import torch

from glm4v_patched.inference.decoding import loop as our_loop
from tests.helpers.tiny import golden_json
from tests.inference import compare_loops

PAIRS = {
    "theirs 1, theirs 2",
    "theirs 1, ours 1",
    "theirs 1, ours 2",
    "theirs 2, ours 1",
    "theirs 2, ours 2",
    "ours 1, ours 2",
}


def compared(tmp_path: Path, *batches: int) -> list[dict]:
    config, out = tmp_path / "config.json", tmp_path / "loops.json"
    config.write_text(json.dumps(golden_json("config.json") | {"initializer_range": 0.3}))
    sizes = ["--batch", *map(str, batches), "--new-tokens", "8", "--prompt-tokens", "6"]
    ways = ["--ways", "not compiled", "--dtype", "float32"]
    compare_loops.main(
        ["--out", str(out), "--config", str(config), "--device", "cpu", *sizes, *ways]
    )
    return json.loads(out.read_text())


def test_loops_that_agree(tmp_path):
    rows = compared(tmp_path, 1, 2)
    assert [row["batch"] for row in rows] == [1, 2]
    for row in rows:
        assert row["same_tokens"] == dict.fromkeys(PAIRS, True)
        assert row["first_differences"] == {} and min(row["distinct_tokens"]) > 1
        assert row["way"] == "not compiled" and row["dtype"] == "float32"
        assert {"torch", "transformers"} <= row["versions"].keys()
        with_scores = row["with_scores"]
        assert with_scores["theirs_as_before"] and with_scores["ours_as_before"]
        assert with_scores["same_tokens"] and with_scores["rows"] == []
        assert with_scores["first_step_scores_differ"] is None


def test_a_fault_is_told_with_its_step_and_scores(tmp_path, monkeypatch):
    """From the fourth token on, the second row is given a position too many."""
    step = our_loop._Drawing.step

    @wraps(step)
    def faulty(self):
        if self.drawn == 3:
            self.inputs["position_ids"][1] += 40
        step(self)

    monkeypatch.setattr(our_loop._Drawing, "step", faulty)
    [row] = compared(tmp_path, 2)
    same = {"theirs 1, theirs 2", "ours 1, ours 2"}
    assert {pair for pair, is_same in row["same_tokens"].items() if is_same} == same
    assert row["first_differences"].keys() == PAIRS - same
    [first] = row["first_differences"]["theirs 1, ours 1"]
    assert first["row"] == 1 and first["step"] >= 3 and len({*first["tokens"]}) == 2
    with_scores = row["with_scores"]
    assert with_scores["theirs_as_before"] and with_scores["ours_as_before"]
    assert not with_scores["same_tokens"] and with_scores["first_step_scores_differ"] == 3
    [found] = with_scores["rows"]
    assert (found["row"], found["step"]) == (1, first["step"])
    tokens = [found[loop]["token"] for loop in ("theirs", "ours")]
    assert tokens == first["tokens"]
    for loop in ("theirs", "ours"):
        of = found[loop]
        assert of["margin"] == of["best"] - of["second"] >= 0
    assert with_scores["largest_difference"] > 100 * found["spacing"]
    best = abs(found["theirs"]["best"])
    spacing = torch.nextafter(torch.tensor(best), torch.tensor(torch.inf)) - best
    assert found["spacing"] == pytest.approx(float(spacing))
