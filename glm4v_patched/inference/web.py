"""``glm4v-patched chat --web``: a page with pictures, and with two models side by side."""

import os
import queue
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..models.find import find_source
from ..models.placement import place
from ..models.quantised_weights import check_weights
from ..terminal_text import pip_install
from .chat import check_picture, question
from .questions import Generation
from .serving.errors import ApiError
from .serving.limits import Limits
from .serving.pictures import require_size
from .serving.serve import is_installed, listen

if TYPE_CHECKING:
    from .serving.answer_queue import AnswerQueue

HOST = "127.0.0.1"
TITLE = "glm-4v"
NO_WORDS = "(the answer is empty)"
# Sharing would send a picture to another machine.
CSS = 'button[aria-label="Share"] { display: none }'


def chat_in_browser(
    models: Sequence[str],
    *,
    port: int = 7860,
    revision: str | None = None,
    device: Any = "cuda",
    weights: str | None = None,
    generation: Generation | None = None,
    system: str | None = None,
) -> None:
    """Show a page until the process is told to end; only this machine reaches it.

    Args:
        models: One or two: folders of models or of adapters, or ids of the Hub.
        port: 0 for any that is free.
        system: What the system says first.

    Raises:
        ValueError: a model or the port cannot be used, before torch is imported.
        RuntimeError: a package or a GPU is missing.
    """
    if not is_installed("gradio"):
        raise RuntimeError(f"--web needs gradio: {pip_install('gradio')}")
    check_weights(weights, device)
    placement = place(1, device)
    with listen(HOST, port) as listener:  # gradio takes no socket, only its number
        port = listener.getsockname()[1]
    bases = [find_source(model, revision, weights) for model in models]

    from ..models.loading import config_of, load
    from .answer_worker import Answerer
    from .serving.answer_queue import AnswerQueue

    generation = generation or Generation()
    engines = []
    for base in bases:
        loaded = load(base, "cpu" if placement.on_cpu else "cuda", weights)
        config = config_of(base)
        engines.append(AnswerQueue(Answerer(loaded, generation), config.seq_length))
    with tempfile.TemporaryDirectory(prefix="glm4v_patched_web") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # where uploads go, and are gone afterwards
        page = make_page(Conversations(models, engines, generation, system))
        page.launch(
            server_name=HOST,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            max_file_size=Limits().max_body_bytes,
            footer_links=[],
            **_style(),
        )
        print(f"the page is http://{HOST}:{port} (Ctrl-C ends it)", flush=True)
        try:
            threading.Event().wait()
        finally:
            for engine in engines:
                engine.stop()
            page.close(verbose=False)


class Conversations:
    """One conversation with each of the models, which are asked the same.

    Args:
        names: Of the models.
        system: What the system says first.
    """

    def __init__(
        self,
        names: Sequence[str],
        engines: "Sequence[AnswerQueue]",
        generation: Generation,
        system: str | None = None,
    ):
        self.names, self.engines, self.generation = names, engines, generation
        self.start = [{"role": "system", "content": system}] if system else []

    def ask(
        self, said: str, pictures: Sequence[str], before: Sequence[list[dict]]
    ) -> Iterator[list[list[dict]]]:
        """Ask each of the models, one after the other.

        Args:
            pictures: Paths.
            before: The messages so far, of each model; empty at the beginning.

        Yields:
            The messages of each model, with as much of the answers as there is.

        Raises:
            ValueError: a picture cannot be used, or no room is left.
        """
        for picture in pictures:
            _require_usable(picture)
        if not said.strip():
            raise ValueError("write a question" + " about the picture" * bool(pictures))
        asked = question(said, pictures)
        every = [
            [*(_answered(messages) or self.start), asked]
            for messages in before or [[]] * len(self.names)
        ]
        yield [*every]
        for number, engine in enumerate(self.engines):
            prompt = every[number]
            for text in self._stream(engine, prompt):
                every[number] = [*prompt, {"role": "assistant", "content": text}]
                yield [*every]

    def _stream(self, engine: "AnswerQueue", prompt: list[dict]) -> Iterator[str]:
        """The answer so far, again and again."""
        from .serving.answer_queue import Ask, Ended, Event, Failed, Text
        from .serving.requests import Wanted

        events: queue.Queue[Event] = queue.Queue()
        ask = Ask(Wanted(prompt, self.generation), events.put)
        engine.submit(ask)
        text = ""
        try:
            while True:
                event = events.get()
                if isinstance(event, Failed):
                    raise ValueError(str(event.error))
                if isinstance(event, Text):
                    text += event.text
                    yield text
                if isinstance(event, Ended):
                    yield text or NO_WORDS
                    return
        finally:
            ask.cancelled.set()  # of a reader that stopped


def _answered(messages: list[dict]) -> list[dict]:
    """The messages without a question at their end that was stopped, or has an empty answer."""
    if messages and messages[-1]["content"] == NO_WORDS:
        messages = messages[:-1]
    return messages[:-1] if messages and messages[-1]["role"] == "user" else messages


def make_page(conversations: Conversations) -> Any:
    """The page, as gradio's Blocks."""
    import gradio

    number = len(conversations.names)

    def ask(given: dict, before: list[list[dict]]) -> Iterator[list[Any]]:
        try:
            for every in conversations.ask(given["text"], given["files"], before):
                yield [given_back, every, *map(_shown, every)]
        except ValueError as error:
            # The question stays where it was typed.
            yield [given, before, *[_shown(messages) for messages in before or [[]] * number]]
            raise gradio.Error(str(error), title="Not answered", print_exception=False) from None

    given_back = {"text": "", "files": []}
    with gradio.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as page:
        every = gradio.State([])
        with gradio.Row():
            boxes = [
                gradio.Chatbot(label=Path(name).name or name, height="70vh", buttons=["copy"])
                for name in conversations.names
            ]
        entry = gradio.MultimodalTextbox(
            placeholder="A question, with pictures",
            show_label=False,
            sources=["upload"],
            file_types=["image"],
            file_count="multiple",
            autofocus=True,
        )
        with gradio.Row():
            stop = gradio.Button("Stop")
            new = gradio.Button("New conversation")
        # One at a time: the models share what is drawn, and the GPU.
        asking = entry.submit(
            ask,
            [entry, every],
            [entry, every, *boxes],
            api_name="ask",
            concurrency_limit=1,
            show_progress="hidden",
        )
        stop.click(None, cancels=[asking])
        gradio.on(
            [new.click, *[box.clear for box in boxes]],
            lambda: [given_back, [], *[[] for _ in boxes]],
            None,
            [entry, every, *boxes],
            cancels=[asking],
            api_name="new",
        )
    return page


def _style() -> dict[str, Any]:
    import gradio

    # Not the default fonts, which a browser would get from Google.
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    return {"theme": theme, "css": CSS}


def _shown(messages: list[dict]) -> list[dict]:
    """As the page shows them: pictures are messages of their own."""
    shown: list[dict] = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            what = {"path": part["image"]} if part["type"] == "image" else part["text"]
            shown.append({"role": message["role"], "content": what})
    return shown


def _require_usable(picture: str) -> None:
    try:
        require_size(Path(picture).read_bytes(), Limits())
    except ApiError as error:
        raise ValueError(str(error)) from None
    check_picture(picture)
