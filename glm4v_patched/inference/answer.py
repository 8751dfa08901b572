"""Answers the rows of a data file: on one process or several, each on a GPU of its own."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.rows import Source
from ..data.workers import Ended, ask_all
from ..engine.environment import python_module, training_environment
from ..models.base import Base, identify
from ..models.find import find_source
from ..models.placement import Placement, place
from ..models.quantised_weights import check_weights
from .answers_file import AnswersFile, Line
from .questions import (
    Generation,
    Question,
    digest_pictures,
    digest_questions,
    read_questions,
)

if TYPE_CHECKING:
    from .answer_worker import Answer


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for.

    Args:
        model: Folder of a model or of adapters, or an id of the Hub.
        data: Of the rows.
        processes: None for one on each GPU; on a CPU, for a single one.
        cache: ``static``, ``dynamic``, or ``auto``: static on a GPU where it pays.
    """

    model: str
    data: Source
    revision: str | None = None
    device: Any = "cuda"
    processes: int | None = None
    batch_size: int = 8
    weights: str | None = None
    generation: Generation = Generation()
    cache: str = "auto"

    def place(self) -> Placement:
        """Raises ``ValueError`` if there are too few GPUs, or none that the options need."""
        check_weights(self.weights, self.device, self.cache)
        return place(self.processes, self.device)


def answer_file(request: Request, out: Path, overwrite: bool = False) -> list[Line]:
    """Answer every row of the data, and write ``out``, a line a row, as the answers come.

    Lines that are there, of the same model, data and options, are kept. With ``overwrite``, they
    are replaced when the first answer is there.

    Raises:
        ValueError: the model, the data, a picture or ``out`` cannot be used, before a model is
            loaded; RuntimeError: answering failed, and what was answered is in ``out``.
    """
    placement = request.place()
    base = find_source(request.model, request.revision, request.weights)
    questions = read_questions(request.data)
    settings = settings_of(request, base, questions, digest_pictures(questions))
    return answer_questions(request, placement, base, questions, settings, out, overwrite)


def answer_questions(
    request: Request,
    placement: Placement,
    base: Base,
    questions: Sequence[Question],
    settings: Mapping[str, Any],
    out: Path,
    overwrite: bool,
) -> list[Line]:
    """:func:`answer_file` of questions that were read, and their :func:`settings_of`."""
    with closing(AnswersFile(out, questions, settings, request.data, overwrite)) as file:
        if file.dropped:
            print(file.dropped, flush=True)
        missing = file.missing
        if file.lines:
            print(f"{len(file.lines):,} of {len(questions):,} answers are there", flush=True)
        if missing:
            from ..data.check import require_pictures  # imports torch

            require_pictures(request.data, to_learn=False)
            _require_room(request, base, missing)
        times = [time.monotonic()]
        try:
            with _progress(len(questions), len(file.lines)) as progress:
                for question, answer in answers(request, placement, base, missing):
                    file.add(Line(question, *answer))
                    progress.update()
                    times.append(time.monotonic())
        except (KeyboardInterrupt, RuntimeError) as error:
            kept = f"{len(file.lines):,} of {len(questions):,} answers are in {out}, and the same "
            kept += f"command continues{', without --overwrite' * overwrite}"
            if overwrite and not file.has_begun:
                kept = f"nothing was answered, and {out} is as it was"
            raise type(error)(f"{str(error) or 'stopped'}\n{kept}") from error
        if missing:
            print(_describe_speed(times, request.batch_size * placement.processes), flush=True)
        return file.all_lines()


def _describe_speed(times: Sequence[float], at_once: int) -> str:
    """
    Args:
        times: When it began, and when each answer was there.
        at_once: Answers that come together; before the first ones the model is loaded.
    """
    start, *done = times
    told = f"{len(done):,} rows answered in {done[-1] - start:.1f} s"
    if len(done) <= at_once:
        return f"{told}, in which the model was loaded"
    first = done[at_once - 1]
    speed = (len(done) - at_once) / max(done[-1] - first, 1e-9)
    return f"{told}: the first {at_once:,} after {first - start:.1f} s, then {speed:.3g} rows/s"


def settings_of(
    request: Request, base: Base, questions: Sequence[Question], pictures: Mapping[str, str]
) -> dict[str, Any]:
    """What decides the answers. Batches and processes do not, but for rounding.

    Args:
        pictures: Of :func:`questions.digest_pictures`.
    """
    options = asdict(request.generation) | {"load_in_4bit": request.weights == "4bit"}
    if request.weights not in (None, "4bit"):
        options["weights"] = request.weights
    data = digest_questions(questions, pictures)
    return {"model": identify(base), "data": data, "options": options}


def answers(
    request: Request, placement: Placement, base: Base, questions: Sequence[Question]
) -> Iterator[tuple[Question, "Answer"]]:
    """Each question with its answer, in order; several processes are started for several.

    Raises:
        RuntimeError: a batch cannot be answered; names its rows.
    """
    if not questions:
        return
    from .answer_worker import Answer, Answerer, Job, batches  # imports torch
    from .decoding.static_cache import chosen

    device = "cpu" if placement.on_cpu else "cuda"
    number = min(placement.processes, -(-len(questions) // request.batch_size))
    parts = list(batches(questions, request.batch_size))
    steps = -(-len(parts) // number) * request.generation.max_new_tokens
    cache = chosen(request.cache, device, steps, request.weights)
    if number == 1:
        from ..models.loading import load

        loaded = load(base, device, request.weights)
        answerer = Answerer(loaded, request.generation, cache)
        for part in parts:
            replies = answerer.answer([q.prompt for q in part], part[0].row)
            yield from zip(part, replies, strict=True)
        return
    job = Job(base, device, request.weights, request.generation, cache)
    command = python_module("glm4v_patched.inference.answer_worker", job.to_json())
    asked = [
        {"prompts": [q.prompt for q in part], "number": part[0].row, "rows": [q.row for q in part]}
        for part in parts
    ]
    every = environments(number, placement.on_cpu)
    with closing(ask_all(command, asked, number, every)) as told:
        for part, reply in zip(parts, told, strict=True):
            if isinstance(reply, Ended):
                rows = [question.row for question in part]
                raise RuntimeError(
                    f"the process that answered the rows {rows} ended with status {reply.status}: "
                    "was it killed for its memory? Lower --batch-size or --processes"
                )
            if "error" in reply:
                raise RuntimeError(reply["error"])
            yield from zip(part, (Answer(*answer) for answer in reply["answers"]), strict=True)


def environments(processes: int, on_cpu: bool) -> list[dict[str, str]]:
    """Of each process: it sees one of the GPUs that this one sees."""
    common = training_environment(processes, on_cpu)
    if on_cpu:
        return [common] * processes
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = given.split(",") if given else [str(number) for number in range(processes)]
    return [common | {"CUDA_VISIBLE_DEVICES": seen[number]} for number in range(processes)]


def _require_room(request: Request, base: Base, questions: Sequence[Question]) -> None:
    from ..models.loading import config_of, load_processor
    from .answer_worker import require_room

    config = config_of(base)
    new = request.generation.max_new_tokens
    require_room(load_processor(base), config.seq_length, questions, new)


def _progress(total: int, done: int):
    from tqdm import tqdm

    return tqdm(total=total, initial=done, unit="row", desc="answering", disable=None)
