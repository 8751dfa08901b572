"""The processor: expanded prompts, images and text together, saving and loading."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from glm4v_patched.remote import processing_chatglm
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.refused import refused
from tests.remote.inputs import IMAGE, pil_image, user

PREFIX = "[gMASK]<sop>"
N = 4
FILL, BEGIN, END = "<|begin_of_video|>", "<|begin_of_image|>", "<|end_of_image|>"
EXPANDED = BEGIN + FILL * N + END
AS_TENSORS = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}


def decode(processor, row):
    """Decode token by token, so that no version's spacing of special tokens interferes."""
    return "".join(processor.tokenizer.convert_ids_to_tokens(list(row)))


def pixels_of(processor, *colors):
    return torch.cat([processor.image_processor(pil_image(c))["pixel_values"] for c in colors])


def test_size_and_fill_follow_from_the_parts(processor, image_processor, reversed_tokenizer):
    assert processor.num_image_tokens == N and processor.tokenizer.image_size == 56
    assert processor.image_token_id == processor.tokenizer.convert_tokens_to_ids(FILL)
    other = reversed_tokenizer
    expanded = ChatGLMProcessor(image_processor, other)(images=pil_image(), text=f"{IMAGE}cat")
    ids = other.convert_tokens_to_ids([BEGIN, FILL, END])
    assert expanded["input_ids"][0][2 : 2 + N + 2] == [ids[0], *[ids[1]] * N, ids[2]]
    processor.tokenizer.image_size = 1120
    with pytest.raises(ValueError, match="image_size 1120 but .* makes images of 56"):
        ChatGLMProcessor(image_processor, processor.tokenizer)


def test_placeholders_are_expanded_and_expanded_images_stay(processor):
    out = processor(images=pil_image(), text=f"<|user|>{IMAGE}cat", return_tensors="pt")
    assert set(out) == {"input_ids", "attention_mask", "pixel_values"}
    assert decode(processor, out["input_ids"][0]).startswith(f"{PREFIX}<|user|>{EXPANDED}")
    assert out["pixel_values"].shape == (1, 3, 56, 56)
    assert out["attention_mask"].tolist() == [[1] * out["input_ids"].shape[1]]
    short = processor(images=pil_image(), text=f"{IMAGE}cat")["input_ids"]
    images_kwargs = {"images_kwargs": {"return_tensors": "pt"}}
    tensors = processor(images=pil_image(), text=f"{IMAGE}cat", **images_kwargs)["input_ids"]
    assert tensors.tolist() == short
    both = processor(images=pil_image(), text=f"{IMAGE}cat", return_tensors="np", **images_kwargs)
    assert all(isinstance(value, np.ndarray) for value in both.values()), "that of the text wins"
    for form in (f"{EXPANDED}cat", short, short[0]):
        assert processor(images=pil_image(), text=form)["input_ids"] == short
    assert set(processor(images=[pil_image()] * 2)) == {"pixel_values"}


EMPTY = (None, [], (), [[]], [(), []], [[], [None]])
NO_MEDIA = ("videos", "video", "audio", "audios", "videos_kwargs", "audio_kwargs")


def test_empty_media_are_none_and_others_are_refused_by_name(processor):
    """lmms-eval passes ``images``, ``videos`` and ``audios`` for every model."""
    one, text = pil_image(), f"{IMAGE}cat"
    tokenizer, chat = processor.tokenizer, user("cat", image=pil_image())
    calls = {
        "processor": lambda **media: processor(text=[text], images=[one], **media),
        "its chats": lambda **media: processor.apply_chat_template(chat, tokenize=True, **media),
        "its texts": lambda **media: processor.apply_chat_template(chat, **media),
        "tokenizer": lambda **media: tokenizer("cat", **media),
        "tokenizer's chats": lambda **media: tokenizer.apply_chat_template(chat, **media),
    }
    for name, call in calls.items():
        want = repr(call())
        images_kwargs = () if name == "processor" else ("images", "image", "pixel_values")
        for media in (*NO_MEDIA, *images_kwargs):
            for empty in EMPTY:
                assert repr(call(**{media: empty})) == want, (name, media, empty)
            for value in ([[], "cat.mp4"], [0.0, 0.0], 0):
                with pytest.raises(ValueError, match=f"was given {media}, which nothing reads"):
                    call(**{media: value})
    with pytest.raises(ValueError, match="was given videos, .* takes images and text"):
        processor.apply_chat_template(
            chat, tokenize=True, processor_kwargs={"videos": ["cat.mp4"], "audio": []}
        )
    for empty in EMPTY:
        assert set(processor(text=["cat"], images=empty)) == {"input_ids", "attention_mask"}
        with pytest.raises(ValueError, match=r"texts have \[1\] begin-of-image ids but 0 images"):
            processor(text=[text], images=empty)


