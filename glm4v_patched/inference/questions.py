"""The questions of a data file, and the options for answering them; needs no torch."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..data.image_files import FileStamp
from ..data.messages import drop_train_flags, images_of, replace_images, text_of
from ..data.rows import DataSource, RowProblem, describe_problems, iter_rows, split_usable_rows
from ..data.source import folders_of_source
from ..models.base import ModelSource, folders_of
from ..models.find import find_source
from ..models.placement import Placement, place_processes
from ..models.quantized_weights import WEIGHT_FORMATS, check_weights_option
from ..option_fields import find_field_problems, option
from ..paths import refuse_overlap
from ..terminal_text import show_progress

# Below this temperature, fp32 logits overflow to infinity and no token can be sampled.
MIN_TEMPERATURE = 1e-3
MIN_PENALTY, MAX_PENALTY = 1e-2, 1e2
# Values of --dtype, with vLLM's names.
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Values of --cache. static: a KV cache of fixed size, with CUDA graphs on a GPU. auto: static on a
# GPU if the weights' format allows CUDA graphs, otherwise dynamic.
CACHES = ("auto", "static", "dynamic")


class Question(NamedTuple):
    """A row of a data file, split into prompt and reference answer.

    Args:
        row: Number of the row, from 1.
        prompt: The messages before the answer.
        reference: The answer that the row ends with; None if it ends with a question.
        swapped: Whether the prompt has the images of another row (:func:`scoring.swap_images`).
    """

    row: int
    prompt: list[dict]
    reference: str | None = None
    swapped: bool = False


def _check_range(low: float, high: float, expected: str) -> Callable[[float], str | None]:
    """Return a function that returns None for a value in range, and ``expected`` otherwise."""
    return lambda value: None if low <= value <= high else expected


CHECK_TEMPERATURE = _check_range(
    MIN_TEMPERATURE, sys.float_info.max, "at least 0.001 (leave it out for greedy answers)"
)
CHECK_TOP_P = _check_range(math.ulp(0), 1, "a number above 0, at most 1")
CHECK_PENALTY = _check_range(MIN_PENALTY, MAX_PENALTY, "a number from 0.01 to 100")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation options, with transformers' names.

    Decoding is greedy, unless temperature, top_p or top_k is set.
    """

    max_new_tokens: int = option(512, "tokens of the longest answer", metavar="N", at_least=1)
    temperature: float | None = option(
        None, "sample at this temperature", metavar="T", check=CHECK_TEMPERATURE
    )
    top_p: float | None = option(
        None,
        "sample from the likeliest tokens up to this total probability",
        metavar="P",
        check=CHECK_TOP_P,
    )
    top_k: int | None = option(None, "sample from the K likeliest tokens", metavar="K", at_least=1)
    repetition_penalty: float | None = option(
        None, "above 1: repeat less", metavar="X", check=CHECK_PENALTY
    )
    num_beams: int = option(1, "beams of a beam search", metavar="N", at_least=1)
    seed: int = option(0, "random seed for sampling")

    def __post_init__(self):
        if problems := "; ".join(find_field_problems(self)):
            raise ValueError(problems)

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled instead of chosen greedily."""
        return any(value is not None for value in (self.temperature, self.top_p, self.top_k))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options as arguments of ``transformers.GenerationConfig``."""
        kwargs = {name: value for name, value in asdict(self).items() if value is not None}
        del kwargs["seed"]
        return kwargs | {"do_sample": self.do_sample}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model that answers, its device, and how its weights are stored.

    Args:
        model: Folder of a model or of LoRA adapters, or an id on the Hub.
        processes: Number of processes that answer; None starts one on each GPU.
    """

    model: str
    processes: int | None = 1
    revision: str | None = option(None, "branch, tag or commit of an id on the Hub")
    device: str = option(
        "cuda", "cpu: use no GPU (slow; for trials with small models)", choices=("cuda", "cpu")
    )
    dtype: str = option(
        "auto",
        "dtype to compute in; auto: the saved one, but float32 on a CPU without instructions for "
        "bf16",
        choices=DTYPES,
    )
    weights: str | None = option(
        None,
        "quantize the layers' weights: fp8 is also faster; 4bit and 8bit use bitsandbytes",
        choices=WEIGHT_FORMATS,
    )
    cache: str = option("auto", "the kind of KV cache", choices=CACHES)

    def placement(self) -> Placement:
        """Return the processes and their devices.

        Raises:
            ValueError: A GPU is missing, or options cannot be combined.
        """
        check_weights_option(self.weights, self.device, self.cache)
        if self.weights is not None and self.dtype != "auto":
            raise ValueError(
                f"--dtype {self.dtype} does not go with --weights {self.weights}: remove one"
            )
        return place_processes(self.processes, self.device)  # type: ignore[arg-type]

    def find(self) -> ModelSource:
        """Find the model's files.

        Raises:
            ValueError: A GPU is missing, or there is no such model; see :func:`find_source`.
        """
        self.placement()
        return find_source(self.model, self.revision, self.weights)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(ModelOptions):
    """Options of the commands answer and evaluate.

    Args:
        data: The rows to answer.
        processes: None starts one on each GPU, or a single one on a CPU.
    """

    data: DataSource
    processes: int | None = option(
        None, "processes, each on a GPU of its own; default: one per GPU", metavar="N", ge=1
    )
    batch_size: int = option(8, "rows that each process answers at once", metavar="N", ge=1)
    generation: Generation = Generation()

    def refuse_overlap(self, base: ModelSource, out: Path) -> None:
        """Raise ``ValueError`` if ``out`` overlaps with the folders of the model or the data."""
        refuse_overlap(out, [*folders_of(base), *folders_of_source(self.data, "--data")], "--out")


def read_questions(data: str | Path | DataSource, with_reference: bool = False) -> list[Question]:
    """Read the questions of a data file; an assistant's message at the end is the reference.

    Args:
        with_reference: Whether every row must have a reference.

    Raises:
        ValueError: Lists all rows with problems.
    """
    questions: list[Question] = []
    rows, problems = split_usable_rows(iter_rows(data, for_training=False))
    for row in rows:
        question = make_question(row.line, row.messages)
        if question.reference is not None or not with_reference:
            questions.append(question)
        else:
            message = (
                f"ends with a message of the {row.messages[-1]['role']}; expected the assistant's "
                "right answer, as a reference to compare with"
            )
            problems.append(RowProblem(row.line, message))
    if problems:
        problems.sort(key=lambda problem: problem.line)
        raise ValueError(describe_problems(data, problems, len(questions) + len(problems)))
    return questions


def evenly_spaced(items: Sequence[Any], max_items: int) -> list[Any]:
    """Return up to ``max_items`` of the items, evenly spaced."""
    num_items = min(len(items), max_items)
    return [items[index * len(items) // num_items] for index in range(num_items)]


def make_question(row: int, messages: list[dict]) -> Question:
    """Split a conversation into a prompt and a reference answer.

    The reference is the last message if it is the assistant's, otherwise None.
    """
    *prompt, last = messages
    if last["role"] != "assistant":
        return Question(row, drop_train_flags(messages))
    tool_name, text = last.get("metadata"), text_of(last)
    reference = f"{tool_name}\n{text}" if tool_name else text
    return Question(row, drop_train_flags(prompt), reference)


def digest_image_files(questions: Sequence[Question]) -> dict[str, str]:
    """Return the sha256 of each image file by path; raise ``ValueError`` for an unreadable file."""
    row_of = {path: question.row for question in questions for path in images_of(question.prompt)}
    digests = {}
    with show_progress("reading images", total=len(row_of), unit="file") as progress:
        for path, row in row_of.items():
            try:
                digests[path] = FileStamp.of(path).sha256
            except ValueError as error:
                raise ValueError(f"row {row}: the image {error}") from None
            progress.update()
    return digests


def digest_questions(questions: Sequence[Question], image_digests: Mapping[str, str]) -> str:
    """Return the sha256 of all prompts and references.

    Args:
        image_digests: The result of :func:`digest_image_files`. Digests stand in place of paths, so
            that image files may be moved.
    """
    digest = hashlib.sha256()
    for question in questions:
        prompt = replace_images(question.prompt, image_digests.__getitem__)
        values = [question.row, prompt, question.reference, question.swapped]
        digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()
