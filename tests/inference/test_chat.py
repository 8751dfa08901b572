"""``glm4v-patched chat``: turns, pictures in any of them, an end; and its page."""

import html
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from glm4v_patched.cli import main
from glm4v_patched.inference import web
from glm4v_patched.inference.answer_worker import Answer, Answerer, positions_of
from glm4v_patched.inference.chat import Chat
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving.answer_queue import AnswerQueue
from glm4v_patched.inference.serving.limits import ApiError
from glm4v_patched.inference.web import ANSWERING, preview, shown
from tests.helpers.processes import ROOT, cpu_environment, heed_signals, serving

NEW = 6


@pytest.fixture
def cat(tmp_path) -> str:
    Image.new("RGB", (56, 56), "orange").save(tmp_path / "my cat.png")
    return str(tmp_path / "my cat.png")


@pytest.fixture
def asked(answerer, monkeypatch) -> list:
    """What the model is asked; its answers are numbers."""
    prompts: list = []

    def answer(given, number, streamer):
        assert number == len(prompts)  # each turn draws its own tokens
        prompts.append(given[0])
        streamer.on_finalized_text(f" {len(prompts)}\x1b[31m", stream_end=True)
        return [Answer(str(len(prompts)), "stop")]

    monkeypatch.setattr(answerer, "answer", answer)
    return prompts


def talk(answerer, lines: str, **options) -> str:
    output = io.StringIO()
    Chat(answerer, 1024, output=output, **options).run(io.StringIO(lines))
    return output.getvalue()


def pictures(prompt: list[dict]) -> list[int]:
    """Pictures in each message."""
    contents = [message["content"] for message in prompt]
    return [sum(p["type"] == "image" for p in c) if isinstance(c, list) else 0 for c in contents]


def test_turns_are_kept_until_reset_and_pictures_belong_to_one(answerer, asked, cat):
    typed = f"What is it?\n\nAnd this?\n/image {cat}\n/image '{cat}'\nAnd these?\n/image {cat}\n"
    typed += "/reset\nHello\n/exit\nnever asked\n"
    told = talk(answerer, typed, images=[cat], system="Be brief.")
    # What a terminal would obey is shown.
    assert told == "".join(f"{number}\\x1b[31m\n" for number in (1, 2, 3, 4))
    roles = [message["role"] for message in asked[2]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in asked[2] if m["role"] == "assistant"] == ["1", "2"]
    assert pictures(asked[2]) == [0, 1, 0, 0, 0, 2]
    system = {"role": "system", "content": "Be brief."}
    assert asked[3] == [system, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_an_answer_is_streamed_word_for_word_and_all_pictures_are_seen(
    answerer, cat, tmp_path, monkeypatch, cache
):
    Image.new("RGB", (56, 56), "blue").save(tmp_path / "blue.png")
    said: list[str] = []
    loaded = answerer.model, answerer.processor
    streaming = Answerer(loaded, answerer.generation, cache)
    conversation = Chat(streaming, 1024, images=[cat, str(tmp_path / "blue.png")])
    monkeypatch.setattr(conversation, "_say", said.append)
    conversation.ask("Which colours?")
    prompt = conversation.messages[:-1]
    [answer] = answerer.answer([prompt])
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.text}
    # The tokenizer leaves white space before the answer away, and so does the stream.
    *told, cut = said
    assert "".join(told).strip() == answer.text and len(told) > 1
    assert cut == " (cut at --max-new-tokens 6)\n"
    assert len(answerer.encode([prompt])["pixel_values"]) == 2


def test_a_question_is_asked_if_its_answer_just_fits_and_refused_with_a_position_less(
    answerer, asked
):
    [taken] = positions_of(answerer.processor, [[{"role": "user", "content": "Hello"}]])
    limit = taken + answerer.generation.max_new_tokens
    with pytest.raises(ValueError, match=f"of the model's {limit - 1:,} positions"):
        Chat(answerer, limit - 1, output=io.StringIO()).ask("Hello")
    assert asked == []
    Chat(answerer, limit, output=io.StringIO()).ask("Hello")
    assert len(asked) == 1


def test_piped_mistakes_end_it_with_their_line(answerer, asked, words):
    for lines, named in (
        ("a\n/image none.png\nb\n", "line 2 of the input: the image none.png"),
        ("/image\n", "line 1 of the input: /image"),
        ("/picture a.png\n", "/picture"),
        ("word " * 1100, "1,024 positions"),
    ):
        with words.refused(ValueError, named):
            talk(answerer, lines)
    assert len(asked) <= 1


def test_at_a_terminal_mistakes_are_told_and_it_goes_on(answerer, asked, monkeypatch):
    typed = ["/image none.png", "Hello"]

    def line(prompt):
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("builtins.input", line)
    terminal, output = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    Chat(answerer, 1024, output=output).run(terminal)
    assert "none.png does not exist" in output.getvalue() and "\n1\\x1b" in output.getvalue()


