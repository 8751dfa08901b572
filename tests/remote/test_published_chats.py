"""The published ways to ask, with the tokenizer alone, and to decode give what they gave.

That is a slow tokenizer: its base in transformers 4 puts spaces around added tokens, and decodes
the bytes between them each for itself.
"""

from itertools import groupby

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.legacy_repository import (
    LEGACY_SPECIAL_TOKENS,
    NUM_RANKS,
    ranks,
    write_legacy_repository,
)

# fp32, another length with padding. Measured 3.4e-6 on this CPU.
ATOL = 1e-5
TEXTS = st.text("ab <|user|>\n图é", max_size=12)
IMAGES = st.sampled_from([None, "", False]) | st.tuples(*[st.integers(0, 255)] * 3).map(
    lambda color: Image.new("RGB", (20, 30), color)
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "observation"]),
        "content": TEXTS,
        "metadata": st.none() | st.just("tool"),
        "image": IMAGES,
    }
)
CHATS = st.lists(st.lists(MESSAGES, min_size=1, max_size=3), min_size=1, max_size=3)
FEW = settings(max_examples=15, derandomize=True, deadline=None)
MANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats") / "published"
    write_legacy_repository(folder)
    return ChatGLMProcessor.from_pretrained(folder)


@pytest.mark.parametrize("budget", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_the_tokenizers_prompts_are_the_processors(budget, processor, model):
    @budget
    @given(CHATS, st.booleans())
    @torch.no_grad()
    def check(chats, add_generation_prompt):
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "padding": True}
        options["add_generation_prompt"] = add_generation_prompt
        short = processor.tokenizer.apply_chat_template(chats, **options)
        expanded = processor.apply_chat_template(chats, **options)
        assert ("images" in short) == ("pixel_values" in expanded)
        if "images" in short:
            assert torch.equal(short["images"], expanded["pixel_values"])
        ours, theirs = model(**short).logits, model(**expanded).logits
        for one, other, number in zip(ours, theirs, expanded["attention_mask"].sum(1), strict=True):
            # The model pads before the expansion, the processor after it.
            torch.testing.assert_close(one[-number:], other[-number:], atol=ATOL, rtol=0)

    check()


SPECIAL = dict(enumerate(LEGACY_SPECIAL_TOKENS, start=NUM_RANKS))
WORDS = st.integers(0, NUM_RANKS - 1)
ROWS = st.lists(WORDS | st.sampled_from([*SPECIAL]), max_size=24)
OF_RANKS = ranks()


def decoded(ids, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
    """Decode as described above, from the bytes of the ranks."""
    shown_ids = [token for token in ids if not (skip_special_tokens and token in SPECIAL)]
    pieces = []
    for is_special, run in groupby(shown_ids, SPECIAL.__contains__):
        if is_special:
            pieces += [SPECIAL[token] for token in run]
        else:
            pieces.append(b"".join(OF_RANKS[token] for token in run).decode(errors="replace"))
    return (" " if spaces_between_special_tokens else "").join(pieces)


@given(ids=ROWS, skip=st.booleans(), spaces=st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_way_to_decode_is_that_of_slow_tokenizers(processor, ids, skip, spaces):
    switches = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    want, tokenizer = decoded(ids, **switches), processor.tokenizer
    assert tokenizer.decode(ids, **switches) == want
    assert tokenizer.batch_decode([ids, []], **switches) == [want, ""]
    for token in ids[:3]:
        assert tokenizer.decode(token, **switches) == decoded([token], **switches)
