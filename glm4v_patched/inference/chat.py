"""A conversation in the terminal, with images in any turn."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

from ..data.decoding import check_image_file
from ..option_fields import from_namespace
from ..paths import expand_path
from ..terminal_text import no_progress, printable, show_progress
from .questions import Generation, ModelOptions

if TYPE_CHECKING:
    from .answer_worker import Answerer

HELP = """\
/image PATH  show an image with the next question; may be given several times
/reset       begin a new conversation
/exit        end the conversation, as Ctrl-D does"""


def chat(options: Namespace) -> None:
    """Read questions from standard input, one per line, and stream the answers to standard output.

    If standard input is a terminal, errors are printed and the conversation goes on. Otherwise they
    are raised.
    """
    for value, name in ((options.other, "a second model"), (options.port, "--port")):
        if value is not None:
            raise ValueError(
                f"{name} ({value}) is only used with --web: add --web, or leave it out"
            )
    generation = from_namespace(Generation, options)
    for image in options.image:
        check_image(image)
    model_options = from_namespace(ModelOptions, options)
    base = model_options.find()

    from ..models.loading import load_model_config
    from .answer_worker import load_answerer

    answerer = load_answerer(model_options, base, generation)
    conversation = Chat(answerer, load_model_config(base).seq_length, options.system, options.image)
    with no_progress():  # prints no progress while it waits for a question
        conversation.run(sys.stdin)


def check_image(path: str) -> None:
    """Raise ``ValueError`` if an image is missing or cannot be decoded."""
    if (problem := check_image_file(path).problem) is not None:
        raise ValueError(f"the image {path} {problem}")


class Chat:
    """A conversation with a model.

    Args:
        context_length: The model's context length, in position ids.
        system: The system message.
        images: Paths of images for the first question.
        output: Where answers are written; standard output by default.
    """

    def __init__(
        self,
        answerer: "Answerer",
        context_length: int,
        system: str | None = None,
        images: Sequence[str] = (),
        output: TextIO | None = None,
    ):
        self.answerer, self.context_length = answerer, context_length
        self.output = output or sys.stdout
        self.system_messages = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict] = [*self.system_messages]
        self.images = [*images]
        self.turn = 0

    def run(self, lines: TextIO) -> None:
        """Handle lines until they end, or until ``/exit``."""
        at_terminal = lines.isatty()
        if at_terminal:
            self._write(f"{HELP}\n")
        inputs = _read_terminal() if at_terminal else lines
        for line_number, line in enumerate(inputs, start=1):
            try:
                if not self.handle_line(line.strip()):
                    return
            except (ValueError, RuntimeError) as error:
                if not at_terminal:
                    raise ValueError(f"line {line_number} of the input: {error}") from error
                self._write(f"{error}\n")
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                self._write("\n(stopped; this question is not part of the conversation)\n")

    def handle_line(self, line: str) -> bool:
        """Run a command or ask a question; return False if the conversation ends."""
        command, _, argument = line.partition(" ")
        if not line.startswith("/"):
            if line:
                self.ask(line)
        elif command == "/image":
            path = argument.strip().strip("\"'")
            if not path:
                raise ValueError("/image: expected the path of an image after it")
            path = expand_path(path)
            check_image(path)
            self.images.append(path)
        elif command == "/reset":
            self.messages, self.images = [*self.system_messages], []
        elif command == "/exit":
            return False
        else:
            raise ValueError(f"unknown command {command}; expected one of\n{HELP}")
        return True

    def ask(self, text: str) -> None:
        """Answer a question about the images that were added since the previous question."""
        from .answer_worker import AnswerStreamer, count_positions

        prompt = [*self.messages, make_user_message(text, self.images)]
        processor = self.answerer.processor
        max_new_tokens = self.answerer.generation.max_new_tokens
        [length] = count_positions(processor, [prompt])
        if length + max_new_tokens > self.context_length:
            raise ValueError(
                f"the conversation takes {length:,} of the model's {self.context_length:,} "
                f"positions, too many to add {max_new_tokens:,} new tokens: begin a new "
                "conversation (/reset), or restart with a lower --max-new-tokens"
            )
        with ExitStack() as progress:
            progress.enter_context(show_progress("reading the question and its images"))

            def write(text: str) -> None:
                progress.close()  # ends at the first text of the answer
                self._write(text)

            streamer = AnswerStreamer(processor.tokenizer, write)
            [answer] = self.answerer.answer([prompt], self.turn, streamer)
        self.turn += 1
        is_cut = answer.finish_reason == "length"
        note = f" (cut at --max-new-tokens {max_new_tokens})" if is_cut else ""
        self._write(f"{note if answer.text else '(the answer is empty)'}\n")
        self.images = []
        if answer.text:
            self.messages = [*prompt, {"role": "assistant", "content": answer.text}]

    def _write(self, text: str) -> None:
        """Write text without the control characters that a terminal would act on."""
        self.output.write(printable(text, allow="\n\t"))
        self.output.flush()


def make_user_message(text: str, images: Sequence[str]) -> dict:
    """Return the user's message for a question about images.

    Args:
        images: Paths of the images.
    """
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _read_terminal() -> Iterator[str]:
    import readline  # noqa: F401  # gives input() a history and line editing

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
