"""The loss curve that a training leaves behind."""

import math
from pathlib import Path

from ..atomic import open_atomically


def plot_loss(history: list[dict], path: Path) -> None:
    """Draw the loss over the steps; NaN and infinity are marked where they were.

    Args:
        history: ``step`` and ``loss``, or ``eval_loss``, each a number or what ``float`` reads as
            one; entries with neither are left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    losses = {entry["step"]: float(entry["loss"]) for entry in history if "loss" in entry}
    held_out = {e["step"]: float(e["eval_loss"]) for e in history if "eval_loss" in e}
    finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    # A gap where one is not.
    axes.plot([*losses], [finite.get(step, math.nan) for step in losses])
    for step in losses.keys() - finite.keys():
        axes.axvline(step, color="red", linestyle=":", gid="not finite")
    if len(finite) < len(losses):
        axes.set_title("dotted: the loss was NaN or infinite")
    if held_out:
        axes.plot([*held_out], [*held_out.values()], marker="o", label="rows for evaluation")
        axes.legend()
    axes.set(xlabel="step", ylabel="loss (nats per supervised token)")
    if any(loss > 0 for loss in [*finite.values(), *held_out.values()]):  # matplotlib needs one
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    with open_atomically(path) as file:
        figure.savefig(file, dpi=130, format="png")
