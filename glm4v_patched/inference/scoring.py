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
    answered, expected = (Counter(WORD.findall(text.lower())) for text in (answer, reference))
    if not answered or not expected:
        return float(answered == expected)
    num_common = (answered & expected).total()
    return 2 * num_common / (answered.total() + expected.total())


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
    """Return the mean score of (answer, reference) pairs, rounded to 4 digits; None without pairs.

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


def swap_images(questions: Sequence[Question], image_digests: Mapping[str, str]) -> list[Question]:
    """Return questions with all of their images replaced by those of another row, the partner.

    The partner has another reference answer and the same number of images, but no image in common.
    Partners with the same question text are preferred. Rows without images or without a partner are
    left out.

    Args:
        image_digests: sha256 of image files by path. Files with equal digests are the same image.
    """
    groups: dict[tuple, list[Question]] = defaultdict(list)
    for question in questions:
        if num_images := len(images_of(question.prompt)):
            groups[num_images,].append(question)
            groups[num_images, text_of(question.prompt[-1])].append(question)
    partners: dict[int, Question] = {}
    for key in sorted(groups, key=len):  # the last groups have equal texts; their partners win
        partners |= _find_partners(groups[key], image_digests)
    return [
        question._replace(
            prompt=_replace_all_images(question.prompt, images_of(partners[question.row].prompt)),
            swapped=True,
        )
        for question in questions
        if question.row in partners
    ]


def _find_partners(
    questions: Sequence[Question], image_digests: Mapping[str, str]
) -> dict[int, Question]:
    """Return the partner of each question, by row number; see :func:`swap_images`."""
    # Shuffled, because neighbors in a file that is sorted by answers have the same reference.
    shuffled = random.Random(0).sample(questions, len(questions))
    images = [
        frozenset(image_digests[path] for path in images_of(question.prompt))
        for question in shuffled
    ]
    # The search skips runs of equal values. To try each question would take minutes if most of them
    # are equal.
    reference_steps = _steps_to_next_different([question.reference for question in shuffled])
    image_steps = _steps_to_next_different(images)
    partners: dict[int, Question] = {}
    for index, question in enumerate(shuffled):
        steps = reference_steps[index]
        while steps < len(shuffled):
            other = (index + steps) % len(shuffled)
            if shuffled[other].reference == question.reference:
                steps += reference_steps[other]
            elif images[other] == images[index]:
                steps += image_steps[other]
            elif images[other] & images[index]:
                steps += 1
            else:
                partners[question.row] = shuffled[other]
                break
    return partners


def _steps_to_next_different(values: Sequence[Any]) -> list[int]:
    """Return for each value the distance to the next different value, such as [2, 1, 1] for "aab".

    The first value follows the last one. If all values are equal, each distance is their number.
    """
    size = len(values)
    steps = [size] * size
    for position in reversed(range(2 * size - 1)):  # two rounds, because values wrap around
        index, next_index = position % size, (position + 1) % size
        is_different = values[index] != values[next_index]
        steps[index] = 1 if is_different else min(steps[next_index] + 1, size)
    return steps


def _replace_all_images(prompt: list[dict], images: Sequence[str]) -> list[dict]:
    paths = iter(images)
    return replace_images(prompt, lambda _: next(paths))
