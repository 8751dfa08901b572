"""The tokenizer: upstream's ids, chat format, safety of user text, saving and loading."""

import json
import operator
import textwrap
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from glm4v_patched.remote.tokenization_chatglm import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    ChatGLM4Tokenizer,
    convert_ranks,
)
from tests.helpers.fresh_process import run_without_package

IMAGE = "<|begin_of_image|><|endoftext|><|end_of_image|>"


def chat_ids(tokenizer, conversation, **kwargs):
    """The ids of one conversation."""
    (row,) = tokenizer.apply_chat_template(conversation, return_dict=False, **kwargs)
    return row


def user(content, **rest):
    return [{"role": "user", "content": content, **rest}]


# The real vocabulary against upstream's ids


def test_special_ids_and_sizes_are_upstreams(real_tokenizer, expected):
    assert {t: real_tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS} == expected[
        "special"
    ]
    assert len(real_tokenizer) == expected["len"]
    assert real_tokenizer.vocab_size == expected["vocab_size_property"]
    assert real_tokenizer.pad_token_id == expected["pad"]
    assert real_tokenizer.eos_token_id == expected["eos"]
    assert real_tokenizer.padding_side == expected["padding_side"]
    assert real_tokenizer.model_max_length == 8192
    assert real_tokenizer.image_size == 1120


def test_encoding_equals_upstream(real_tokenizer, expected):
    for case in expected["encode"]:
        text = case["text"]
        assert real_tokenizer.encode(text) == case["add_special_tokens_true"], text
        plain = real_tokenizer.encode(text, add_special_tokens=False)
        assert plain == case["add_special_tokens_false"], text
        raw = real_tokenizer._plain_tokenizer().encode(text, add_special_tokens=False).ids
        assert raw == case["raw_tiktoken_no_special"], text


def test_decoding_equals_upstream(real_tokenizer, expected):
    for case in expected["decode"]:
        assert real_tokenizer.decode(case["ids"], skip_special_tokens=True) == case["skip"]
        assert real_tokenizer.decode(case["ids"]) == case["text"]


def test_chat_ids_equal_upstream(real_tokenizer, expected):
    for case in expected["chat"]:
        kwargs = {"add_generation_prompt": case["add_generation_prompt"]}
        ids = chat_ids(real_tokenizer, case["conversation"], **kwargs)
        assert ids == case["ids"], case["name"]
        text = real_tokenizer.apply_chat_template(case["conversation"], tokenize=False, **kwargs)
        # Upstream's string lacks the image.
        assert text.replace(IMAGE, "") == case["string"], case["name"]


def picture(color=(200, 30, 30), size=(80, 60)):
    return Image.new("RGB", size, color)


