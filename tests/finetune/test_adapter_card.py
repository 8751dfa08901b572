"""The card beside adapters names what others need, and nothing of this machine."""

import re
from pathlib import Path

from huggingface_hub import ModelCard

from glm4v_patched.finetune.adapter_card import CARD, write_card
from glm4v_patched.models.base import Base
from tests.helpers.recipes import train_here


def test_a_training_of_adapters_leaves_a_card_that_the_hub_reads(mine, tmp_path):
    changes = {"lora.rank": 2, "lora.alpha": 8, "data.eval": 0.2, "data.eval_answers": 2}
    trained = mine.override(changes | {"trainer.max_steps": 2, "trainer.eval_steps": 1})
    report = train_here(trained)
    card = ModelCard.load(Path(trained.out, CARD))
    assert card.data.library_name == "peft" and card.data.base_model is None
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    last = report["evaluations"][-1]
    assert scores == {n.removeprefix("eval_"): last[n] for n in ("eval_loss", "eval_exact_match")}
    assert re.search(r"on 1\d rows, for 2 steps", card.content)
    for told in ("lora_lm", "rank: 2", "learning_rate: 0.001", "PeftModel.from_pretrained"):
        assert told in card.content, card.content
    for nothing in ("More Information Needed", str(Path(trained.model).parent), "/tmp"):
        assert nothing not in card.content
    # A base of the Hub is named with its commit.
    write_card(trained, Base("zai-org/glm-4v-9b", "0" * 40), report | {"evaluations": []}, 16)
    card = ModelCard.load(Path(trained.out, CARD))
    assert card.data.base_model == "zai-org/glm-4v-9b" and card.data.eval_results is None
    assert f'from_pretrained("zai-org/glm-4v-9b", revision="{"0" * 40}"' in card.content
    assert "They were not evaluated." in card.content
