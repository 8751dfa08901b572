"""Answers the rows of a data file: on one process or several, each on a GPU of its own."""

import os
import pickle
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any

from ..engine.environment import python_module_command, training_environment
from ..models.base import ModelSource, identify
from .answers_file import AnswersFile, AnswerLine, open_answers
from .questions import Question, AnswerOptions, digest_image_files, digest_questions, read_questions

if TYPE_CHECKING:
    from .answer_worker import Answer


def answer_file(request: AnswerOptions, out: Path, overwrite: bool = False) -> list[AnswerLine]:
    """Answer every row of the data, and write ``out``, a line a row, as the answers come.

    Lines that are there, of the same model, data and options, are kept. With ``overwrite``, they
    are replaced when the first answer is there.

    Raises:
        ValueError: the model, the data, an image or ``out`` cannot be used, before a model is
            loaded; RuntimeError: answering failed, and what was answered is in ``out``.
    """
    base = request.find()
    request.require_apart(base, out)
    questions = read_questions(request.data)
    settings = settings_of(request, base, questions, digest_image_files(questions))
    return answer_questions(request, base, questions, settings, out, overwrite)


def answer_questions(
    request: AnswerOptions,
    base: ModelSource,
    questions: Sequence[Question],
    settings: Mapping[str, Any],
    out: Path | None,
    overwrite: bool,
) -> list[AnswerLine]:
    """:func:`answer_file` of questions that were read, and their :func:`settings_of`; without
    ``out`` nothing is written."""
    from ..data.check import require_images
    from .answer_worker import require_room

    require_images(request.data)
    require_room(base, questions, request.generation.max_new_tokens)
    if out is None:
        return [*_answer(request, base, questions, len(questions))]
    with open_answers(out, questions, settings, request.data, overwrite) as file:
        if file.lines:
            print(f"{len(file.lines):,} of {len(questions):,} answers are there", flush=True)
        if missing := file.missing:
            _answer_missing(request, base, file, missing)
        return file.all_lines()


def _answer_missing(
    request: AnswerOptions, base: ModelSource, file: AnswersFile, missing: Sequence[Question]
) -> None:
    try:
        for line in _answer(request, base, missing, len(file.questions)):
            file.add(line)
    except (KeyboardInterrupt, RuntimeError):
        if file.lines:
            kept = f"{len(file.lines):,} of {len(file.questions):,} answers are in {file.path}, and"
            kept += f" the same command continues{', without --overwrite' * file.overwrite}"
            print(kept, file=sys.stderr)
        raise


def _answer(
    request: AnswerOptions, base: ModelSource, questions: Sequence[Question], of: int
) -> Iterator[AnswerLine]:
    """Answer questions, and show how far it is with all ``of`` them."""
    from tqdm import tqdm

    start, first = time.monotonic(), 0.0
    bar: dict[str, Any] = {"total": of, "initial": of - len(questions), "disable": None}
    with tqdm(**bar, unit="row", desc="answering") as progress:
        for question, answer in answers(request, base, questions):
            yield AnswerLine(question, *answer)
            progress.update()
            first = first or time.monotonic() - start
    print(describe_speed(len(questions), time.monotonic() - start, first), flush=True)


def describe_speed(rows: int, seconds: float, first: float) -> str:
    """What is said at the end; :mod:`..bench.answers` reads it.

    Args:
        first: Seconds until the first answers, which a batch has together.
    """
    return f"{rows:,} rows answered in {seconds:.1f} s, the first after {first:.1f} s"


def settings_of(
    request: AnswerOptions, base: ModelSource, questions: Sequence[Question], images: Mapping[str, str]
) -> dict[str, Any]:
    """What decides the answers. Batches and processes do not, but for rounding."""
    options = asdict(request.generation) | {"weights": request.weights}
    data = digest_questions(questions, images)
    return {"model": identify(base), "data": data, "options": options}


def answers(
    request: AnswerOptions, base: ModelSource, questions: Sequence[Question]
) -> Iterator[tuple[Question, "Answer"]]:
    """Each question with its answer, in order; several processes are started for several."""
    from .answer_worker import Answer, answer_parts, batches

    placement = request.place()
    parts = list(batches(questions, request.batch_size))
    number = min(placement.processes, len(parts))
    if number == 1:
        told: Generator[list[Any], None, None] = answer_parts(request, base, parts)
    else:
        every = environments(number, placement.on_cpu)
        told = _answers_of_processes(request, base, parts, every)
    with closing(told):
        for part, replies in zip(parts, told, strict=True):
            yield from zip(part, (Answer(*answer) for answer in replies), strict=True)


def _answers_of_processes(
    request: AnswerOptions,
    base: ModelSource,
    parts: Sequence[Sequence[Question]],
    every: list[dict[str, str]],
) -> Generator[list[Any], None, None]:
    """Answers to batches that processes take in turn, in order."""
    command = python_module_command("glm4v_patched.inference.answer_worker")
    # In a session of its own: Ctrl-C is ours to answer.
    how: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "start_new_session": True}
    processes: list[Any] = [Popen(command, env=each, **how) for each in every]
    try:
        for first, process in enumerate(processes):
            with suppress(OSError):  # it has ended
                pickle.dump((request, base, parts[first :: len(every)]), process.stdin)
                process.stdin.flush()  # it stays open until all is answered
        for part, process in zip(parts, cycle(processes), strict=False):
            try:
                reply = pickle.load(process.stdout)
            except (EOFError, pickle.UnpicklingError):  # it ended, or amid a reply
                raise RuntimeError(
                    f"the process that answered the rows {[question.row for question in part]} "
                    f"ended with status {process.wait()}: was it killed for its memory? Lower "
                    "--batch-size or --processes"
                ) from None
            if isinstance(reply, str):
                raise RuntimeError(reply)
            yield reply
    finally:
        for process in processes:
            process.kill()
            with suppress(OSError):  # what was not written yet has nobody to read it
                process.communicate()


def environments(processes: int, on_cpu: bool) -> list[dict[str, str]]:
    """Of each process: it sees one of the GPUs that this one sees."""
    common = training_environment(processes, on_cpu)
    if on_cpu:
        return [common] * processes
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = given.split(",") if given else [str(number) for number in range(processes)]
    return [common | {"CUDA_VISIBLE_DEVICES": seen[number]} for number in range(processes)]
