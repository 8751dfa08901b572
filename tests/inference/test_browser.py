"""The chat page in a browser: it works under its policy, and what it shows loads nothing."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import uvicorn
from PIL import Image

from glm4v_patched.inference.serving import page
from glm4v_patched.inference.serving.answer_queue import AnswerEnd
from glm4v_patched.inference.serving.connections import Connection, track_requests
from glm4v_patched.inference.serving.serve import allowed_hosts
from tests.helpers.serving import EchoQueue, echo_app

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is missing: nox -f tests/noxfile.py -s browser"
)
PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="a browser is missing: apt-get install chromium"
)
KEY = "secret"

# What might load something, or open a connection, without anybody's doing; {0} is a canary.
LOADS = """
![a]({0}/markdown) ![a][b] [c]({0}/link)

[b]: {0}/reference

<img src="{0}/img"> <img srcset="{0}/srcset 1x" src="data:,"> <input type=image src="{0}/input">
<picture><source srcset="{0}/source"><img src="data:,"></picture>
<div style="background: url({0}/style); list-style-image: url('{0}/list')">a</div>
<style>@import url({0}/import); @font-face {{ font-family: f; src: url({0}/font) }}
* {{ background-image: url({0}/sheet) !important; font-family: f !important }}</style>
<video src="{0}/video" poster="{0}/poster" autoplay></video>
<audio src="{0}/audio" autoplay></audio>
<svg width=9 height=9><image href="{0}/svg" width=9 height=9 /><use href="{0}/use#a" />
<foreignObject><img src="{0}/foreign"></foreignObject></svg>
<link rel=stylesheet href="{0}/stylesheet"> <link rel=prefetch href="{0}/prefetch">
<link rel=preload as=image href="{0}/preload"> <link rel=modulepreload href="{0}/module">
<link rel=preconnect href="{0}"> <link rel=icon href="{0}/icon">
<iframe src="{0}/frame"></iframe> <iframe srcdoc="<img src={0}/srcdoc>"></iframe>
<object data="{0}/object"></object> <embed src="{0}/embed">
<base href="{0}/"> <form action="{0}/form"><button autofocus>a</button></form>
<img src=x onerror="fetch('{0}/js')">
<script>fetch("{0}/script"); navigator.sendBeacon("{0}/beacon")</script>
<script src="{0}/src"></script> <a href="{0}/a" ping="{0}/ping">LINK</a>
<table background="{0}/table"><tr><td background="{0}/td">a</table>
THE END"""
# No policy stops what navigates.
NAVIGATES = '\n<meta http-equiv=refresh content="0; url={0}/refresh">'


@contextmanager
def canary() -> Iterator[tuple[str, list[str]]]:
    """A server of another origin, and what was asked of it; a connection alone counts, too."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def setup(self):
            requests.append("a connection")
            super().setup()

        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


