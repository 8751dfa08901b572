"""The application: OpenAI's chat completions and list of models, on an :class:`AnswerQueue`."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...data.messages import as_words
from ..questions import Generation
from .answer_queue import AnswerQueue, Ask, Ended, Event, Failed, Started, Text
from .errors import ApiError
from .guard import BODY, Guard
from .limits import Limits
from .requests import Wanted, read_request

SECONDS_BETWEEN_LOOKS = 0.1
"""At whether the client is still there."""


def make_app(
    engine: AnswerQueue,
    name: str,
    defaults: Generation,
    limits: Limits,
    on_start: Callable[[], object] = lambda: None,
) -> Starlette:
    """Args:
    name: Of the model, for clients.
    defaults: What is generated where a request does not say.
    on_start: Called when requests can be taken.
    """
    server = _Server(engine, name, defaults, limits)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        on_start()
        yield
        engine.stop()
        await asyncio.to_thread(engine.join)

    return Starlette(
        routes=[
            Route("/health", server.health),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/v1/chat/completions", server.chat_completions, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, limits=limits)],
        exception_handlers={ApiError: _told, HTTPException: _told_by_starlette, Exception: _failed},
        lifespan=lifespan,
    )


class _Server:
    def __init__(self, engine: AnswerQueue, name: str, defaults: Generation, limits: Limits):
        self.engine, self.name, self.defaults, self.limits = engine, name, defaults, limits
        self.created = int(time.time())
        # One for each: where pictures are fetched, slow hosts keep no other request waiting.
        self.readers = ThreadPoolExecutor(limits.most_at_once, "reader")

    async def health(self, request: Request) -> Response:
        if not self.engine.is_alive:
            raise ApiError(503, "the thread that answers has ended: start the server again")
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["name"]
        if asked != self.name:
            told = f"there is no model {as_words(asked)}; this server has {as_words(self.name)}"
            raise ApiError(404, told, "model", "model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        owner = "glm4v-patched"
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": owner}

    async def chat_completions(self, request: Request) -> Response:
        body = request.scope[BODY]
        # In a thread: pictures are decoded from base64, and perhaps fetched.
        given = (body, self.name, self.defaults, self.limits)
        loop = asyncio.get_running_loop()
        wanted = await loop.run_in_executor(self.readers, read_request, *given)
        events = self._events(request, wanted)
        first = await anext(events)
        assert isinstance(first, Started)
        reply = _Reply(self.name, first.tokens)
        if wanted.stream:
            return StreamingResponse(
                _stream(reply, events, wanted.include_usage),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        texts: list[str] = []
        async for event in events:
            if isinstance(event, Text):
                texts.append(event.text)
            else:
                assert isinstance(event, Ended)
                return JSONResponse(reply.whole("".join(texts), event))
        raise AssertionError("an answer ends with Ended, or raises")

    async def _events(self, request: Request, wanted: Wanted) -> AsyncIterator[Event]:
        """What happens to a request, which is cancelled when nobody waits for it any more.

        Raises:
            ApiError: it failed, or the client is gone.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        ask = Ask(wanted, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        self.engine.submit(ask)
        looked = loop.time()
        try:
            while True:
                event = None
                with suppress(TimeoutError):
                    event = await asyncio.wait_for(events.get(), SECONDS_BETWEEN_LOOKS)
                # Of a whole answer nothing is sent meanwhile, and its words may come fast.
                if loop.time() - looked >= SECONDS_BETWEEN_LOOKS:
                    await self._require_both_there(request)
                    looked = loop.time()
                if isinstance(event, Failed):
                    raise event.error
                if event is not None:
                    yield event
                if isinstance(event, Ended):
                    return
        finally:
            ask.cancelled.set()

    async def _require_both_there(self, request: Request) -> None:
        if await request.is_disconnected():
            raise ApiError(499, "the client is gone")
        if not self.engine.is_alive:
            raise ApiError(503, "the server is being stopped")


class _Reply:
    """The JSON of an answer, whole or in chunks."""

    def __init__(self, model: str, prompt_tokens: int):
        self.prompt_tokens = prompt_tokens
        self.head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, end: Ended) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end.reason}
        usage = {"usage": self.usage(end)}
        return self.head | {"object": "chat.completion", "choices": [choice]} | usage

    def chunk(self, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self.head | {"object": "chat.completion.chunk", "choices": [choice]}

    def usage(self, end: Ended) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": end.tokens,
            "total_tokens": self.prompt_tokens + end.tokens,
        }


async def _stream(
    reply: _Reply, events: AsyncIterator[Event], include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events."""
    try:
        yield _event(reply.chunk({"role": "assistant", "content": ""}))
        async for event in events:
            if isinstance(event, Text):
                yield _event(reply.chunk({"content": event.text}))
            elif isinstance(event, Ended):
                yield _event(reply.chunk({}, event.reason))
                if include_usage:
                    yield _event(reply.chunk({}) | {"choices": [], "usage": reply.usage(event)})
                yield "data: [DONE]\n\n"
    except ApiError as error:  # the status was sent long ago
        yield _event(error.body())
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # a generator


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _told_by_starlette(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail}"
    told += "; this server has POST /v1/chat/completions, GET /v1/models and GET /health"
    return JSONResponse(ApiError(error.status_code, told).body(), error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, f"{type(error).__name__}: {error}").body(), 500)
