"""Ids become the text that the published tokenizer makes of them, byte for byte.

That is a slow tokenizer: its base in transformers 4 puts spaces around added tokens, and decodes
the bytes between them each for itself.
"""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.legacy_repository import (
    LEGACY_SPECIAL_TOKENS,
    NUM_RANKS,
    ranks,
    write_legacy_tokenizer,
)

SPECIAL = dict(enumerate(LEGACY_SPECIAL_TOKENS, start=NUM_RANKS))
WORDS = st.integers(0, NUM_RANKS - 1)
ROWS = st.lists(WORDS | st.sampled_from([*SPECIAL]), max_size=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_legacy_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return ChatGLM4Tokenizer.from_pretrained(folder)


OF_RANKS = ranks()


def expected(ids, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
    """By the description above, from the bytes of the ranks."""
    kept = [token for token in ids if not (skip_special_tokens and token in SPECIAL)]
    pieces = []
    for is_special, run in groupby(kept, SPECIAL.__contains__):
        if is_special:
            pieces += [SPECIAL[token] for token in run]
        else:
            pieces.append(b"".join(OF_RANKS[token] for token in run).decode(errors="replace"))
    return (" " if spaces_between_special_tokens else "").join(pieces)


SWITCHES = st.fixed_dictionaries(
    {"skip_special_tokens": st.booleans(), "spaces_between_special_tokens": st.booleans()}
)


@given(ids=ROWS, switches=SWITCHES)
@settings(max_examples=300, deadline=None)
def test_every_way_to_decode_is_that_of_slow_tokenizers(tokenizer, ids, switches):
    want = expected(ids, **switches)
    assert tokenizer.decode(ids, **switches) == want
    assert tokenizer.batch_decode([ids, []], **switches) == [want, ""]
    for token in ids[:3]:
        assert tokenizer.decode(token, **switches) == expected([token], **switches)


def test_spaces_are_tidied_where_that_is_asked_for(tokenizer):
    ids = tokenizer.encode("it 's there , is n't it ?", add_special_tokens=False)
    assert tokenizer.decode(ids) == "it 's there , is n't it ?"
    tidied = tokenizer.decode(ids, clean_up_tokenization_spaces=True)
    assert tidied == "it's there, isn't it?"


@given(ids=st.lists(WORDS, max_size=9), pair=st.none() | st.lists(WORDS, max_size=5))
@settings(max_examples=50, deadline=None)
def test_ids_get_the_prefix_that_texts_get(tokenizer, ids, pair):
    prefix = tokenizer.get_prefix_tokens()
    built = tokenizer.build_inputs_with_special_tokens(ids, pair)
    assert built == [*prefix, *ids, *(pair or [])]
    assert len(built) - len(ids) - len(pair or []) == tokenizer.num_special_tokens_to_add(
        pair is not None
    )
    mask = tokenizer.get_special_tokens_mask(ids, pair)
    assert mask == tokenizer.get_special_tokens_mask(built, already_has_special_tokens=True)
    prepared = tokenizer.prepare_for_model(ids, pair, return_length=True)
    assert prepared["input_ids"] == built and prepared["attention_mask"] == [1] * len(built)


def test_ids_are_prepared_as_transformers_4_prepares_them(tokenizer):
    prefix, ids = tokenizer.get_prefix_tokens(), [72, 73, 74, 75]
    prepare = tokenizer.prepare_for_model
    assert prepare(ids, add_special_tokens=False)["input_ids"] == ids
    cut = prepare(ids, truncation=True, max_length=4)
    assert cut["input_ids"] == [*prefix, 72, 73]
    padded = prepare(ids, padding="max_length", max_length=8, return_tensors="pt")
    assert padded["input_ids"].tolist() == [*[tokenizer.pad_token_id] * 2, *prefix, *ids]
    assert padded["attention_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
