"""Requests to a server, and an application that is called without one."""

import asyncio
import base64
import io
import json

from PIL import Image

QUESTION = "What is it?"
CHAT = "/v1/chat/completions"


def png(size=(80, 60), colour="orange", mode="RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def about(*urls: str, text: str = QUESTION) -> list[dict]:
    """A question about pictures."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


async def call(
    app, body: object = None, method: str = "POST", path: str = CHAT, **headers: str
) -> tuple[int, dict]:
    """What an ASGI application answers, as status and JSON; the body comes in two parts.

    Args:
        body: Bytes as they are, or what JSON is made of.
        **headers: With ``_`` for ``-``.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    parts = [content[: len(content) // 2], content[len(content) // 2 :]]
    sent: list[dict] = []

    async def receive():
        if not parts:
            await asyncio.Event().wait()  # the client stays
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    given = {"host": "localhost:8000", "content_type": "application/json"} | headers
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()],
    }
    await app(scope, receive, send)
    said = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(said or b"{}")
