"""What is said of a training that has come to its end. Needs no torch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..models.base import TRAINING_REPORT, read_report
from ..terminal_text import own_command
from .job import Job
from .run_folder import PLOT, SHEET


def describe_end(job: Job, on_cpu: bool) -> str:
    """Why it ended, whose weights were saved, how fast it was, the files, and what to type next; of
    the report in ``job.out``."""
    report, out = read_report(job.out), str(job.out)
    what = "adapters" if job.has_adapters else "model"
    beside = [
        str(path) for name in (PLOT, SHEET, TRAINING_REPORT) if (path := Path(out, name)).is_file()
    ]
    command = ["chat", out]
    if isinstance(job.data.eval, str) and os.path.isfile(job.data.eval):
        command = ["evaluate", out, "--data", job.data.eval, "--out", "evaluation"]
    told = {
        "ended": _describe_reason(job, report),
        "saved": f"the {what} of step {_describe_saved(job, report)}",
        "measured": _describe_measured(report["measured"]),
        "files": ", ".join([f"{out} ({what})", *beside]),
        "next": own_command(*command, *["--device", "cpu"] * on_cpu),
    }
    return "\n".join(f"{name:<12}{text}" for name, text in told.items())


def _describe_reason(job: Job, report: Mapping[str, Any]) -> str:
    done, asked = report["steps"]["done"], report["steps"]["asked"]
    told = f"after all {done:,} steps"
    if done < asked:
        told = f"early, after step {done:,} of {asked:,}: {job.trainer.early_stopping_patience} "
        told += f"evaluations without a better {job.trainer.metric_for_best_model}"
    left_out = report.get("left_out", 0)
    return told + (f"; {left_out:,} rows could not be used" if left_out else "")


def saved(report: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The step whose weights were saved, and what was measured of them."""
    step = report.get("best_step")
    if step is None:
        step = report["steps"]["done"]
    found = [entry for entry in report.get("evaluations", ()) if entry["step"] == step]
    names = [name for name in ("eval_loss", "eval_exact_match") if found and name in found[-1]]
    # JSON has NaN as text.
    return step, {name: float(found[-1][name]) for name in names}


def _describe_saved(job: Job, report: Mapping[str, Any]) -> str:
    step, scores = saved(report)
    told = f"{step:,}"
    if report.get("best_step") is not None:
        told += f", the best by {job.trainer.metric_for_best_model}"
        told += ", which is what training started from" * (step == 0)
    if scores:
        return f"{told}: {', '.join(f'{name} {value:.4g}' for name, value in scores.items())}"
    if report["history"]:
        last = report["history"][-1]
        told += f": loss {float(last['loss']):.4g} at step {last['step']:,}"
    return told


def _describe_measured(measured: Mapping[str, float | None]) -> str:
    told: list[str] = []
    speed = measured["samples_per_s"]
    if speed is not None:
        told.append(f"{speed:.3g} samples/s")
    if "peak_allocated_gib" in measured:
        names = ("peak_allocated_gib", "predicted_gib", "peak_reserved_gib")
        allocated, predicted, reserved = (f"{measured[name]:.1f}" for name in names)
        told.append(
            f"{allocated} GiB allocated at most on the first GPU ({predicted} predicted), "
            f"{reserved} reserved"
        )
    return ", ".join(told) or "too few steps to tell the speed"
