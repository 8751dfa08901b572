"""The ends that the plug-in for axolotl adds to rows, where axolotl itself is missing, too."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import torch


def test_every_row_ends_with_an_end_that_is_seen(monkeypatch):
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

    processor = SimpleNamespace(
        apply_chat_template=encode, tokenizer=SimpleNamespace(eos_token_id=9)
    )
    ended = module.EndedRows(processor)
    batch = ended.apply_chat_template([[], []], processor_kwargs={"padding": True})
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [9, 9, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
