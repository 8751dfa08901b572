"""Two processes end together if a training diverges or reads an unusable row, even if only one of
them sees it."""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.recipes import drawn_recipe, planned, train_in_processes

BROKEN = "transformer.encoder.layers.1.mlp.dense_h_to_4h.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("divergence")
    recipe = drawn_recipe(folder, {"trainer.max_steps": 6, "trainer.save_steps": 2})
    broken = folder / "broken"
    shutil.copytree(recipe.model, broken)
    weights = load_file(broken / "model.safetensors")
    weights[BROKEN][-1, -1] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    changes = {"reported": {}, "saved": {"trainer.max_steps": 1}, "last": {"trainer.max_steps": 1}}
    changes["base"] = {"model": str(broken), "trained": "lora_lm"}
    changes["evaluated"] = {"data.eval": 0.2, "trainer.eval_steps": 1}
    # Process 1 reads every second row: this one is in its second batch.
    lines = Path(recipe.data.train).read_text().splitlines()
    lines[5] = "no row"
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(lines))
    changes["row"] = {"data.train": str(rows), "data.check": "first 4", "data.shuffle_buffer": 1}
    recipes = [
        recipe.override({"out": str(folder / name)} | changed) for name, changed in changes.items()
    ]
    ended = train_in_processes(diverging=[planned(case, processes=2) for case in recipes])
    assert ended.status == 0, ended.output[-8000:]
    return folder


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("reported", "NaN or infinite in 3 steps in a row, 2 to 4"),
        ("saved", f"have become NaN or infinite, in 1 tensor: {BROKEN}"),
        ("last", "the loss of the last batch is NaN or infinite with the weights of step 1"),
        ("evaluated", "exact match 0.0"),  # rank 0's, for all
        ("row", "rows.jsonl:6: "),
        ("base", f"NaN or infinity before the first step, in 1 tensor: {BROKEN}"),
    ],
)
def test_both_processes_end_with_one_message_and_leave_no_model(case, message, folder):
    first, second = (folder.joinpath(case, f"outcome-{rank}.txt").read_text() for rank in (0, 1))
    assert message in first and first == second
    assert not [*(folder / case).glob("*.safetensors")]
    assert {path.name for path in (folder / case).glob("checkpoint-*")} <= {"checkpoint-2"}
    report = json.loads((folder / case / "training.json").read_text(), parse_constant=pytest.fail)
    assert report["error"] == first and not report["finished"]
    if case == "reported":  # the history contains what only one process has seen
        assert [entry["loss"] for entry in report["history"][1:]] == ["nan"] * 3
        assert all(0 < entry["grad_norm"] < 100 for entry in report["history"])
