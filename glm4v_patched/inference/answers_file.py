"""The file of answers, which is written line by line and continued where an earlier run stopped.

An existing file is replaced only with ``--overwrite``, and not before the first new answer is
written. Beside the file, ``NAME.settings.json`` records the model, data and options of its answers.
Needs no torch.
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
from ..terminal_text import shorten, write_line
from .questions import Question
from .scoring import exact_match

OUT_ADVICE = "give --out another file, or replace this one (--overwrite)"
PARSE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors that reading unexpected or damaged JSON raises."""


class AnswerLine(NamedTuple):
    """One answer in the file."""

    question: Question
    answer: str
    finish_reason: str

    def to_json(self) -> str:
        """Return the line as JSON. It includes the question, so readers do not need the data."""
        row, prompt, reference, swapped = self.question
        values = {"row": row, "question": text_of(prompt[-1]), "images": images_of(prompt)}
        values |= {"answer": self.answer, "finish_reason": self.finish_reason}
        if reference is not None:
            values |= {"reference": reference, "right": exact_match(self.answer, reference) == 1}
        if swapped:
            values["swapped"] = True
        return json.dumps(values, ensure_ascii=False)


@contextmanager
def open_answers(
    path: Path,
    questions: Sequence[Question],
    settings: Mapping[str, Any],
    data: DataSource,
    overwrite: bool = False,
) -> Iterator["AnswersFile"]:
    """Open and lock a file of answers, to continue it.

    Args:
        path: The file. A missing parent folder is created.
        questions: The questions that the file will answer.
        settings: Model, data and options that determine the answers. Errors name keys that differ.
        data: Source of the questions; ``path`` may be neither its file nor one of its images.
        overwrite: Replace an existing file when the first answer is written.

    Raises:
        ValueError: The file's answers were made with other settings, the file is part of the data,
            or another process is writing it.
    """
    for file_path in (path, settings_path(path)):
        require_file(file_path, refuse_hard_links=True)
    image_paths = [image for question in questions for image in images_of(question.prompt)]
    for data_path in (data.path, *image_paths):
        if path.exists() and Path(data_path).exists() and path.samefile(data_path):
            raise ValueError(f"--out {path} is part of the data; give --out another file")
    if not overwrite:
        require_same_answer_settings(path, settings)  # before a file is created
    with explain_failed_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    with file:
        try:
            take_lock(file.fileno(), path)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to {path}; wait for it, or give --out another file"
            ) from None
        answers = AnswersFile(path, file, questions, settings, overwrite)
        if not overwrite:
            # Checked again under the lock, because another process may have written answers.
            require_same_answer_settings(path, settings)
            answers.read()
        yield answers


def require_same_answer_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``path`` holds answers of another model, other data or options."""
    recorded_path = settings_path(path)
    has_answers = path.exists() and path.stat().st_size > 0
    if not has_answers and not recorded_path.exists():
        return
    try:
        recorded = json.loads(recorded_path.read_text(encoding="utf-8"))
        if recorded.keys() != settings.keys():
            raise ValueError("not the settings of answers")
        before, now = dict(_flatten_settings(recorded)), dict(_flatten_settings(settings))
    except (OSError, *PARSE_ERRORS):
        raise ValueError(
            f"{recorded_path} is missing or does not name the model, data and options of the "
            f"answers in {path.name}, so these answers are not replaced; {OUT_ADVICE}"
        ) from None
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if has_answers and differing:
        differences = [
            f"{name}: {_describe_value(before.get(name))} before, "
            f"{_describe_value(now.get(name))} now"
            for name in differing
        ]
        raise ValueError(
            f"the answers in {path} are of another model, other data or options; {OUT_ADVICE}\n  "
            + "\n  ".join(differences)
        )


def settings_path(path: Path) -> Path:
    """Return the path of the settings that belong to a file of answers."""
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
        self.replaces_content = True  # whether the next added line replaces the file's content
        self.lines: dict[tuple[int, bool], AnswerLine] = {}  # by row number and "swapped"

    def read(self) -> None:
        """Read the existing lines, and remove an incomplete last line from the file."""
        unanswered = {(question.row, question.swapped): question for question in self.questions}
        self.file.seek(0)
        line_start = 0
        for line_number, text in enumerate(self.file, start=1):
            if not text.endswith(b"\n"):
                write_line(f"{self.path}:{line_number} is cut off; this row is answered again")
                self.file.truncate(line_start)
                break
            line_start += len(text)
            try:
                values = json.loads(text)
                key = values["row"], values.get("swapped", False)
                line = AnswerLine(unanswered.pop(key), values["answer"], values["finish_reason"])
            except PARSE_ERRORS:
                raise ValueError(
                    f"{self.path}:{line_number} is not an answer to a row of the data, or a second "
                    f"answer to the same row; remove the line, {OUT_ADVICE}"
                ) from None
            self.lines[key] = line
        self.replaces_content = line_start == 0

    @property
    def missing(self) -> list[Question]:
        """Questions without an answer, in order."""
        return [q for q in self.questions if (q.row, q.swapped) not in self.lines]

    def add(self, line: AnswerLine) -> None:
        """Write an answer without a buffer, so that none is lost if the process is killed."""
        if self.replaces_content:
            recorded_path = settings_path(self.path)
            with explain_failed_writes(recorded_path), open_atomically(recorded_path) as settings:
                settings.write(json.dumps(self.settings, indent=2).encode() + b"\n")
                settings.flush()  # a full disk raises an error before the old answers are lost
                self.file.truncate(0)
            self.replaces_content = False
        content = line.to_json().encode() + b"\n"
        with explain_failed_writes(self.path):
            while content:  # os.write may write only a part of it
                content = content[os.write(self.file.fileno(), content) :]
        self.lines[line.question.row, line.question.swapped] = line

    def all_lines(self) -> list[AnswerLine]:
        """Return the answers in the order of the questions; all must be answered."""
        return [self.lines[question.row, question.swapped] for question in self.questions]


def _flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted names, such as ``("options.seed", 0)``."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _describe_value(value: Any) -> str:
    return "nothing" if value is None else shorten(str(value), 60)