@pytest.mark.parametrize("flag", [True, False])
def test_the_prefix_is_written_once_unless_add_special_tokens_is_false(processor, flag):
    messages = user("cat", image=pil_image())
    text = processor.apply_chat_template(messages, tokenize=False)
    assert text == f"{PREFIX}<|user|>\n{IMAGE}cat"
    row = processor(images=pil_image(), text=text, add_special_tokens=flag)["input_ids"]
    assert decode(processor, row[0]).count("[gMASK]") == 1
    # TRL passes this option; the template writes the prefix.
    options = {"processor_kwargs": {"add_special_tokens": flag}}
    assert processor.apply_chat_template(messages, tokenize=True, **options) == row
    bare = processor(text="cat", add_special_tokens=flag)["input_ids"][0]
    assert decode(processor, bare) == f"{PREFIX if flag else ''}cat"
    assert bare == processor.tokenizer.encode("cat", add_special_tokens=flag)
    assert processor(text="cat", text_kwargs={"add_special_tokens": flag})["input_ids"] == [bare]
    half = processor(text="[gMASK]cat", add_special_tokens=flag)["input_ids"][0]
    assert decode(processor, half) == f"{PREFIX if flag else ''}[gMASK]cat"


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_with_no_one_and_two_images(processor, side):
    texts = ["cat", f"{IMAGE}cat", f"{IMAGE}and{IMAGE}"]
    flat = [pil_image(c) for c in ("red", "green", "blue")]
    options = {"text": texts, "padding": True, "padding_side": side, "return_tensors": "pt"}
    out = processor(images=flat, **options)
    ids, mask = out["input_ids"], out["attention_mask"]
    assert (ids == processor.image_token_id).sum(1).tolist() == [0, N, 2 * N]
    alone = [
        processor(images=i, text=t)["input_ids"][0]
        for i, t in zip([None, flat[0], flat[1:]], texts, strict=True)
    ]
    assert [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)] == alone
    assert (mask[0, 0].item() == 0) is (side == "left")
    assert torch.equal(out["pixel_values"], pixels_of(processor, "red", "green", "blue"))
    for nested in ([[], flat[:1], flat[1:]], [None, flat[0], flat[1:]]):
        again = processor(images=nested, **options)
        assert all(torch.equal(again[name], out[name]) for name in out)


