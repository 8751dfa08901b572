"""Score a model's answers to rows with their own images and with the images of other rows."""

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..atomic import explain_failed_writes, require_file, write_atomically
from ..terminal_text import pluralize
from .answer import answer_questions, answer_settings
from .answers_file import AnswerLine
from .contact_sheet import draw_sheet
from .grounding import BOX_METRICS, OPERATION_METRICS, metric_applies
from .questions import AnswerOptions, digest_image_files, read_questions
from .scoring import METRICS, Metric, load_metric, mean_score, swap_images

ANSWERS_FILE, METRICS_FILE, SHEET_FILE = "answers.jsonl", "metrics.json", "answers.png"
REPORTED_PACKAGES = ("torch", "transformers")


def evaluate(
    options: AnswerOptions,
    out: Path | None = None,
    metric: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Answer every row with its own images and with another row's, and score the answers.

    Args:
        out: Folder for ``answers.jsonl``, ``answers.png`` and ``metrics.json``; None writes none.
            Answers in the folder are reused if model, data and options are the same.
        metric: ``FILE.py:FUNCTION``, computed in addition to :data:`METRICS`.

    Returns:
        The content of ``metrics.json``. The mean of a metric has the metric's name as key. The mean
        with swapped images has the key ``NAME_swapped``, and is None if no row has images to swap.

    Raises:
        ValueError, RuntimeError: See :func:`answer.answer_file`. ValueError also if a row has no
            reference answer, or the metric cannot be used.
    """
    metrics = dict(METRICS)
    if metric:
        name, function = load_metric(metric)
        metrics[name] = function
    base = options.find()
    if out is not None:
        options.refuse_overlap(base, out)
        _require_own_folder(out, overwrite)
    questions = read_questions(options.data, with_reference=True)
    reference = questions[0].reference or ""
    for name, function in metrics.items():  # finds a broken metric before the model is loaded
        mean_score(name, function, [(reference, reference)])
    digests = digest_image_files(questions)
    all_questions = [*questions, *swap_images(questions, digests)]
    settings = answer_settings(options, base, all_questions, digests)
    path = None if out is None else out / ANSWERS_FILE
    lines = answer_questions(options, base, all_questions, settings, path, overwrite)
    report = {
        "model": options.model,
        **compute_scores(lines, metrics),
        "settings": settings,
        "versions": {name: version(name) for name in REPORTED_PACKAGES}
        | {"glm4v-patched": __version__},
    }
    if out is None:
        return report
    note = f"; all answers are in {path}"
    with explain_failed_writes(out / METRICS_FILE, note):
        text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
        write_atomically(out / METRICS_FILE, text)
    answers = [line.answer for line in lines if not line.question.swapped]
    with explain_failed_writes(out / SHEET_FILE, note):
        draw_sheet(questions, answers, out / SHEET_FILE)
    return report


def _require_own_folder(out: Path, overwrite: bool) -> None:
    """Raise ``ValueError`` if the evaluation would replace files that no evaluation wrote."""
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out {out} is not a folder; expected a folder, existing or new")
    for name in (METRICS_FILE, SHEET_FILE):
        require_file(out / name)
        if (out / name).exists() and not (out / ANSWERS_FILE).is_file() and not overwrite:
            raise ValueError(
                f"{out} holds a {name} that no evaluation wrote; give --out another folder, or "
                "replace the file (--overwrite)"
            )


def compute_scores(lines: Sequence[AnswerLine], metrics: dict[str, Metric]) -> dict[str, Any]:
    """Return the numbers of rows, and each metric's mean with own and with swapped images.

    Scores of boxes and operations are means over the rows whose reference has a box or operation.
    They are left out if there is no such row.
    """
    own_lines = [line for line in lines if not line.question.swapped]
    swapped_lines = [line for line in lines if line.question.swapped]
    scores: dict[str, Any] = {
        "rows": len(own_lines),
        "rows_swapped": len(swapped_lines),
        "rows_cut": sum(line.finish_reason == "length" for line in own_lines),
    }
    for name, metric in metrics.items():
        for suffix, group in (("", own_lines), ("_swapped", swapped_lines)):
            pairs = [(line.answer, line.question.reference or "") for line in group]
            pairs = [pair for pair in pairs if metric_applies(name, pair[1])]
            if pairs or name in scores or name not in BOX_METRICS | OPERATION_METRICS:
                scores[name + suffix] = mean_score(name, metric, pairs)
    return scores


def describe_scores(report: dict[str, Any], out: Path | None = None) -> str:
    """Return the scores as a table, the numbers of rows, and the files in ``out``."""
    # All keys with a "_swapped" beside them are scores, except the number of rows.
    names = [name for name in report if f"{name}_swapped" in report and name != "rows"]
    width = max(len(name) for name in names)
    lines = [f"{'':{width}}  right images  swapped images"]
    for name in names:
        swapped = report[f"{name}_swapped"]
        cell = "no rows" if swapped is None else f"{swapped:.4f}"
        lines.append(f"{name:{width}}  {report[name]:>14.4f}  {cell:>16}")
    lines.append(
        f"{pluralize(report['rows'], 'row')}; {report['rows_swapped']:,} of them asked again with "
        "swapped images"
    )
    if report["rows_cut"]:
        cut = pluralize(report["rows_cut"], "answer was", "answers were")
        lines[-1] += f"; {cut} cut at --max-new-tokens"
    if out is not None:
        lines.append(f"answers {out / ANSWERS_FILE}")
        lines.append(f"sheet   {out / SHEET_FILE}")
        lines.append(f"metrics {out / METRICS_FILE}")
    return "\n".join(lines)
