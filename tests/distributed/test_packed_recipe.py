"""A recipe that packs trains as one that pads."""

import json
from pathlib import Path

import pytest

from glm4v_patched.data.packing import share_out
from glm4v_patched.data.rows import write_conversations
from glm4v_patched.demo.pictures import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.finetune.plan import check_data
from glm4v_patched.finetune.recipe import Recipe
from tests.helpers.processes import run_warm
from tests.helpers.recipes import planned

SECONDS_TO_RUN = 300


def losses(recipe: Recipe) -> list[float]:
    trainer = ["-m", "glm4v_patched.finetune.process", str(planned(recipe))]
    ended = run_warm(*trainer, seconds=SECONDS_TO_RUN, processes=1)
    assert ended.status == 0, ended.output[-8000:]
    history = json.loads(Path(recipe.out, "training.json").read_text())["history"]
    return [entry["loss"] for entry in history]


@pytest.mark.slow
def test_a_packed_run_has_the_losses_of_a_padded_one(tmp_path):
    conversations = draw_data_set(tmp_path / "pictures", 4, seed=0, side=IMAGE_SIDE)
    write_conversations(tmp_path / "train.jsonl", conversations)
    build_from_scratch(tmp_path / "model", conversations, seed=0)
    # Four conversations a step in either, which are all there are.
    padded = Recipe.of(
        {
            "model": str(tmp_path / "model"),
            "out": str(tmp_path / "padded"),
            "data": {"train": str(tmp_path / "train.jsonl")},
            "engine": {"precision": "fp32"},
            "trainer": {
                "max_steps": 4,
                "per_device_train_batch_size": 4,
                "learning_rate": 1e-3,
            },
        }
    )
    sizes = check_data(padded).row_sizes
    longest = max(size.positions for size in sizes)
    images = max(size.images for size in sizes)
    assert images == 1
    shares = share_out([size.positions for size in sizes], 2 * longest)
    assert [len(share) for share in shares] == [2, 2]
    positions = max(sum(sizes[number].positions for number in share) for share in shares)
    images = max(sum(sizes[number].images for number in share) for share in shares)
    assert longest < positions <= 2 * longest and images == 2
    packed = padded.override(
        {
            "out": str(tmp_path / "packed"),
            "trainer.per_device_train_batch_size": 2,
            "data.pack_to": 2 * longest,
        }
    )
    want = losses(padded)
    assert len(want) == 4 and want[-1] < want[0] - 0.1
    assert losses(packed) == pytest.approx(want, abs=1e-4)
