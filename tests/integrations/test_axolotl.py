"""The plug-in for axolotl: rows as a recipe of ours has them, and nothing learned but answers."""

import importlib.util
import pickle

import pytest
import torch

if importlib.util.find_spec("axolotl") is None:
    reason = "axolotl is not installed: nox -f tests/noxfile.py -s \"jobs(system='axolotl')\""
    pytest.skip(reason, allow_module_level=True)

from axolotl.model_support import get_model_support
from axolotl.processing_strategies import get_processing_strategy
from axolotl.utils.collators.mm_chat import MultiModalChatDataCollator

from glm4v_patched.integrations.axolotl import EndedRows, register
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.frameworks import drawn_task


@pytest.fixture(scope="module")
def collate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    conversations = drawn_task.draw(folder / "pictures")
    drawn_task.build_random(folder / "model", conversations)
    processor = ChatGLMProcessor.from_pretrained(folder / "model")
    register()
    register()
    strategy = get_processing_strategy(processor, None, "tokenizer_default", model_type="chatglm")
    collator = MultiModalChatDataCollator(processor.tokenizer, strategy)

    def collate(*rows: list[dict]) -> dict[str, torch.Tensor]:
        return collator([{"messages": row} for row in rows])

    collate.processor = processor
    return collate, processor.tokenizer, conversations


def test_a_started_process_gets_a_copy(collate):
    copied = pickle.loads(pickle.dumps(EndedRows(collate[0].processor)))
    assert copied.tokenizer.eos_token == "<|endoftext|>"


def test_a_chatglm_sees(collate):
    assert get_model_support("chatglm").is_multimodal


def test_answers_and_their_ends_are_learned(collate):
    collate, tokenizer, conversations = collate
    (question, answer), (other, other_answer) = conversations[:2]
    asked, asked_too = (
        {"role": "user", "content": [{"type": "image", "path": q["image"]},
                                     {"type": "text", "text": q["content"]}]}
        for q in (question, other)
    )  # fmt: skip
    batch = collate([asked, answer, asked_too, other_answer], [asked, answer])
    first, second = (row[row != -100].tolist() for row in batch["labels"])
    said, said_too = answer["content"], other_answer["content"]
    assert tokenizer.decode(first) == f"\n{said}<|user|>\n{said_too}<|endoftext|>"
    assert tokenizer.decode(second) == f"\n{said}<|endoftext|>"
    assert len(batch["pixel_values"]) == 3
    # Padding of the shorter row is on the left, and nothing of it is learned.
    padding = int((batch["attention_mask"][1] == 0).sum())
    assert padding > 0 and batch["attention_mask"][1, padding:].all()
    assert batch["attention_mask"][0].all()


def test_a_text_that_spells_an_end_is_text(collate):
    collate, tokenizer, _ = collate
    answer = {"role": "assistant", "content": "<|endoftext|> it"}
    batch = collate([{"role": "user", "content": "What?"}, answer])
    [row] = batch["labels"]
    assert (row == tokenizer.eos_token_id).sum() == 1 and row[-1] == tokenizer.eos_token_id