def test_left_padded_batch_equals_upstream(real_tokenizer, expected):
    want = dict(expected["batch_left_pad"])
    real_tokenizer.image_size = want["images"][-1]  # of the recorded configuration
    try:
        out = real_tokenizer.apply_chat_template(
            [user("a longer question about it?", image=picture()), user("hm", image=picture())],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
    finally:
        real_tokenizer.image_size = 1120
    assert list(out["images"].shape) == want.pop("images")
    assert {name: out[name].tolist() for name in out if name != "images"} == want


def test_ranks_below_those_of_their_parts_are_merged(real_tokenizer):
    """In this file some tokens rank below their parts; one merge a token loses these two words."""
    assert real_tokenizer.encode("函数", add_special_tokens=False) == [102481]
    assert real_tokenizer.encode("的参数", add_special_tokens=False)[-1] == 100955


def test_whole_pieces_are_looked_up_before_merging(real_tokenizer):
    """tiktoken does; no sequence of merges gives this token."""
    assert real_tokenizer.encode(" 王", add_special_tokens=False) == [102322]


def test_newlines_of_the_content_stay_apart_from_the_line_above(real_tokenizer):
    assert real_tokenizer.encode("\n\n", add_special_tokens=False) == [271]
    assert chat_ids(real_tokenizer, user("\n"))[3:] == [198, 198]


def test_real_vocabulary_survives_saving(real_tokenizer, expected, tmp_path):
    real_tokenizer.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.model").exists()
    again = ChatGLM4Tokenizer.from_pretrained(tmp_path)
    for case in expected["encode"]:
        assert again.encode(case["text"]) == case["add_special_tokens_true"]
    assert len(again) == expected["len"]
    assert (again.image_size, again.model_max_length) == (1120, 8192)


# Vocabulary and padding


def test_ids_follow_the_vocabulary(tokenizer, reversed_tokenizer):
    other = reversed_tokenizer
    for tok in (tokenizer, other):
        prefix = [tok.convert_tokens_to_ids(t) for t in ("[gMASK]", "<sop>")]
        assert tok.encode("hello")[:2] == prefix
        assert chat_ids(tok, user("hello"))[:2] == prefix
        assert tok.decode(tok.encode("hello"), skip_special_tokens=True) == "hello"
    assert tokenizer.convert_tokens_to_ids("<sop>") == 4
    assert other.convert_tokens_to_ids("<sop>") == 9
    assert tokenizer.all_special_ids == list(range(14))


def test_missing_special_tokens_are_added(small_backend):
    data = json.loads(small_backend.to_str())
    data["added_tokens"] = []
    for token in SPECIAL_TOKENS:
        del data["model"]["vocab"][token]
    ids = {i: new for new, i in enumerate(sorted(data["model"]["vocab"].values()))}
    data["model"]["vocab"] = {t: ids[i] for t, i in data["model"]["vocab"].items()}
    bare = type(small_backend).from_str(json.dumps(data))
    size = bare.get_vocab_size()
    tok = ChatGLM4Tokenizer(tokenizer_object=bare)
    assert [tok.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == [
        size + i for i in range(len(SPECIAL_TOKENS))
    ]
    assert tok.encode("") == [size + 2, size + 4]


def test_both_padding_sides(tokenizer):
    texts = ["hello", "hello to the dog and the cat"]
    tokenizer.padding_side = "left"
    left = tokenizer(texts, padding=True)
    tokenizer.padding_side = "right"
    right = tokenizer(texts, padding=True)
    pad = len(left["input_ids"][1]) - sum(left["attention_mask"][0])
    assert pad > 0
    assert left["attention_mask"][0][:pad] == [0] * pad
    assert right["attention_mask"][0][-pad:] == [0] * pad
    assert left["input_ids"][0][pad:] == right["input_ids"][0][:-pad]
    assert set(left) == {"input_ids", "attention_mask"}


def test_pair_is_prefixed_once(tokenizer):
    ids = tokenizer.encode("hello", "cat")
    assert ids == tokenizer.encode("hello") + tokenizer.encode("cat", add_special_tokens=False)


def test_no_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="no vocabulary: give a folder"):
        ChatGLM4Tokenizer()


def test_ranks_of_another_tokenizer_are_an_error(tmp_path):
    ranks = tmp_path / "tokenizer.model"
    ranks.write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="<sop> should have id 7 but follows .* as 2"):
        convert_ranks(str(ranks), {7: "<sop>"})


# The chat format


def test_image_is_in_the_string_and_in_the_ids(tokenizer):
    text = tokenizer.apply_chat_template(user("What is it?", image="x"), tokenize=False)
    assert text == f"[gMASK]<sop><|user|>\n{IMAGE}What is it?"
    ids = chat_ids(tokenizer, user("What is it?", image="x"))
    image = tokenizer.convert_tokens_to_ids(["<|begin_of_image|>", "<|endoftext|>"])
    at = ids.index(image[0])
    assert ids[at + 1] == image[1]
    assert tokenizer.decode(ids[at - 1]) == "\n"


def test_content_lists_equal_upstreams_form(tokenizer):
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    want = chat_ids(tokenizer, user("What is it?", image="x"))
    assert chat_ids(tokenizer, user(parts)) == want
    assert chat_ids(tokenizer, user(parts[::-1])) == want
    assert chat_ids(tokenizer, user([{"type": "image_url", "image_url": {}}, parts[1]])) == want


def test_several_images(tokenizer):
    two = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    conversation = [*user(two), {"role": "assistant", "content": "b"}, *user("c", image=1)]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert text == (f"[gMASK]<sop><|user|>\n{IMAGE}{IMAGE}a<|assistant|>\nb<|user|>\n{IMAGE}c")


def test_empty_messages_are_left_out(tokenizer):
    conversation = [*user(""), *user([]), {"role": "user"}, *user(None, image=None), *user("x")]
    assert chat_ids(tokenizer, conversation) == chat_ids(tokenizer, user("x"))
    assert tokenizer.apply_chat_template(conversation, tokenize=False).count("<|user|>") == 1


def test_tools_argument_equals_tools_in_a_system_message(tokenizer):
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    inside = [{"role": "system", "content": "", "tools": tools}, *user("x")]
    want = chat_ids(tokenizer, inside)
    assert len(want) > len(chat_ids(tokenizer, user("x"))) + 50
    assert chat_ids(tokenizer, user("x"), tools=tools) == want
    assert chat_ids(tokenizer, user("x"), tools=[tools[0]["function"]]) == want
    with_content = [{"role": "system", "content": "Be brief.", "tools": tools}]
    text = tokenizer.apply_chat_template(with_content, tokenize=False)
    assert text.endswith("参数。<|system|>\nBe brief.")


