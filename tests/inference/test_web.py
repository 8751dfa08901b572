"""``glm4v-patched chat --web``: the conversations, and the page in a browser without a window."""

import re
import shutil
import signal
import sys

import pytest
from PIL import Image

from glm4v_patched.cli import main
from glm4v_patched.inference import web
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving.answer_queue import AnswerQueue
from glm4v_patched.inference.web import Conversations
from glm4v_patched.models import loading
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load
from tests.helpers.processes import serving

NEW = 6
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def answerers(files) -> list[Answerer]:
    sources = [str(files.model), str(files.adapters)]
    generation = Generation(max_new_tokens=NEW)
    return [Answerer(load(find_source(source), "cpu"), generation) for source in sources]


@pytest.fixture(scope="module")
def conversations(answerers):
    engines = [AnswerQueue(answerer, 1024, log=lambda line: None) for answerer in answerers]
    yield Conversations(["model", "adapters"], engines, Generation(max_new_tokens=NEW))
    for engine in engines:
        engine.stop()


@pytest.fixture
def cat(tmp_path) -> str:
    Image.new("RGB", (56, 56), "orange").save(tmp_path / "cat.png")
    return str(tmp_path / "cat.png")


def test_both_models_are_asked_the_same_turn_after_turn(conversations, answerers, cat):
    picture = {"type": "image", "image": cat}
    asked = {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}
    *growing, every = conversations.ask("What is it?", [cat], [])
    assert growing[0] == [[asked], [asked]] and len(growing) > 4
    *_, second = conversations.ask("And now?", [], every)
    for answerer, messages in zip(answerers, second, strict=True):
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2
        for end in (1, 3):
            [alone] = answerer.answer([messages[:end]])
            assert messages[end]["content"] == alone.text
    assert second[0][1] != second[1][1]


def test_a_question_that_was_stopped_is_not_asked_again(conversations, answerers):
    stopped = conversations.ask("What is it?", [], [])
    next(stopped)
    *_, every = conversations.ask("And now?", [], next(stopped))
    stopped.close()
    # The first model had begun to answer, the second one had not.
    roles = [[message["role"] for message in messages] for messages in every]
    assert roles == [["user", "assistant"] * 2, ["user", "assistant"]]


def test_an_empty_answer_is_no_turn(conversations):
    before = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": web.NO_WORDS}]]
    first = next(conversations.ask("b", [], before * 2))
    assert first == [[{"role": "user", "content": "b"}]] * 2


@pytest.mark.parametrize(
    ("said", "picture", "message"),
    [
        ("", "cat.png", "write a question about the picture"),
        ("a", "text.png", "are no picture"),
        ("a", "large.png", r"12,500 x 8,000 pixels"),
        ("word " * 3000, "cat.png", "of the model's 1024 positions"),
    ],
)
def test_what_cannot_be_asked_is_told(conversations, cat, tmp_path, said, picture, message):
    (tmp_path / "text.png").write_text("no picture")
    if picture == "large.png":
        Image.new("1", (12_500, 8_000)).save(tmp_path / picture)
    with pytest.raises(ValueError, match=message):
        list(conversations.ask(said, [str(tmp_path / picture)], []))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--web"], "--web needs gradio: "),
        (["other"], "a second model (other) is for the page: add --web"),
        (["--port", "1"], "--port (1) is for the page"),
        (["--web", "--image", "a.png"], "with --web, pictures are given in the page"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(files, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(web, "is_installed", lambda name: False)
    assert main(["chat", str(files.model), *arguments, "--device", "cpu"]) == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def page(files, tmp_path):
    """The URL of the page of a model and of adapters on it."""
    pytest.importorskip("gradio", reason='gradio is missing: pip install -e ".[web]"')
    command = [sys.executable, "-m", "glm4v_patched", "chat", str(files.model), str(files.adapters)]
    command += ["--web", "--port", "0", "--device", "cpu", "--max-new-tokens", str(NEW)]
    log = tmp_path / "page.log"
    with serving(command, r"the page is (\S+)", log) as (url, process):
        yield url
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT, log.read_text()[-4000:]


@pytest.mark.slow
def test_two_models_are_asked_in_a_browser(page, answerers, cat):
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing: pip install playwright"
    )
    if BROWSER is None:
        pytest.skip("no browser: apt-get install chromium")
    prompt = {"role": "user", "image": cat, "content": "What is it?"}
    alone = [answerer.answer([[prompt]])[0] for answerer in answerers]
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page()
        hosts = set()
        tab.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        tab.goto(page)
        tab.wait_for_selector("textarea")
        tab.set_input_files("input[type=file]", cat)
        tab.wait_for_selector("button[aria-label='Remove file'], .thumbnail-item")
        ask(tab, "What is it?", answers=2)
        # Markdown and fonts change some characters.
        shown = tab.locator(".message.bot").all_inner_texts()
        for text, answer in zip(shown, alone, strict=True):
            assert letters(text) == letters(answer.text)
        assert tab.locator(".user img").count() == 2
        ask(tab, "And now?", answers=4)
        tab.get_by_text("New conversation").click()
        tab.wait_for_function("document.querySelectorAll('.message.bot').length == 0")
        tab.fill("textarea", "   ")
        tab.keyboard.press("Enter")
        tab.wait_for_selector("text=write a question")
        browser.close()
    # Nothing is asked of other machines.
    assert hosts == {page.split("/")[2]}


def ask(tab, text: str, answers: int) -> None:
    tab.fill("textarea", text)
    tab.keyboard.press("Enter")
    tab.wait_for_function(
        f"document.querySelectorAll('.message.bot').length == {answers} && "
        "!document.querySelector('button[aria-label=Stop], .generating, .pending')",
        timeout=60_000,
    )
    tab.wait_for_timeout(1000)  # for the last words


def letters(text: str) -> str:
    return "".join(re.findall(r"[A-Za-z]", text))
