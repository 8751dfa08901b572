"""Requests to a server, and calls of its application without one."""

import base64
import io
import itertools
import json
from types import SimpleNamespace
from typing import Any

import httpx2  # openai requires it
from PIL import Image

from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving import replies
from glm4v_patched.inference.serving.answer_queue import AnswerEnd
from glm4v_patched.inference.serving.app import make_app
from glm4v_patched.inference.serving.limits import ServerLimits

QUESTION = "What is it?"
CHAT = "/v1/chat/completions"


def png(size=(80, 60), color="orange", mode="RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def about(*urls: str, text: str = QUESTION, **keys: object) -> list[dict]:
    """Return a question about images; ``keys`` are further keys of the images."""
    parts = [{"type": "image_url", "image_url": {"url": url} | keys} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


async def send(
    app, body: object = None, method: str = "POST", path: str = CHAT, **headers: str
) -> httpx2.Response:
    """Send a request to an ASGI application, with its body in two parts.

    Args:
        body: Bytes, or a value to send as JSON.
        **headers: With ``_`` in place of ``-``.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def parts():
        yield content[: len(content) // 2]
        yield content[len(content) // 2 :]

    pairs = {"content_type": "application/json"} | headers
    request = httpx2.Request(
        method,
        f"http://localhost:8000{path}",
        content=parts(),
        headers={name.replace("_", "-"): value for name, value in pairs.items()},
    )
    response = await httpx2.ASGITransport(app).handle_async_request(request)
    await response.aread()
    return response


async def call(app, *request: Any, **options: Any) -> tuple[int, dict]:
    """Return the status and JSON of a response; a stream of events has the key ``lines``."""
    response = await send(app, *request, **options)
    if response.content.startswith((b"data: ", b"event: ")):
        return response.status_code, {"lines": response.content.decode().splitlines()}
    return response.status_code, json.loads(response.content or b"{}")


class EchoQueue:
    """Answer at once, without a model: "Turn 1 of tiny." and so on, in three pieces."""

    is_alive = True

    def __init__(self, names=("tiny",)) -> None:
        self.answerers = dict.fromkeys(names)
        self.requests: list = []

    def submit(self, queued) -> None:
        request = queued.request
        self.requests.append(request)
        turns = sum(message["role"] == "user" for message in request.prompt)
        text = f"Turn {turns} of {request.model}."
        cuts = [text.partition(stop)[0] for stop in request.stop if stop in text]
        text = min(cuts, key=len, default=text)
        for piece in filter(None, (text[:4], text[4:9], text[9:])):
            queued.on_event(piece)
        queued.on_event(AnswerEnd("stop", 3, 7))

    def stop(self) -> None: ...

    def join(self) -> None: ...


def echo_app(queue: EchoQueue, with_page: bool = False, **limits):
    limits = ServerLimits(**limits)
    return make_app(queue, Generation(), limits, lambda: None, with_page)  # type: ignore


def numbered_ids(monkeypatch) -> None:
    """Give responses and their messages ids that are the same in every run."""
    numbers = itertools.count(1)
    fake_uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):032}"))
    monkeypatch.setattr(replies, "uuid", fake_uuid)