def test_content_is_encoded_apart_from_the_line_above(tokenizer):
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    assert tokenizer.encode("\n\n", add_special_tokens=False) != [newline] * 2
    assert chat_ids(tokenizer, user("\n"))[3:] == [newline] * 2


def test_keys_without_a_value_are_dropped(tokenizer):
    template = "{% if 'metadata' in messages[0] %}None{% endif %}cat"
    ids = chat_ids(tokenizer, user("x", metadata=None), chat_template=template)
    assert tokenizer.decode(ids) == "cat"


def test_enum_members_are_their_values(tokenizer):
    class Role(str, Enum):  # noqa: UP042  # StrEnum has another str()
        USER = "user"

    ids = chat_ids(tokenizer, [{"role": Role.USER, "content": "x"}])
    assert ids == chat_ids(tokenizer, user("x"))


def test_truncation_keeps_either_side(tokenizer):
    whole = chat_ids(tokenizer, user("the cat and the dog"))
    kwargs = {"truncation": True, "max_length": 4}
    assert chat_ids(tokenizer, user("the cat and the dog"), **kwargs) == whole[:4]
    tokenizer.truncation_side = "left"
    assert chat_ids(tokenizer, user("the cat and the dog"), **kwargs) == whole[-4:]


def test_bad_messages_are_errors(tokenizer):
    for tokenize in (True, False):
        with pytest.raises(Exception, match="has the role tool: use system, user"):
            tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=tokenize)
        with pytest.raises(Exception, match="a part of type video: use text or image"):
            tokenizer.apply_chat_template(user([{"type": "video"}]), tokenize=tokenize)
        with pytest.raises(Exception, match="a tool has type python: only function tools"):
            tokenizer.apply_chat_template(user("x"), tools=[{"type": "python"}], tokenize=tokenize)
    with pytest.raises(ValueError, match="0 messages: give at least 1"):
        tokenizer.apply_chat_template([])
    with pytest.raises(ValueError, match="a message must be a dict, .* got str"):
        tokenizer.apply_chat_template(["hello"])
    with pytest.raises(ValueError, match=r"unknown tokenizer_kwargs \['pad'\]"):
        tokenizer.apply_chat_template(user("x"), tokenizer_kwargs={"pad": 1})


def test_batches_are_those_of_transformers(tokenizer, small_backend):
    stock = PreTrainedTokenizerFast(
        tokenizer_object=small_backend, pad_token="<|endoftext|>", padding_side="left"
    )
    two = [user("hello"), user("hello to the cat")]
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for kwargs in [
        {"return_dict": False},
        {"padding": True, "return_dict": False, "return_tensors": "pt"},
        {"padding": True, "return_dict": True, "return_tensors": "pt"},
        {"padding": "max_length", "max_length": 20, "return_dict": True},
        {"truncation": True, "max_length": 3, "return_dict": True},
        {"tokenize": False, "return_dict": False},
    ]:
        kwargs["chat_template"] = template
        want = stock.apply_chat_template(two, **kwargs)
        got = tokenizer.apply_chat_template(two, **kwargs)
        assert type(got) is type(want), kwargs
        if not hasattr(want, "keys"):
            want, got = {"input_ids": want}, {"input_ids": got}
        for name in want.keys() - {"token_type_ids"}:
            assert type(got[name]) is type(want[name]), kwargs
            same = torch.equal if isinstance(want[name], torch.Tensor) else operator.eq
            assert same(got[name], want[name]), kwargs


# What the published tokenizer gives and takes


@pytest.mark.parametrize("options", [{}, {"return_dict": False}])
def test_one_conversation_is_a_batch_of_ids(options, tokenizer, expected):
    assert all(case["returned_as_batch"] for case in expected["chat"])
    (row,) = tokenizer.apply_chat_template(user("hello"), **options)
    assert type(row) is list and row[:2] == tokenizer.get_prefix_tokens()
    tensor = tokenizer.apply_chat_template(user("hello"), return_tensors="pt", **options)
    assert tensor.tolist() == [row]
    assert tokenizer.apply_chat_template([user("hello")] * 2, **options) == [row, row]


