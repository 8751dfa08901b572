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
    options.refuse_overlap(base, out)
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
        settings: The result of :func:`answer_settings`.
        out: JSONL file; None writes no file.
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
            command = "the same command"
            if file.overwrite:
                command += " without --overwrite"
            print(
                f"{len(file.lines):,} of {len(file.questions):,} answers are in {file.path}; "
                f"{command} generates the others",
                file=sys.stderr,
            )
        raise


def _answer_with_progress(
    options: AnswerOptions, base: ModelSource, questions: Sequence[Question], total: int
) -> Iterator[AnswerLine]:
    """Yield the answers, show the progress, and print the speed at the end.

    Args:
        total: Number of all rows. Those that are not in ``questions`` are answered already.
    """
    start, first_answer_s = time.monotonic(), 0.0
    with show_progress("answering", total=total, done=total - len(questions)) as progress:
        for question, answer in generate_answers(options, base, questions):
            yield AnswerLine(question, *answer)
            progress.update()
            first_answer_s = first_answer_s or time.monotonic() - start
    write_line(describe_speed(len(questions), time.monotonic() - start, first_answer_s))


def describe_speed(num_rows: int, seconds: float, first_answer_s: float) -> str:
    """Return a line with the time of all answers and of the first.

    :mod:`..bench.answers` parses this line.
    """
    rows = pluralize(num_rows, "row")
    return f"{rows} answered in {seconds:.1f} s, the first after {first_answer_s:.1f} s"


def answer_settings(
    options: AnswerOptions,
    base: ModelSource,
    questions: Sequence[Question],
    image_digests: Mapping[str, str],
) -> dict[str, Any]:
    """Return what determines the answers: model, digest of the data, and generation options.

    Batch size and number of processes are left out, because they change answers only by rounding.

    Args:
        image_digests: sha256 of each image file, by path.
    """
    generation = asdict(options.generation) | {"weights": options.weights}
    if options.dtype != "auto":
        generation["dtype"] = options.dtype
    data = digest_questions(questions, image_digests)
    return {"model": identify(base), "data": data, "options": generation}


def generate_answers(
    options: AnswerOptions, base: ModelSource, questions: Sequence[Question]
) -> Iterator[tuple[Question, "Answer"]]:
    """Yield each question with its answer, in order.

    This process answers, or several worker processes do.
    """
    from .answer_worker import Answer, answer_batches, decide_dtype, split_into_batches

    placement = options.placement()
    batches = list(split_into_batches(questions, options.batch_size))
    num_workers = min(placement.processes, len(batches))
    if num_workers == 1:
        batch_answers: Generator[list[Any], None, None] = answer_batches(options, base, batches)
    else:
        options = replace(options, dtype=decide_dtype(options, base, num_workers))
        environments = worker_environments(num_workers, placement.on_cpu)
        batch_answers = _answer_in_workers(options, base, batches, environments)
    with closing(batch_answers):
        for batch, answers in zip(batches, batch_answers, strict=True):
            yield from zip(batch, (Answer(*answer) for answer in answers), strict=True)


def _answer_in_workers(
    options: AnswerOptions,
    base: ModelSource,
    batches: Sequence[Sequence[Question]],
    environments: list[dict[str, str]],
) -> Generator[list[Any], None, None]:
    """Yield the answers to each batch, in order. The workers take batches in turn.

    Args:
        environments: The environment variables of each worker.
    """
    command = python_module_command("glm4v_patched.inference.answer_worker")
    # Each worker has its own session, so that Ctrl-C in the terminal does not reach it.
    popen_kwargs: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "start_new_session": True}
    workers: list[Any] = [
        Popen(command, env=variables, **popen_kwargs) for variables in environments
    ]
    try:
        for index, worker in enumerate(workers):
            with suppress(OSError):  # a worker that has ended is reported where its reply is read
                pickle.dump((options, base, batches[index :: len(workers)]), worker.stdin)
                worker.stdin.flush()  # stays open, because the worker ends when stdin is closed
        for batch, worker in zip(batches, cycle(workers), strict=False):
            try:
                reply = pickle.load(worker.stdout)
            except (EOFError, pickle.UnpicklingError):  # no reply, or only a part of it
                raise RuntimeError(
                    f"the process that answered rows {[question.row for question in batch]} ended "
                    f"with status {worker.wait()}. If the system killed it because memory ran "
                    "out, lower --batch-size or --processes"
                ) from None
            if isinstance(reply, str):  # an error message
                raise RuntimeError(reply)
            yield reply
    finally:
        for worker in workers:
            worker.kill()
            with suppress(OSError):  # communicate flushes stdin, which the worker no longer reads
                worker.communicate()


def worker_environments(num_workers: int, on_cpu: bool) -> list[dict[str, str]]:
    """Return each worker's environment variables, with one of the GPUs that this process sees."""
    common = training_environment(num_workers, on_cpu)
    if on_cpu:
        return [common] * num_workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(num_workers)]
    return [common | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:num_workers]]
