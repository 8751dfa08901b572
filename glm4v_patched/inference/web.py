"""``glm4v-patched chat --web``: a page with pictures, and with two models side by side."""

import asyncio
import os
import queue
import shutil
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps

from ..atomic import take_lock
from ..engine.options import require_packages
from ..models.find import find_source
from ..models.placement import place
from ..models.quantised_weights import check_weights
from .chat import check_picture, question
from .page_guard import PageGuard, require_guarded
from .questions import Generation
from .serving.limits import LARGEST_PICTURES, ApiError, Limits
from .serving.pictures import require_size
from .serving.requests import Wanted
from .serving.serve import hosts_of, listen

if TYPE_CHECKING:
    from .serving.answer_queue import AnswerQueue, Event

HOST = "127.0.0.1"
TITLE = "glm-4v"
NO_WORDS = "(the answer is empty)"
ANSWERING = {"role": "assistant", "content": "", "metadata": {"title": "…", "status": "pending"}}
"""A message that moves, until the answer begins."""
SHOWN_BY_BROWSERS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
PREVIEW = 1024
"""Pixels of a side, of other pictures."""
UPLOADS = "glm4v_patched_web_"
# Sharing would send a picture to another machine.
CSS = 'button[aria-label="Share"] { display: none }'


def chat_in_browser(options: Namespace) -> None:
    """Show a page of one or two models until the process is told to end; only this machine reaches
    it.
    """
    if options.image:
        raise ValueError(f"--image {options.image[0]}: with --web, pictures are given in the page")
    if options.cache == "static":
        raise ValueError(
            "--cache static with --web: CUDA graphs belong to one thread; leave it out"
        )
    generation = Generation.of(options)
    require_packages("chat --web")
    check_weights(options.weights, options.device)
    place(1, options.device)
    listener = listen(HOST, 7860 if options.port is None else options.port)
    models = [options.model] if options.other is None else [options.model, options.other]
    bases = [find_source(model, options.revision, options.weights) for model in models]

    from ..models.loading import config_of, load
    from .answer_worker import Answerer
    from .serving.answer_queue import AnswerQueue
    from .serving.connections import run_server

    queues = []
    for base in bases:
        answerer = Answerer(load(base, options.device, options.weights), generation)
        queues.append(AnswerQueue(answerer, config_of(base).seq_length))

    def stop() -> None:
        for each in queues:
            each.stop()

    with folder_of_uploads() as folder:
        # Before gradio is imported, which reads it then.
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_RUN_HISTORY": "False"}
        page = make_page(models, queues, generation, options.system)
        app = application(page, folder)
        asyncio.run(require_guarded(app))
        print(f"the page is http://{HOST}:{listener.getsockname()[1]} (Ctrl-C ends it)", flush=True)
        # Of a browser that still listens at the end, uvicorn would print a traceback.
        run_server(app, listener, on_exit=stop, log_level="critical")


@contextmanager
def folder_of_uploads() -> Iterator[str]:
    """A folder that is gone when this process ends, also when it is told to by a signal; after
    ``kill -9``, when the next one begins."""
    # Which uvicorn raises again when it has ended; run_server makes it of SIGHUP.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for left in Path(tempfile.gettempdir()).glob(f"{UPLOADS}*"):
        # The process that made it holds a lock on it; root could remove other users', too.
        with suppress(OSError), _held(left):
            if left.stat().st_uid == os.getuid():
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=UPLOADS) as folder, _held(Path(folder)):
        before, tempfile.tempdir = tempfile.tempdir, folder  # of uploads that are on their way
        try:
            yield folder
        finally:
            tempfile.tempdir = before


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a folder that is no link, or raise ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        take_lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def ask(
    queues: "Sequence[AnswerQueue]",
    generation: Generation,
    said: str,
    pictures: Sequence[str],
    before: Sequence[list[dict]],
) -> Iterator[list[list[dict]]]:
    """Ask each of several models the same, one after the other.

    Args:
        pictures: Paths.
        before: The messages so far, of each model.

    Yields:
        The messages of each model, with as much of the answers as there is.
    """
    from .serving.answer_queue import Ask, Ended

    limits = Limits()
    earlier = sum(_num_images(message) for messages in before[:1] for message in messages)
    if (number_of := earlier + len(pictures)) > limits.max_pictures:
        raise ValueError(
            f"the conversation has {number_of} images; the page takes {limits.max_pictures}: send "
            "fewer, or begin a new one"
        )
    pixels = sum(require_size(Path(picture).read_bytes(), limits) for picture in pictures)
    if pixels > (most := limits.max_pixels * LARGEST_PICTURES):
        raise ValueError(
            f"the images have {pixels / 1e6:.1f} million pixels; the page takes {most / 1e6:g} "
            "million with a question: make them smaller, the model sees far fewer"
        )
    for picture in pictures:
        check_picture(picture)
    if not said.strip():
        raise ValueError("write a question" + " about the picture" * bool(pictures))
    asked = question(said, pictures)
    every = [[*_answered(messages), asked] for messages in before]
    yield [*every]
    for number, answers in enumerate(queues):
        prompt, text = every[number], ""
        events: queue.Queue[Event] = queue.Queue()
        waiting = Ask(Wanted(prompt=prompt, generation=generation), events.put)
        answers.submit(waiting)
        try:
            while not isinstance(event := events.get(), Ended):
                if isinstance(event, ApiError):
                    raise event
                text += event
                every[number] = [*prompt, {"role": "assistant", "content": text}]
                yield [*every]
            every[number] = [*prompt, {"role": "assistant", "content": text or NO_WORDS}]
            yield [*every]
        finally:
            waiting.cancelled.set()  # of a reader that stopped


