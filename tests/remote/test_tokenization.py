"""The tokenizer: the published ids, chat format, safety of user text, saving and loading."""

import json
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedTokenizerFast

from glm4v_patched.remote.tokenization_chatglm import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    UNSUPPORTED_TEXT_OPTIONS,
    ChatGLM4Tokenizer,
    convert_ranks,
)
from tests.helpers.refused import refused
from tests.remote.inputs import IMAGE, pil_image, user


def chat_ids(tokenizer, conversation, **kwargs):
    """The ids of one conversation."""
    (row,) = tokenizer.apply_chat_template(conversation, return_dict=False, **kwargs)
    return row


def test_ids_are_upstreams(real_tokenizer, expected):
    tokenizer = real_tokenizer
    special = {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS}
    assert special == expected["special"]
    assert len(tokenizer) == expected["len"]
    assert tokenizer.vocab_size == expected["vocab_size_property"]
    assert tokenizer.pad_token_id == expected["pad"]
    assert tokenizer.eos_token_id == expected["eos"]
    assert tokenizer.padding_side == expected["padding_side"]
    assert (tokenizer.image_size, tokenizer.model_max_length) == (1120, 8192)
    for case in expected["encode"]:
        text = case["text"]
        assert tokenizer.encode(text) == case["add_special_tokens_true"], text
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert plain == case["add_special_tokens_false"], text
        raw = tokenizer._tokenizer_without_specials().encode(text, add_special_tokens=False).ids
        assert raw == case["raw_tiktoken_no_special"], text
    for case in expected["decode"]:
        assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["skip"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    # One merge per token would lose the first two, and no sequence of merges gives the third.
    for text, last in (("函数", 102481), ("的参数", 100955), (" 王", 102322)):
        assert tokenizer.encode(text, add_special_tokens=False)[-1] == last


def test_chats_equal_upstream_also_as_a_padded_batch(real_tokenizer, expected, monkeypatch):
    for case in expected["chat"]:
        kwargs = {"add_generation_prompt": case["add_generation_prompt"]}
        messages = case["conversation"]
        assert chat_ids(real_tokenizer, messages, **kwargs) == case["ids"], case["name"]
        text = real_tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        # Upstream's string lacks the image.
        assert text.replace(IMAGE, "") == case["string"], case["name"]
    want = dict(expected["batch_left_pad"])
    monkeypatch.setattr(real_tokenizer, "image_size", want["images"][-1])
    out = real_tokenizer.apply_chat_template(
        [user("a longer question about it?", image=pil_image()), user("hm", image=pil_image())],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert list(out["images"].shape) == want.pop("images")
    assert {name: out[name].tolist() for name in out if name != "images"} == want


def test_a_vocabulary_that_is_missing_or_anothers_is_refused(tmp_path):
    with refused(ValueError, "tokenizer.json"):
        ChatGLM4Tokenizer()
    ranks = tmp_path / "tokenizer.model"
    ranks.write_text("IQ== 0\nIg== 1\n")
    with refused(ValueError, "<sop>", "id 7", "gets 2"):
        convert_ranks(str(ranks), {7: "<sop>"})


def test_images_stand_in_the_string_and_the_ids_in_every_form(tokenizer):
    want = chat_ids(tokenizer, user("What is it?", image="x"))
    at = want.index(tokenizer.convert_tokens_to_ids("<|begin_of_image|>"))
    assert want[at + 1] == tokenizer.pad_token_id and tokenizer.decode(want[at - 1]) == "\n"
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    for form in (parts, parts[::-1], [{"type": "image_url", "image_url": {}}, parts[1]]):
        assert chat_ids(tokenizer, user(form)) == want
    two = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    conversation = [*user(two), {"role": "assistant", "content": "b"}, *user("c", image=1)]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert text == (f"[gMASK]<sop><|user|>\n{IMAGE}{IMAGE}a<|assistant|>\nb<|user|>\n{IMAGE}c")


def test_messages_without_content_are_left_out_and_objects_are_read(tokenizer):
    class Role(str, Enum):  # noqa: UP042  # StrEnum has another str()
        USER = "user"

    want = chat_ids(tokenizer, user("x"))
    conversation = [*user(""), {"role": "user"}, *user(None, image=None), *user("x")]
    assert chat_ids(tokenizer, conversation) == want
    assert chat_ids(tokenizer, [{"role": Role.USER, "content": "x"}]) == want
    chat = SimpleNamespace(messages=user("x"))  # as pipelines pass them
    assert tokenizer.apply_chat_template([chat, chat]) == [want, want]


BAD_CHATS = {
    "a role": ([{"role": "tool", "content": "x"}], {}, "role tool"),
    "nothing": ([], {}, "0 messages"),
    "a string": (["hello"], {}, "got str"),
    "a mask of a string": (user("x"), {"return_assistant_tokens_mask": True}, "return_dict=True"),
    "a film": (user([{"type": "video", "video": "x"}]), {}, "a part of type video"),
    "an empty image": (user([{"type": "image", "image": ""}]), {}, "'image' is ''"),
    "no size": (user("x", image=pil_image()), {"return_dict": True}, "image_size None"),
}


@pytest.mark.parametrize("case", BAD_CHATS)
def test_chats_that_cannot_be_rendered_are_refused(tokenizer, case):
    conversation, options, named = BAD_CHATS[case]
    with refused(Exception, named):  # what a template raises is Jinja's
        tokenizer.apply_chat_template(conversation, **options)


def test_one_conversation_is_a_batch(tokenizer):
    (row,) = ids = tokenizer.apply_chat_template(user("\n"))
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    assert row[:2] == tokenizer.get_prefix_tokens() and row[3:] == [newline] * 2  # not merged
    assert tokenizer.apply_chat_template([user("\n")] * 2) == [row, row]
    want = {"input_ids": ids, "attention_mask": [[1] * len(row)]}
    want["position_ids"] = [[*range(len(row))]]
    assert dict(tokenizer.apply_chat_template(user("\n"), return_dict=True)) == want
    out = tokenizer.apply_chat_template(user("\n"), return_dict=True, return_tensors="pt")
    assert {name: value.tolist() for name, value in out.items()} == want
    # As in transformers 5; 4.57 and the published code refuse it.
    text = tokenizer.apply_chat_template(user("hello"), tokenize=False, return_dict=True)
    assert text == "[gMASK]<sop><|user|>\nhello"
    with pytest.raises(ValueError, match="continue_final_message excludes"):
        chat_ids(tokenizer, user("x"), continue_final_message=True, add_generation_prompt=True)


def test_images_are_the_image_processors(tokenizer, image_processor):
    tokenizer.image_size = 56
    one = pil_image()
    want = image_processor(one)["pixel_values"]
    for tensors in (None, "pt", "np"):
        out = tokenizer.apply_chat_template(
            user("What?", image=one), return_dict=True, return_tensors=tensors
        )
        assert isinstance(out["images"], np.ndarray) is (tensors == "np")
        assert torch.equal(torch.as_tensor(out["images"]), want) and want.dtype == torch.float32
    # Images are read only if requested, and image parts may have none.
    assert len(chat_ids(tokenizer, user("What?", image="no such file"))) > 6
    with pytest.raises(Exception, match="no such file"):
        tokenizer.apply_chat_template(user("What?", image="no such file"), return_dict=True)
    part = {"type": "image"}
    out = tokenizer.apply_chat_template(user([part, part]), return_dict=True)
    assert set(out) == {"input_ids", "attention_mask", "position_ids"}
    with pytest.raises(ValueError, match="message 0 has an image part with 0 images"):
        tokenizer.apply_chat_template(user([part, part | {"image": one}]), return_dict=True)


def test_truncation_keeps_either_side_and_cuts_no_image(tokenizer):
    tokenizer.image_size = 56
    message, options = user("What?", image=pil_image()), {"truncation": True}
    whole = chat_ids(tokenizer, message)
    # [gMASK] <sop> <|user|> \n begin placeholder end
    for length, name in [(4, "begin"), (6, "end")]:
        with pytest.raises(ValueError, match=rf"has 1 images, but .* 0 times <.{name}_of_image"):
            tokenizer.apply_chat_template(message, max_length=length, return_dict=True, **options)
    out = tokenizer.apply_chat_template(message, max_length=7, return_dict=True, **options)
    assert out["input_ids"] == [whole[:7]] and len(out["images"]) == 1
    assert chat_ids(tokenizer, message, max_length=4, truncation="do_not_truncate") == whole
    assert chat_ids(tokenizer, message, max_length=0, **options) == []
    tokenizer.truncation_side = "left"
    assert chat_ids(tokenizer, message, max_length=4, **options) == whole[-4:]
    assert chat_ids(tokenizer, message, max_length=0, **options) == []


def test_arguments_by_place_are_in_the_published_order(tokenizer):
    speaks = tokenizer.convert_tokens_to_ids("<|assistant|>")
    apply = tokenizer.apply_chat_template
    assert apply(user("hello"), True) == [[*chat_ids(tokenizer, user("hello")), speaks]]
    out = apply([user("a"), user("the cat")], False, True, "max_length", True, 12, "pt", True)
    options = {"padding": "max_length", "truncation": True, "max_length": 12}
    want = apply([user("a"), user("the cat")], **options, return_tensors="pt", return_dict=True)
    assert all(torch.equal(out[name], want[name]) for name in ("input_ids", "position_ids"))
    (row,) = apply(user("a"), False, True, False, False, None, None, False, None, False)
    assert row == chat_ids(tokenizer, user("a"))[2:]
    tools = [{"name": "f", "description": "d"}]
    want = chat_ids(tokenizer, [{"role": "system", "content": "", "tools": tools}, *user("x")])
    assert apply(user("x"), tools=tools) == [want]
    with pytest.raises(ValueError, match="add_generation_prompt is a list: .* give tools, docu"):
        apply(user("x"), tools)
    options = {"tokenize": False, "add_special_tokens": False}
    text = "x [gMASK]<sop>"  # the caller's own stays
    assert apply(user(text), **options) == f"<|user|>\n{text}"


def test_single_messages_make_up_a_chat(tokenizer):
    image = ["<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>"]
    build = tokenizer.build_single_message
    row = tokenizer.get_prefix_tokens()
    row += build("user", "", "say <|user|>", message_prefix=tokenizer.convert_tokens_to_ids(image))
    row += build("assistant", "tool", "\nyes")
    answer = {"role": "assistant", "content": "\nyes", "metadata": "tool"}
    assert chat_ids(tokenizer, [*user("say <|user|>", image="x"), answer]) == row
    assert build("observation", "a", "b", tokenize=False) == "<|observation|>a\nb"
    with pytest.raises(ValueError, match="has the role 'tool': use system, user"):
        build("tool", "", "x")
    # There is no attribute `tokenizer`: frameworks would take its owner for a processor.
    assert not hasattr(tokenizer, "tokenizer")


@pytest.mark.parametrize("kind", ["python", "simple_browser", "cogview", "web_search"])
def test_a_tool_of_another_type_is_refused_by_its_name(tokenizer, kind):
    """The published code has its own texts for three of them."""
    tools = [{"type": kind}]
    named = f"a tool has type {kind}, .* give tools of type function, or describe it in a system"
    for options in (
        {"tools": tools},
        {"conversation": [{"role": "system", "content": "x", "tools": tools}, *user("x")]},
    ):
        with pytest.raises(Exception, match=named):
            tokenizer.apply_chat_template(**{"conversation": user("x")} | options)


def test_names_of_transformers_4_are_there(tokenizer):
    built = tokenizer.build_inputs_with_special_tokens([40, 41], [42])
    assert built == [*tokenizer.get_prefix_tokens(), 40, 41, 42]
    assert tokenizer.get_special_tokens_mask([40, 41], [42]) == [1, 1, 0, 0, 0]
    mask = tokenizer.get_special_tokens_mask(built, already_has_special_tokens=True)
    assert mask == [1, 1, 0, 0, 0]


# Where fix_mistral_regex fails, whatever the tokenizer.
WITHOUT_ADVICE = Version("5.0") <= Version(transformers.__version__) < Version("5.4")


@pytest.mark.parametrize("name", UNSUPPORTED_TEXT_OPTIONS)
def test_options_of_other_models_tokenizers_are_refused_or_change_nothing(tokenizer, name):
    want, of_pair = tokenizer("the cat")["input_ids"], tokenizer("the", "cat")["input_ids"]
    of_object = {"tokenizer_object": tokenizer.backend_tokenizer}
    with pytest.raises(ValueError, match=f"^{name} is True, .* leave it out"):
        ChatGLM4Tokenizer(**of_object, **{name: True})
    built = ChatGLM4Tokenizer(**of_object, **{name: False})
    if hasattr(ChatGLM4Tokenizer, name):  # of transformers 5, which may be set later
        with pytest.raises(ValueError, match=f"^{name} is True, .* leave it out"):
            setattr(built, name, True)
        setattr(built, name, False)
    assert built("the cat")["input_ids"] == want and want[:2] == built.get_prefix_tokens()
    assert built("the", "cat")["input_ids"] == of_pair


def test_each_tokenizer_option_has_the_effect_that_the_page_says(tokenizer):
    def of(**options) -> tuple:
        built = ChatGLM4Tokenizer(tokenizer_object=tokenizer.backend_tokenizer, **options)
        spaced = built.decode(built("a , b <|user|>")["input_ids"])
        cut = built("the cat the", truncation=True, max_length=4)["input_ids"]
        padded = built(["the", "the cat"], padding=True)["input_ids"]
        chat = built.apply_chat_template(user("the cat"))
        return spaced, cut, padded, chat, built.model_max_length, [*built("the")]

    want = of()
    nothing = ("use_fast", "legacy", "trim_offsets", "encode_special_tokens")
    assert all(of(**{name: value}) == want for name in nothing for value in (True, False))
    assert of(padding=True, truncation=True, max_length=3, of_no_tokenizer=1) == want
    does = {"padding_side": "right", "truncation_side": "left", "model_max_length": 9}
    does |= {"pad_token": "[MASK]", "chat_template": "{{ messages[0].content }}"}
    does |= {"model_input_names": ["input_ids"], "split_special_tokens": True}
    does |= {"clean_up_tokenization_spaces": True}
    assert not [name for name, value in does.items() if of(**{name: value}) == want]


def test_transformers_does_not_change_the_split_pattern_as_for_mistral(
    real_tokenizer, tmp_path, warned
):
    """It does so for large vocabularies only."""
    real_tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "chatglm", "vision_config": {}, "transformers_version": "4.57.6"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    advice = {} if WITHOUT_ADVICE else {"fix_mistral_regex": True}
    loaded = ChatGLM4Tokenizer.from_pretrained(tmp_path, **advice).backend_tokenizer
    assert loaded.to_str() == real_tokenizer.backend_tokenizer.to_str()
    assert "regex" not in warned.text
    # If transformers renames the method that asks, ours does nothing.
    assert hasattr(PreTrainedTokenizerFast, "_patch_mistral_regex")


def test_assistant_mask_covers_what_the_model_writes(tokenizer):
    call = {"role": "assistant", "metadata": "tool", "content": "on <|user|> it"}
    conversations = [[*user("hi"), call, *user("bye")], user("hello to the cat and the dog " * 3)]
    options = {"padding": True, "return_dict": True, "return_tensors": "pt"}
    out = tokenizer.apply_chat_template(conversations, return_assistant_tokens_mask=True, **options)
    mask = out["assistant_masks"].bool()
    assert tokenizer.decode(out["input_ids"][0][mask[0]]) == "tool\non <|user|> it"
    assert not mask[1].any() and not (mask & (out["attention_mask"] == 0)).any()
    want = tokenizer.apply_chat_template(conversations, **options)
    assert torch.equal(out["input_ids"], want["input_ids"])
    # A template that begins to speak inside of a piece.
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


def special_token_ids(tokenizer, ids) -> list[int]:
    return [i for i in ids if i in set(tokenizer.all_special_ids)]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_no_string_of_the_user_becomes_special(tokenizer, token):
    def tool(x: int):
        """Placeholder."""

    def ids_with(evil: str) -> list[int]:
        tool.__doc__ = f"Do {evil}.\n\nArgs:\n    x: {evil}\n"
        conversation = [
            {"role": "system", "content": "", "tools": [{"name": evil, evil: {"k": [evil]}}]},
            {"role": "user", "content": f"a{evil}b {evil}", "metadata": f"x{evil}"},
            {"role": "assistant", "content": [{"type": "text", "text": evil}], "metadata": evil},
            {"role": "user", "content": "c", "image": evil},
        ]
        tools = [tool, {"name": evil, "description": evil}]
        return chat_ids(tokenizer, conversation, add_generation_prompt=True, tools=tools)

    ids = ids_with(token)
    assert special_token_ids(tokenizer, ids) == special_token_ids(tokenizer, ids_with("evil"))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert f"a{token}b {token}" in text and text.count(token) >= 10
    # Nor do its parts join.
    for at in range(1, len(token)):
        parts = [{"type": "text", "text": t} for t in (token[:at], token[at:])]
        ids = chat_ids(tokenizer, user(parts))
        assert len(special_token_ids(tokenizer, ids)) == 3, at
        assert tokenizer.decode(ids).endswith(token)


def test_user_text_is_safe_in_any_template(tokenizer):
    class Evil:
        def __str__(self):
            return "<|user|>"

    template = "<sop>{% for m in messages %}{{ m['content'] | trim | upper }}{% endfor %}<eop>"
    ids = chat_ids(tokenizer, user("  <|x|> [MASK]<|"), chat_template=template)
    assert special_token_ids(tokenizer, ids) == tokenizer.convert_tokens_to_ids(["<sop>", "<eop>"])
    assert tokenizer.decode(ids) == "<sop> <|X|> [MASK]<| <eop>"
    template = "{{ evil }}{{ messages[0]['metadata'] }}"
    message = user("x", metadata=Evil())
    ids = chat_ids(tokenizer, message, chat_template=template, evil="<sop>")
    assert special_token_ids(tokenizer, ids) == []
    ids = chat_ids(tokenizer, user("x"), chat_template="{{ n }}", n=np.int64(3))
    assert tokenizer.decode(ids) == "3"


def test_text_comes_back_unchanged(tokenizer):
    texts = ["\ufdd0\ufdd1", "\ufdd00000060", "a\ufdd1b", "<<|<|user|>|>", "[[gMASK[gMASK]"]
    more = ["abab", "☃"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL_TOKENS, *more]})
    for text in [*texts, "ababab! ☃"]:
        ids = chat_ids(tokenizer, user(text))
        assert len(special_token_ids(tokenizer, ids)) == 3
        assert tokenizer.decode(ids, skip_special_tokens=True) == "\n" + text
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer.encode("a , b", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a, b"
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == "a , b"


def test_chats_leave_the_tokenizer_as_it_is(tokenizer):
    before = tokenizer.backend_tokenizer.to_str()
    calls = [(chat_ids, tokenizer, user("say <|user|>")), (tokenizer.encode, "a<|user|>b")]
    want = [function(*arguments) for function, *arguments in calls]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(*call) for _ in range(40) for call in calls]
        assert [job.result() for job in jobs] == want * 40
    assert tokenizer.backend_tokenizer.to_str() == before


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_a_saved_folder_loads_with_its_sizes_and_its_template(tokenizer, tmp_path, key):
    """Special tokens under the name of either major version."""
    tokenizer.image_size = 56
    tokenizer.save_pretrained(tmp_path)
    path, template = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    config = json.loads(path.read_text())
    assert config["auto_map"]["AutoTokenizer"][0] == "tokenization_chatglm.ChatGLM4Tokenizer"
    assert template.read_text(encoding="utf-8") == CHAT_TEMPLATE
    for name in ("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"):
        config.pop(name, None)
    path.write_text(json.dumps(config | {key: list(SPECIAL_TOKENS)}))
    template.write_text("hello")
    again = ChatGLM4Tokenizer.from_pretrained(tmp_path)
    assert (again.image_size, again.model_max_length, again.padding_side) == (56, 8192, "left")
    assert again.all_special_ids == tokenizer.all_special_ids and len(again) == len(tokenizer)
    assert again.encode("a<|user|>b") == tokenizer.encode("a<|user|>b")
    assert again.chat_template == "hello"


def test_a_template_beside_the_ranks_is_used_only_if_it_has_images(
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
