"""The file of answers: written line by line, and continued where it was stopped.

It is replaced only when told so, and not before there is an answer. Beside it lies
``NAME.settings.json``: the model, the data and the options that its answers belong to. Needs no
torch.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..atomic import explain_failed_writes, open_atomically, require_file, take_lock
from ..data.messages import images_of, text_of
from ..data.rows import DataSource
from ..terminal_text import shorten
from .questions import Question
from .scoring import exact_match

CURE = "give --out another file, or replace it (--overwrite)"
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading of JSON that is not as it was written ends with."""


class AnswerLine(NamedTuple):
    """An answer in the file."""

    question: Question
    answer: str
    finish_reason: str

    def to_json(self) -> str:
        """What is asked stands there, too, so that the file can be read by itself."""
        row, prompt, reference, swapped = self.question
        told = {"row": row, "question": text_of(prompt[-1]), "images": images_of(prompt)}
        told |= {"answer": self.answer, "finish_reason": self.finish_reason}
        if reference is not None:
            told |= {"reference": reference, "right": exact_match(self.answer, reference) == 1}
        if swapped:
            told["swapped"] = True
        return json.dumps(told, ensure_ascii=False)


@contextmanager
def open_answers(
    path: Path,
    questions: Sequence[Question],
    settings: Mapping[str, Any],
    data: DataSource,
    overwrite: bool = False,
) -> Iterator["AnswersFile"]:
    """Open a file of answers to be continued, for this process alone.

    Args:
        path: Its folder is made if it is missing.
        questions: That it will have an answer to.
        settings: What its answers belong to, by names that are told where they differ.
        data: What the questions are of; it and its images are not written to.
        overwrite: Whether a file that is there may be replaced, at the first answer.
    """
    for each in (path, settings_path(path)):
        require_file(each, alone=True)
    for other in (data.path, *(p for q in questions for p in images_of(q.prompt))):
        if path.exists() and Path(other).exists() and path.samefile(other):
            raise ValueError(f"--out {path} is what is read; expected another file")
    if not overwrite:
        require_same_answer_settings(path, settings)  # before a file is made
    with explain_failed_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    with file:
        try:
            take_lock(file.fileno(), path)
        except BlockingIOError:
            told = f"another process writes to {path}; wait for it, or give --out another file"
            raise ValueError(told) from None
        answers = AnswersFile(path, file, questions, settings, overwrite)
        if not overwrite:
            require_same_answer_settings(path, settings)  # which another process may have written
            answers.read()
        yield answers


def require_same_answer_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the answers that are there belong to something else."""
    beside, has_answers = settings_path(path), path.exists() and path.stat().st_size > 0
    if not has_answers and not beside.exists():
        return
    try:
        there = json.loads(beside.read_text(encoding="utf-8"))
        if there.keys() != settings.keys():
            raise ValueError("of something else")
        flat, now = dict(_flat(there)), dict(_flat(settings))
    except (OSError, *DAMAGED):
        raise ValueError(
            f"{beside} does not say what the answers beside it belong to, and nothing of others "
            f"is replaced; {CURE}"
        ) from None
    names = [n for n in {**flat, **now} if flat.get(n) != now.get(n)]
    if has_answers and names:
        told = [f"{n}: {_told(flat.get(n))} there, {_told(now.get(n))} now" for n in names]
        raise ValueError(
            f"the answers in {path} belong to something else; {CURE}\n  " + "\n  ".join(told)
        )


def settings_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.settings.json")


class AnswersFile:
    """A file of answers that :func:`open_answers` has opened and locked."""

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        questions: Sequence[Question],
        settings: Mapping[str, Any],
        overwrite: bool,
    ):
        self.path, self.file, self.overwrite = path, file, overwrite
        self.questions, self.settings = questions, settings
        self.has_begun = False
        self.lines: dict[tuple[int, bool], AnswerLine] = {}

    def read(self) -> None:
        """Take over the lines that are there."""
        known = {(question.row, question.swapped): question for question in self.questions}
        self.file.seek(0)
        start = 0
        for number, text in enumerate(self.file, start=1):
            if not text.endswith(b"\n"):
                print(f"line {number} of {self.path} was cut off, and is answered again")
                self.file.truncate(start)
                break
            start += len(text)
            try:
                told = json.loads(text)
                key = told["row"], told.get("swapped", False)
                line = AnswerLine(known.pop(key), told["answer"], told["finish_reason"])
            except DAMAGED:
                raise ValueError(
                    f"{self.path}:{number} is no answer to a row of the data that has none before "
                    f"it; take the line out, {CURE}"
                ) from None
            self.lines[key] = line
        self.has_begun = start > 0

    @property
    def missing(self) -> list[Question]:
        """Questions without an answer, in order."""
        return [q for q in self.questions if (q.row, q.swapped) not in self.lines]

    def add(self, line: AnswerLine) -> None:
        """Write an answer; a process that is killed loses none that was added before."""
        if not self.has_begun:  # now there is something to put in place of what is there
            name = settings_path(self.path)
            with explain_failed_writes(name), open_atomically(name) as settings:
                settings.write(json.dumps(self.settings, indent=2).encode() + b"\n")
                settings.flush()  # of a full disk, before what is there is lost
                self.file.truncate(0)
            self.has_begun = True
        content = line.to_json().encode() + b"\n"
        with explain_failed_writes(self.path):
            while content:  # without a buffer, of which the rest would be written at the end
                content = content[os.write(self.file.fileno(), content) :]
        self.lines[line.question.row, line.question.swapped] = line

    def all_lines(self) -> list[AnswerLine]:
        """In the order of the questions, all of which are answered."""
        return [self.lines[question.row, question.swapped] for question in self.questions]


def _flat(values: Mapping[str, Any], before: str = ""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _told(value: Any) -> str:
    return "nothing" if value is None else shorten(str(value), 60)
