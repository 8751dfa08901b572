"""What is said of a training that has come to its end. Needs no torch."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..engine.options import is_lora
from ..models.base import REPORT, read_report
from ..terminal_text import own_command
from .recipe import Recipe
from .run_folder import PLOT, SHEET


def describe_end(recipe: Recipe, on_cpu: bool) -> str:
    """Why it ended, whose weights were saved, how fast it was, the files, and what to type next; of
    the report in ``recipe.out``."""
    report = read_report(Path(recipe.out))
    told = {
        "ended": _describe_reason(recipe, report["steps"]) + _describe_left_out(report),
        "saved": _describe_saved(recipe, report),
        "measured": describe_measured(report["measured"]),
        "files": ", ".join(_files(recipe)),
        "next": _next_command(recipe, on_cpu),
    }
    return "\n".join(f"{name:<12}{text}" for name, text in told.items())


def describe_measured(measured: Mapping[str, float | None]) -> str:
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


def _describe_reason(recipe: Recipe, steps: Mapping[str, int]) -> str:
    if steps["done"] >= steps["asked"]:
        return f"after all {steps['done']:,} steps"
    patience = recipe.trainer.early_stopping_patience
    return (
        f"early, after step {steps['done']:,} of {steps['asked']:,}: {patience} evaluations "
        f"without a better {recipe.trainer.metric_for_best_model}"
    )


def _describe_left_out(report: Mapping[str, Any]) -> str:
    number = report.get("left_out", 0)
    return f"; {number:,} rows could not be used" if number else ""


def _describe_saved(recipe: Recipe, report: Mapping[str, Any]) -> str:
    last = report["steps"]["done"]
    step = report.get("best_step") or last
    what = "adapters" if is_lora(recipe.trained) else "model"
    told = f"the {what} of step {step:,}"
    if "best_step" in report:
        told += f", the best by {recipe.trainer.metric_for_best_model}"
    scores = [entry for entry in report.get("evaluations", ()) if entry["step"] == step]
    if scores:
        names = [name for name in ("eval_loss", "eval_exact_match") if name in scores[-1]]
        return f"{told}: {', '.join(f'{name} {_number(scores[-1][name])}' for name in names)}"
    if report["history"]:
        told += f": loss {_number(report['history'][-1]['loss'])} at step "
        told += f"{report['history'][-1]['step']:,}"
    return told


def _number(value: float | str) -> str:
    return f"{float(value):.4g}"  # JSON has NaN as text


def _files(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.out} ({'adapters' if is_lora(recipe.trained) else 'model'})"
    for name in (PLOT, SHEET, REPORT):
        if (path := Path(recipe.out, name)).is_file():
            yield str(path)


def _next_command(recipe: Recipe, on_cpu: bool) -> str:
    device = ["--device", "cpu"] * on_cpu
    rows = recipe.data.eval
    if isinstance(rows, str) and os.path.isfile(rows):
        return own_command("evaluate", recipe.out, "--data", rows, "--out", "evaluation", *device)
    return own_command("chat", recipe.out, *device)
