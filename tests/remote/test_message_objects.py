"""Messages may be objects: dataclasses, and pydantic's models as OpenAI's client gives them."""

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from tests.remote.chats import picture


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


ASKED, ANSWERED = (
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A cat."},
)


def answer_of_client() -> Any:
    openai = pytest.importorskip("openai.types.chat", reason="needs the client: pip install openai")
    return openai.ChatCompletionMessage(**ANSWERED, annotations=[])


KINDS = {
    "dataclasses": lambda: [Plain(**ASKED), Plain(**ANSWERED)],
    "OpenAI's client": lambda: [ASKED, answer_of_client()],
}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_the_messages_that_their_fields_say(tokenizer, processor, kind):
    objects = KINDS[kind]()
    for each in (tokenizer, processor):
        for tokenize in (True, False):
            want = each.apply_chat_template([ASKED, ANSWERED], tokenize=tokenize)
            assert each.apply_chat_template(objects, tokenize=tokenize) == want


TEXT = {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize(
    "message",
    [
        Plain("user", [Part("image", picture()), TEXT]),
        Model(role="user", content=[{"type": "image", "image": picture()}, TEXT]),
    ],
    ids=["part of a dataclass", "part in a model"],
)
def test_pictures_of_objects_are_found(processor, message):
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    got = processor.apply_chat_template([message], **options)
    assert got["pixel_values"].shape == (1, 3, 56, 56)


def test_what_is_no_message_or_has_a_key_that_nothing_reads_is_refused(tokenizer):
    for wrong in ("text", Plain):
        with pytest.raises(ValueError, match="a message must be a dict, a dataclass or a model of"):
            tokenizer.apply_chat_template([ASKED, wrong])
    message = Model(**ANSWERED, annotations=["a page"])
    with pytest.raises(ValueError, match="message 0 has the key 'annotations', which nothing read"):
        tokenizer.apply_chat_template([message])
