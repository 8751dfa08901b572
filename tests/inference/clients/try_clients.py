"""Clients themselves, unchanged, against ``glm4v-patched serve``: three turns, whole and streamed.

``nox -f tests/noxfile.py -s clients`` installs them and runs this; what is missing is skipped.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import openai
import pytest

from tests.helpers.processes import cpu_environment, run_with_limit, serving
from tests.helpers.serving import about, data_url
from tests.inference.clients import talks

HERE = Path(__file__).parent
RECORDED = {path.stem: path for path in sorted((HERE / "recorded").glob("*.json"))}
KEY = "none"
NODE = os.environ.get("CLIENTS_OF_NODE")
"""The folder into which npm installed its clients."""
MODULES = {"llama_index": "llama_index.llms.openai_like"}
# The system message of clients that have one.
SYSTEM = {
    "pydantic_ai": "Be short.\n\nBe kind.",
    "pydantic_ai_responses": "Be kind.\n\nBe short.",
    **dict.fromkeys(("langchain_openai", "langchain_openai_responses"), "Be short."),
    **dict.fromkeys(("node_ai_chat", "node_ai_responses"), "Be short."),
    "node_ai_responses_not_stored": "Be short.",
}


@pytest.fixture(scope="module")
def url(files, tmp_path_factory):
    command = [sys.executable, "-m", "glm4v_patched", "serve", str(files.model), "--device", "cpu"]
    command += ["--port", "0", "--served-model-name", talks.MODEL, "--max-new-tokens", "8"]
    log = tmp_path_factory.mktemp("clients") / "serve.log"
    with serving(command, r"is served at (\S+)", log) as (address, _):
        yield address
    assert "Traceback" not in log.read_text()


def installed(client: str) -> bool:
    if client.startswith("node_"):
        return NODE is not None
    module = MODULES.get(client, client.removesuffix("_chat").partition("_responses")[0])
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def answers(url: str, system: str | None, *questions: list[dict]) -> list[str]:
    """Return the expected answers: each turn is asked with all previous ones, by ``openai``."""
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    messages = [{"role": "system", "content": system}] if system else []
    texts = []
    for question in questions:
        messages += question
        reply = client.chat.completions.create(model=talks.MODEL, messages=messages)
        texts.append(reply.choices[0].message.content)
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


@pytest.mark.parametrize("client", RECORDED)
def test_a_client_talks_with_our_server(client, url):
    if not installed(client):
        pytest.skip(f"{client} is not installed")
    recorded, system = json.loads(RECORDED[client].read_text())["answers"], SYSTEM.get(client)
    first = about(data_url(talks.png()), text=talks.QUESTION)
    more = [[{"role": "user", "content": text}] for text in talks.NEXT]
    expected = answers(url, system, first, *more)
    command = [sys.executable, str(HERE / "talks.py"), client]
    if client.startswith("node_"):
        command = ["node", str(HERE / "talks.mjs"), client.removeprefix("node_")]
    command += [url, KEY, expected[0][:1], *([NODE] if command[0] == "node" else [])]
    ended = run_with_limit(command, 120, cpu_environment() | {"PATH": os.environ["PATH"]})
    assert ended.status == 0, ended.output
    results = json.loads(ended.output.splitlines()[-1])
    assert results["whole"] == results["streamed"] == expected
    if recorded["stopped"][0] == "":
        joined = about(data_url(talks.png()), text=f"{talks.QUESTION}\n\n{talks.NEXT[0]}")
        assert results["stopped"] == ["", *answers(url, system, joined)]
    elif len(recorded["stopped"]) == 1:
        assert results["stopped"] == recorded["stopped"]
    else:  # its API has none
        assert results["stopped"] == expected[:2]
    assert results["error"]["type"] == recorded["error"]["type"]
    assert "not an image" in results["error"]["message"]
