"""Answer the rows of a data file, in one process or in several with one GPU each."""

import os
import pickle
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any

from ..engine.environment import python_module_command, training_environment
from ..models.base import ModelSource, identify
from ..terminal_text import pluralize, show_progress, write_line
from .answers_file import AnswerLine, AnswersFile, open_answers
from .questions import (
    AnswerOptions,
    Question,
    digest_image_files,
    digest_questions,
    read_questions,
)

if TYPE_CHECKING:
    from .answer_worker import Answer


def answer_file(options: AnswerOptions, out: Path, overwrite: bool = False) -> list[AnswerLine]:
    """Answer every row of the data and write each answer to ``out`` as soon as it is generated.

    If ``out`` holds answers of the same model, data and options, only the missing ones are
    generated.

    Args:
        out: JSONL file, one line per row.
        overwrite: Replace ``out``, as soon as the first new answer is generated.

    Raises:
        ValueError: The model, the data, an image or ``out`` cannot be used. This is checked before
            the model is loaded.
        RuntimeError: Answering failed. The answers so far are in ``out``.
    """
    base = options.find()
    options.require_apart(base, out)
    questions = read_questions(options.data)
    settings = answer_settings(options, base, questions, digest_image_files(questions))
    return answer_questions(options, base, questions, settings, out, overwrite)


def answer_questions(
    options: AnswerOptions,
    base: ModelSource,
    questions: Sequence[Question],
    settings: Mapping[str, Any],
    out: Path | None,
    overwrite: bool,
) -> list[AnswerLine]:
    """Answer questions that have been read already; see :func:`answer_file`.

    Args:
        settings: From :func:`answer_settings`.
        out: None writes no file.
    """
    from ..data.check import require_images
    from .answer_worker import require_context_length

    require_images(options.data)
    require_context_length(base, questions, options.generation.max_new_tokens)
    if out is None:
        return [*_answer_with_progress(options, base, questions, len(questions))]
    with open_answers(out, questions, settings, options.data, overwrite) as file:
        if file.lines:
            total = pluralize(len(questions), "answer")
            write_line(f"{len(file.lines):,} of {total} are in {out} already")
        if missing := file.missing:
            _answer_missing(options, base, file, missing)
        return file.all_lines()


def _answer_missing(
    options: AnswerOptions, base: ModelSource, file: AnswersFile, missing: Sequence[Question]
) -> None:
    try:
        for line in _answer_with_progress(options, base, missing, len(file.questions)):
            file.add(line)
    except (KeyboardInterrupt, RuntimeError):
        if file.lines:
            command = (
                "the same command without --overwrite" if file.overwrite else "the same command"
            )
            print(
                f"{len(file.lines):,} of {len(file.questions):,} answers are in {file.path}; "
                f"{command} generates the others",
                file=sys.stderr,
            )
        raise


def _answer_with_progress(
    options: AnswerOptions, base: ModelSource, questions: Sequence[Question], total: int
) -> Iterator[AnswerLine]:
    """Yield the answers; print how many of ``total`` rows have one, and the speed at the end."""
    start, first_answer_s = time.monotonic(), 0.0
    with show_progress("answering", total=total, done=total - len(questions)) as progress:
        for question, answer in generate_answers(options, base, questions):
            yield AnswerLine(question, *answer)
            progress.update()
            first_answer_s = first_answer_s or time.monotonic() - start
    write_line(describe_speed(len(questions), time.monotonic() - start, first_answer_s))


def describe_speed(num_rows: int, seconds: float, first_answer_s: float) -> str:
    """Return the line that is printed at the end; :mod:`..bench.answers` parses it."""
    total = f"{pluralize(num_rows, 'row')} answered in {seconds:.1f} s"
    return f"{total}, the first after {first_answer_s:.1f} s"


def answer_settings(
    options: AnswerOptions,
    base: ModelSource,
    questions: Sequence[Question],
    images: Mapping[str, str],
) -> dict[str, Any]:
    """Return the identity of the model, the digest of the data and the generation options.

    Batch size and number of processes are left out, because they change answers only by rounding.

    Args:
        images: sha256 of each image file, by path.
    """
    generation = asdict(options.generation) | {"weights": options.weights}
    generation |= {} if options.dtype == "auto" else {"dtype": options.dtype}
    data = digest_questions(questions, images)
    return {"model": identify(base), "data": data, "options": generation}


def generate_answers(
    options: AnswerOptions, base: ModelSource, questions: Sequence[Question]
) -> Iterator[tuple[Question, "Answer"]]:
    """Yield each question with its answer, in order, from this process or several workers."""
    from .answer_worker import Answer, answer_batches, decide_dtype, split_into_batches

    placement = options.placement()
    batches = list(split_into_batches(questions, options.batch_size))
    processes = min(placement.processes, len(batches))
    if processes == 1:
        replies: Generator[list[Any], None, None] = answer_batches(options, base, batches)
    else:
        options = replace(options, dtype=decide_dtype(options, base, processes))
        environments = worker_environments(processes, placement.on_cpu)
        replies = _answer_in_processes(options, base, batches, environments)
    with closing(replies):
        for batch, answers in zip(batches, replies, strict=True):
            yield from zip(batch, (Answer(*answer) for answer in answers), strict=True)


def _answer_in_processes(
    options: AnswerOptions,
    base: ModelSource,
    batches: Sequence[Sequence[Question]],
    environments: list[dict[str, str]],
) -> Generator[list[Any], None, None]:
    """Yield the answers to each batch, in order; the batches go to the processes round-robin."""
    command = python_module_command("glm4v_patched.inference.answer_worker")
    # In sessions of their own, the workers do not receive Ctrl-C.
    pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "start_new_session": True}
    processes: list[Any] = [Popen(command, env=variables, **pipes) for variables in environments]
    try:
        for number, process in enumerate(processes):
            with suppress(OSError):  # a worker that has ended is reported where its reply is read
                pickle.dump((options, base, batches[number :: len(processes)]), process.stdin)
                process.stdin.flush()  # stays open, because the worker ends when stdin is closed
        for batch, process in zip(batches, cycle(processes), strict=False):
            try:
                reply = pickle.load(process.stdout)
            except (EOFError, pickle.UnpicklingError):  # no reply, or only a part of it
                raise RuntimeError(
                    f"the process that answered rows {[question.row for question in batch]} ended "
                    f"with status {process.wait()}. If the system killed it because memory ran "
                    "out, lower --batch-size or --processes"
                ) from None
            if isinstance(reply, str):
                raise RuntimeError(reply)
            yield reply
    finally:
        for process in processes:
            process.kill()
            with suppress(OSError):  # communicate flushes stdin, which the worker no longer reads
                process.communicate()


def worker_environments(processes: int, on_cpu: bool) -> list[dict[str, str]]:
    """Return each worker's environment, with one of the GPUs that this process sees."""
    shared = training_environment(processes, on_cpu)
    if on_cpu:
        return [shared] * processes
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(processes)]
    return [shared | {"CUDA_VISIBLE_DEVICES": gpus[number]} for number in range(processes)]
