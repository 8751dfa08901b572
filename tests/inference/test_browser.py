"""The chat page in a browser: it works under its policy, and what it shows loads nothing.

``nox -f tests/noxfile.py -s browser`` runs this with gradio's oldest and newest release.
"""

import asyncio
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

from glm4v_patched.inference import page_guard, web
from glm4v_patched.inference.page_guard import PageGuard
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving.answer_queue import Ended
from glm4v_patched.inference.serving.connections import MOST_CONNECTIONS, Connection

gradio = pytest.importorskip("gradio", reason='gradio is missing: pip install -e ".[web]"')
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is missing: nox -f tests/noxfile.py -s browser"
)
PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="a browser is missing: apt-get install chromium"
)

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
<video autoplay><source src="{0}/media"><track default src="{0}/track"></video>
<svg width=9 height=9><image href="{0}/svg" width=9 height=9 /><use href="{0}/use#a" />
<feImage href="{0}/fe" /><foreignObject><img src="{0}/foreign"></foreignObject></svg>
<link rel=stylesheet href="{0}/stylesheet"> <link rel=prefetch href="{0}/prefetch">
<link rel=preload as=image href="{0}/preload"> <link rel=modulepreload href="{0}/module">
<link rel=preconnect href="{0}"> <link rel=dns-prefetch href="{0}"> <link rel=icon href="{0}/icon">
<link rel=manifest href="{0}/manifest"> <link rel=prerender href="{0}/prerender">
<iframe src="{0}/frame"></iframe> <iframe srcdoc="<img src={0}/srcdoc>"></iframe>
<object data="{0}/object"></object> <embed src="{0}/embed"> <frameset><frame src="{0}/f"></frameset>
<meta http-equiv=refresh content="0; url={0}/refresh"> <base href="{0}/"> <body background="{0}/b">
<form action="{0}/form"><button autofocus>a</button></form> <img src=x onerror="fetch('{0}/js')">
<script>fetch("{0}/script"); location = "{0}/location"; navigator.sendBeacon("{0}/beacon")</script>
<script src="{0}/src"></script> <a href="{0}/a" ping="{0}/ping">LINK</a>
<table background="{0}/table"><tr><td background="{0}/td">a</table> <math href="{0}/math">a</math>
THE END
"""
# Without what navigates: no policy stops it, and the sanitizers of older gradios let it pass.
[REFRESH] = [line for line in LOADS.splitlines() if "<meta http-equiv=refresh" in line]
STAYS = LOADS.replace(REFRESH, REFRESH.partition("> ")[2])


@contextmanager
def canary() -> Iterator[tuple[str, list[str]]]:
    """A server of another origin, and what was asked of it; a connection alone counts, too."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def setup(self):
            asked.append("a connection")
            super().setup()

        def do_GET(self):
            asked.append(self.path)
            if self.headers["host"] not in self.headers.get("referer", self.headers["host"]):
                asked.append("a referrer")
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