def test_a_dict_has_positions_and_is_a_batch(tokenizer):
    out = tokenizer.apply_chat_template(user("hello"), return_dict=True)
    (row,) = tokenizer.apply_chat_template(user("hello"))
    length = len(row)
    assert dict(out) == {
        "input_ids": [row],
        "attention_mask": [[1] * length],
        "position_ids": [[*range(length)]],
    }
    out = tokenizer.apply_chat_template(user("hello"), return_dict=True, return_tensors="pt")
    assert {name: (tuple(t.shape), t.dtype) for name, t in out.items()} == {
        name: ((1, length), torch.int64) for name in ("input_ids", "attention_mask", "position_ids")
    }


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_begin_where_the_row_does(side, tokenizer):
    out = tokenizer.apply_chat_template(
        [user("hello"), user("hello to the cat")],
        padding="max_length",
        max_length=20,
        return_dict=True,
        return_tensors="pt",
        tokenizer_kwargs={"padding_side": side},
    )
    for mask, positions in zip(out["attention_mask"], out["position_ids"], strict=True):
        assert positions[mask == 1].tolist() == [*range(int(mask.sum()))]
        assert not positions[mask == 0].any()


def test_pictures_are_the_image_processors(tokenizer, image_processor):
    tokenizer.image_size = 56
    one, two, three = picture(), picture((0, 90, 5)), picture((9, 9, 250), (300, 20))
    conversations = [
        user("What?", image=one),
        user("hello"),
        [
            *user([{"type": "text", "text": "a"}, {"type": "image", "image": two}]),
            *user("", image=three),
        ],
    ]
    want = image_processor([one, two, three])["pixel_values"]
    for tensors in (None, "pt"):
        out = tokenizer.apply_chat_template(
            conversations, padding=True, return_dict=True, return_tensors=tensors
        )
        assert torch.equal(out["images"], want) and out["images"].dtype == torch.float32
        begin = tokenizer.convert_tokens_to_ids("<|begin_of_image|>")
        assert [[*row].count(begin) for row in out["input_ids"]] == [1, 0, 2]
    out = tokenizer.apply_chat_template(
        conversations, padding=True, return_dict=True, return_tensors="np"
    )
    assert {type(value).__name__ for value in out.values()} == {"ndarray"}
    assert "images" not in tokenizer.apply_chat_template(user("hello"), return_dict=True)


def test_pictures_kept_elsewhere_are_left_to_the_caller(tokenizer):
    tokenizer.image_size = 56
    part = {"type": "image"}
    out = tokenizer.apply_chat_template(user([part, part]), return_dict=True)
    assert set(out) == {"input_ids", "attention_mask", "position_ids"}
    with pytest.raises(ValueError, match="message 0 has an image part with 0 images"):
        tokenizer.apply_chat_template(user([part, part | {"image": picture()}]), return_dict=True)


def test_ids_alone_open_no_picture(tokenizer):
    message = user("What?", image="no such file")
    assert len(chat_ids(tokenizer, message)) > 6
    with pytest.raises(ValueError, match="image_size None"):
        tokenizer.apply_chat_template(message, return_dict=True)
    tokenizer.image_size = 56
    with pytest.raises(Exception, match="no such file|ncorrect image|ncorrect format"):
        tokenizer.apply_chat_template(message, return_dict=True)


@pytest.mark.parametrize("empty", ["", b"", [], (), {}, False, 0, 0.0, np.bool_(False)], ids=repr)
def test_what_is_not_true_is_no_picture(tokenizer, empty):
    """As in the published code: tables have it in rows of text."""
    tokenizer.image_size = 56
    for tokenize in (True, False):
        want = tokenizer.apply_chat_template(user("hello"), tokenize=tokenize)
        got = tokenizer.apply_chat_template(user("hello", image=empty), tokenize=tokenize)
        batch = tokenizer.apply_chat_template([user("hello", image=empty)], tokenize=tokenize)
        assert got == want and batch == (want if tokenize else [want])
    chat = [*user("", image=empty), *user("hello", image=picture())]
    out = tokenizer.apply_chat_template(chat, return_dict=True)
    assert out["input_ids"] == tokenizer.apply_chat_template(user("hello", image=1))
    assert len(out["images"]) == 1
    part = {"type": "image", "image": empty}
    if not isinstance(empty, dict):
        with pytest.raises(ValueError, match="part 0, is an image, but under 'image' it has"):
            tokenizer.apply_chat_template(user([part]))


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_arrays_are_pictures_though_they_may_have_no_truth(tokenizer, kind):
    tokenizer.image_size = 56
    message = user("hello", image=kind(np.zeros((8, 8, 3), dtype=np.uint8)))
    out = tokenizer.apply_chat_template(message, return_dict=True)
    assert out["input_ids"] == tokenizer.apply_chat_template(user("hello", image=picture()))
    assert out["images"].shape == (1, 3, 56, 56)
    assert tokenizer.apply_chat_template(message, tokenize=False).count(IMAGE) == 1


