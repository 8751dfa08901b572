"""TRL's DPOTrainer on pairs of answers about pictures: adapters, ZeRO-3, two processes."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from glm4v_patched.demo.pictures import COLOURS, SHAPES, draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from tests.helpers.processes import run_two_processes

MISSING = [
    name
    for name in ("trl", "datasets", "peft", "deepspeed")
    if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"not installed: {', '.join(MISSING)}; nox -f tests/noxfile.py -s frameworks",
)

WORKER = Path(__file__).with_name("dpo_worker.py")
SCENARIOS = [
    {"name": "plain", "use_reentrant": None, "other_images": False},
    {"name": "reentrant", "use_reentrant": True, "other_images": False},
    {"name": "non-reentrant", "use_reentrant": False, "other_images": False},
    {"name": "other-images", "use_reentrant": None, "other_images": True},
]


def preferences(folder: Path) -> tuple[list[list[dict]], list[dict]]:
    """Conversations to learn a vocabulary from, and pairs of answers; every third has no image."""
    conversations = draw_data_set(folder, number=12, seed=0, side=IMAGE_SIDE)
    rows = []
    for index, (question, answer) in enumerate(conversations):
        wrong = next(w for w in (*COLOURS, *SHAPES) if w not in answer["content"])
        row = {"prompt": [{"role": "user", "content": question["content"]}]}
        row["images"] = [] if index % 3 == 2 else [question["image"]]
        row["chosen"] = [{"role": "assistant", "content": answer["content"]}]
        row["rejected"] = [{"role": "assistant", "content": wrong}]
        rows.append(row)
    return conversations, rows


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("dpo")
    conversations, rows = preferences(folder / "pictures")
    build_from_scratch(folder / "model", conversations, seed=0)
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "scenarios.json").write_text(json.dumps(SCENARIOS))
    # DeepSpeed compiles its CPU collectives the first time: up to 75 s on two cores.
    run_two_processes(str(WORKER), str(folder), seconds=400)
    return {s["name"]: torch.load(folder / f"{s['name']}.pt") for s in SCENARIOS}


@pytest.mark.parametrize("name", [scenario["name"] for scenario in SCENARIOS])
def test_training_starts_at_the_reference_and_moves_the_adapters_of_both_towers(name, results):
    result = results[name]
    assert all(math.isfinite(loss) for loss in result["losses"])
    # Untrained adapters answer as the reference does: the loss is -log(1 / 2) whatever the data.
    assert result["losses"][0] == pytest.approx(math.log(2), abs=1e-3)
    assert result["losses"][-1] != pytest.approx(math.log(2), abs=1e-3)
    before, after = result["weights"][0], result["weights"][-1]
    assert before and before.keys() == after.keys()
    for tower in ("vision", "encoder"):
        assert any(tower in name for name in before)
    for name in before:
        assert not torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointed_training_equals_plain_training(mode, results):
    plain, checkpointed = results["plain"], results[mode]
    # Once for the reference and once for the policy, which a checkpoint runs again.
    assert checkpointed["runs"]["layers"] == plain["runs"]["layers"] * 3 / 2
    assert checkpointed["losses"] == plain["losses"]
    for got_step, want_step in zip(checkpointed["weights"], plain["weights"], strict=True):
        assert got_step.keys() == want_step.keys()
        for name, want in want_step.items():
            assert torch.equal(got_step[name], want), name


def test_the_answers_preferred_depend_on_the_images(results):
    plain, other = results["plain"], results["other-images"]
    # A text-only row brings a blank image, which is not counted.
    assert plain["runs"]["images"] > 0
    assert other["runs"] == plain["runs"]
    assert other["losses"][1:] != plain["losses"][1:]
