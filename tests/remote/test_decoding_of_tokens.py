"""Ids become the text that the published tokenizer makes of them, byte for byte.

That is a slow tokenizer: its base in transformers 4 puts spaces around added tokens, and decodes
the bytes between them each for itself.
"""

from itertools import groupby

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import AutoTokenizer, TextStreamer

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
EXAMPLES = [
    [*SPECIAL],
    [NUM_RANKS, 200, 228, NUM_RANKS + 1, 189, 160],  # a character that a special token cuts in two
    [72, 32, 46, 32, 110, 39, 116],
]


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


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5"),
    reason="transformers 5 changed its slow tokenizers: pip install 'transformers==4.57.6'",
)
@given(ids=ROWS, switches=SWITCHES, clean_up=st.sampled_from([None, True, False]))
@settings(max_examples=300, deadline=None)
def test_decoding_is_that_of_the_published_code(folder, tokenizer, ids, switches, clean_up):
    published = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, use_fast=False)
    switches = switches | {"clean_up_tokenization_spaces": clean_up}
    for row in [ids, *EXAMPLES]:
        assert tokenizer.decode(row, **switches) == published.decode(row, **switches)
    build = "build_inputs_with_special_tokens"
    assert getattr(tokenizer, build)(ids) == getattr(published, build)(ids)


def test_streamers_and_what_takes_off_the_end_token_give_the_same(tokenizer, capsys):
    """MMTrustEval ends with ``rstrip("<|endoftext|>")``, which is a set of letters."""
    ids = [*tokenizer.encode("a red square", add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode(ids).rstrip("<|endoftext|>").rstrip() == "a red square"  # noqa: B005
    streamer = TextStreamer(tokenizer)
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert capsys.readouterr().out == tokenizer.decode(ids) + "\n"


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
