"""Requests to a server, and calls of its application without one."""

import asyncio
import base64
import io
import itertools
import json
from types import SimpleNamespace

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


async def call(
    app, body: object = None, method: str = "POST", path: str = CHAT, **headers: str
) -> tuple[int, dict]:
    """Return an ASGI application's status and JSON; a stream of events has the key ``lines``.

    The body is sent in two parts.

    Args:
        body: Bytes, or a value to send as JSON.
        **headers: With ``_`` in place of ``-``.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    parts = [content[: len(content) // 2], content[len(content) // 2 :]]
    sent: list[dict] = []

    async def receive():
        if not parts:
            await asyncio.Event().wait()  # the client stays connected
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    all_headers = {"host": "localhost:8000", "content_type": "application/json"} | headers
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in all_headers.items()],
    }
    await app(scope, receive, send)
    reply_body = b"".join(message.get("body", b"") for message in sent[1:])
    if reply_body.startswith((b"data: ", b"event: ")):
        return sent[0]["status"], {"lines": reply_body.decode().splitlines()}
    return sent[0]["status"], json.loads(reply_body or b"{}")


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
