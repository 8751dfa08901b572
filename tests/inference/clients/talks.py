"""Conversations that clients hold with a server: ``python talks.py CLIENT URL KEY STOP``.

Each client is a function that begins a conversation and returns what asks its next question. What
is printed is JSON: the answers of three turns, whole and streamed, those around a text that stops
one at once, and the client's own error about a broken image. Imports nothing of this package.
"""

import base64
import io
import json
import sys
from collections.abc import Callable
from typing import Any

from PIL import Image

MODEL = "tiny"
QUESTION = "What is it?"
NEXT = ["And now?", "Why?"]
BROKEN = b"GIF89a" + bytes(20)


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 12), "orange").save(file, "PNG")
    return file.getvalue()


def data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def parts_of(text: str, image: bytes | None) -> str | list[dict[str, Any]]:
    image_part = {"type": "image_url", "image_url": {"url": data_url(image)}} if image else None
    return [image_part, {"type": "text", "text": text}] if image_part else text


def by_messages(complete: Callable[..., tuple[str, dict]]) -> Callable:
    """Ask with all messages so far.

    Args:
        complete: Takes the messages, and whether and where the answer is streamed and stopped;
            returns the answer's text and its message.
    """
    messages: list[dict] = []

    def ask(text, image=None, stream=False, stop=None):
        messages.append({"role": "user", "content": parts_of(text, image)})
        answer_text, message = complete(messages, stream, stop)
        messages.append(message)
        return answer_text

    return ask


def joined(chunks) -> tuple[str, dict]:
    """Return the text of streamed chunks, and a message of it."""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, {"role": "assistant", "content": text}


def openai_chat(url: str, key: str) -> Callable:
    import openai

    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)

    def complete(messages, stream, stop):
        # Not .stream(), which raises where an answer is cut.
        arguments = {"model": MODEL, "messages": messages, "stop": stop, "stream": stream}
        reply = client.chat.completions.create(**arguments)
        if stream:
            return joined(reply)
        message = reply.choices[0].message
        return message.content, message.model_dump()

    return by_messages(complete)


def openai_responses(url: str, key: str, store: bool = True) -> Callable:
    """By ``previous_response_id``, which needs the default ``store: true``; or by what the
    responses held, sent back."""
    import openai

    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    last, items = openai.omit, []

    def ask(text, image=None, stream=False, stop=None):
        nonlocal last
        content: list[dict] = [{"type": "input_text", "text": text}]
        if image:
            content.insert(0, {"type": "input_image", "image_url": data_url(image)})
        if store:
            items.clear()
        items.append({"role": "user", "content": content})
        arguments: dict[str, Any] = {"model": MODEL, "input": items, "extra_body": {"stop": stop}}
        arguments |= {"previous_response_id": last} if store else {"store": False}
        response = client.responses.create(**arguments, stream=stream)
        if stream:
            *_, last_event = response
            response = last_event.response
        last = response.id
        items.extend(response.output)
        return response.output_text

    return ask


def openai_responses_not_stored(url: str, key: str) -> Callable:
    return openai_responses(url, key, store=False)