def test_arguments_by_place_may_be_in_the_published_order(tokenizer):
    speaks = tokenizer.convert_tokens_to_ids("<|assistant|>")
    apply = tokenizer.apply_chat_template
    assert apply(user("hello"), True) == [[*chat_ids(tokenizer, user("hello")), speaks]]
    assert apply(user("hello"), False) == [chat_ids(tokenizer, user("hello"))]
    assert apply(user("hello"), True, False) == "[gMASK]<sop><|user|>\nhello<|assistant|>"
    out = apply([user("a"), user("the cat")], False, True, "max_length", True, 12, "pt", True)
    want = apply(
        [user("a"), user("the cat")],
        padding="max_length",
        truncation=True,
        max_length=12,
        return_tensors="pt",
        return_dict=True,
    )
    assert all(torch.equal(out[name], want[name]) for name in ("input_ids", "position_ids"))
    (row,) = apply(user("a"), False, True, False, False, None, None, False, None, False)
    assert row == chat_ids(tokenizer, user("a"))[2:]
    with pytest.raises(TypeError, match="add_generation_prompt"):
        apply(user("hello"), True, add_generation_prompt=True)
    with pytest.raises(TypeError, match="given 11 arguments by place, and takes 10: conversation"):
        apply(user("a"), True, True, False, False, None, None, False, None, True, None)
    # In the order of transformers, too.
    tools = [{"name": "f", "description": "d"}]
    assert apply(user("hello"), tools) == apply(user("hello"), tools=tools)


def test_text_is_text_with_return_dict_too(tokenizer):
    """As in transformers 5; 4.57 and the published code refuse it."""
    text = tokenizer.apply_chat_template(user("hello"), tokenize=False, return_dict=True)
    assert text == "[gMASK]<sop><|user|>\nhello"


def test_a_picture_that_truncation_cuts_is_an_error(tokenizer):
    tokenizer.image_size = 56
    message = user("What?", image=picture())
    options = {"return_dict": True, "truncation": True}
    # [gMASK] <sop> <|user|> \n begin placeholder end
    for length, name in [(4, "begin"), (6, "end")]:
        with pytest.raises(ValueError, match=rf"holds 1 images, but .* 0 times <.{name}_of_image"):
            tokenizer.apply_chat_template(message, max_length=length, **options)
    out = tokenizer.apply_chat_template(message, max_length=7, **options)
    assert len(out["input_ids"][0]) == 7 and len(out["images"]) == 1


def test_chats_without_the_prefix(tokenizer):
    for kwargs in ({}, {"return_dict": True, "return_assistant_tokens_mask": True}):
        whole = tokenizer.apply_chat_template(user("hello"), **kwargs)
        bare = tokenizer.apply_chat_template(user("hello"), add_special_tokens=False, **kwargs)
        for name in whole if kwargs else ():
            if name != "position_ids":
                assert bare[name][0] == whole[name][0][2:], name
        assert kwargs or bare[0] == whole[0][2:]
    for conversation, want in [(user("x"), "<|user|>\nx"), ([user("x")], ["<|user|>\nx"])]:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_special_tokens=False)
        assert text == want


def test_single_messages_make_up_a_chat(tokenizer):
    image = tokenizer.convert_tokens_to_ids(["<|begin_of_image|>", "<|endoftext|>"])
    image.append(tokenizer.convert_tokens_to_ids("<|end_of_image|>"))
    build = tokenizer.build_single_message
    row = tokenizer.get_prefix_tokens()
    row += build("user", "", "say <|user|>", message_prefix=image)
    row += build("assistant", "tool", "\nyes")
    chat = [*user("say <|user|>", image="x"), {"role": "assistant", "content": "\nyes"}]
    chat[1]["metadata"] = "tool"
    assert chat_ids(tokenizer, chat) == row
    assert build("observation", "a", "b", tokenize=False) == "<|observation|>a\nb"
    with pytest.raises(ValueError, match="has the role 'tool': use system, user"):
        build("tool", "", "x")


def test_real_messages_equal_upstream(real_tokenizer, expected):
    for case in expected["chat"]:
        messages = [m for m in case["conversation"] if m.get("content") and "tools" not in m]
        if any("image" in m or "tools" in m for m in case["conversation"]):
            continue
        row = real_tokenizer.get_prefix_tokens()
        for m in messages:
            row += real_tokenizer.build_single_message(
                m["role"], m.get("metadata", ""), m["content"]
            )
        if case["add_generation_prompt"]:
            row.append(real_tokenizer.convert_tokens_to_ids("<|assistant|>"))
        assert row == case["ids"], case["name"]


