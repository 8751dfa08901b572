"""The published way to ask, with the tokenizer alone, computes what the processor's way does."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.tiny import BOI, NUM_IMAGE_TOKENS

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
    options = {
        "add_generation_prompt": add_generation_prompt,
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
        "padding": True,
    }
    short = processor.tokenizer.apply_chat_template(chats, **options)
    grown = processor.apply_chat_template(chats, **options)
    assert ("images" in short) == ("pixel_values" in grown)
    if "images" in short:
        assert torch.equal(short["images"], grown["pixel_values"])
    for few, many, mask in zip(
        short["input_ids"].tolist(),
        grown["input_ids"].tolist(),
        short["attention_mask"],
        strict=True,
    ):
        tokens = few[len(few) - int(mask.sum()) :]
        images = tokens.count(BOI)
        length = len(tokens) + images * (NUM_IMAGE_TOKENS - 1)
        filled = many[len(many) - length :]
        assert [t for t in filled if t != processor.image_token_id] == [
            t for at, t in enumerate(tokens) if at == 0 or tokens[at - 1] != BOI
        ]
    here, there = model(**short).logits, model(**grown).logits
    for one, other, number in zip(here, there, grown["attention_mask"].sum(1), strict=True):
        # Rows are padded before they grow here, and after it there: there may be more padding.
        torch.testing.assert_close(one[-number:], other[-number:], atol=ATOL, rtol=0)


@settings(max_examples=15, derandomize=True, deadline=None)
@given(CHATS, st.booleans())
def test_the_tokenizers_rows_are_the_processors(processor, model, chats, add_generation_prompt):
    compare(chats, add_generation_prompt, processor, model)


@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHATS, st.booleans())
def test_many_of_the_tokenizers_rows_are_the_processors(
    processor, model, chats, add_generation_prompt
):
    compare(chats, add_generation_prompt, processor, model)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))]
)
def test_copies_of_the_tokenizer_chat_alike(duplicate, processor):
    """Processes that prepare data get it so."""
    chat = [{"role": "user", "content": "a", "image": Image.new("RGB", (9, 9))}]
    one, other = processor.tokenizer, duplicate(processor.tokenizer)
    assert other.image_size == one.image_size
    want = one.apply_chat_template(chat, return_dict=True)
    got = other.apply_chat_template(chat, return_dict=True)
    assert torch.equal(got.pop("images"), want.pop("images")) and dict(got) == dict(want)
