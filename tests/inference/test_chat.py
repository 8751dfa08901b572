"""``glm4v-patched chat``: turns, pictures in any of them, an end."""

import io

import pytest
from PIL import Image

from glm4v_patched.cli import main
from glm4v_patched.inference.answer_worker import Answer
from glm4v_patched.inference.chat import Chat


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
        streamer.on_finalized_text(f" {len(prompts)}\x1b[31m", stream_end=True)
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


def test_turns_are_kept_until_reset_and_pictures_belong_to_one(answerer, asked, cat):
    typed = f"What is it?\n\nAnd this?\n/image {cat}\n/image '{cat}'\nAnd these?\n/reset\nHello\n"
    told = talk(answerer, f"{typed}/exit\nnever asked\n", images=[cat], system="Be brief.")
    # What a terminal would obey is shown.
    assert told == "".join(f"{number}\\x1b[31m\n" for number in (1, 2, 3, 4))
    roles = [message["role"] for message in asked[2]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in asked[2] if m["role"] == "assistant"] == ["1", "2"]
    assert shown(asked[2]) == [0, 1, 0, 0, 0, 2]
    system = {"role": "system", "content": "Be brief."}
    assert asked[3] == [system, {"role": "user", "content": "Hello"}]


def test_an_answer_is_streamed_word_for_word_and_all_pictures_are_seen(answerer, cat, tmp_path):
    Image.new("RGB", (56, 56), "blue").save(tmp_path / "blue.png")
    output, images = io.StringIO(), [cat, str(tmp_path / "blue.png")]
    conversation = Chat(answerer, 1024, images=images, output=output)
    conversation.ask("Which colours?")
    prompt = conversation.messages[:-1]
    [answer] = answerer.answer([prompt])
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.text}
    # The tokenizer leaves white space before the answer away, and so does the stream.
    told = output.getvalue().removesuffix(" (cut at --max-new-tokens 6)\n")
    assert told.strip() == answer.text and len(answerer.encode([prompt])["pixel_values"]) == 2


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


def test_a_mistake_is_told(files, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no picture")
    for name in ("none.png", "text.png"):
        refused(["chat", files.model, "--device", "cpu", "--image", name], name)