class Answers(EchoQueue):
    """Answers with a text, in two pieces; before the second one it waits until it may go on."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__(names)
        self.text, self.may_go_on, self.stopped = "", threading.Event(), threading.Event()

    def submit(self, queued) -> None:
        self.requests.append(queued.request)
        threading.Thread(target=self._answer, args=[queued], daemon=True).start()

    def _answer(self, queued) -> None:
        queued.on_event(self.text[:5])
        while not self.may_go_on.wait(0.05):
            if queued.cancelled.is_set():
                return self.stopped.set()
        queued.on_event(self.text[5:])
        queued.on_event(AnswerEnd("stop", 1, 1))


@pytest.fixture(scope="module")
def served():
    """The address of a page, and what stands for its two models."""
    queue = Answers(("one", "models/two"))
    app = echo_app(queue, with_page=True, api_key=KEY, hosts=allowed_hosts("127.0.0.1", None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = partial(Connection, set(), 256)
        config = uvicorn.Config(track_requests(app), http=http, ws="none", log_level="critical")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", queue
        server.should_exit = server.force_exit = True
        thread.join(30)


@pytest.fixture
def queue(served) -> Answers:
    _, queue = served
    queue.requests.clear()
    queue.text = "It is <b>a</b> cat &amp; 1 < 2\n\nIndeed."
    queue.may_go_on.set()
    queue.stopped.clear()
    return queue


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def tab(browser):
    context = browser.new_context()
    context.set_default_timeout(30_000)
    tab = context.new_page()
    tab.problems = []
    tab.on("console", lambda event: event.type == "error" and tab.problems.append(event.text))
    tab.on("pageerror", lambda event: tab.problems.append(str(event)))
    yield tab
    context.close()


@pytest.fixture
def chat(served, queue, tab):
    """A tab with the page."""
    tab.goto(f"{served[0]}#key={KEY}&system=Be+brief.")
    tab.locator("h2").nth(1).wait_for()
    return tab


def answers(tab) -> list[str]:
    return tab.locator(".turn:not(.user)").all_inner_texts()


def ask(tab, text: str) -> None:
    """Ask in the page, and wait until both models have answered."""
    tab.fill("textarea", text)
    tab.press("textarea", "Enter")
    tab.locator("#stop:disabled").wait_for()


def test_both_models_are_asked_with_images_turn_after_turn(chat, queue, tmp_path):
    files = [tmp_path / "a cat & <b>.png", tmp_path / "b.tiff"]
    for number, path in enumerate(files):
        Image.new("RGB", (300 + number, 200), "orange").save(path)
    assert chat.locator("h2").all_inner_texts() == ["one", "models/two"]
    chat.set_input_files("#files", [*map(str, files)])
    chat.locator("#images img").nth(1).wait_for()
    ask(chat, "What is <i>it</i>?")
    # Text, as it was generated and typed.
    assert answers(chat) == [queue.text] * 2
    assert "What is <i>it</i>?" in chat.locator(".user").first.inner_text()
    image = chat.locator(".user img").first
    assert image.evaluate("async each => { await each.decode(); return each.naturalWidth }") == 300
    assert chat.locator(".user img").nth(1).get_attribute("alt") == "b.tiff"
    assert [wanted.model for wanted in queue.requests] == ["one", "models/two"]
    for wanted in queue.requests:
        system, question = wanted.prompt
        assert system == {"role": "system", "content": "Be brief."}
        *images, text_part = question["content"]
        assert [part["image"] for part in images] == [path.read_bytes() for path in files]
        assert text_part == {"type": "text", "text": "What is <i>it</i>?"}
    ask(chat, "And now?")
    roles = [message["role"] for message in queue.requests[-1].prompt]
    assert roles == ["system", "user", "assistant", "user"]
    assert queue.requests[-1].prompt[2]["content"] == queue.text
    chat.get_by_text("New conversation").click()
    ask(chat, "Hello")
    assert len(queue.requests[-1].prompt) == 2 and len(answers(chat)) == 2
    assert not chat.problems


def test_an_answer_grows_and_is_stopped(chat, queue):
    queue.may_go_on.clear()
    chat.fill("textarea", "What is it?")
    chat.press("textarea", "Enter")
    chat.get_by_text(queue.text[:5].strip()).wait_for()
    assert not chat.is_enabled("#send") and answers(chat) == ["It is"]
    chat.click("#stop")
    assert queue.stopped.wait(30)
    chat.get_by_text("(stopped)").wait_for()
    assert [wanted.model for wanted in queue.requests] == ["one"]
    queue.may_go_on.set()
    ask(chat, "And now?")
    # The first model had begun to answer, the second one had not.
    turns = [[message["content"] for message in wanted.prompt[1:]] for wanted in queue.requests[1:]]
    assert turns == [["What is it?", "It is", "And now?"], ["And now?"]]
    # What still comes of an answer belongs to no new conversation.
    queue.may_go_on.clear()
    chat.fill("textarea", "What is it?")
    chat.press("textarea", "Enter")
    chat.locator(".turn").nth(5).wait_for()
    chat.get_by_text("New conversation").click()
    chat.locator("#stop:disabled").wait_for()
    queue.may_go_on.set()
    ask(chat, "Hello")
    assert len(queue.requests[-2].prompt) == 2 and len(answers(chat)) == 2


def test_an_error_is_text_and_the_question_stays(chat, queue, tmp_path):
    (tmp_path / "<img src=x>.png").write_text("no image")
    chat.set_input_files("#files", str(tmp_path / "<img src=x>.png"))
    chat.locator("#images img").wait_for()
    ask(chat, "What is it?")
    assert "not an image" in chat.inner_text("#error") and not queue.requests
    assert chat.input_value("textarea") == "What is it?"
    chat.locator("#images img").click()
    ask(chat, "What is it?")
    assert not chat.is_visible("#error") and len(queue.requests) == 2
    queue.text = ""
    ask(chat, "Empty?")
    assert "(empty answer; this question is not part of the conversation)" in chat.inner_text(
        "#models"
    )
    queue.text = "a"
    ask(chat, "And now?")
    assert "Empty?" not in str(queue.requests[-1].prompt)


def test_a_wrong_key_is_refused(served, queue, tab):
    url, _ = served
    for fragment in ("", "#key=wrong", "#system=a"):
        tab.goto("about:blank")
        tab.goto(url + fragment)
        tab.get_by_text("the API key is missing or wrong").wait_for()
        assert "Open the complete address that the command printed" in tab.inner_text("#error")
        ask(tab, "What is it?")
        assert tab.locator("h2").count() == 0 and not queue.requests


def test_an_answer_loads_nothing(chat, queue):
    with canary() as (leak, requests):
        queue.text = (NAVIGATES + LOADS).format(leak).strip()
        # Of a question, <picture> would be the place of an image.
        ask(chat, queue.text.replace("\n", " ").replace("picture>", "b>"))
        chat.wait_for_timeout(1500)
        assert answers(chat) == [queue.text] * 2
        assert not requests and not chat.problems
        assert chat.locator(f'[href*="{leak}"], [src*="{leak}"]').count() == 0


def put(tab, leak: str) -> None:
    """Put all of it into the document, as if an answer were HTML."""
    tab.evaluate(
        "html => { document.body.insertAdjacentHTML('beforeend', html) }", LOADS.format(leak)
    )
    tab.wait_for_timeout(1500)


def test_the_policy_holds_where_an_answer_is_html(chat):
    """Each of two walls alone: the policy, and that texts are no HTML."""
    with canary() as (leak, requests):
        put(chat, leak)
        chat.evaluate("document.querySelector('form[action]').submit()")
        chat.wait_for_timeout(500)
        assert {*requests} <= {"a connection"}  # of <link rel=preconnect>
        assert any("Content Security Policy" in problem for problem in chat.problems)


def test_without_the_policy_it_does_load(served, queue, tab, monkeypatch):
    """The canary sees what the other tests say does not happen."""
    monkeypatch.setattr(page, "HEADERS", {})
    with canary() as (leak, requests):
        tab.goto(served[0])
        put(tab, leak)
        assert {"/img", "/srcset", "/sheet", "/stylesheet", "/import", "/video"} <= {*requests}
        assert {"/poster", "/frame", "/object", "/prefetch", "/js"} <= {*requests}