def test_names_of_transformers_4_are_there(tokenizer):
    texts = ["hello", "hello to the cat"]
    want = dict(tokenizer(texts, padding=True))
    assert dict(tokenizer.batch_encode_plus(texts, padding=True)) == want
    assert dict(tokenizer.encode_plus("hello")) == dict(tokenizer("hello"))
    pairs = tokenizer.batch_encode_plus([("hello", "cat"), ("a", "dog")])
    assert pairs["input_ids"][0] == tokenizer.encode("hello", "cat")
    # Words are no pairs, but lists of words may be.
    rows = [["the", "cat"], ["a", "dog"]]
    split = tokenizer.batch_encode_plus(rows, is_split_into_words=True)["input_ids"]
    assert split == [tokenizer.encode(row, is_split_into_words=True) for row in rows]
    (pair,) = tokenizer.batch_encode_plus([tuple(rows)], is_split_into_words=True)["input_ids"]
    assert pair == [*split[0], *split[1][2:]]


def test_the_tokenizer_of_tiktoken_is_missed_with_a_word(tokenizer):
    """Frameworks take an object that has a tokenizer for a processor."""
    assert getattr(tokenizer, "tokenizer", tokenizer) is tokenizer
    with pytest.raises(AttributeError, match="tiktoken's, which is not used here: encode"):
        tokenizer.tokenizer.encode("hello")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tokenizer.no_such_name


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_collators_pad_positions(side, as_tensors, tokenizer):
    tokenizer.padding_side = side
    rows = [[7, 8, 9, 10], [11, 12]]
    features = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]
    for feature in features:
        feature["position_ids"] = [*range(len(feature["input_ids"]))]
        if as_tensors:
            feature |= {name: torch.tensor(value) for name, value in feature.items()}
    batch = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=6)(features)
    assert batch["position_ids"].shape == batch["labels"].shape == (2, 6)
    for row, mask, positions in zip(
        rows, batch["attention_mask"], batch["position_ids"], strict=True
    ):
        assert positions[mask == 1].tolist() == [*range(len(row))]
        assert positions.sum() == sum(range(len(row)))


WITHOUT_ADVICE = Version("5.0") <= Version(transformers.__version__) < Version("5.4")


@pytest.mark.parametrize("advice", [{}, {"fix_mistral_regex": True}])
@pytest.mark.parametrize("version", ["4.57.6", "4.44.2", None])
def test_nobody_takes_it_for_mistrals(version, advice, real_tokenizer, expected, tmp_path, warned):
    if advice and WITHOUT_ADVICE:
        pytest.skip("fix_mistral_regex fails in these transformers, whatever the tokenizer")
    real_tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "chatglm", "vision_config": {}}
    if version is not None:
        config["transformers_version"] = version
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = ChatGLM4Tokenizer.from_pretrained(tmp_path, **advice)
    for case in expected["encode"]:
        assert again.encode(case["text"]) == case["add_special_tokens_true"], case["text"]
    assert "regex" not in warned.text
    # The method that asks is transformers' own: if it has another name there, so must ours.
    # If transformers renames the method that asks, ours does nothing.
    assert hasattr(PreTrainedTokenizerFast, "_patch_mistral_regex")


def test_objects_with_messages_are_conversations(tokenizer):
    """Pipelines pass such objects."""
    chat = SimpleNamespace(messages=user("hello"))
    want = chat_ids(tokenizer, user("hello"))
    assert tokenizer.apply_chat_template([chat, chat]) == [want, want]
    assert chat_ids(tokenizer, chat) == want