def test_the_command_reads_piped_lines(files, cat, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\nAnd now?\n"))
    options = ["--image", cat, "--device", "cpu", "--max-new-tokens", "4"]
    assert main(["chat", str(files.adapters), *options]) == 0
    assert capsys.readouterr().out.count("cut at --max-new-tokens 4") == 2


@pytest.fixture(scope="module")
def ask_both(answerer, adapted):
    queues = [AnswerQueue(each, 1024) for each in (answerer, adapted)]
    yield partial(web.ask, queues, Generation(max_new_tokens=NEW))
    for queue in queues:
        queue.stop()


def test_both_models_are_asked_the_same_turn_after_turn(ask_both, answerer, adapted, cat):
    picture = {"type": "image", "image": cat}
    asked = {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}
    *growing, every = ask_both("What is it?", [cat], [[], []])
    assert growing[0] == [[asked], [asked]] and len(growing) > 4
    *_, second = ask_both("And now?", [], every)
    for each, messages in zip((answerer, adapted), second, strict=True):
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2
        for end in (1, 3):
            [alone] = each.answer([messages[:end]])
            assert messages[end]["content"] == alone.text
    assert second[0][1] != second[1][1]


def test_a_question_that_was_stopped_is_not_asked_again(ask_both):
    stopped = ask_both("What is it?", [], [[], []])
    next(stopped)
    *_, every = ask_both("And now?", [], next(stopped))
    stopped.close()
    # The first model had begun to answer, the second one had not.
    roles = [[message["role"] for message in messages] for messages in every]
    assert roles == [["user", "assistant"] * 2, ["user", "assistant"]]
    # An empty answer is no turn.
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": web.NO_WORDS}
    assert next(ask_both("a", [], [[asked, said]] * 2)) == [[asked]] * 2
    # Something moves until an answer begins.
    assert shown([asked], waits=True) == [asked, ANSWERING] and shown([asked]) == [asked]
    assert shown([asked, said], waits=True) == [asked, said] and shown([]) == []
    # A page shows HTML, of which a text has none.
    [message] = shown([{"role": "user", "content": '<img src="a"> & <link>'}])
    assert message["content"] == '&lt;img src="a"&gt; &amp; &lt;link&gt;'


def test_what_cannot_be_asked_is_told(ask_both, cat, tmp_path, words):
    (tmp_path / "text.png").write_text("no picture")
    Image.new("1", (12_500, 8_000)).save(tmp_path / "large.png")
    Image.new("1", (7_000, 7_000)).save(tmp_path / "fits.png")
    asked = {"role": "user", "content": [{"type": "image", "image": cat}] * 16}
    answered = [asked, {"role": "assistant", "content": "a"}]
    with words.refused(ValueError, "the conversation has 17 images"):
        list(ask_both("a", [cat], [answered, answered]))
    with words.refused(ValueError, "245.0 million pixels"):
        list(ask_both("a", [str(tmp_path / "fits.png")] * 5, [[], []]))
    for said, picture, named in (
        ("", "my cat.png", "write a question about the picture"),
        ("a", "text.png", "no picture"),
        ("a", "large.png", "12,500 x 8,000"),
        ("word " * 3000, "my cat.png", "1,024 positions"),
    ):
        with words.refused((ValueError, ApiError), named):
            list(ask_both(said, [str(tmp_path / picture)], [[], []]))


@pytest.mark.parametrize("kind", ["webp", "tif"])
def test_a_picture_of_any_kind_is_shown_as_browsers_show_it(tmp_path, kind):
    path = tmp_path / f"picture.{kind}"
    Image.new("RGB", (3000, 2000), "orange").save(path)
    own = preview(str(path)) == str(path)
    with Image.open(preview(str(path))) as image:
        assert own == (kind == "webp") and (own or image.format == "PNG")
        assert image.size == ((3000, 2000) if own else (1024, 683))
        assert image.convert("RGB").getpixel((9, 9))[0] > 240


def test_a_mistake_is_told(files, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no picture")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for arguments, named in (
        (["--image", "none.png"], "none.png"),
        (["--image", "text.png"], "text.png"),
        (["--web"], "chat --web needs gradio and uvicorn: "),
        (["other"], "a second model (other)"),
        (["--port", "1"], "--port (1)"),
        (["--web", "--image", "a.png"], "--image a.png"),
        (["--web", "--cache", "static"], "--cache static"),
    ):
        refused(["chat", files.model, *arguments, "--device", "cpu"], named)


HOLD = """
import os, sys, tempfile, time
from glm4v_patched.inference.web import folder_of_uploads
before = tempfile.gettempdir()
with folder_of_uploads() as folder:
    tempfile.NamedTemporaryFile(delete=False)
    print(folder, len(os.listdir(folder)), flush=True)
    time.sleep(60 if len(sys.argv) < 2 else 0)
assert tempfile.gettempdir() == before
"""


def test_uploads_are_gone_at_every_ending_and_temporary_files_lie_where_they_did(tmp_path):
    """Also those on their way, in the usual folder of temporary files; after ``kill -9``, when the
    next page begins, and not those of a page that runs."""
    environment = cpu_environment() | {"TMPDIR": str(tmp_path)}

    def start(*given: str) -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, "-c", HOLD, *given]
        options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, preexec_fn=heed_signals, **options)
        folder, number = process.stdout.readline().split()
        assert number == "1" and Path(folder).parent == tmp_path
        return process, Path(folder)

    (runs, other), (killed, left) = start(), start()
    killed.kill()
    killed.wait(30)
    assert left.exists()
    assert start("once")[0].wait(30) == 0
    assert not left.exists() and other.exists()
    runs.terminate()
    assert runs.wait(30) == 128 + signal.SIGTERM and not os.listdir(tmp_path)


