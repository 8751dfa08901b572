"""The tokenizer: upstream's ids, chat format, safety of user text, saving and loading."""

import json
import operator
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from glm4v_patched.remote.tokenization_chatglm import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    ChatGLM4Tokenizer,
    convert_ranks,
)

IMAGE = "<|begin_of_image|><|endoftext|><|end_of_image|>"


def chat_ids(tokenizer, conversation, **kwargs):
    return tokenizer.apply_chat_template(conversation, return_dict=False, **kwargs)


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


def test_chat_ids_equal_upstream(real_tokenizer, expected):
    for case in expected["chat"]:
        kwargs = {"add_generation_prompt": case["add_generation_prompt"]}
        ids = chat_ids(real_tokenizer, case["conversation"], **kwargs)
        assert ids == case["ids"], case["name"]
        text = real_tokenizer.apply_chat_template(case["conversation"], tokenize=False, **kwargs)
        # Upstream's string lacks the image.
        assert text.replace(IMAGE, "") == case["string"], case["name"]


def test_left_padded_batch_equals_upstream(real_tokenizer, expected):
    want = expected["batch_left_pad"]
    out = real_tokenizer.apply_chat_template(
        [user("a longer question about it?", image="x"), user("hm", image="x")],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert out["input_ids"].tolist() == want["input_ids"]
    assert out["attention_mask"].tolist() == want["attention_mask"]


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
    class Role(str, Enum):
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
    with pytest.raises(ValueError, match="a message must be a dict, got str"):
        tokenizer.apply_chat_template(["hello"])
    with pytest.raises(ValueError, match=r"unknown tokenizer_kwargs \['pad'\]"):
        tokenizer.apply_chat_template(user("x"), tokenizer_kwargs={"pad": 1})


def test_return_types_are_those_of_transformers(tokenizer, small_backend):
    stock = PreTrainedTokenizerFast(
        tokenizer_object=small_backend, pad_token="<|endoftext|>", padding_side="left"
    )
    one, two = user("hello"), [user("hello"), user("hello to the cat")]
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for conversation, kwargs in [
        (one, {}),
        (one, {"return_dict": False}),
        (one, {"return_dict": True}),
        (one, {"return_dict": True, "return_tensors": "pt"}),
        (one, {"return_dict": False, "return_tensors": "pt"}),
        (two, {}),
        (two, {"return_dict": False}),
        (two, {"padding": True, "return_dict": True, "return_tensors": "pt"}),
        (two, {"padding": "max_length", "max_length": 20, "return_dict": True}),
        (two, {"truncation": True, "max_length": 3, "return_dict": True}),
        (two, {"tokenize": False}),
    ]:
        kwargs["chat_template"] = template
        want = stock.apply_chat_template(conversation, **kwargs)
        got = tokenizer.apply_chat_template(conversation, **kwargs)
        assert type(got) is type(want), kwargs
        if not hasattr(want, "keys"):
            want, got = {"input_ids": want}, {"input_ids": got}
        for name in want.keys() - {"token_type_ids"}:
            assert type(got[name]) is type(want[name]), kwargs
            same = torch.equal if isinstance(want[name], torch.Tensor) else operator.eq
            assert same(got[name], want[name]), kwargs


def test_objects_with_messages_are_conversations(tokenizer):
    """Pipelines pass such objects."""
    chat = SimpleNamespace(messages=user("hello"))
    want = chat_ids(tokenizer, user("hello"))
    assert chat_ids(tokenizer, [chat, chat]) == [want, want]
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
    assert tokenizer.decode(out["input_ids"]) == "user:<|user|> cat|user:dog<|user|>|"
    pairs = zip(out["input_ids"], out["assistant_masks"], strict=True)
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
    assert tokenizer.decode(ids) == "<sop><|X|> [MASK]<|<eop>"
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


def test_saved_folder_holds_what_a_stranger_needs(tokenizer, tmp_path):
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


def run_as_stranger(script, folder, tmp_path):
    """Run a script in a process in which this package cannot be imported."""
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    head = "import sys\nsys.modules['glm4v_patched'] = None\nfolder = sys.argv[1]\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script), str(folder)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_auto_tokenizer_loads_the_saved_folder(tokenizer, tmp_path):
    tokenizer.image_size = 56
    tokenizer.save_pretrained(tmp_path / "saved")
    out = run_as_stranger(
        """
        import json
        from transformers import AutoTokenizer

        tok = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        assert type(tok).__module__.startswith("transformers_modules."), type(tok)
        tok.save_pretrained(folder + "-again")
        tok = AutoTokenizer.from_pretrained(folder + "-again", trust_remote_code=True)
        messages = [{"role": "user", "content": "say <|user|>", "image": "x"}]
        ids = tok.apply_chat_template(messages, return_dict=False)
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