def huggingface_hub(url: str, key: str) -> Callable:
    """Without a model, as its pages show it for a server of one's own."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=url, api_key=key)

    def complete(messages, stream, stop):
        reply = client.chat_completion(messages, stream=stream, stop=stop)
        if stream:
            return joined(reply)
        text = reply.choices[0].message.content
        return text, {"role": "assistant", "content": text}

    return by_messages(complete)


def _pydantic_ai(model: Any) -> Callable:
    from pydantic_ai import Agent, BinaryContent

    agent = Agent(model, system_prompt="Be short.", instructions="Be kind.", retries=0)
    history: list = []

    def ask(text, image=None, stream=False, stop=None):
        nonlocal history
        prompt = [text, BinaryContent(image, media_type="image/png")] if image else text
        settings = {"stop_sequences": stop} if stop else {}
        arguments = {"message_history": history, "model_settings": settings}
        if stream:
            reply = agent.run_stream_sync(prompt, **arguments)
            answer_text = reply.get_output()
        else:
            reply = agent.run_sync(prompt, **arguments)
            answer_text = reply.output
        history = reply.all_messages()
        return answer_text

    return ask


def pydantic_ai(url: str, key: str) -> Callable:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return _pydantic_ai(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=key)))


def pydantic_ai_responses(url: str, key: str) -> Callable:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key=key)
    return _pydantic_ai(OpenAIResponsesModel(MODEL, provider=provider))


def smolagents(url: str, key: str) -> Callable:
    from smolagents import ChatMessage, OpenAIServerModel

    model = OpenAIServerModel(MODEL, api_base=url, api_key=key)
    messages: list = []

    def ask(text, image=None, stream=False, stop=None):
        content: list[dict] = [{"type": "text", "text": text}]
        if image == BROKEN:  # which it would open itself
            content = parts_of(text, image)
        elif image:
            content.insert(0, {"type": "image", "image": Image.open(io.BytesIO(image))})
        messages.append(ChatMessage(role="user", content=content))
        if stream:
            chunks = model.generate_stream(messages, stop_sequences=stop)
            answer_text = "".join(chunk.content or "" for chunk in chunks)
        else:
            answer_text = model.generate(messages, stop_sequences=stop).content
        messages.append(
            ChatMessage(role="assistant", content=[{"type": "text", "text": answer_text}])
        )
        return answer_text

    return ask


def langchain_openai(url: str, key: str, **how) -> Callable:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=url, api_key=key, max_retries=0, **how)
    messages: list = [SystemMessage("Be short.")]

    def ask(text, image=None, stream=False, stop=None):
        messages.append(HumanMessage(content=parts_of(text, image)))
        if stream:
            first, *rest = model.stream(messages, stop=stop)
            reply = sum(rest, start=first)
        else:
            reply = model.invoke(messages, stop=stop)
        messages.append(reply)
        return reply.text

    return ask


def langchain_openai_responses(url: str, key: str) -> Callable:
    return langchain_openai(url, key, use_responses_api=True)


def litellm(url: str, key: str) -> Callable:
    from litellm import completion, stream_chunk_builder

    to_server = {"model": f"openai/{MODEL}", "api_base": url, "api_key": key}

    def complete(messages, stream, stop):
        reply = completion(**to_server, messages=messages, stream=stream, stop=stop)
        reply = stream_chunk_builder([*reply]) if stream else reply
        message = reply.choices[0].message
        return message.content or "", message.model_dump()

    return by_messages(complete)


def llama_index(url: str, key: str) -> Callable:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.llms.openai_like import OpenAILike

    how = {"is_chat_model": True, "temperature": 0, "max_retries": 0}
    model = OpenAILike(model=MODEL, api_base=url, api_key=key, **how)
    messages: list = []

    def ask(text, image=None, stream=False, stop=None):
        blocks: list = [TextBlock(text=text)]
        if image:
            blocks.insert(0, ImageBlock(image=image, image_mimetype="image/png"))
        messages.append(ChatMessage(role="user", blocks=blocks))
        arguments = {"stop": stop} if stop else {}
        reply = (
            [*model.stream_chat(messages, **arguments)][-1]
            if stream
            else model.chat(messages, **arguments)
        )
        messages.append(reply.message)
        return reply.message.content or ""

    return ask


def hold(begin: Callable[[str, str], Callable], url: str, key: str, stop: str) -> dict[str, Any]:
    """Hold all conversations of a client."""
    results: dict[str, Any] = {}
    for name, stream in (("whole", False), ("streamed", True)):
        ask = begin(url, key)
        results[name] = [ask(QUESTION, png(), stream=stream)]
        results[name] += [ask(text, stream=stream) for text in NEXT]
    ask = begin(url, key)
    try:
        results["stopped"] = [ask(QUESTION, png(), stop=[stop]), ask(NEXT[0])]
    except Exception as error:  # pydantic-ai takes no empty answer
        results["stopped"] = [type(error).__name__]
    try:
        begin(url, key)(QUESTION, BROKEN)
    except Exception as error:
        results["error"] = {"type": type(error).__name__, "message": str(error)}
    return results


if __name__ == "__main__":
    client, *arguments = sys.argv[1:]
    print(json.dumps(hold(globals()[client], *arguments)))