def _num_images(message: dict) -> int:
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] == "image" for part in content)


def _answered(messages: list[dict]) -> list[dict]:
    """The messages without a question at their end that was stopped, or has an empty answer."""
    if messages and messages[-1]["content"] == NO_WORDS:
        messages = messages[:-1]
    return messages[:-1] if messages and messages[-1]["role"] == "user" else messages


def make_page(
    models: Sequence[str],
    queues: "Sequence[AnswerQueue]",
    generation: Generation,
    system: str | None,
) -> Any:
    """The page, as gradio's Blocks."""
    import gradio

    begun = [{"role": "system", "content": system}] if system else []
    nothing_said: list[list[dict]] = [begun for _ in models]
    nothing_typed: dict[str, Any] = {"text": "", "files": []}

    def answer(given: dict, before: list[list[dict]]) -> Iterator[list[Any]]:
        try:
            for every in ask(queues, generation, given["text"], given["files"], before):
                yield [nothing_typed, every, *[shown(messages, waits=True) for messages in every]]
        except (ValueError, ApiError) as error:
            # The question stays where it was typed.
            yield [given, before, *map(shown, before)]
            told = escape(str(error))  # gradio shows HTML
            raise gradio.Error(told, title="Not answered", print_exception=False) from None

    def stop_asking(every: list[list[dict]]) -> Any:
        return dict(zip(boxes, map(shown, every), strict=True))

    names = [escape(Path(name).name or name) for name in models]
    with gradio.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as page:
        gradio.Markdown(f"# {TITLE}\n{' and '.join(names)}, on this machine")
        every = gradio.State(nothing_said)
        with gradio.Row():
            boxes = [
                # Side by side, or one above the other where the window is narrow.
                gradio.Chatbot(
                    label=name,
                    height="65vh",
                    min_width=320,
                    buttons=[],  # of which one would copy what escape() made of the text
                    render_markdown=False,  # it is HTML then, which escape() keeps from being any
                )
                for name in names
            ]
        entry = gradio.MultimodalTextbox(
            placeholder="A question, with pictures",
            show_label=False,
            sources=["upload"],
            file_types=["image", *sorted(Image.registered_extensions())],
            file_count="multiple",
            autofocus=True,
        )
        with gradio.Row():
            stop = gradio.Button("Stop")
            new = gradio.Button("New conversation")
        all_of_it = [entry, every, *boxes]
        # One at a time: the models share what is drawn, and the GPU.
        how = {"api_name": "ask", "concurrency_limit": 1, "show_progress": "hidden"}
        asking = entry.submit(answer, [entry, every], all_of_it, **how)
        stop.click(stop_asking, every, boxes, cancels=[asking])
        gradio.on(
            [new.click, *[box.clear for box in boxes]],
            lambda: [nothing_typed, nothing_said, *[[] for _ in models]],
            None,
            all_of_it,
            cancels=[asking],
            api_name="new",
        )
    return page.queue(max_size=Limits().most_at_once)


def application(page: Any, folder: str) -> PageGuard:
    """Return the page as an ASGI application, behind its guard.

    Args:
        folder: Where gradio puts uploads.
    """
    import fastapi
    import gradio

    # Not the default fonts, which a browser would get from Google.
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    limits = Limits()
    gradio.mount_gradio_app(
        app,
        page,
        "/",
        footer_links=[],
        max_file_size=limits.max_body_bytes,
        ssr_mode=False,  # else GRADIO_SSR_MODE starts a server of its own
        theme=theme,
        css=CSS,
    )
    hosts = hosts_of(HOST, None)
    assert hosts is not None  # it is None with a key alone
    return PageGuard(app, hosts, folder, limits)


def shown(messages: Sequence[dict], waits: bool = False) -> list[dict]:
    """As the page shows them: pictures are messages of their own.

    Args:
        waits: Whether a question at the end is being answered.
    """
    found: list[dict] = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            is_image = part["type"] == "image"
            # gradio lets HTML through, and no policy stops <link rel=preconnect>.
            what = {"path": preview(part["image"])} if is_image else escape(part["text"], False)
            found.append({"role": message["role"], "content": what})
    return [*found, ANSWERING] if waits and messages and messages[-1]["role"] == "user" else found


def preview(picture: str) -> str:
    """The path of a picture, or of a smaller copy, if it is of a kind that browsers do not show."""
    with Image.open(picture) as image:
        if image.format in SHOWN_BY_BROWSERS:
            return picture
        copy = f"{picture}.png"  # beside the upload, with which it is deleted
        if not os.path.isfile(copy):
            small = ImageOps.exif_transpose(image).convert("RGB")
            small.thumbnail((PREVIEW, PREVIEW))
            small.save(copy)
        return copy
