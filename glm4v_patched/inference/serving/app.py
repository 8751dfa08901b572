"""The application: OpenAI's API on an :class:`AnswerQueue`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..questions import Generation
from .answer_queue import AnswerQueue, Ask, AnswerEnd, Event, as_api_error
from .guard import BODY, HOLD, PAGE_PATH, Guard, refusal
from .limits import ApiError, ServerLimits, log
from .page import show_page
from .replies import ChatReply, ResponseReply, TextReply
from .requests import (
    ChatRequest,
    ResponseRequest,
    Stored,
    TextRequest,
    Wanted,
    model_called,
    read_request,
)
from .response_store import ResponseStore

ENDPOINTS: dict[str, tuple[type, type[TextReply]]] = {
    "/v1/chat/completions": (ChatRequest, ChatReply),
    "/v1/completions": (TextRequest, TextReply),
    "/v1/responses": (ResponseRequest, ResponseReply),
}


def make_app(
    queue: AnswerQueue,
    defaults: Generation,
    limits: ServerLimits,
    on_start: Callable[[], object],
    with_page: bool = False,
) -> Starlette:
    """Args:
    defaults: What is generated where a request does not say.
    on_start: Called when requests can be taken.
    with_page: Whether a page is shown at ``/``.
    """
    names = [*queue.answerers]
    created = int(time.time())
    responses = ResponseStore(limits.max_body_bytes)

    def described(name: str) -> dict[str, Any]:
        owner = "glm4v-patched"
        return {"id": name, "object": "model", "created": created, "owned_by": owner}

    async def health(request: Request) -> Response:
        if not queue.is_alive:
            raise ApiError(503, "the thread that answers has ended: start the server again")
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described(name) for name in names]})

    async def model(request: Request) -> Response:
        return JSONResponse(described(model_called(request.path_params["name"], names)))

    async def answer(request: Request) -> Response:
        kind, form = ENDPOINTS[request.url.path]
        body, stored = request.scope[BODY], Stored(responses, limits, request.scope[HOLD])
        wanted = await asyncio.to_thread(read_request, kind, body, names, defaults, stored)
        events, reply = _events(queue, request, wanted), form(wanted)

        async def save(text: str, end: AnswerEnd) -> dict[str, Any]:
            response = reply.whole(text, end)
            if wanted.store:
                await asyncio.to_thread(responses.save, wanted.items, response)
            return response

        if wanted.stream:
            first = await anext(events)  # or a refusal, with a status of its own
            return StreamingResponse(
                _stream(reply, first, events, request.url.path, save),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        *texts, end = [each async for each in events]
        return JSONResponse(await save("".join(map(str, texts)), end))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        on_start()
        yield
        queue.stop()
        await asyncio.to_thread(queue.join)

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            *[Route(path, answer, methods=["POST"]) for path in ENDPOINTS],
            *([Route(PAGE_PATH, show_page)] if with_page else []),
        ],
        middleware=[Middleware(Guard, limits=limits)],
        exception_handlers={ApiError: _told, HTTPException: _told, Exception: _told},
        lifespan=lifespan,
    )
    # Its redirects would lead from a proxy's https to http.
    app.router.redirect_slashes = False
    return app


async def _events(queue: AnswerQueue, request: Request, wanted: Wanted) -> AsyncIterator[Any]:
    """The texts of an answer, and its end; it is cancelled when nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def tell(event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended before the queue
            loop.call_soon_threadsafe(events.put_nowait, event)

    async def tell_of_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        events.put_nowait(ApiError(499, "the client is gone"))

    ask = Ask(wanted, tell)
    gone = asyncio.create_task(tell_of_end())
    queue.submit(ask)
    try:
        while True:
            event = await events.get()
            if isinstance(event, ApiError):
                raise event
            yield event
            if isinstance(event, AnswerEnd):
                return
    finally:
        ask.cancelled.set()
        gone.cancel()


async def _stream(
    reply: TextReply,
    found: Event,
    events: AsyncIterator[Any],
    path: str,
    save: Callable[[str, AnswerEnd], Awaitable[object]],
) -> AsyncIterator[str]:
    """Server-sent events, of which ``found`` is the first."""
    text = ""
    try:
        for each in reply.begin():
            yield each
        while not isinstance(found, AnswerEnd):
            text += str(found)
            yield reply.more(str(found))
            found = await anext(events)
        await save(text, found)  # before the client knows its id as that of a complete one
        for each in reply.end(text, found):
            yield each
    except ApiError as error:  # the status was sent long ago
        log(path, error)
        for each in reply.failed(error):
            yield each
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # a generator


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        told = f"{request.method} {request.url.path}: {error.detail}; this server has POST "
        told += f"{', '.join(ENDPOINTS)}, GET /v1/models and GET /health"
        error = ApiError(error.status_code, told)
    return refusal(request.url.path, as_api_error(error))
