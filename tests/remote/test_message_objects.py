"""Messages may be objects: dataclasses, and pydantic's models as OpenAI's client gives them."""

from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image
from pydantic import BaseModel

PICTURE = Image.new("RGB", (56, 56), "red")


@dataclass
class Plain:
    role: str
    content: Any
    image: Any = None


class Model(BaseModel):
    role: str
    content: Any
    refusal: str | None = None
    annotations: list = []


@dataclass
class Part:
    type: str
    image: Any


def chats(kind: str) -> tuple[list, list[dict]]:
    """A conversation of objects, and the same of dicts."""
    dicts = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}]
    if kind == "dataclasses":
        return [Plain(**message) for message in dicts], dicts
    if kind == "pydantic":
        return [Model(**message) for message in dicts], dicts
    if kind == "a dict, then an object":
        return [dicts[0], Model(**dicts[1])], dicts
    openai = pytest.importorskip("openai.types.chat", reason="needs the client: pip install openai")
    said = openai.ChatCompletionMessage(role="assistant", content="A cat.", annotations=[])
    return [dicts[0], said], dicts


KINDS = ["dataclasses", "pydantic", "a dict, then an object", "OpenAI's client"]


@pytest.mark.parametrize("tokenize", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_the_messages_that_their_fields_say(tokenizer, processor, kind, tokenize):
    objects, dicts = chats(kind)
    for each in (tokenizer, processor):
        want = each.apply_chat_template(dicts, tokenize=tokenize)
        assert each.apply_chat_template(objects, tokenize=tokenize) == want
        batch = each.apply_chat_template([objects, dicts], tokenize=tokenize)
        assert batch[0] == batch[1]


@pytest.mark.parametrize(
    "message",
    [
        Plain("user", "What is it?", PICTURE),
        Plain("user", [Part("image", PICTURE), {"type": "text", "text": "What is it?"}]),
        Model(
            role="user", content=[{"type": "image", "image": PICTURE}, {"type": "text", "text": ""}]
        ),
    ],
    ids=["image of a message", "part of a dataclass", "part in a model"],
)
def test_pictures_of_objects_are_found(processor, message):
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    got = processor.apply_chat_template([message], **options)
    assert got["pixel_values"].shape == (1, 3, 56, 56)


def test_a_key_that_nothing_reads_is_refused_in_objects_too(tokenizer):
    message = Model(role="assistant", content="A cat.", annotations=["a page"])
    with pytest.raises(ValueError, match="message 0 has the key 'annotations', which nothing read"):
        tokenizer.apply_chat_template([message])


@pytest.mark.parametrize("wrong", ["text", 3, Plain])
def test_what_is_no_message_is_refused(tokenizer, wrong):
    with pytest.raises(ValueError, match="a message must be a dict, a dataclass or a model of"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}, wrong])