WRONG_CALLS = {
    "nothing": ({}, "neither"),
    "an image for text": ({"text": "cat", "images": pil_image()}, "[0] begin-of-image", "1 images"),
    "of other rows": (
        {"text": [IMAGE, IMAGE], "images": [[pil_image()] * 2, []]},
        "[1, 1]",
        "[2, 0]",
    ),
    "a begin inside": ({"text": BEGIN * 2 + END, "images": pil_image()}, "token 2 of 5"),
    "another size": ({"text": BEGIN + FILL * 3 + END, "images": pil_image()}, "3 ids", "4 times"),
    "text inside": ({"text": BEGIN + FILL * 3 + "a" + END, "images": pil_image()}, "4 ids", "4 ti"),
    "an option": ({"text": "cat", "max_len": 3}, "['max_len']"),
    "an option twice": (
        {"text": "a", "padding": "longest", "text_kwargs": {"padding": False}},
        "padding",
        "'longest'",
        "False",
    ),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_calls_that_contradict_themselves_are_refused(processor, case):
    arguments, *named = WRONG_CALLS[case]
    with refused(ValueError, *named):
        processor(**arguments)


def test_truncation_counts_expanded_ids_and_cuts_no_image(processor):
    inputs = {"text": f"{IMAGE}cat cat cat", "images": pil_image()}
    whole = processor(**inputs)["input_ids"][0]
    options = {"truncation": True, "max_length": 8}
    for given_options in (options, {"text_kwargs": options}):
        out = processor(**inputs, **given_options)
        assert out["input_ids"][0] == whole[:8] and len(out["attention_mask"][0]) == 8
    message = "ids to max_length {} would cut the image at tokens 2 to 7: use a max_.*{}"
    for most in (7, 2):
        with pytest.raises(ValueError, match=f"{len(whole)} {message.format(most, 'least 8')}"):
            processor(**inputs, truncation=True, max_length=most)
    two = {"text": f"{IMAGE}cat{IMAGE}cat cat", "images": [pil_image()] * 2}
    of_two = processor(**two)["input_ids"][0]
    needed = len(of_two) - len(processor.tokenizer.encode("cat cat", add_special_tokens=False))
    for most in (7, needed - 1):  # which cuts the first image, and the last
        with pytest.raises(ValueError, match=f"at least {needed},"):
            processor(**two, truncation=True, max_length=most)
    out = processor(**two, truncation=True, max_length=needed)
    assert out["input_ids"][0] == of_two[:needed]
    processor.tokenizer.truncation_side = "left"
    needed = len(whole) - 2
    out = processor(**inputs, truncation=True, max_length=needed)
    assert out["input_ids"][0] == whole[2:]
    with pytest.raises(ValueError, match=f"at least {needed}"):
        processor(**inputs, truncation=True, max_length=needed - 1)


def test_chats_take_images_in_every_form(processor, tmp_path):
    path = tmp_path / "p.png"
    pil_image().save(path)
    want = processor(images=pil_image(), text=f"<|user|>\n{IMAGE}cat", return_tensors="pt")
    text = {"type": "text", "text": "cat"}
    for content, image in [
        *(
            ("cat", image)
            for image in (pil_image(), np.asarray(pil_image()), path, path.read_bytes())
        ),
        ([{"type": "image", "image": pil_image()}, text], None),
        ([{"type": "image", "path": str(path)}, text], None),
        ([text, {"type": "image", "url": str(path)}], None),
        ([{"type": "image_url", "image_url": {"url": str(path)}}, text], None),
    ]:
        out = processor.apply_chat_template(user(content, image=image), **AS_TENSORS)
        assert set(out) == set(want)
        assert torch.equal(out["input_ids"], want["input_ids"])
        assert torch.equal(out["pixel_values"], want["pixel_values"])


def test_images_of_a_message_come_first_then_those_of_its_parts(processor):
    parts = [
        {"type": "image", "image": pil_image("green")},
        {"type": "text", "text": "cat"},
        {"type": "image", "image": pil_image("yellow")},
    ]
    chat = [*user("cat", image=pil_image("blue")), *user(parts, image=pil_image("red"))]
    out = processor.apply_chat_template([user("hi"), chat], padding=True, **AS_TENSORS)
    assert (out["input_ids"] == processor.image_token_id).sum(1).tolist() == [0, 4 * N]
    assert decode(processor, out["input_ids"][1]).endswith(f"{EXPANDED * 3}cat")
    assert torch.equal(out["pixel_values"], pixels_of(processor, "blue", "red", "green", "yellow"))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("caller", ["processor", "tokenizer"])
def test_the_assistant_mask_is_expanded_and_padded_with_the_ids(processor, caller, side):
    processor.tokenizer.padding_side = "right" if side == "left" else "left"
    image = {"image": pil_image()} if caller == "processor" else {}
    conversations = [
        [*user("cat", **image), {"role": "assistant", "content": "A dog."}],
        [*user("the cat and the dog" * 3), {"role": "assistant", "content": "A mat on a dog."}],
    ]
    options = {"padding_side": side}
    if caller == "tokenizer":
        options = {"tokenizer_kwargs": options}
    part = processor if caller == "processor" else processor.tokenizer
    out = part.apply_chat_template(
        conversations, return_assistant_tokens_mask=True, padding=True, **AS_TENSORS, **options
    )
    assert out["attention_mask"][0, 0 if side == "left" else -1] == 0
    for ids, mask, answer in zip(
        out["input_ids"], out["assistant_masks"], ["A dog.", "A mat on a dog."], strict=True
    ):
        assert processor.decode(ids[mask.bool()]) == f"\n{answer}"


def test_the_image_processor_is_that_of_the_folder_or_follows_the_tokenizers_size(
    tmp_path, small_backend, monkeypatch
):
    ChatGLM4Tokenizer(tokenizer_object=small_backend, image_size=84).save_pretrained(tmp_path)
    loaded = ChatGLMProcessor.from_pretrained(tmp_path)  # the published one has none
    assert loaded.num_image_tokens == 9
    assert loaded.image_processor.size == {"height": 84, "width": 84}
    loaded.image_processor.image_mean = [0.1, 0.2, 0.3]
    loaded.save_pretrained(tmp_path)
    again = ChatGLMProcessor.from_pretrained(tmp_path)
    assert again.image_processor.image_mean == [0.1, 0.2, 0.3]
    calls = []
    monkeypatch.setattr(
        processing_chatglm, "cached_file", lambda *_, **options: calls.append(options)
    )
    ChatGLMProcessor.from_pretrained(tmp_path, revision="of-last-year")
    assert calls[0]["revision"] == "of-last-year"


@dataclass
class Message:
    role: str
    content: Any
    image: Any = None


class Model(BaseModel):
    """A pydantic model, as OpenAI's client returns."""

    role: str
    content: Any
    annotations: list = []


def test_dataclass_and_pydantic_messages_are_read_like_dicts(processor):
    question, answered = user("What is it?"), {"role": "assistant", "content": "A cat."}
    for part, tokenize in product((processor, processor.tokenizer), (True, False)):
        want = part.apply_chat_template([*question, answered], tokenize=tokenize)
        for objects in (
            [Message(**question[0]), Message(**answered)],
            [*question, Model(**answered)],
        ):
            assert part.apply_chat_template(objects, tokenize=tokenize) == want
    image = {"type": "image", "image": pil_image()}
    for message in (Message("user", "cat", pil_image()), Model(role="user", content=[image])):
        actual = processor.apply_chat_template([message], **AS_TENSORS)
        assert actual["pixel_values"].shape == (1, 3, 56, 56)
    for wrong, problem in (
        ("text", "message must be a dict, a dataclass or a pydantic model"),
        (Message, "message must be a dict, a dataclass or a pydantic model"),
        (Model(role="user", content="x", annotations=["a"]), "key 'annotations', which nothing"),
    ):
        with pytest.raises(ValueError, match=problem):
            processor.apply_chat_template([*question, wrong])


BOTH = {"image": "a.png", "url": "b.png"}
LOST = {
    "images": {"images": [pil_image()]},
    "bytes of a part": {"content": [{"type": "text", "text": b"cat"}]},
    "two sources of a part": {"content": [{"type": "image", **BOTH}]},
    "metadata": {"metadata": {"name": "tool"}},
}


@pytest.mark.parametrize("case", LOST)
def test_contents_of_messages_that_would_be_dropped_are_refused(processor, case):
    messages = [*user("hi"), {"role": "user", "content": "cat"} | LOST[case]]
    with refused(ValueError, "message 1"):
        processor.apply_chat_template(messages)
    for tokenize in (True, False):
        with pytest.raises(ValueError, match="^message 1"):
            processor.tokenizer.apply_chat_template([user("hi"), messages], tokenize=tokenize)


def test_an_image_tag_in_a_text_stays_text(processor):
    out = processor.apply_chat_template(user("what does <image> do in SVG?"), **AS_TENSORS)
    assert "<image>" in processor.decode(out["input_ids"][0]) and "pixel_values" not in out
