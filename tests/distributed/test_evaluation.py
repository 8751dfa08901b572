"""Evaluation under ZeRO-3: processes with and without pictures, and one row too few for all."""

import json
from pathlib import Path

import pytest

from tests.helpers.recipes import drawn_recipe, launch_warm, train_here

pytestmark = pytest.mark.slow


def test_two_sharded_processes_find_the_loss_that_one_finds(tmp_path):
    drawn = drawn_recipe(tmp_path, {"trainer.max_steps": 2, "trained": "lora_lm"})
    lines = Path(drawn.data.train).read_text().splitlines()
    without = json.loads(lines[0])
    del without["messages"][0]["image"]
    # In batches of one, the second process has a text and then nothing, but the first a picture.
    Path(tmp_path, "eval.jsonl").write_text("\n".join([lines[1], json.dumps(without), lines[2]]))
    changes = {"data.eval": str(tmp_path / "eval.jsonl"), "trainer.learning_rate": 1e-30}
    changes |= {"trainer.eval_steps": 1}  # what is gathered to answer is trained again
    drawn = drawn.override(changes | {"trainer.per_device_eval_batch_size": 1})
    one = train_here(drawn.override({"engine.zero_stage": 0, "out": str(tmp_path / "one")}))
    launch_warm(drawn)
    two = json.loads((tmp_path / "out" / "training.json").read_text())
    for found in (one, two):
        [_, entry] = found["evaluations"]
        assert entry["eval_loss"] == pytest.approx(one["evaluations"][0]["eval_loss"], rel=1e-5)
        assert entry["eval_tokens"] == one["evaluations"][0]["eval_tokens"]
        assert entry["eval_exact_match"] == one["evaluations"][0]["eval_exact_match"]
    assert (tmp_path / "out" / "answers.png").is_file()
