"""``glm4v-patched chat``: turns, images in any of them, an end; and its page."""

import io
import re
import urllib.parse
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from glm4v_patched.cli import main
from glm4v_patched.inference.answer_worker import Answer, Answerer, count_positions
from glm4v_patched.inference.chat import Chat
from glm4v_patched.inference.web import PAGE_PORT
from tests.helpers.serving import CHAT, QUESTION, about, data_url

NEW = 6


@pytest.fixture
def cat(tmp_path) -> str:
    Image.new("RGB", (56, 56), "orange").save(tmp_path / "my cat.png")
    return str(tmp_path / "my cat.png")


@pytest.fixture
def seen_prompts(answerer, monkeypatch) -> list:
    """The prompts that the model gets; its answers are numbers."""
    prompts: list = []

    def answer(batch, number, streamer):
        assert number == len(prompts)  # each turn samples with its own seed
        prompts.append(batch[0])
        streamer.on_finalized_text(f" {len(prompts)}\x1b[31m", stream_end=True)
        return [Answer(str(len(prompts)), "stop")]

    monkeypatch.setattr(answerer, "answer", answer)
    return prompts


def talk(answerer, lines: str, **options) -> str:
    output = io.StringIO()
    Chat(answerer, 1024, output=output, **options).run(io.StringIO(lines))
    return output.getvalue()


def images(prompt: list[dict]) -> list[int]:
    """Images in each message."""
    contents = [message["content"] for message in prompt]
    return [sum(p["type"] == "image" for p in c) if isinstance(c, list) else 0 for c in contents]


def test_turns_are_kept_until_reset_and_each_has_its_own_images_and_random_numbers(
    answerer, seen_prompts, cat
):
    typed = f"What is it?\n\nAnd this?\n/image {cat}\n/image '{cat}'\nAnd these?\n/image {cat}\n"
    typed += "/reset\nHello\n/exit\nnever asked\n"
    output = talk(answerer, typed, images=[cat], system="Be brief.")
    # What a terminal would obey is shown.
    assert output == "".join(f"{number}\\x1b[31m\n" for number in (1, 2, 3, 4))
    roles = [message["role"] for message in seen_prompts[2]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in seen_prompts[2] if m["role"] == "assistant"] == ["1", "2"]
    assert images(seen_prompts[2]) == [0, 1, 0, 0, 0, 2]
    system = {"role": "system", "content": "Be brief."}
    assert seen_prompts[3] == [system, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_an_answer_is_streamed_word_for_word_and_all_images_are_seen(
    answerer, cat, tmp_path, monkeypatch, cache
):
    Image.new("RGB", (56, 56), "blue").save(tmp_path / "blue.png")
    written: list[str] = []
    loaded = answerer.model, answerer.processor
    streaming = Answerer(loaded, answerer.generation, cache)
    conversation = Chat(streaming, 1024, images=[cat, str(tmp_path / "blue.png")])
    monkeypatch.setattr(conversation, "_write", written.append)
    conversation.ask("Which colors?")
    prompt = conversation.messages[:-1]
    [answer] = answerer.answer([prompt])
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.text}
    # The tokenizer leaves white space before the answer away, and so does the stream.
    *texts, cut = written
    assert "".join(texts).strip() == answer.text and len(texts) > 1
    assert cut == " (cut at --max-new-tokens 6)\n"
    assert len(answerer.encode([prompt])["pixel_values"]) == 2


def test_a_question_is_asked_if_its_answer_just_fits_and_refused_with_a_position_less(
    answerer, seen_prompts
):
    [length] = count_positions(answerer.processor, [[{"role": "user", "content": "Hello"}]])
    limit = length + answerer.generation.max_new_tokens
    with pytest.raises(ValueError, match=f"of the model's {limit - 1:,} positions"):
        Chat(answerer, limit - 1, output=io.StringIO()).ask("Hello")
    assert seen_prompts == []
    Chat(answerer, limit, output=io.StringIO()).ask("Hello")
    assert len(seen_prompts) == 1


def test_piped_mistakes_end_it_with_their_line(answerer, seen_prompts, words):
    for lines, named in (
        ("a\n/image none.png\nb\n", "line 2 of the input: the image none.png"),
        ("/image\n", "line 1 of the input: /image"),
        ("/picture a.png\n", "/picture"),
        ("word " * 1100, "1,024 positions"),
    ):
        with words.refused(ValueError, named):
            talk(answerer, lines)
    assert len(seen_prompts) <= 1


def test_at_a_terminal_mistakes_are_told_and_it_goes_on(answerer, seen_prompts, monkeypatch):
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


def test_a_mistake_is_told(files, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no image")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for arguments, named in (
        (["--image", "none.png"], "none.png"),
        (["--image", "text.png"], "text.png"),
        (["--web"], "chat --web needs starlette and uvicorn: "),
        (["other"], "a second model (other)"),
        (["--port", "1"], "--port (1)"),
        (["--web", "--image", "a.png"], "--image a.png"),
        ([str(files.model), "--web"], "is the same as the first"),
    ):
        refused(["chat", files.model, *arguments, "--device", "cpu"], named)


def test_both_models_of_the_page_answer_who_has_its_key_alone(
    files, answerer, adapted, cat, served, capsys
):
    command = ["chat", str(files.model), str(files.adapters), "--web", "--port", "0"]
    command += ["--device", "cpu", "--max-new-tokens", str(NEW), "--system", "Be brief."]
    assert main(command) == 0
    body = {"messages": about(data_url(Path(cat).read_bytes()))}
    prompt = {"role": "user", "image": cat, "content": QUESTION}
    with TestClient(served.pop(), "http://127.0.0.1") as client:
        printed = capsys.readouterr().out
        port, fragment = re.search(r"the page is http://127.0.0.1:(\d+)/#(\S+)", printed).groups()
        assert int(port) != PAGE_PORT  # 0 is a free port
        start = urllib.parse.parse_qs(fragment)
        assert start["system"] == ["Be brief."]
        client.headers["Authorization"] = f"Bearer {start['key'][0]}"
        models = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert models == [str(files.model), str(files.adapters)]
        for name, model_answerer in zip(models, (answerer, adapted), strict=True):
            [choice] = client.post(CHAT, json=body | {"model": name}).json()["choices"]
            assert choice["message"]["content"] == model_answerer.answer([[prompt]])[0].text
        for status, path, headers in (  # test_serve_guard.py has more
            (401, "/v1/models", {"Authorization": "Bearer wrong"}),
            (403, "/", {"Host": "evil.example"}),
            (404, f"/file={urllib.parse.quote(cat)}", {}),
        ):
            assert client.get(path, headers=headers).status_code == status, (path, headers)
        # No path of a file is read, whoever asks.
        assert client.post(CHAT, json={"messages": about(cat)}).status_code == 400


@pytest.mark.parametrize("command", [["chat"], ["chat", "--web"], ["serve"]], ids=" ".join)
def test_a_wrong_option_is_told_before_the_model_is_looked_for(command, capsys):
    assert main([*command, "nowhere", "--device", "cpu", "--temperature", "0"]) == 1
    assert "--temperature is 0.0" in capsys.readouterr().err
