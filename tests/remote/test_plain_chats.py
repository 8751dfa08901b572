"""Chats of plain messages are written without Jinja, and as the chat template writes them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from glm4v_patched.remote import tokenization_chatglm
from glm4v_patched.remote.tokenization_chatglm import CHAT_ROLES, CHAT_TEMPLATE, _render_plain

WORDS = st.text(alphabet=st.sampled_from("a<|>user {{}}%\n \t'\"\\é图\ufdd1"), max_size=12)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(CHAT_ROLES), "content": WORDS},
    optional={"image": st.sampled_from(["a.png", object()])},
)


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGE, max_size=5), st.sampled_from(["", "\ufdd1"]))
def test_plain_messages_are_written_as_by_the_template(messages, piece_break):
    [rendered], _ = render_jinja_template(
        conversations=[messages], chat_template=CHAT_TEMPLATE, piece_break=piece_break
    )
    assert _render_plain(messages, piece_break) == rendered


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": None},
        {"role": "assistant", "content": "a", "metadata": "tool"},
        {"role": "system", "content": "a", "tools": [{"name": "f"}]},
        {"content": "a"},
        {"role": "user", "content": "a", "more": 1},
    ],
    ids=str,
)
def test_other_messages_are_left_to_the_template(message):
    assert _render_plain([{"role": "user", "content": "a"}, message], "") is None


def test_one_row_that_is_not_plain_does_not_change_the_others(tokenizer, monkeypatch):
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    call = [{"role": "assistant", "content": "{}", "metadata": "tool"}]
    together = tokenizer.encode_chats([plain, [*plain, *call]])["input_ids"]
    assert together[0] == tokenizer.encode_chats([plain])["input_ids"][0]
    monkeypatch.setattr(tokenization_chatglm, "_render_plain", lambda *arguments: None)
    for generation in (False, True):
        by_template = tokenizer.encode_chats([plain], add_generation_prompt=generation)
        monkeypatch.undo()
        assert tokenizer.encode_chats([plain], add_generation_prompt=generation) == by_template
        monkeypatch.setattr(tokenization_chatglm, "_render_plain", lambda *arguments: None)
    assert together[1] == tokenizer.encode_chats([[*plain, *call]])["input_ids"][0]
