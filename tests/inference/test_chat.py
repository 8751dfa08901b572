"""``glm4v-patched chat``: turns, pictures in any of them, an end."""

import io

import pytest
from PIL import Image

from glm4v_patched.cli import main
from glm4v_patched.inference.answer_worker import Answer, Answerer
from glm4v_patched.inference.chat import Chat
from glm4v_patched.inference.questions import Generation
from glm4v_patched.models import loading
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load


@pytest.fixture(scope="module")
def answerer(files) -> Answerer:
    return Answerer(load(find_source(str(files.model)), "cpu"), Generation(max_new_tokens=6))


@pytest.fixture
def cat(tmp_path) -> str:
    Image.new("RGB", (56, 56), "orange").save(tmp_path / "my cat.png")
    return str(tmp_path / "my cat.png")


@pytest.fixture
def asked(answerer, monkeypatch) -> list:
    """What the model is asked; its answers are numbers."""
    prompts: list = []

    def answer(given, number, streamer):
        prompts.append(given[0])
        streamer.on_finalized_text(f" {len(prompts)}", stream_end=True)
        return [Answer(str(len(prompts)), "stop")]

    monkeypatch.setattr(answerer, "answer", answer)
    return prompts


def talk(answerer, lines: str, **options) -> str:
    output = io.StringIO()
    Chat(answerer, 1024, output=output, **options).run(io.StringIO(lines))
    return output.getvalue()


def shown(prompt: list[dict]) -> list[int]:
    """Pictures in each message."""
    contents = [message["content"] for message in prompt]
    return [sum(p["type"] == "image" for p in c) if isinstance(c, list) else 0 for c in contents]


def test_what_a_terminal_would_obey_is_shown(answerer, monkeypatch):
    def answer(given, number, streamer):
        streamer.on_finalized_text("red\x1b[31m \N{CJK UNIFIED IDEOGRAPH-4F60}", stream_end=True)
        return [Answer("red", "stop")]

    monkeypatch.setattr(answerer, "answer", answer)
    told = talk(answerer, "Hello\n")
    assert r"red\x1b[31m" in told and "\N{CJK UNIFIED IDEOGRAPH-4F60}" in told


def test_turns_are_kept_until_reset_and_pictures_belong_to_one(answerer, asked, cat):
    told = talk(
        answerer,
        f"What is it?\n\nAnd this?\n/image {cat}\n/image '{cat}'\nAnd these?\n/reset\nHello\n"
        "/exit\nnever asked\n",
        images=[cat],
        system="Be brief.",
    )
    assert told == "1\n2\n3\n4\n"
    assert [message["role"] for message in asked[2]] == [
        "system",
        *["user", "assistant"] * 2,
        "user",
    ]
    assert [message["content"] for message in asked[2] if message["role"] == "assistant"] == [
        "1",
        "2",
    ]
    assert shown(asked[2]) == [0, 1, 0, 0, 0, 2]
    assert asked[3] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


def test_an_answer_is_streamed_word_for_word(answerer, cat):
    parts: list[str] = []

    class Output(io.StringIO):
        def write(self, text):
            parts.append(text)

    conversation = Chat(answerer, 1024, images=[cat], output=Output())
    conversation.ask("What is it?")
    prompt = conversation.messages[:-1]
    [answer] = answerer.answer([prompt])
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.text}
    # The tokenizer leaves white space before the answer away, and so does the stream.
    told = "".join(parts)
    assert told.removesuffix(" (cut at --max-new-tokens 6)\n").strip() == answer.text
    assert len(parts) > 2


def test_two_pictures_in_a_turn_are_both_seen(answerer, cat, tmp_path):
    Image.new("RGB", (56, 56), "blue").save(tmp_path / "blue.png")
    conversation = Chat(
        answerer, 1024, images=[cat, str(tmp_path / "blue.png")], output=io.StringIO()
    )
    conversation.ask("Which colours?")
    assert len(answerer.encode([conversation.messages[:-1]])["pixel_values"]) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a\n/image none.png\nb\n", "line 2 of the input: the image none.png does not exist"),
        ("/image\n", "line 1 of the input: /image: expected the path"),
        ("/picture a.png\n", "there is no command /picture; expected one of\n/image PATH"),
        ("word " * 1100, "of the model's 1,024 positions, .*: begin again with a lower --max-new"),
    ],
)
def test_piped_mistakes_end_it_with_their_line(answerer, asked, lines, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        talk(answerer, lines)
    assert len(asked) <= 1


def test_at_a_terminal_mistakes_are_told_and_it_goes_on(answerer, asked, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    typed = iter(["/image none.png", "Hello", "stop"])

    def line(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", line)
    take = Chat.take

    def stopped(chat, line):
        if line == "stop":
            raise KeyboardInterrupt
        return take(chat, line)

    monkeypatch.setattr(Chat, "take", stopped)
    output = io.StringIO()
    Chat(answerer, 1024, output=output).run(Terminal())
    told = output.getvalue()
    assert "none.png does not exist" in told and "\n1\n" in told and "(stopped" in told


def test_the_command_reads_piped_lines(files, cat, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\nAnd now?\n"))
    options = ["--image", cat, "--device", "cpu", "--max-new-tokens", "4"]
    assert main(["chat", str(files.adapters), *options]) == 0
    assert capsys.readouterr().out.count("cut at --max-new-tokens 4") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "none.png"], "none.png does not exist"),
        (["--image", "text.png"], "text.png cannot be decoded"),
        (["--load-in-4bit"], "--load-in-4bit needs a GPU"),
        (["--temperature", "0"], "--temperature 0.0: expected at least 0.001"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(
    files, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no picture")
    assert main(["chat", str(files.model), "--device", "cpu", *arguments]) == 1
    assert message in capsys.readouterr().err
