"""The card beside adapters names what others need, and nothing of this machine."""

import os
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from glm4v_patched.finetune.adapter_card import CARD, write_card
from glm4v_patched.models.base import Base, read_report
from tests.helpers.recipes import drawn_recipe, train_here


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A recipe whose adapters were trained and evaluated."""
    changes = {"trained": "lora_lm", "lora.rank": 2, "data.eval": 0.2, "engine.zero_stage": 0}
    changes |= {"trainer.max_steps": 2, "lora.alpha": 8}
    changes |= {"data.eval_answers": 2, "trainer.eval_steps": 1}
    recipe = drawn_recipe(tmp_path_factory.mktemp("card"), changes)
    train_here(recipe)
    return recipe


def test_a_training_of_adapters_leaves_a_card_that_the_hub_reads(trained):
    card = ModelCard.load(Path(trained.out, CARD))
    report = read_report(Path(trained.out))
    assert card.data.library_name == "peft" and card.data.base_model is None
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    last = report["evaluations"][-1]
    assert scores == {n.removeprefix("eval_"): last[n] for n in ("eval_loss", "eval_exact_match")}
    assert re.search(r"on 1\d rows, for 2 steps", card.content)
    for told in ("lora_lm", "rank: 2", "learning_rate: 0.001"):
        assert told in card.content, card.content
    for command in ("PeftModel.from_pretrained", "glm4v-patched answer", "glm4v-patched merge"):
        assert command in card.content
    assert "More Information Needed" not in card.content
    assert (
        str(Path(trained.model).parent) not in card.content and os.sep + "tmp" not in card.content
    )


def test_a_base_of_the_hub_is_named_with_its_commit(trained, tmp_path):
    recipe = trained.override({"out": str(tmp_path), "trainer.run_name": "/home/me/run"})
    report = read_report(Path(trained.out)) | {"evaluations": []}
    write_card(recipe, Base("zai-org/glm-4v-9b", "0" * 40), report, 16)
    card = ModelCard.load(tmp_path / CARD)
    assert card.data.base_model == "zai-org/glm-4v-9b" and card.data.eval_results is None
    assert f'from_pretrained("zai-org/glm-4v-9b", revision="{"0" * 40}"' in card.content
    assert "They were not evaluated." in card.content and "/home" not in card.content
