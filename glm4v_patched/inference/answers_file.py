"""The file of answers: written line by line, and continued where it was stopped.

It is replaced only when told so, and not before there is an answer. Beside it lies
``NAME.settings.json``: the model, the data and the options that its answers belong to. Needs no
torch.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..atomic import require_file, write_atomically
from ..data.messages import pictures_of, text_of
from ..data.rows import Source
from ..terminal_text import shorten
from .questions import Question
from .scoring import exact_match


class Line(NamedTuple):
    """An answer in the file."""

    question: Question
    answer: str
    finish_reason: str

    def to_json(self) -> str:
        """What is asked stands there, too, so that the file can be read by itself."""
        row, prompt, reference, swapped = self.question
        told = {"row": row, "question": text_of(prompt[-1]), "pictures": pictures_of(prompt)}
        told |= {"answer": self.answer, "finish_reason": self.finish_reason}
        if reference is not None:
            told |= {"reference": reference, "right": exact_match(self.answer, reference) == 1}
        if swapped:
            told["swapped"] = True
        return json.dumps(told, ensure_ascii=False)


class AnswersFile:
    """Opened to be continued.

    Args:
        path: Its folder is made if it is missing.
        questions: That it will have an answer to.
        settings: What its answers belong to, by names that are told where they differ.
        data: What the questions are of; it and its pictures are not written to.
        overwrite: Whether a file that is there may be replaced, at the first answer.

    Raises:
        ValueError: it is there and its answers belong to something else, it is no file of answers,
            the file of settings is of something else, or another process writes to it.
    """

    def __init__(
        self,
        path: Path,
        questions: Sequence[Question],
        settings: Mapping[str, Any],
        data: Source,
        overwrite: bool = False,
    ):
        self.path = path
        self.settings_path = path.with_name(f"{path.name}.settings.json")
        self.questions, self.settings = questions, settings
        self.has_begun = False
        self.lines: dict[tuple[int, bool], Line] = {}
        self.dropped = ""
        _require_apart(path, data, questions)
        for each in (path, self.settings_path):
            require_file(each, alone=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = _locked(path)
        try:
            if not overwrite:
                self._continue()
        except BaseException:
            self.close()
            raise

    def _continue(self) -> None:
        if self.file.seek(0, os.SEEK_END):
            self._require_same()
            self._read()
            self.has_begun = True
        elif os.path.lexists(self.settings_path) and not self._is_ours():
            raise ValueError(
                f"{self.settings_path} is there, without answers beside it, and would be replaced; "
                "give --out another file, or replace it (--overwrite)"
            )

    def _is_ours(self) -> bool:
        try:
            there = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(there, dict) and there.keys() == self.settings.keys()

    def _begin(self) -> None:
        """Replace what is there: now there is an answer to put in its place."""
        self.has_begun = True
        self.file.truncate(0)
        text = json.dumps(self.settings, indent=2) + "\n"
        write_atomically(self.settings_path, text)

    def _require_same(self) -> None:
        cure = "give --out another file, or replace it (--overwrite)"
        try:
            there = json.loads(self.settings_path.read_text(encoding="utf-8"))
            flat = dict(_flat(there))
        except (OSError, ValueError, AttributeError, RecursionError):
            raise ValueError(
                f"{self.path} is there, and {self.settings_path.name} beside it does not say what "
                f"its answers belong to; {cure}"
            ) from None
        now = dict(_flat(self.settings))
        names = [n for n in {**flat, **now} if flat.get(n) != now.get(n)]
        if names:
            told = [f"{n}: {_told(flat.get(n))} there, {_told(now.get(n))} now" for n in names]
            raise ValueError(
                f"the answers in {self.path} belong to something else; {cure}\n  "
                + "\n  ".join(told)
            )

    def _read(self) -> None:
        known = {(question.row, question.swapped): question for question in self.questions}
        self.file.seek(0)
        start = 0
        for number, text in enumerate(self.file, start=1):
            if not text.endswith(b"\n"):
                self.dropped = f"line {number} of {self.path} was cut off, and is answered again"
                self.file.truncate(start)
                return
            start += len(text)
            try:
                told = json.loads(text)
                row, swapped = told["row"], told.get("swapped", False)
                line = Line(known[row, swapped], told["answer"], told["finish_reason"])
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise self._damaged(number, "is no answer to a row of the data") from None
            if (row, swapped) in self.lines:
                raise self._damaged(number, f"answers row {row} a second time")
            if told.get("reference") != line.question.reference:
                raise self._damaged(number, f"has another reference than row {row}")
            self.lines[row, swapped] = line

    def _damaged(self, number: int, what: str) -> ValueError:
        return ValueError(
            f"{self.path}:{number} {what}; take the line out, give --out another file, or replace "
            "this one (--overwrite)"
        )

    @property
    def missing(self) -> list[Question]:
        """Questions without an answer, in order."""
        return [q for q in self.questions if (q.row, q.swapped) not in self.lines]

    def add(self, line: Line) -> None:
        """Write an answer; a process that is killed loses none that was added before."""
        if not self.has_begun:
            self._begin()
        self.file.write(line.to_json().encode() + b"\n")
        self.file.flush()
        self.lines[line.question.row, line.question.swapped] = line

    def all_lines(self) -> list[Line]:
        """In the order of the questions, all of which are answered."""
        return [self.lines[question.row, question.swapped] for question in self.questions]

    def close(self) -> None:
        """Also removes a file without a line, which says nothing."""
        if os.fstat(self.file.fileno()).st_size == 0:
            if self.has_begun:
                self.settings_path.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)  # while it is locked: see _locked
        self.file.close()


def _require_apart(path: Path, data: Source, questions: Sequence[Question]) -> None:
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; expected a file")
    if not path.exists():
        return
    read = [Path(data.path), *(Path(p) for q in questions for p in pictures_of(q.prompt))]
    for each in read:
        if each.exists() and path.samefile(each):
            raise ValueError(f"--out {path} is what is read; expected another file")


def _locked(path: Path):
    while True:
        try:
            file = path.open("a+b")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Else another process has removed it, empty, since it was opened.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"another process writes to {path}; wait for it, or give --out another file"
            ) from None
        file.close()


def _flat(values: Mapping[str, Any], before: str = ""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _told(value: Any) -> str:
    return "nothing" if value is None else shorten(str(value), 60)
