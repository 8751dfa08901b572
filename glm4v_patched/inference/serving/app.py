"""The ASGI application: OpenAI's API in front of an :class:`AnswerQueue`."""

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
from .answer_queue import AnswerEnd, AnswerEvent, AnswerQueue, QueuedRequest, as_api_error
from .guard import BODY_KEY, COUNT_BYTES_KEY, PAGE_PATH, Guard, error_response
from .limits import ApiError, ServerLimits, log
from .page import show_page
from .replies import ChatReply, ResponseReply, TextReply
from .requests import (
    ChatRequest,
    ParsedRequest,
    ResponseRequest,
    StoredContext,
    TextRequest,
    read_request,
    resolve_model_name,
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
    """Return the application.

    Args:
        defaults: Values of generation options that a request does not set.
        on_start: Called when the server accepts requests.
        with_page: Whether the chat page is served at ``/``.
    """
    names = [*queue.answerers]
    created = int(time.time())
    responses = ResponseStore(limits.max_body_bytes)

    def describe_model(name: str) -> dict[str, Any]:
        owner = "glm4v-patched"
        return {"id": name, "object": "model", "created": created, "owned_by": owner}

    async def health(request: Request) -> Response:
        if not queue.is_alive:
            raise ApiError(503, "the thread that answers has died: restart the server")
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [describe_model(name) for name in names]})

    async def model(request: Request) -> Response:
        return JSONResponse(describe_model(resolve_model_name(request.path_params["name"], names)))

    async def answer(request: Request) -> Response:
        request_type, reply_type = ENDPOINTS[request.url.path]
        body = request.scope[BODY_KEY]
        stored = StoredContext(responses, limits, request.scope[COUNT_BYTES_KEY])
        parsed = await asyncio.to_thread(read_request, request_type, body, names, defaults, stored)
        events, reply = _answer_events(queue, request, parsed), reply_type(parsed)

        async def save(text: str, end: AnswerEnd) -> dict[str, Any]:
            response = reply.full_response(text, end)
            if parsed.store:
                await asyncio.to_thread(responses.save, parsed.items, response)
            return response

        if parsed.stream:
            first = await anext(events)  # an error before the first text can still set the status
            return StreamingResponse(
                _stream(reply, first, events, request.url.path, save),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        *texts, end = [event async for event in events]
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
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _handle_error),
        lifespan=lifespan,
    )
    # The router's redirects would lead clients from an https proxy to http.
    app.router.redirect_slashes = False
    return app


async def _answer_events(
    queue: AnswerQueue, request: Request, parsed: ParsedRequest
) -> AsyncIterator[Any]:
    """Yield an answer's texts and end; cancel the answer when the client disconnects."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[AnswerEvent] = asyncio.Queue()

    def on_event(event: AnswerEvent) -> None:
        with suppress(RuntimeError):  # at shutdown, the event loop may end before the queue does
            loop.call_soon_threadsafe(events.put_nowait, event)

    async def watch_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        events.put_nowait(ApiError(499, "the client disconnected"))

    queued = QueuedRequest(parsed, on_event)
    watcher = asyncio.create_task(watch_disconnect())
    queue.submit(queued)
    try:
        while True:
            event = await events.get()
            if isinstance(event, ApiError):
                raise event
            yield event
            if isinstance(event, AnswerEnd):
                return
    finally:
        queued.cancelled.set()
        watcher.cancel()


async def _stream(
    reply: TextReply,
    event: AnswerEvent,
    events: AsyncIterator[Any],
    path: str,
    save: Callable[[str, AnswerEnd], Awaitable[object]],
) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer.

    Args:
        event: The answer's first event.
        events: The answer's other events.
        save: Called with the complete text and the end.
    """
    text = ""
    try:
        for chunk in reply.begin():
            yield chunk
        while not isinstance(event, AnswerEnd):
            text += str(event)
            yield reply.more(str(event))
            event = await anext(events)
        await save(text, event)  # before the client gets the end and may refer to the response's id
        for chunk in reply.end(text, event):
            yield chunk
    except ApiError as error:  # the HTTP status has been sent, so the error is an event
        log(path, error)
        for chunk in reply.failed(error):
            yield chunk
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # a generator


async def _handle_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(
            error.status_code,
            f"{request.method} {request.url.path}: {error.detail}; this server has POST "
            f"{', '.join(ENDPOINTS)}, GET /v1/models and GET /health",
        )
    return error_response(request.url.path, as_api_error(error))
