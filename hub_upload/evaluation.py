"""Scores of ``glm4v-patched evaluate`` in a build: read, checked, and shown by the card."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from pydantic import BaseModel, ConfigDict

import glm4v_patched
from glm4v_patched.models.base import digest_file

from .files import SourceFiles
from .manifest import ID_PATTERN, MANIFEST, Evaluation


class _Settings(BaseModel):
    model: dict[str, str]


class _Metrics(BaseModel):
    """What every ``metrics.json`` has; a metric is a key beside which ``KEY_swapped`` exists."""

    model_config = ConfigDict(extra="allow", title="metrics.json of glm4v-patched evaluate")
    rows: int
    settings: _Settings


def read_evaluation(path: Path | None, dataset: str | None, source: SourceFiles) -> Evaluation:
    """Read a ``metrics.json``.

    Args:
        dataset: What the rows are: an id on the Hub, or words.
        source: The files that are published, whose weights must be those that were evaluated.

    Raises:
        ValueError: The file is none of ``evaluate``, or is of other weights.
    """
    if not path or not dataset:
        raise ValueError(
            f"--evaluation is {path} and --evaluated-on is {dataset}: give both, a metrics.json and "
            "the id or name of the data set"
        )
    report = _Metrics.model_validate_json(path.read_bytes())
    evaluated = {name.removeprefix("adapters: "): d for name, d in report.settings.model.items()}
    for name, published in _digests(source):
        if evaluated.get(name) != published:
            raise ValueError(
                f"{path} is of other weights: {name} was {evaluated.get(name, 'not there')}, and "
                f"{published} is published: evaluate {source.name} itself"
            )
    extra: dict[str, Any] = report.model_extra or {}
    names = [name for name in extra if f"{name}_swapped" in extra]
    scores = {n: extra[n] for name in names for n in (name, f"{name}_swapped")}
    known = {name: score for name, score in scores.items() if score is not None}
    return Evaluation(dataset=dataset, rows=report.rows, scores=known)


def _digests(source: SourceFiles) -> Iterator[tuple[str, str]]:
    """Yield the name and identity of each file of weights, as ``evaluate`` records them."""
    for name in source.weights:
        if path := source.files[name].path:
            yield name, digest_file(path)
        elif origin := source.origin:
            yield "model on the Hub", f"{origin.repository} at {origin.revision}"


def show_evaluation(card: str, name: str, evaluation: Evaluation | None) -> str:
    """Return a card with the scores in its metadata (``model-index``) and before its first section.

    Args:
        name: Id of the repository, whose manifest is the source of the scores.
    """
    if evaluation is None:
        return card
    parsed = ModelCard(card)
    data: Any = parsed.data
    url = f"https://huggingface.co/{name}/blob/v{glm4v_patched.__version__}/{MANIFEST}"
    dataset, is_id = evaluation.dataset, re.fullmatch(ID_PATTERN, evaluation.dataset)
    common = {"task_type": "image-text-to-text", "source_name": MANIFEST, "source_url": url}
    common |= {"dataset_name": dataset, "dataset_type": dataset if is_id else "private"}
    data.model_name = name.partition("/")[2]
    data.eval_results = [
        EvalResult(metric_type=metric, metric_value=score, **common)
        for metric, score in evaluation.scores.items()
    ]
    lines = [f"| `{metric}` | {score:.4f} |" for metric, score in evaluation.scores.items()]
    text = "\n".join(
        [
            f"\n## Evaluation\n\nThe command `glm4v-patched evaluate`, on {evaluation.rows:,} rows of "
            f"{dataset}. Scores with\n`_swapped` were computed with the images of other rows.\n",
            "| metric | mean |\n|---|---|",
            *lines,
        ]
    )
    head, mark, rest = parsed.text.partition("\n## ")
    return f"---\n{data.to_yaml()}\n---\n{head}{text}\n{mark}{rest}"
