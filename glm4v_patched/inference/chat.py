"""A conversation in the terminal, with images in any turn."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from ..data.decoding import check_image_file
from ..option_fields import from_namespace
from ..paths import expand_path
from ..terminal_text import printable
from .questions import Generation, ModelOptions

if TYPE_CHECKING:
    from .answer_worker import Answerer

HELP = """\
/image PATH  show an image with the next question; may be given several times
/reset       begin a new conversation
/exit        end, as the end of the input does"""


def chat(options: Namespace) -> None:
    """Read questions from standard input, a line each, and write the answers as they come.

    At a terminal a mistake is told, and the conversation goes on; else it ends it.
    """
    for given, name in ((options.other, "a second model"), (options.port, "--port")):
        if given is not None:
            raise ValueError(f"{name} ({given}) is for the page: add --web, or leave it out")
    generation = from_namespace(Generation, options)
    for image in options.image:
        check_image(image)
    asked = from_namespace(ModelOptions, options)
    base = asked.find()

    from ..models.loading import load_model_config
    from .answer_worker import load_answerer

    answerer = load_answerer(asked, base, generation)
    Chat(answerer, load_model_config(base).seq_length, options.system, options.image).run(sys.stdin)


def check_image(path: str) -> None:
    """Raise ``ValueError`` if an image is not there or cannot be decoded."""
    if (fault := check_image_file(path).problem) is not None:
        raise ValueError(f"the image {path} {fault}")


class Chat:
    """A conversation."""

    def __init__(
        self,
        answerer: "Answerer",
        limit: int,
        system: str | None = None,
        images: Sequence[str] = (),
        output: TextIO | None = None,
    ):
        self.answerer, self.limit, self.output = answerer, limit, output or sys.stdout
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict] = [*self.start]
        self.images = [*images]
        self.turn = 0

    def run(self, lines: TextIO) -> None:
        """Take lines until they end, or ``/exit``."""
        at_terminal = lines.isatty()
        if at_terminal:
            self._say(f"{HELP}\n")
        for number, line in enumerate(_typed() if at_terminal else lines, start=1):
            try:
                if not self.take(line.strip()):
                    return
            except (ValueError, RuntimeError) as error:
                if not at_terminal:
                    raise ValueError(f"line {number} of the input: {error}") from error
                self._say(f"{error}\n")
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                self._say("\n(stopped; the question is not kept)\n")

    def take(self, line: str) -> bool:
        """Do what a line says; False if it ends the conversation."""
        command, _, rest = line.partition(" ")
        if not line.startswith("/"):
            if line:
                self.ask(line)
        elif command == "/image":
            path = rest.strip().strip("\"'")
            if not path:
                raise ValueError("/image: expected the path of an image after it")
            path = expand_path(path)
            check_image(path)
            self.images.append(path)
        elif command == "/reset":
            self.messages, self.images = [*self.start], []
        elif command == "/exit":
            return False
        else:
            raise ValueError(f"there is no command {command}; expected one of\n{HELP}")
        return True

    def ask(self, text: str) -> None:
        """Answer a question, which shows the images that were given since the last one."""
        from .answer_worker import Words, positions_of

        asked = [*self.messages, question(text, self.images)]
        processor, new = self.answerer.processor, self.answerer.generation.max_new_tokens
        [taken] = positions_of(processor, [asked])
        if taken + new > self.limit:
            raise ValueError(
                f"the conversation takes {taken:,} of the model's {self.limit:,} positions, which "
                f"leaves too little room for {new:,} new tokens: begin a new one (/reset), or "
                "again with a lower --max-new-tokens"
            )
        words = Words(processor.tokenizer, self._say)
        [answer] = self.answerer.answer([asked], self.turn, words)
        self.turn += 1
        cut = f" (cut at --max-new-tokens {new})" if answer.finish_reason == "length" else ""
        self._say(f"{cut if answer.text else '(the answer is empty)'}\n")
        self.images = []
        if answer.text:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]

    def _say(self, text: str) -> None:
        """What a model or a file says may hold what a terminal would obey."""
        self.output.write(printable(text, allow="\n\t"))
        self.output.flush()


def question(text: str, images: Sequence[str]) -> dict:
    """The message of a question that shows images."""
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _typed() -> Iterator[str]:
    import readline  # noqa: F401  # input() then has a history, and keys that move

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
