"""The plug-in for axolotl: samples as a recipe has them, with only the answers supervised."""

import copy
import importlib
import importlib.util
import pickle
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.frameworks import drawn_task
from tests.frameworks.any_trainer_script import Collator


def test_every_conversation_ends_with_an_unmasked_end_token(monkeypatch):
    """Runs with a stand-in of axolotl, which need not be installed."""
    axolotl = ModuleType("axolotl")
    axolotl.model_support = SimpleNamespace()
    axolotl.processing_strategies = SimpleNamespace(ProcessingStrategy=object)
    monkeypatch.setitem(sys.modules, "axolotl", axolotl)
    monkeypatch.delitem(sys.modules, "glm4v_patched.integrations.axolotl", raising=False)
    module = importlib.import_module("glm4v_patched.integrations.axolotl")
    del sys.modules["glm4v_patched.integrations.axolotl"]  # monkeypatch would restore it

    def encode(conversations, *, processor_kwargs):
        assert processor_kwargs == {"padding": True, "padding_side": "left"}
        ids, mask = torch.tensor([[5, 6, 7], [9, 9, 8]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
        return {"input_ids": ids, "attention_mask": mask}

    tokenizer = SimpleNamespace(eos_token_id=9)
    with_end = module.EndOfTextProcessor(
        SimpleNamespace(apply_chat_template=encode, tokenizer=tokenizer)
    )
    assert copy.copy(with_end).tokenizer is tokenizer  # a started process gets a copy
    batch = with_end.apply_chat_template([[], []], processor_kwargs={"padding": True})
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [9, 9, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.skipif(
    importlib.util.find_spec("axolotl") is None,
    reason="axolotl is not installed: nox -f tests/noxfile.py -s axolotl",
)
def test_only_answers_and_their_ends_are_supervised(tmp_path):
    from axolotl.model_support import get_model_support
    from axolotl.processing_strategies import get_processing_strategy
    from axolotl.utils.collators.mm_chat import MultiModalChatDataCollator

    from glm4v_patched.integrations.axolotl import EndOfTextProcessor, register

    register()
    register()
    assert get_model_support("chatglm").is_multimodal
    models = drawn_task.Models(tmp_path)
    processor = Collator(models("random")).processor

    def text_part(text: str) -> dict:
        return {"type": "text", "text": text}

    copied = pickle.loads(pickle.dumps(EndOfTextProcessor(processor)))  # a started process gets it
    assert copied.tokenizer.eos_token == "<|endoftext|>"
    strategy = get_processing_strategy(processor, None, "tokenizer_default", model_type="chatglm")
    (question, answer), (other, other_answer) = models.conversations[:2]
    turn, other_turn = (
        {
            "role": "user",
            "content": [{"type": "image", "path": q["image"]}, text_part(q["content"])],
        }
        for q in (question, other)
    )
    samples = [turn, answer, other_turn, other_answer], [turn, answer]
    collator = MultiModalChatDataCollator(processor.tokenizer, strategy)
    batch = collator([{"messages": messages} for messages in samples])
    first, second = (labels[labels != -100].tolist() for labels in batch["labels"])
    text, other_text = answer["content"], other_answer["content"]
    decode = partial(processor.tokenizer.decode, spaces_between_special_tokens=False)
    assert decode(first) == f"\n{text}<|user|>\n{other_text}<|endoftext|>"
    assert decode(second) == f"\n{text}<|endoftext|>"
    assert len(batch["pixel_values"]) == 3
    padding = int((batch["attention_mask"][1] == 0).sum())
    assert padding > 0 and batch["attention_mask"][1, padding:].all()  # padding is on the left
