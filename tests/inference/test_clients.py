"""Clients of OpenAI's API that nobody here wrote, unchanged: each is answered as OpenAI's own.

``nox -f tests/noxfile.py -s clients`` installs them; elsewhere those that are missing are skipped.
"""

import io
import sys
from collections.abc import Callable

import openai
import pytest
from PIL import Image

from tests.helpers.processes import serving
from tests.helpers.serving import QUESTION, about, data_url, png

MESSAGES = about(data_url(png()))
URL = MESSAGES[0]["content"][0]["image_url"]["url"]


@pytest.fixture(scope="module")
def url(files, tmp_path_factory):
    command = [sys.executable, "-m", "glm4v_patched", "serve", str(files.model), "--device", "cpu"]
    command += ["--port", "0", "--served-model-name", "tiny", "--max-new-tokens", "6"]
    log = tmp_path_factory.mktemp("clients") / "serve.log"
    with serving(command, r"is served at (\S+)", log) as (url, _):
        yield url


def langchain(url: str) -> str:
    models = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage

    model = models.ChatOpenAI(model="tiny", base_url=url, api_key="none")
    asked = [HumanMessage(content=MESSAGES[0]["content"])]
    told = model.invoke(asked).content
    assert "".join(chunk.content for chunk in model.stream(asked)) == told
    return told


def litellm(url: str) -> str:
    client = pytest.importorskip("litellm")
    asked = {"model": "openai/tiny", "messages": MESSAGES}
    reply = client.completion(**asked, api_base=url, api_key="none")
    return reply.choices[0].message.content


def llama_index(url: str) -> str:
    models = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

    how = {"is_chat_model": True, "temperature": 0}
    model = models.OpenAILike(model="tiny", api_base=url, api_key="none", **how)
    shown = [ImageBlock(image=png(), image_mimetype="image/png"), TextBlock(text=QUESTION)]
    return model.chat([ChatMessage(role="user", blocks=shown)]).message.content


def evalscope(url: str) -> str:
    models = pytest.importorskip("evalscope.api.model")
    from evalscope.api.messages import ChatMessageUser, ContentImage, ContentText

    where = {"eval_type": "openai_api", "base_url": url, "api_key": "none"}
    model = models.get_model(model="tiny", config=models.GenerateConfig(temperature=0), **where)
    shown = [ContentImage(image=URL), ContentText(text=QUESTION)]
    return model.generate([ChatMessageUser(content=shown)]).completion


def lmms_eval(url: str) -> str:
    models = pytest.importorskip("lmms_eval.models.chat.openai")
    from lmms_eval.api.instance import Instance

    model = models.OpenAICompatible(model_version="tiny", base_url=url, api_key="none")
    model.task_dict = {"task": {"test": [Image.open(io.BytesIO(png()))]}}

    def messages_of(picture) -> list[dict]:
        parts = [{"type": "image", "url": picture}, {"type": "text", "text": QUESTION}]
        return [{"role": "user", "content": parts}]

    given = ("", messages_of, {"max_new_tokens": 6, "temperature": 0}, 0, "task", "test")
    about_task = {"task": "task", "doc_id": 0, "repeats": 1}
    asked = Instance("generate_until", given, 0, metadata=about_task)
    [reply] = model.generate_until([asked])
    return reply.text if hasattr(reply, "text") else reply


CLIENTS = [langchain, litellm, llama_index, evalscope, lmms_eval]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_client_is_answered_as_openais(client: Callable[[str], str], url):
    own = openai.OpenAI(base_url=url, api_key="none").chat.completions
    expected = own.create(model="tiny", messages=MESSAGES).choices[0].message.content
    assert client(url) == expected
