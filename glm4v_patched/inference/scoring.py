"""How answers are compared with references, and whether they depend on the images; needs no
torch."""

import math
import random
import re
import runpy
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.messages import images_of, replace_images, text_of
from .questions import Question

Metric = Callable[[str, str], float]
# A word; or a character of a script that has no spaces between words.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def exact_match(answer: str, reference: str) -> float:
    """1 if the two are equal, but for white space around them."""
    return float(answer.strip() == reference.strip())


def token_f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of words, in small letters, without punctuation;
    each character of Chinese and Japanese counts as a word. Two texts without a word are equal."""
    given, wanted = (Counter(WORD.findall(text.lower())) for text in (answer, reference))
    if not given or not wanted:
        return float(given == wanted)
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total())


METRICS: dict[str, Metric] = {"exact_match": exact_match, "token_f1": token_f1}


def load_metric(text: str) -> tuple[str, Metric]:
    """The name and the function of ``FILE.py:FUNCTION``, which is given an answer and a reference
    and returns a number.
    """
    place, _, name = text.rpartition(":")
    path, expected = Path(place), "expected FILE.py:FUNCTION, of a file that is there"
    if not name.isidentifier() or path.suffix != ".py" or not path.is_file():
        raise ValueError(f"--metric {text}: {expected}")
    if name in METRICS:
        raise ValueError(f"--metric {text}: {name} is computed anyway; give yours another name")
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)  # it may import its neighbors, as a script may
    try:
        function: Any = runpy.run_path(str(path)).get(name)
    except Exception as error:
        raise ValueError(f"--metric {text}: {path} fails: {error!r}") from error
    finally:
        sys.path.remove(folder)
    if not callable(function):
        raise ValueError(f"--metric {text}: {path} has no function {name}")
    return name, function


def mean_score(name: str, metric: Metric, pairs: Iterable[tuple[str, str]]) -> float | None:
    """The mean over pairs of answer and reference, to 4 digits; None of no pair."""
    scores = []
    for answer, reference in pairs:
        try:
            scores.append(float(metric(answer, reference)))
            if not math.isfinite(scores[-1]):
                raise ValueError(f"it returned {scores[-1]}")
        except Exception as error:
            raise ValueError(
                f"the metric {name} gives no finite number for the answer {answer!r} and the "
                f"reference {reference!r}: {error!r}"
            ) from error
    return round(math.fsum(scores) / len(scores), 4) if scores else None


def swap_images(questions: Sequence[Question], digests: Mapping[str, str]) -> list[Question]:
    """The questions with the images of another row that has a different reference, and none of
    their own images.

    Of a row with the same question, if there is one; else of any with as many images. Rows
    without images, or without such another row, are left out.

    Args:
        digests: Of images by their paths; those with one digest are one image.
    """
    alike: dict[tuple, list[Question]] = defaultdict(list)
    for question in questions:
        if number := len(images_of(question.prompt)):
            alike[number,].append(question)
            alike[number, text_of(question.prompt[-1])].append(question)
    partners: dict[int, Question] = {}
    for key in sorted(alike, key=len):  # those with the same question come last, and count
        partners |= _partners(alike[key], digests)
    return [
        question._replace(
            prompt=_with_images(question.prompt, images_of(partners[question.row].prompt)),
            swapped=True,
        )
        for question in questions
        if question.row in partners
    ]


def _partners(questions: Sequence[Question], digests: Mapping[str, str]) -> dict[int, Question]:
    """For each row another one, with another reference and other images."""
    # In files that are sorted by their answers, the next row has the same one.
    rows = random.Random(0).sample(questions, len(questions))
    shown = [frozenset(digests[path] for path in images_of(row.prompt)) for row in rows]
    to_reference = _to_the_next_other([row.reference for row in rows])
    to_images = _to_the_next_other(shown)
    found: dict[int, Question] = {}
    for at, row in enumerate(rows):
        ahead = to_reference[at]
        while ahead < len(rows):
            place = (at + ahead) % len(rows)
            if rows[place].reference == row.reference:
                ahead += to_reference[place]
            elif shown[place] == shown[at]:
                ahead += to_images[place]
            elif shown[place] & shown[at]:
                ahead += 1
            else:
                found[row.row] = rows[place]
                break
    return found


def _to_the_next_other(values: Sequence[Any]) -> list[int]:
    """How many places after each value, in a circle, the next other one is; as many as there are
    where all are equal. Where one answer is rare, a look at each row would take minutes."""
    size = len(values)
    steps = [size] * size
    for at in reversed(range(2 * size - 1)):
        here, after = at % size, (at + 1) % size
        steps[here] = 1 if values[here] != values[after] else min(steps[after] + 1, size)
    return steps


def _with_images(prompt: list[dict], images: Sequence[str]) -> list[dict]:
    names = iter(images)
    return replace_images(prompt, lambda _: next(names))