def test_continuing_the_final_message(tokenizer):
    conversation = [*user("hi"), {"role": "assistant", "content": "A cat "}]
    whole = chat_ids(tokenizer, conversation)
    assert chat_ids(tokenizer, conversation, continue_final_message=True) == whole
    with pytest.raises(ValueError, match="continue_final_message excludes"):
        chat_ids(tokenizer, user("x"), continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_assistant_mask_covers_what_the_model_writes(tokenizer, side):
    tokenizer.padding_side = side
    call = {"role": "assistant", "metadata": "tool", "content": "on <|user|> it"}
    conversations = [[*user("hi"), call, *user("bye")], user("hello to the cat and the dog " * 3)]
    out = tokenizer.apply_chat_template(
        conversations,
        return_dict=True,
        return_assistant_tokens_mask=True,
        padding=True,
        return_tensors="pt",
    )
    ids, mask = out["input_ids"][0], out["assistant_masks"].bool()
    assert mask.shape == out["input_ids"].shape
    assert tokenizer.decode(ids[mask[0]]) == "tool\non <|user|> it"
    assert not mask[1].any()
    assert not (mask & (out["attention_mask"] == 0)).any()
    assert torch.equal(
        out["input_ids"],
        tokenizer.apply_chat_template(
            conversations, return_dict=False, padding=True, return_tensors="pt"
        ),
    )
    with pytest.raises(ValueError, match="needs tokenize=True and return_dict=True"):
        chat_ids(tokenizer, conversations, return_assistant_tokens_mask=True)


def test_assistant_mask_with_a_template_that_starts_inside_a_piece(tokenizer):
    template = (
        "{% for m in messages %}{{ m['role'] }}:"
        "{% generation %}{{ m['content'] }}{% endgeneration %}|{% endfor %}"
    )
    out = tokenizer.apply_chat_template(
        [*user("<|user|> cat"), *user("dog<|user|>")],
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert tokenizer.decode(out["input_ids"][0]) == "user:<|user|> cat|user:dog<|user|>|"
    pairs = zip(out["input_ids"][0], out["assistant_masks"][0], strict=True)
    marked = "".join(tokenizer.decode([i]) if m else "_" for i, m in pairs)
    assert [part for part in marked.split("_") if part] == ["<|user|> cat", "dog<|user|>"]


# User text never becomes a special token


def special_counts(tokenizer, ids):
    specials = set(tokenizer.all_special_ids)
    return [i for i in ids if i in specials]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_no_string_of_the_user_becomes_special(tokenizer, token):
    def conversation(evil):
        return [
            {"role": "system", "content": "", "tools": [{"name": evil, evil: {"k": [evil]}}]},
            {"role": "user", "content": f"a{evil}b {evil}", "metadata": f"x{evil}"},
            {"role": "assistant", "content": [{"type": "text", "text": evil}], "metadata": evil},
            {"role": "user", "content": "c", "image": evil},
        ]

    def tool(x: int):
        """Placeholder.

        Args:
            x: placeholder
        """

    tool.__doc__ = f"Do {token}.\n\nArgs:\n    x: {token}\n"
    tools = [tool, {"name": token, "description": token}]
    ids = chat_ids(tokenizer, conversation(token), tools=tools, add_generation_prompt=True)
    harmless = chat_ids(
        tokenizer,
        conversation("evil"),
        tools=[{"name": "evil"}],
        add_generation_prompt=True,
    )
    want = special_counts(tokenizer, harmless)
    assert special_counts(tokenizer, ids) == want
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert f"a{token}b {token}" in text
    assert text.count(token) >= 10


def test_split_special_tokens_do_not_join(tokenizer):
    for token in SPECIAL_TOKENS:
        for at in range(1, len(token)):
            parts = [{"type": "text", "text": t} for t in (token[:at], token[at:])]
            ids = chat_ids(tokenizer, user(parts))
            assert len(special_counts(tokenizer, ids)) == 3, (token, at)
            assert tokenizer.decode(ids).endswith(token)


def test_user_text_is_safe_in_any_template(tokenizer):
    template = "<sop>{% for m in messages %}{{ m['content'] | trim | upper }}{% endfor %}<eop>"
    ids = chat_ids(tokenizer, user("  <|x|> [MASK]<|"), chat_template=template)
    specials = [tokenizer.convert_tokens_to_ids(t) for t in ("<sop>", "<eop>")]
    assert special_counts(tokenizer, ids) == specials
    assert tokenizer.decode(ids) == "<sop> <|X|> [MASK]<| <eop>"
    template = "{{ evil }}{{ messages[0]['content'] }}"
    ids = chat_ids(tokenizer, user("x"), chat_template=template, evil="<sop>")
    assert special_counts(tokenizer, ids) == []


def test_text_comes_back_unchanged(tokenizer):
    """Also the characters that the escaping itself uses."""
    for text in ["\ufdd0\ufdd1", "\ufdd00000060", "a\ufdd1b", "<<|<|user|>|>", "[[gMASK[gMASK]"]:
        ids = chat_ids(tokenizer, user(text))
        assert len(special_counts(tokenizer, ids)) == 3
        assert tokenizer.decode(ids, skip_special_tokens=True) == "\n" + text


def test_overlapping_and_one_character_specials(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL_TOKENS, "abab", "☃"]})
    ids = chat_ids(tokenizer, user("ababab! ☃"))
    assert len(special_counts(tokenizer, ids)) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\nababab! ☃"


