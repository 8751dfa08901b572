"""The lines that are printed at the end of a training. Imports no torch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..models.base import TRAINING_REPORT, read_training_report
from ..terminal_text import own_command, pluralize
from .job import Job
from .run_folder import CONTACT_SHEET, LOSS_PLOT


def describe_end(job: Job, on_cpu: bool) -> str:
    """Describe a finished training, from its report in ``job.out``.

    The lines give the reason for the end, the step whose weights were saved, the speed and memory,
    the files, and the next command.
    """
    report, out = read_training_report(job.out), str(job.out)
    result = "adapters" if job.has_adapters else "model"
    extra_files = [Path(out, name) for name in (LOSS_PLOT, CONTACT_SHEET, TRAINING_REPORT)]
    files = [f"{out} ({result})", *(str(path) for path in extra_files if path.is_file())]
    command = ["chat", out]
    if isinstance(job.data.eval, str) and os.path.isfile(job.data.eval):
        command = ["evaluate", out, "--data", job.data.eval, "--out", "evaluation"]
    if on_cpu:
        command += ["--device", "cpu"]
    lines = {
        "ended": _describe_reason(job, report),
        "saved": f"the {result} of step {_describe_saved(job, report)}",
        "measured": _describe_measured(report["measured"]),
        "files": ", ".join(files),
        "next": own_command(*command),
    }
    return "\n".join(f"{name:<12}{text}" for name, text in lines.items())


def _describe_reason(job: Job, report: Mapping[str, Any]) -> str:
    """Describe when and why the training ended, and how many rows were skipped."""
    done, planned = report["steps"]["done"], report["steps"]["asked"]
    reason = f"after all {done:,} steps" if done > 1 else f"after {done} step"
    if done < planned:
        patience, metric = job.trainer.early_stopping_patience, job.trainer.metric_for_best_model
        reason = f"early, after step {done:,} of {planned:,}: "
        reason += f"{pluralize(patience or 0, 'evaluation')} without a better {metric}"
    if skipped := report.get("left_out"):
        reason += f"; {pluralize(skipped, 'row')} could not be used"
    return reason


def saved_step_and_scores(report: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return the step whose weights were saved, and their scores by name."""
    step = report.get("best_step")
    if step is None:
        step = report["steps"]["done"]
    at_step = [entry for entry in report.get("evaluations", ()) if entry["step"] == step]
    evaluation = at_step[-1] if at_step else {}
    names = [name for name in ("eval_loss", "eval_exact_match") if name in evaluation]
    return step, {name: float(evaluation[name]) for name in names}  # NaN is text in the report


def _describe_saved(job: Job, report: Mapping[str, Any]) -> str:
    """Describe the step whose weights were saved, beginning with its number, and its scores."""
    step, scores = saved_step_and_scores(report)
    text = f"{step:,}"
    if report.get("best_step") is not None:
        text += f", the best by {job.trainer.metric_for_best_model}"
        if step == 0:
            text += ", which is the model that training started from"
    if scores:
        return f"{text}: {', '.join(f'{name} {value:.4g}' for name, value in scores.items())}"
    if report["history"]:
        last = report["history"][-1]
        text += f": loss {float(last['loss']):.4g} at step {last['step']:,}"
    return text


def _describe_measured(measured: Mapping[str, float | None]) -> str:
    """Describe the speed, and on a GPU the peaks of memory."""
    results: list[str] = []
    speed = measured["samples_per_s"]
    if speed is not None:
        results.append(f"{speed:.3g} samples/s")
    if "peak_allocated_gib" in measured:
        names = ("peak_allocated_gib", "predicted_gib", "peak_reserved_gib")
        allocated, predicted, reserved = (f"{measured[name]:.1f}" for name in names)
        results.append(
            f"{allocated} GiB allocated at most on the first GPU ({predicted} predicted), "
            f"{reserved} reserved"
        )
    return ", ".join(results) or "too few steps to measure the speed"
