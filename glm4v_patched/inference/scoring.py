"""Compare answers with references, and swap images to test whether the model looks at them.

Needs no torch.
"""

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
from .grounding import BOX_METRICS, OPERATION_METRICS
from .questions import Question

Metric = Callable[[str, str], float]
# A word, or one character of a script without spaces between words (Chinese, Japanese).
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def exact_match(answer: str, reference: str) -> float:
    """Return 1 if both are equal except for surrounding white space, otherwise 0."""
    return float(answer.strip() == reference.strip())


def token_f1(answer: str, reference: str) -> float:
    """Return the F1 score over lower-case words without punctuation.

    Each Chinese or Japanese character counts as a word. Two texts without words score 1.
    """
    words, expected = (Counter(WORD.findall(text.lower())) for text in (answer, reference))
    if not words or not expected:
        return float(words == expected)
    common = (words & expected).total()
    return 2 * common / (words.total() + expected.total())


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    **BOX_METRICS,
    **OPERATION_METRICS,
}


def load_metric(text: str) -> tuple[str, Metric]:
    """Return name and function of a user's metric, ``FILE.py:FUNCTION``.

    The function takes an answer and a reference, and returns a number. Raises ``ValueError`` if the
    function cannot be loaded.
    """
    file, _, name = text.rpartition(":")
    path, expected = Path(file), "expected FILE.py:FUNCTION, where FILE.py exists"
    if not name.isidentifier() or path.suffix != ".py" or not path.is_file():
        raise ValueError(f"--metric {text}: {expected}")
    if name in METRICS:
        raise ValueError(f"--metric {text}: {name} is a built-in metric; give yours another name")
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)  # as for a script, so that the file may import others beside it
    try:
        function: Any = runpy.run_path(str(path)).get(name)
    except Exception as error:
        raise ValueError(f"--metric {text}: {path} raised {error!r}") from error
    finally:
        sys.path.remove(folder)
    if not callable(function):
        raise ValueError(f"--metric {text}: {path} has no function {name}")
    return name, function


def mean_score(name: str, metric: Metric, pairs: Iterable[tuple[str, str]]) -> float | None:
    """Return the mean score of pairs of answer and reference, to 4 digits; None without pairs.

    Raises ``ValueError`` if the metric raises, or returns NaN or infinity.
    """
    scores = []
    for answer, reference in pairs:
        try:
            scores.append(float(metric(answer, reference)))
            if not math.isfinite(scores[-1]):
                raise ValueError(f"it returned {scores[-1]}")
        except Exception as error:
            raise ValueError(
                f"the metric {name} returns no finite number for the answer {answer!r} and the "
                f"reference {reference!r}: {error!r}"
            ) from error
    return round(math.fsum(scores) / len(scores), 4) if scores else None


def swap_images(questions: Sequence[Question], digests: Mapping[str, str]) -> list[Question]:
    """Return questions with all of their images replaced by those of another row, the partner.

    A partner has another reference and as many images, none of which the row has. Partners with the
    same question text are preferred. Rows without images or without a partner are left out.

    Args:
        digests: sha256 of image files by path; equal digests are the same image.
    """
    groups: dict[tuple, list[Question]] = defaultdict(list)
    for question in questions:
        if number := len(images_of(question.prompt)):
            groups[number,].append(question)
            groups[number, text_of(question.prompt[-1])].append(question)
    partners: dict[int, Question] = {}
    for key in sorted(groups, key=len):  # groups with the same text come last, and take precedence
        partners |= _find_partners(groups[key], digests)
    return [
        question._replace(
            prompt=_replace_all_images(question.prompt, images_of(partners[question.row].prompt)),
            swapped=True,
        )
        for question in questions
        if question.row in partners
    ]


def _find_partners(
    questions: Sequence[Question], digests: Mapping[str, str]
) -> dict[int, Question]:
    """Return each row's partner by row number: it has another reference and none of its images."""
    # Shuffled, because neighbors in a file that is sorted by answers have the same reference.
    rows = random.Random(0).sample(questions, len(questions))
    images = [frozenset(digests[path] for path in images_of(row.prompt)) for row in rows]
    # The search skips runs of equal values: trying each row takes minutes if most are equal.
    next_reference = _steps_to_next_different([row.reference for row in rows])
    next_images = _steps_to_next_different(images)
    partners: dict[int, Question] = {}
    for index, row in enumerate(rows):
        steps = next_reference[index]
        while steps < len(rows):
            other = (index + steps) % len(rows)
            if rows[other].reference == row.reference:
                steps += next_reference[other]
            elif images[other] == images[index]:
                steps += next_images[other]
            elif images[other] & images[index]:
                steps += 1
            else:
                partners[row.row] = rows[other]
                break
    return partners


def _steps_to_next_different(values: Sequence[Any]) -> list[int]:
    """Return for each value how many steps away the next different value is, cyclically.

    If all values are equal, each result is the number of values.
    """
    size = len(values)
    steps = [size] * size
    for position in reversed(range(2 * size - 1)):
        index, following = position % size, (position + 1) % size
        is_different = values[index] != values[following]
        steps[index] = 1 if is_different else min(steps[following] + 1, size)
    return steps


def _replace_all_images(prompt: list[dict], images: Sequence[str]) -> list[dict]:
    paths = iter(images)
    return replace_images(prompt, lambda _: next(paths))
