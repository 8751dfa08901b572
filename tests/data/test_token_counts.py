"""Tokens that are counted without encoding are as many as encoding gives."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from glm4v_patched.data.check import measure_conversations
from glm4v_patched.data.collate import ConversationCollator, SampleSize
from glm4v_patched.data.messages import drop_train_flags
from glm4v_patched.data.token_counts import WORD_START_RE, TokenCounter
from glm4v_patched.demo.tiny_model import build_processor
from glm4v_patched.remote.tokenization_chatglm import CHAT_TEMPLATE, SPECIAL_TOKENS
from tests.data.samples import said, turns

# Words that contain spaces and other white space inside of and between tokens.
TAUGHT = [
    "What is it?  It's 2025\n\n a <|user|> here. I'LL\tsee",
    "你好，世界！ 这是 一张图片。",
    "  a\n b",
    *["a    b     c", "a  \n \n   b \n c"] * 9,
]
PARTS = [
    *(
        "a",
        "It",
        "it's",
        "'LL",
        "42",
        "1234567",
        "é",
        "e\u0301",
        "图片",
        "，",
        "。",
        "🙂",
        "\u0000",
    ),
    *("\ufdd0", "\ufdd1", "\ufdd00065533", "\u180e", "\u200b", "\ufeff", "\x1c", "\x85", "ſ"),
    *(" ", " ", " ", "  ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", ".", "!", "-"),
    *(*SPECIAL_TOKENS, "<|", "|>", "[", "<|user"),
]
TEXT = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), min_size=1, max_size=14).map("".join)
TEXT = TEXT.filter(bool)  # rows with an empty text are refused
IMAGES = st.lists(st.just({"type": "image", "image": "/a.png"}), min_size=1, max_size=3)
QUESTION = st.one_of(
    st.fixed_dictionaries({"content": TEXT}, optional={"image": st.just("/a.png")}),
    st.builds(
        lambda images, text: {"content": [*images, {"type": "text", "text": text}]}, IMAGES, TEXT
    ),
)
ANSWER = st.fixed_dictionaries(
    {"content": TEXT},
    optional={"train": st.just(False), "metadata": st.sampled_from(["", "a tool"])},
)
SYSTEM = st.fixed_dictionaries(
    {"content": TEXT}, optional={"tools": st.just([{"name": "look", "description": "<|user|> a"}])}
)


@st.composite
def chats(draw) -> list[dict]:
    system = [{"role": "system", **draw(SYSTEM)}] if draw(st.booleans()) else []
    exchanges = draw(st.lists(st.tuples(QUESTION, ANSWER), min_size=1, max_size=3))
    return system + [
        {"role": role, **message}
        for question, answer in exchanges
        for role, message in (("user", question), ("assistant", answer))
    ]


@pytest.fixture(scope="module")
def collator():
    return ConversationCollator(build_processor(TAUGHT))


def encoded_size(collator: ConversationCollator, chat: list[dict]) -> SampleSize:
    """What the real encoding and its labels have."""
    [ids] = collator.processor.tokenizer.encode_chats([drop_train_flags(chat)])["input_ids"]
    ids = [*ids, collator.end_id]
    images = ids.count(collator.image_id)
    labels = collator.labels(ids, chat)
    expanded = len(ids) + images * (collator.processor.num_image_tokens - 1)
    return SampleSize(expanded, len(ids), images, sum(label != -100 for label in labels))


@settings(max_examples=150, deadline=None)
@given(st.lists(chats(), max_size=2))
def test_counted_sizes_are_those_of_encoded_chats(collator, rows):
    assert collator.measure(rows) == [encoded_size(collator, chat) for chat in rows]


def test_only_chats_with_tools_or_empty_messages_are_encoded(collator, monkeypatch):
    encoded = []
    encode = collator.processor.tokenizer.encode_chats

    def encode_chats(conversations, **options):
        encoded.extend(conversations)
        return encode(conversations, **options)

    monkeypatch.setattr(
        type(collator.processor.tokenizer), "encode_chats", staticmethod(encode_chats)
    )
    plain = turns("What is it?", "a", image="/a.png")
    tools = [said("system", "", tools=[{"name": "f"}]), *plain]
    empty = [*plain, said("user", ""), said("assistant", "b")]
    sizes = collator.measure([plain, tools, empty, plain])
    assert encoded == [tools, empty] and sizes[0] == sizes[3] != sizes[1]


def _with_template(processor):
    processor.chat_template = CHAT_TEMPLATE.replace("[gMASK]<sop>", "[gMASK]<sop>!", 1)


def _with_token(processor):
    processor.tokenizer.add_tokens([AddedToken("a b", special=False)])


def _with_normalizer(processor):
    processor.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def _with_other_words(processor):
    processor.tokenizer.backend_tokenizer.pre_tokenizer = None


@pytest.mark.parametrize(
    "change", [_with_template, _with_token, _with_normalizer, _with_other_words]
)
def test_other_templates_and_tokenizers_are_encoded(change):
    processor = build_processor(TAUGHT)
    change(processor)
    assert not TokenCounter(processor).is_supported
    collator, chat = ConversationCollator(processor), turns("A  A a b. \n A", "a b A")
    [ids] = processor.tokenizer.encode_chats([chat], chat_template=processor.chat_template)[
        "input_ids"
    ]
    assert collator.measure([chat])[0].tokens == len(ids) + 1


def test_the_cache_of_words_is_emptied_and_filled_again(collator, monkeypatch):
    monkeypatch.setattr("glm4v_patched.data.token_counts.MAX_CACHED_WORDS", 3)
    chat = turns("What is it? It's 2025", "I see it")
    assert len({*map(tuple, (collator.measure([chat]) for _ in range(3)))}) == 1


def test_no_white_space_of_the_tokenizer_is_a_character_after_which_words_are_split(collator):
    """Of all characters that are not letters, digits or symbols: python's \\S and the tokenizer's
    may differ."""
    split = collator.processor.tokenizer.backend_tokenizer.pre_tokenizer[0].pre_tokenize_str
    for code in range(0x110000):
        character = chr(code)
        kind = unicodedata.category(character)
        if kind[0] in "CZ" and kind != "Cs" and (kind not in ("Co", "Cn") or code % 9973 == 0):
            text = f"a{character} b"
            if len(words := WORD_START_RE.split(text)) > 1:
                assert [p for w in words for p, _ in split(w)] == [p for p, _ in split(text)], code


def test_a_chat_that_the_template_refuses_is_refused_with_its_words(collator):
    tools = [said("system", "", tools=[{"name": "f", "type": "x"}]), *turns("a", "b")]
    refused, size = measure_conversations([tools, turns("a", "b")], collator)
    text = "cannot be rendered by the model's chat template: a tool has type x, of which this "
    assert isinstance(refused, str) and refused.startswith(f"{text}template has no text: give")
    assert size == encoded_size(collator, turns("a", "b"))