def test_objects_are_not_printed(tokenizer):
    class Evil:
        def __str__(self):
            return "<|user|>"

    template = "{{ messages[0]['metadata'] }}"
    ids = chat_ids(tokenizer, user("x", metadata=Evil()), chat_template=template)
    assert special_counts(tokenizer, ids) == []


def test_added_tokens_that_are_not_special_are_found(tokenizer):
    tokenizer.add_tokens(["<think>"])
    number = tokenizer.convert_tokens_to_ids("<think>")
    assert number == len(tokenizer) - 1
    assert chat_ids(tokenizer, user("a<think>b")).count(number) == 1


def test_chats_leave_the_tokenizer_as_it_is(tokenizer):
    before = tokenizer.backend_tokenizer.to_str()
    conversation = user("say <|user|>")
    want, plain = chat_ids(tokenizer, conversation), tokenizer.encode("a<|user|>b")
    with ThreadPoolExecutor(4) as pool:
        chats = [pool.submit(chat_ids, tokenizer, conversation) for _ in range(40)]
        texts = [pool.submit(tokenizer.encode, "a<|user|>b") for _ in range(40)]
        assert all(job.result() == want for job in chats)
        assert all(job.result() == plain for job in texts)
    assert tokenizer.backend_tokenizer.to_str() == before


# Saving and loading


def test_saved_folder_holds_all_that_loading_needs(tokenizer, tmp_path):
    tokenizer.image_size = 56
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["auto_map"]["AutoTokenizer"][0] == "tokenization_chatglm.ChatGLM4Tokenizer"
    assert config["image_size"] == 56
    assert (tmp_path / "tokenization_chatglm.py").is_file()
    assert (tmp_path / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    again = ChatGLM4Tokenizer.from_pretrained(tmp_path)
    assert again.image_size == 56
    assert again.model_max_length == 8192
    assert again.padding_side == "left"
    assert again.encode("a<|user|>b") == tokenizer.encode("a<|user|>b")


def test_template_of_the_folder_wins(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("hello")
    assert ChatGLM4Tokenizer.from_pretrained(tmp_path).chat_template == "hello"


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_folders_of_either_major_version_load(tokenizer, tmp_path, key):
    """5.x saves the special tokens under one name, 4.57 under the other."""
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for name in ("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"):
        config.pop(name, None)
    config[key] = list(SPECIAL_TOKENS)
    path.write_text(json.dumps(config))
    again = ChatGLM4Tokenizer.from_pretrained(tmp_path)
    assert again.all_special_ids == tokenizer.all_special_ids
    assert len(again) == len(tokenizer)


def test_template_beside_the_ranks_is_used_only_if_it_has_images(
    tmp_path, monkeypatch, small_backend
):
    monkeypatch.setattr(
        "glm4v_patched.remote.tokenization_chatglm.convert_ranks", lambda *_: small_backend
    )
    (tmp_path / "tokenizer.model").touch()
    for template, want in [("{{ x }}", CHAT_TEMPLATE), (f"{IMAGE}{{{{ x }}}}", None)]:
        config = {"chat_template": template, "tokenizer_class": "ChatGLM4Tokenizer"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        loaded = ChatGLM4Tokenizer.from_pretrained(tmp_path)
        assert loaded.chat_template == (want or template)


def printed_without_package(script, folder, tmp_path):
    """The last line that a script prints where this package cannot be imported."""
    head = "import sys\nsys.modules['glm4v_patched'] = None\nfolder = sys.argv[1]\n"
    printed = run_without_package(head + textwrap.dedent(script), tmp_path, str(folder))
    return printed.strip().splitlines()[-1]


def test_auto_tokenizer_loads_the_saved_folder(tokenizer, tmp_path):
    tokenizer.image_size = 56
    tokenizer.save_pretrained(tmp_path / "saved")
    out = printed_without_package(
        """
        import json
        from transformers import AutoTokenizer

        tok = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        assert type(tok).__module__.startswith("transformers_modules."), type(tok)
        tok.save_pretrained(folder + "-again")
        tok = AutoTokenizer.from_pretrained(folder + "-again", trust_remote_code=True)
        messages = [{"role": "user", "content": "say <|user|>", "image": "x"}]
        (ids,) = tok.apply_chat_template(messages)
        print(json.dumps([type(tok).__name__, tok.image_size, ids, tok.encode("hello")]))
        """,
        tmp_path / "saved",
        tmp_path,
    )
    assert json.loads(out) == [
        "ChatGLM4Tokenizer",
        56,
        chat_ids(tokenizer, user("say <|user|>", image="x")),
        tokenizer.encode("hello"),
    ]
