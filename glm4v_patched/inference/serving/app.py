"""The application: OpenAI's API on an :class:`AnswerQueue`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..questions import Generation
from .answer_queue import AnswerQueue, Ask, Ended, Event, Failed, Started, Text
from .errors import ApiError, log
from .guard import BODY, Guard
from .limits import Limits
from .replies import ChatReply, Reply, ResponseReply, TextReply, event
from .requests import ChatRequest, ResponseRequest, TextRequest, model_called, read_request
from .requests import Request as Asked

ENDPOINTS: dict[str, tuple[type[Asked], type[Reply]]] = {
    "/v1/chat/completions": (ChatRequest, ChatReply),
    "/v1/completions": (TextRequest, TextReply),
    "/v1/responses": (ResponseRequest, ResponseReply),
}


def make_app(
    engine: AnswerQueue,
    names: Sequence[str],
    defaults: Generation,
    limits: Limits,
    on_start: Callable[[], object] = lambda: None,
) -> Starlette:
    """Args:
    names: Of the models, for clients.
    defaults: What is generated where a request does not say.
    on_start: Called when requests can be taken.
    """
    created = int(time.time())

    def described(name: str) -> dict[str, Any]:
        owner = "glm4v-patched"
        return {"id": name, "object": "model", "created": created, "owned_by": owner}

    async def health(request: Request) -> Response:
        if not engine.is_alive:
            raise ApiError(503, "the thread that answers has ended: start the server again")
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described(name) for name in names]})

    async def model(request: Request) -> Response:
        return JSONResponse(described(model_called(request.path_params["name"], names)))

    async def answer(request: Request) -> Response:
        kind, form = ENDPOINTS[request.url.path]
        body = request.scope[BODY]
        wanted = await asyncio.to_thread(read_request, kind, body, names, defaults)
        events = _events(engine, request, Ask(wanted, lambda event: None))
        first = await anext(events)
        assert isinstance(first, Started)
        reply = form(wanted.model, first.tokens, wanted.include_usage)
        if wanted.stream:
            return StreamingResponse(
                _stream(reply, events, request.url.path),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        text, end = "", None
        async for each in events:
            if isinstance(each, Text):
                text += each.text
            elif isinstance(each, Ended):
                end = each
        assert end is not None, "an answer ends with Ended, or raises"
        return JSONResponse(reply.whole(text, end))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        on_start()
        yield
        engine.stop()
        await asyncio.to_thread(engine.join)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            *[Route(path, answer, methods=["POST"]) for path in ENDPOINTS],
        ],
        middleware=[Middleware(Guard, limits=limits)],
        exception_handlers={ApiError: _told, HTTPException: _told_by_starlette, Exception: _failed},
        lifespan=lifespan,
    )


async def _events(engine: AnswerQueue, request: Request, ask: Ask) -> AsyncIterator[Event]:
    """What happens to a request, which is cancelled when nobody waits for it any more.

    Raises:
        ApiError: it failed, or the client is gone.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def tell(event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended before the engine
            loop.call_soon_threadsafe(events.put_nowait, event)

    async def tell_of_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        events.put_nowait(Failed(ApiError(499, "the client is gone")))

    ask.tell = tell
    gone = asyncio.create_task(tell_of_end())
    engine.submit(ask)
    try:
        while True:
            event = await events.get()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Ended):
                return
    finally:
        ask.cancelled.set()
        gone.cancel()


async def _stream(reply: Reply, events: AsyncIterator[Event], path: str) -> AsyncIterator[str]:
    """Server-sent events."""
    text = ""
    try:
        for each in reply.begin():
            yield each
        async for found in events:
            if isinstance(found, Text):
                text += found.text
                yield reply.more(found.text)
            elif isinstance(found, Ended):
                for each in reply.end(text, found):
                    yield each
    except ApiError as error:  # the status was sent long ago
        log(path, error)
        yield event(error.body())
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # a generator


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    log(request.url.path, error)
    return JSONResponse(error.body(), error.status)


async def _told_by_starlette(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail}; this server has POST "
    told += f"{', '.join(ENDPOINTS)}, GET /v1/models and GET /health"
    return await _told(request, ApiError(error.status_code, told))


async def _failed(request: Request, error: Exception) -> Response:
    return await _told(request, ApiError(500, f"{type(error).__name__}: {error}"))
