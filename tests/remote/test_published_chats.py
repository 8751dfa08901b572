"""The published way to ask, with the tokenizer alone, computes what the processor's way does."""

import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.legacy_repository import write_legacy_repository

# fp32, rows of another length with their padding. Measured 3.4e-6 on this CPU.
ATOL = 1e-5
TEXTS = st.text("ab <|user|>\n图é", max_size=12)
PICTURES = st.sampled_from([None, "", False]) | st.tuples(*[st.integers(0, 255)] * 3).map(
    lambda color: Image.new("RGB", (20, 30), color)
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "observation"]),
        "content": TEXTS,
        "metadata": st.none() | st.just("tool"),
        "image": PICTURES,
    }
)
CHATS = st.lists(st.lists(MESSAGES, min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats") / "published"
    write_legacy_repository(folder)
    return ChatGLMProcessor.from_pretrained(folder)


@torch.no_grad()
def compare(chats, add_generation_prompt, processor, model) -> None:
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    options["add_generation_prompt"] = add_generation_prompt
    short = processor.tokenizer.apply_chat_template(chats, **options)
    grown = processor.apply_chat_template(chats, **options)
    assert ("images" in short) == ("pixel_values" in grown)
    if "images" in short:
        assert torch.equal(short["images"], grown["pixel_values"])
    here, there = model(**short).logits, model(**grown).logits
    for one, other, number in zip(here, there, grown["attention_mask"].sum(1), strict=True):
        # Rows are padded before they grow here, and after it there: there may be more padding.
        torch.testing.assert_close(one[-number:], other[-number:], atol=ATOL, rtol=0)


FEW = settings(max_examples=15, derandomize=True, deadline=None)
MANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("budget", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_the_tokenizers_rows_are_the_processors(budget, processor, model):
    @budget
    @given(CHATS, st.booleans())
    def check(chats, add_generation_prompt):
        compare(chats, add_generation_prompt, processor, model)

    check()


def test_copies_of_the_tokenizer_chat_alike(processor):
    """Processes that prepare data get it so."""
    chat = [{"role": "user", "content": "a", "image": Image.new("RGB", (9, 9))}]
    one, other = processor.tokenizer, pickle.loads(pickle.dumps(processor.tokenizer))
    want = one.apply_chat_template(chat, return_dict=True)
    got = other.apply_chat_template(chat, return_dict=True)
    assert torch.equal(got.pop("images"), want.pop("images")) and dict(got) == dict(want)
