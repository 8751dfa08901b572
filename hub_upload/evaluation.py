"""Scores of ``glm4v-patched evaluate`` in a build: read, checked, and shown by the card."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

import glm4v_patched
from glm4v_patched.models.base import digest_file
from glm4v_patched.patch.config_json import parse_json_object

from .files import SourceFiles
from .manifest import ID_PATTERN, MANIFEST, Evaluation


def read_evaluation(path: Path | None, data: str | None, source: SourceFiles) -> Evaluation | None:
    """Read a ``metrics.json``; without ``path`` and ``data``, return None.

    Args:
        data: Id of the data set on the Hub, or a description of it.
        source: The files to publish; their weights must be those that were evaluated.

    Raises:
        ValueError: ``evaluate`` did not write the file, or has evaluated other weights.
    """
    if path is None and data is None:
        return None
    if path is None or not data:
        raise ValueError(f"--evaluation is {path}, --evaluated-on is {data}; expected both")
    report = parse_json_object(path.read_bytes(), str(path))
    settings = report.get("settings")
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise ValueError(f"{path} has no settings.model: expected a file of glm4v-patched evaluate")
    if quantized := (settings.get("options") or {}).get("weights"):
        raise ValueError(
            f"{path} has scores of weights quantized to {quantized}: evaluate without --weights"
        )
    evaluated = settings["model"]
    for name, published in _digests(source):
        if evaluated.get(name) != published:
            raise ValueError(
                f"{path} has scores of other weights: {name} was "
                f"{evaluated.get(name, 'not there')}, and {published} is published: evaluate "
                f"{source.name} itself"
            )
    # Each metric has two scores: with the rows' own images, and with the images of other rows.
    rows = report.pop("rows", None)
    names = [n for name in report if f"{name}_swapped" in report for n in (name, f"{name}_swapped")]
    scores = {name: report[name] for name in names if report[name] is not None}
    return Evaluation(dataset=data, rows=rows, scores=scores)


def _digests(source: SourceFiles) -> Iterator[tuple[str, str]]:
    """Yield the name and identity of each file of weights, as ``evaluate`` records them."""
    for name in source.weights:
        if path := source.files[name].path:
            yield name, digest_file(path)
        elif origin := source.origin:
            yield "model on the Hub", f"{origin.repository} at {origin.revision}"


def add_evaluation(card: str, name: str, evaluation: Evaluation | None) -> str:
    """Return the card with the scores added to its metadata (``model-index``), which the Hub shows.

    Args:
        name: Id of the repository, whose manifest is the source of the scores.
    """
    if evaluation is None:
        return card
    parsed = ModelCard(card)
    data: Any = parsed.data
    is_id = re.fullmatch(ID_PATTERN, evaluation.dataset)
    data.model_name = name.partition("/")[2]
    data.eval_results = [
        EvalResult(
            task_type="image-text-to-text",
            dataset_type=evaluation.dataset if is_id else "private",
            dataset_name=evaluation.dataset,
            metric_type=metric,
            metric_value=score,
            source_name=MANIFEST,
            source_url=f"https://huggingface.co/{name}/blob/v{glm4v_patched.__version__}/{MANIFEST}",
        )
        for metric, score in evaluation.scores.items()
    ]
    return f"---\n{data.to_yaml()}\n---\n{parsed.text}"
