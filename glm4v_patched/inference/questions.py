"""The questions of a data file, and how they are to be answered; needs no torch."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..data.image_files import FileStamp
from ..data.messages import images_of, replace_images, text_of, drop_train_flags
from ..data.rows import RowProblem, DataSource, describe_problems, iter_rows, split_usable_rows
from ..data.source import folders_of_source
from ..models.base import ModelSource, folders_of
from ..models.find import find_source
from ..models.placement import Placement, place_processes
from ..models.quantized_weights import WEIGHT_FORMATS, check_weights_option
from ..option_fields import find_field_problems, option
from ..paths import require_apart

# Below, logits in fp32 become infinite, and no token can be drawn.
LEAST_TEMPERATURE = 1e-3
LEAST_PENALTY, MOST_PENALTY = 1e-2, 1e2
# static: one size for all steps, which are recorded on a GPU and replayed; auto: so on a GPU, if
# they can be recorded.
CACHES = ("auto", "static", "dynamic")


class Question(NamedTuple):
    """A row of a data file, without the answer that it ends with.

    Args:
        row: Its line in the file.
        prompt: Messages.
        reference: The answer that the row ends with, if it does.
        swapped: Whether the images are those of another row.
    """

    row: int
    prompt: list[dict]
    reference: str | None = None
    swapped: bool = False


def _within(least: float, most: float, expected: str) -> Callable[[float], str | None]:
    # A NaN is in no range.
    return lambda value: None if least <= value <= most else expected


OF_TEMPERATURE = _within(
    LEAST_TEMPERATURE, sys.float_info.max, "at least 0.001 (without it, answers are greedy)"
)
OF_TOP_P = _within(math.ulp(0), 1, "a number above 0, at most 1")
OF_PENALTY = _within(LEAST_PENALTY, MOST_PENALTY, "a number from 0.01 to 100")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How answers are generated; the names are transformers'. Greedy, unless one of temperature,
    top_p and top_k is given."""

    max_new_tokens: int = option(512, "tokens of the longest answer", metavar="N", at_least=1)
    temperature: float | None = option(
        None, "draw tokens at this temperature", metavar="T", check=OF_TEMPERATURE
    )
    top_p: float | None = option(
        None, "draw among the likeliest, up to this probability", metavar="P", check=OF_TOP_P
    )
    top_k: int | None = option(None, "draw among the K likeliest", metavar="K", at_least=1)
    repetition_penalty: float | None = option(
        None, "above 1: repeat less", metavar="X", check=OF_PENALTY
    )
    num_beams: int = option(1, "beams of a beam search", metavar="N", at_least=1)
    seed: int = option(0, "of what is drawn")

    def __post_init__(self):
        if wrong := "; ".join(find_field_problems(self)):
            raise ValueError(wrong)

    @property
    def do_sample(self) -> bool:
        return not self.temperature is self.top_p is self.top_k is None

    def given(self) -> dict[str, Any]:
        """As ``transformers.GenerationConfig`` takes it."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        del given["seed"]
        return given | {"do_sample": self.do_sample}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model answers, and how it is held.

    Args:
        model: Folder of a model or of adapters, or an id of the Hub.
    """

    model: str
    processes: int | None = 1
    revision: str | None = option(None, "branch, tag or commit of an id of the Hub")
    device: str = option(
        "cuda", "cpu: without GPUs (slow: for trials of small models)", choices=("cuda", "cpu")
    )
    weights: str | None = option(
        None,
        "hold the layers' in fewer bytes: fp8 is faster, too; the others are bitsandbytes's",
        choices=WEIGHT_FORMATS,
    )
    cache: str = option("auto", "of keys and values", choices=CACHES)

    def place(self) -> Placement:
        """Raises ``ValueError`` if there are too few GPUs, or none that the options need."""
        check_weights_option(self.weights, self.device, self.cache)
        return place_processes(self.processes, self.device)  # type: ignore[arg-type]

    def find(self) -> ModelSource:
        """Raises as :meth:`place` and :func:`find_source`."""
        self.place()
        return find_source(self.model, self.revision, self.weights)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(ModelOptions):
    """What the command line asks for.

    Args:
        data: Of the rows.
        processes: None for one on each GPU; on a CPU, for a single one.
    """

    data: DataSource
    processes: int | None = option(
        None, "processes, each on a GPU of its own; default: all GPUs", metavar="N", ge=1
    )
    batch_size: int = option(8, "rows that a process answers at once", metavar="N", ge=1)
    generation: Generation = Generation()

    def require_apart(self, base: ModelSource, out: Path) -> None:
        """Raise ``ValueError`` unless ``out`` lies apart from the folders that are read."""
        require_apart(out, [*folders_of(base), *folders_of_source(self.data, "--data")], "--out")


def read_questions(path: str | Path | DataSource, with_reference: bool = False) -> list[Question]:
    """Read rows; where one ends with the assistant, that is its reference."""
    questions: list[Question] = []
    rows, faults = split_usable_rows(iter_rows(path, for_training=False))
    for row in rows:
        question = make_question(row.line, row.messages)
        if question.reference is not None or not with_reference:
            questions.append(question)
        else:
            told = f"ends with a message of {row.messages[-1]['role']}; expected the right answer "
            faults.append(RowProblem(row.line, f"{told}as one of the assistant, to compare with"))
    if faults:
        faults.sort(key=lambda fault: fault.line)
        raise ValueError(describe_problems(path, faults, len(questions) + len(faults)))
    return questions


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """So many of them, evenly."""
    number = min(len(items), most)
    return [items[place * len(items) // number] for place in range(number)]


def make_question(row: int, messages: list[dict]) -> Question:
    """Of a conversation; what the assistant says at its end is the reference."""
    *prompt, last = messages
    if last["role"] != "assistant":
        return Question(row, drop_train_flags(messages))
    tool, words = last.get("metadata"), text_of(last)
    return Question(row, drop_train_flags(prompt), f"{tool}\n{words}" if tool else words)


def digest_image_files(questions: Sequence[Question]) -> dict[str, str]:
    """sha256 of each image's bytes, by its path; raises ``ValueError`` if one cannot be read."""
    from tqdm import tqdm

    rows = {path: question.row for question in questions for path in images_of(question.prompt)}
    digests = {}
    bar: dict[str, Any] = {"unit": "file", "desc": "reading images", "disable": None, "delay": 1}
    for path, row in tqdm(rows.items(), **bar):
        try:
            digests[path] = FileStamp.of(path).sha256
        except ValueError as error:
            raise ValueError(f"row {row}: the image {error}") from None
    return digests


def digest_questions(questions: Sequence[Question], images: Mapping[str, str]) -> str:
    """sha256 of rows and references.

    Args:
        images: Of :func:`digest_image_files`: they count by their bytes, and may move.
    """
    digest = hashlib.sha256()
    for question in questions:
        prompt = replace_images(question.prompt, images.__getitem__)
        row = [question.row, prompt, question.reference, question.swapped]
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest()