@pytest.fixture
def page(files, tmp_path):
    """The URL of the page of a model and of adapters on it, and the folder of its uploads."""
    pytest.importorskip("gradio", reason='gradio is missing: pip install -e ".[web]"')
    command = [sys.executable, "-m", "glm4v_patched", "chat", str(files.model), str(files.adapters)]
    command += ["--web", "--port", "0", "--device", "cpu", "--max-new-tokens", str(NEW)]
    log, uploads = tmp_path / "page.log", tmp_path / "uploads"
    uploads.mkdir()
    environment = cpu_environment() | {"TMPDIR": str(uploads)}
    with serving(command, r"the page is (\S+)", log, environment) as (url, process):
        yield url, uploads
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 128 + signal.SIGTERM, log.read_text()[-4000:]
        assert "Traceback" not in log.read_text() and not os.listdir(uploads)


def test_the_page_answers_and_gives_no_file_that_was_not_uploaded(page, answerer, adapted, cat):
    url, uploads = page
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    api, kind = f"{url}/gradio_api", {"Content-Type": "application/json"}
    assert f'"title":"{web.TITLE}"' in browser.open(url).read().decode()
    tiff = io.BytesIO()
    Image.open(cat).save(tiff, "TIFF")

    def post(name: str, body: object, headers: dict[str, str] = kind, by=browser) -> object:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{api}/{name}", content, headers)
        with by.open(request, timeout=60) as reply:
            return json.load(reply)

    def ask(text: str, *paths: str, by=browser) -> list:
        files = [{"path": path, "meta": {"_type": "gradio.FileData"}} for path in paths]
        data = [{"text": text, "files": files}, None]
        post("queue/join", {"data": data, "fn_index": 0, "session_hash": "a1"}, by=by)
        with by.open(f"{api}/queue/data?session_hash=a1", timeout=60) as events:
            told = [json.loads(line[6:]) for line in events if line.startswith(b"data: {")]
        [ended] = [each for each in told if each["msg"] == "process_completed"]
        return ended["output"]

    form = b'--x\r\nContent-Disposition: form-data; name="files"; filename="cat.tiff"\r\n\r\n'
    form += tiff.getvalue() + b"\r\n--x--\r\n"
    [path] = post("upload", form, {"Content-Type": "multipart/form-data; boundary=x"})
    assert [*uploads.rglob("*.tiff")] == [Path(path)]
    *_, one, two = ask("What is it?", path)["data"]
    prompt = {"role": "user", "image": cat, "content": "What is it?"}
    for messages, each in zip((one, two), (answerer, adapted), strict=True):
        shown_image = messages[0]["content"][0]["file"]
        assert shown_image["path"] == f"{path}.png"
        with browser.open(f"{api}/file={path}.png") as reply, Image.open(reply) as image:
            assert image.size == (56, 56)
        said = each.answer([[prompt]])[0].text
        assert messages[-1]["content"][0]["text"] == html.escape(said, quote=False)
    assert "write a question" in ask("  ")["error"]

    os.chmod(cat, 0o600)
    file = {"path": cat, "meta": {"_type": "gradio.FileData"}}
    other = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    other.open(url)
    for attempt in (
        lambda: post("call/ask", {"data": [{"text": "a", "files": [file]}]}),
        lambda: ask("a", cat),
        lambda: browser.open(f"{api}/file={urllib.parse.quote(cat)}"),
        lambda: ask("a", path, by=other),
        lambda: other.open(f"{api}/file={path}"),
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            attempt()
    assert not [*uploads.rglob("*cat.png")]
    for header in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            post("upload", form, header)


@pytest.mark.parametrize("command", [["chat"], ["chat", "--web"], ["serve"]], ids=" ".join)
def test_a_wrong_option_is_told_before_the_model_is_looked_for(command, capsys):
    assert main([*command, "nowhere", "--device", "cpu", "--temperature", "0"]) == 1
    assert "--temperature is 0.0" in capsys.readouterr().err


def test_uploads_of_another_user_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    left = tmp_path / f"{web.UPLOADS}of_another"
    left.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        with web.folder_of_uploads():
            assert left.exists()
    with web.folder_of_uploads():
        assert not left.exists()