class Answers:
    """Stands for a queue before a model: keeps what is asked, and answers with a text."""

    def __init__(self):
        self.asked, self.text = [], ""

    def submit(self, ask):
        self.asked.append(ask.wanted.prompt)
        for part in (self.text[:5], self.text[5:]):
            ask.tell(part)
        ask.tell(Ended("stop", 1, 1))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The URL of a page, and what stands for its two models."""
    folder = str(tmp_path_factory.mktemp("uploads"))
    queues = [Answers(), Answers()]
    with (
        pytest.MonkeyPatch.context() as patched,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        patched.setenv("GRADIO_TEMP_DIR", folder)
        page = web.make_page(["one", "two"], queues, Generation(max_new_tokens=6), None)
        app = web.application(page, folder)
        asyncio.run(page_guard.require_guarded(app))
        http = partial(Connection, most=MOST_CONNECTIONS)
        options = {"http": http, "ws": "none", "lifespan": "on", "log_level": "critical"}
        server = uvicorn.Server(uvicorn.Config(app, **options))
        thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", queues
        server.should_exit = server.force_exit = True
        thread.join(30)


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
    page = context.new_page()
    page.problems = []
    page.on("console", lambda each: each.type == "error" and page.problems.append(each.text))
    page.on("pageerror", lambda each: page.problems.append(str(each)))
    yield page
    context.close()


def ask(tab, text: str, answer: str) -> None:
    """Ask in the page, and wait until both models have answered."""
    tab.fill("textarea", text)
    tab.press("textarea", "Enter")
    for number in (0, 1):
        tab.locator("[data-testid=bot]").filter(has_text=answer).nth(number).wait_for(
            state="attached"
        )


def unexpected(tab) -> list[str]:
    # gradio before 6.18 or so wants a script of a CDN, for pages in frames.
    return [each for each in tab.problems if "iframeResizer" not in each]


def test_the_page_works_under_its_policy(served, tab, tmp_path):
    url, queues = served
    for queue in queues:
        queue.text, queue.asked = "It is <b>a</b> cat &amp; 1 < 2\n\nIndeed.", []
    Image.new("RGB", (300, 200), "orange").save(tmp_path / "a cat & <b>.tiff")
    tab.goto(url)
    tab.set_input_files("input[type=file]", str(tmp_path / "a cat & <b>.tiff"))
    tab.locator("[aria-label='Remove this file'], .thumbnail-item").first.wait_for()
    ask(tab, "What is <i>it</i>?", "Indeed.")
    # Text, as it was generated and typed.
    assert tab.locator("[data-testid=bot]").first.inner_text() == queues[0].text
    assert tab.locator("[data-testid=user]").last.inner_text() == "What is <i>it</i>?"
    image = tab.locator("[data-testid=user] img").first
    image.wait_for()
    assert image.evaluate("async each => { await each.decode(); return each.naturalWidth }") == 300
    assert [len(queue.asked) for queue in queues] == [1, 1]
    assert queues[1].asked[0][0]["content"][0]["type"] == "image"
    # An error is text, too.
    tab.fill("textarea", " ")
    tab.press("textarea", "Enter")
    tab.get_by_text("write a question").wait_for()
    tab.get_by_text("New conversation").click()
    tab.locator("[data-testid=bot]").first.wait_for(state="detached")
    assert not unexpected(tab)


def shown(served, tab, answer: str) -> None:
    """Show an answer that would load much."""
    url, queues = served
    for queue in queues:
        queue.text = answer
    tab.goto(url)
    ask(tab, "What is it?", "THE END")
    tab.wait_for_timeout(1500)


def test_an_answer_loads_nothing(served, tab):
    with canary() as (leak, asked):
        shown(served, tab, LOADS.format(leak))
        assert tab.locator(f'[href*="{leak}"], [src*="{leak}"]').count() == 0
        assert not asked and not unexpected(tab)
        # Also with what a question says.
        ask(tab, LOADS.format(leak).replace("\n", " "), "THE END")
        assert not asked and tab.locator(f'[href*="{leak}"], [src*="{leak}"]').count() == 0


def test_the_policy_holds_where_an_answer_is_html(served, tab, monkeypatch):
    """Each of two walls alone: the policy, and that texts are no HTML."""
    with canary() as (leak, asked):
        monkeypatch.setattr(web, "escape", lambda text, *_: text)
        shown(served, tab, STAYS.format(leak))
        requests = [each for each in asked if each != "a connection"]
        assert not requests and any("Content Security Policy" in each for each in tab.problems)


def put(tab, leak: str) -> None:
    """Put all of it into the document itself, past gradio's sanitizer, but what navigates."""
    content = STAYS.format(leak)
    tab.evaluate("html => { document.body.insertAdjacentHTML('beforeend', html) }", content)
    tab.wait_for_timeout(1500)


def test_the_policy_holds_past_the_sanitizer(served, tab):
    url, _ = served
    with canary() as (leak, asked):
        tab.goto(url)
        tab.locator("textarea").wait_for()
        put(tab, leak)
        tab.evaluate("document.querySelector('form[action]').submit()")
        tab.wait_for_timeout(500)
        assert {*asked} <= {"a connection"}  # of <link rel=preconnect>
        tab.evaluate("[...document.querySelectorAll('a[ping]')].at(-1).click()")
        tab.wait_for_url(f"{leak}/a")
        assert "/a" in asked and {*asked} <= {"a connection", "/a", "/favicon.ico"}


def test_without_them_an_answer_does_load(served, tab, monkeypatch):
    """The canary sees what the other tests say does not happen."""
    with canary() as (leak, asked):
        monkeypatch.setattr(web, "escape", lambda text, *_: text)
        monkeypatch.setattr(PageGuard, "_secured", lambda self, scope, send: send)
        shown(served, tab, STAYS.format(leak))
        assert {"/img", "/srcset", "a referrer"} <= {*asked}
        put(tab, leak)
        more = {"/sheet", "/stylesheet", "/import", "/video", "/poster", "/frame", "/object"}
        assert more | {"/prefetch"} <= {*asked}
        tab.evaluate("[...document.querySelectorAll('a[ping]')].at(-1).click()")
        tab.wait_for_url(f"{leak}/a")
        assert "/ping" in asked


def test_no_other_page_shows_or_reads_it(served, tab):
    url, _ = served
    tab.goto(url)
    tab.locator("textarea").wait_for()
    with canary() as (other, _):
        page = tab.context.new_page()
        page.goto(other)
        page.set_content(f'<iframe src="{url}"></iframe>')
        page.wait_for_timeout(1000)
        [frame] = page.frames[1:]
        assert "gradio" not in frame.content()
        for options in ("{}", "{mode: 'no-cors'}", "{method: 'POST', mode: 'no-cors'}"):
            read = f"fetch('{url}/theme.css', {options}).then(() => 'read', () => 'refused')"
            assert page.evaluate(read) == "refused"
