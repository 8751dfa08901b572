"""Scores of a model's answers, with the right images and with those of other rows."""

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..atomic import explain_failed_writes, require_file, write_atomically
from .answer import answer_questions, settings_of
from .answers_file import AnswerLine
from .contact_sheet import draw_sheet
from .questions import AnswerOptions, digest_image_files, read_questions
from .scoring import METRICS, Metric, load_metric, mean_score, swap_images

ANSWERS, REPORT, SHEET = "answers.jsonl", "metrics.json", "answers.png"
VERSIONS = ("torch", "transformers")


def evaluate(
    request: AnswerOptions,
    out: Path | None = None,
    metric: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Answer every row with its images and with another row's, and compare with the references.

    Args:
        out: Folder for ``answers.jsonl``, ``answers.png`` and ``metrics.json``; answers that are
            there, of the same model, data and options, are kept. None writes nothing.
        metric: ``FILE.py:FUNCTION``, scored beside the others.

    Returns:
        What goes to ``metrics.json``: the mean of each metric, and under ``NAME_swapped`` the mean
        with other images; None where no row has images to swap.

    Raises:
        As :func:`answer.answer_file`; ValueError also where a row has no reference, or the metric
        cannot be used.
    """
    metrics = METRICS | (dict([load_metric(metric)]) if metric else {})
    base = request.find()
    if out is not None:
        request.require_apart(base, out)
        _require_ours(out, overwrite)
    questions = read_questions(request.data, with_reference=True)
    for name, function in metrics.items():  # on something, before the model is loaded
        mean_score(name, function, [(questions[0].reference or "", questions[0].reference or "")])
    images = digest_image_files(questions)
    asked = [*questions, *swap_images(questions, images)]
    settings = settings_of(request, base, asked, images)
    answers = None if out is None else out / ANSWERS
    lines = answer_questions(request, base, asked, settings, answers, overwrite)
    report = {
        "model": request.model,
        "data": request.data.path,
        **compute_scores(lines, metrics),
        "settings": settings,
        "versions": {name: version(name) for name in VERSIONS} | {"glm4v-patched": __version__},
    }
    if out is None:
        return report
    kept = f"; all answers are in {answers}"
    with explain_failed_writes(out / REPORT, kept):
        write_atomically(out / REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    right = [line.answer for line in lines if not line.question.swapped]
    with explain_failed_writes(out / SHEET, kept):
        draw_sheet(questions, right, out / SHEET)
    return report


def _require_ours(out: Path, overwrite: bool) -> None:
    """Raise ``ValueError`` if a folder holds something of others that would be replaced."""
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out {out} is no folder; expected one, or a name for a new one")
    for name in (REPORT, SHEET):
        require_file(out / name)
        if (out / name).exists() and not (out / ANSWERS).is_file() and not overwrite:
            raise ValueError(
                f"{out} holds {name}, which no evaluation wrote; give --out another folder, or "
                "replace it (--overwrite)"
            )


def compute_scores(lines: Sequence[AnswerLine], metrics: dict[str, Metric]) -> dict[str, Any]:
    """Numbers of rows, and the mean of each metric with right and with swapped images."""
    right = [line for line in lines if not line.question.swapped]
    swapped = [line for line in lines if line.question.swapped]
    cut = sum(line.finish_reason == "length" for line in right)
    scores: dict[str, Any] = {"rows": len(right), "rows_swapped": len(swapped), "rows_cut": cut}
    for name, metric in metrics.items():
        for suffix, some in (("", right), ("_swapped", swapped)):
            pairs = ((line.answer, line.question.reference or "") for line in some)
            scores[name + suffix] = mean_score(name, metric, pairs)
    return scores


def describe_scores(report: dict[str, Any], out: Path | None = None) -> str:
    """The scores as a table, and what they are of."""
    names = [name for name in report if f"{name}_swapped" in report and name != "rows"]
    wide = max(len(name) for name in names)
    lines = [f"{'':{wide}}  right images  swapped images"]
    for name in names:
        swapped = report[f"{name}_swapped"]
        told = "no rows" if swapped is None else f"{swapped:.4f}"
        lines.append(f"{name:{wide}}  {report[name]:>14.4f}  {told:>16}")
    lines.append(f"{report['rows']:,} rows, {report['rows_swapped']:,} of them with swapped images")
    if report["rows_cut"]:
        lines[-1] += f"; {report['rows_cut']:,} answers were cut at --max-new-tokens"
    if out is not None:
        lines.append(f"answers {out / ANSWERS}\nsheet   {out / SHEET}\nfigures {out / REPORT}")
    return "\n".join(lines)
