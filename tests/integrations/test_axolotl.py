"""The plug-in for axolotl: rows as a recipe of ours has them, and nothing learned but answers."""

import copy
import importlib
import importlib.util
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.frameworks import drawn_task
from tests.frameworks.any_trainer_script import Collator


def test_every_row_ends_with_an_end_that_is_seen(monkeypatch):
    """Where axolotl itself is missing, too."""
    axolotl = ModuleType("axolotl")
    axolotl.model_support = SimpleNamespace()
    axolotl.processing_strategies = SimpleNamespace(ProcessingStrategy=object)
    monkeypatch.setitem(sys.modules, "axolotl", axolotl)
    monkeypatch.delitem(sys.modules, "glm4v_patched.integrations.axolotl", raising=False)
    module = importlib.import_module("glm4v_patched.integrations.axolotl")
    monkeypatch.delitem(sys.modules, "glm4v_patched.integrations.axolotl")

    def encode(conversations, *, processor_kwargs):
        assert processor_kwargs == {"padding": True, "padding_side": "left"}
        ids, mask = torch.tensor([[5, 6, 7], [9, 9, 8]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
        return {"input_ids": ids, "attention_mask": mask}

    tokenizer = SimpleNamespace(eos_token_id=9)
    ended = module.EndOfTextProcessor(SimpleNamespace(apply_chat_template=encode, tokenizer=tokenizer))
    assert copy.copy(ended).tokenizer is tokenizer  # as a started process has it
    batch = ended.apply_chat_template([[], []], processor_kwargs={"padding": True})
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [9, 9, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.skipif(
    importlib.util.find_spec("axolotl") is None,
    reason="axolotl is not installed: nox -f tests/noxfile.py -s axolotl",
)
def test_answers_and_their_ends_are_learned(tmp_path):
    from axolotl.model_support import get_model_support
    from axolotl.processing_strategies import get_processing_strategy
    from axolotl.utils.collators.mm_chat import MultiModalChatDataCollator

    from glm4v_patched.integrations.axolotl import EndOfTextProcessor, register

    register()
    register()
    assert get_model_support("chatglm").is_multimodal
    models = drawn_task.Models(tmp_path)
    processor = Collator(models("random")).processor

    def text(words: str) -> dict:
        return {"type": "text", "text": words}

    # A started process gets a copy.
    assert pickle.loads(pickle.dumps(EndOfTextProcessor(processor))).tokenizer.eos_token == "<|endoftext|>"
    strategy = get_processing_strategy(processor, None, "tokenizer_default", model_type="chatglm")
    (question, answer), (other, other_answer) = models.conversations[:2]
    asked, asked_too = (
        {"role": "user", "content": [{"type": "image", "path": q["image"]}, text(q["content"])]}
        for q in (question, other)
    )
    rows = [asked, answer, asked_too, other_answer], [asked, answer]
    collator = MultiModalChatDataCollator(processor.tokenizer, strategy)
    batch = collator([{"messages": row} for row in rows])
    first, second = (row[row != -100].tolist() for row in batch["labels"])
    said, said_too = answer["content"], other_answer["content"]
    decode = processor.tokenizer.decode
    assert decode(first) == f"\n{said}<|user|>\n{said_too}<|endoftext|>"
    assert decode(second) == f"\n{said}<|endoftext|>"
    assert len(batch["pixel_values"]) == 3
    padding = int((batch["attention_mask"][1] == 0).sum())
    assert padding > 0 and batch["attention_mask"][1, padding:].all()  # it is on the left
