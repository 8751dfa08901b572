"""Plot the loss curve of a training."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..atomic import open_atomically


def plot_loss(
    history: list[dict], path: Path, saved: Sequence[int] = (), best: int | None = None
) -> None:
    """Plot the loss over the steps, and mark the steps at which it was NaN or infinite.

    Args:
        history: Log entries with ``step``, and with ``loss`` or ``eval_loss``, which are numbers or
            texts such as "nan". Entries with neither are skipped.
        saved: Steps of the checkpoints.
        best: Step of the best evaluation.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, label, marker in (("loss", "training", ""), ("eval_loss", "evaluation", "o")):
        losses = {entry["step"]: float(entry[name]) for entry in history if name in entry}
        # matplotlib leaves a gap for NaN.
        finite = [loss if math.isfinite(loss) else math.nan for loss in losses.values()]
        if losses:
            axes.plot([*losses], finite, marker=marker, label=label)
        for step, loss in losses.items():
            if not math.isfinite(loss):
                axes.axvline(step, color="red", linestyle=":", gid="not finite")
                axes.set_title("dotted: the loss was NaN or infinite")
    if best is not None:
        axes.axvline(best, color="gray", linestyle="--", label=f"best evaluation: step {best}")
    if saved:
        x_transform = axes.get_xaxis_transform()
        axes.plot(
            saved, [0] * len(saved), "k^", label="checkpoint", transform=x_transform, clip_on=False
        )
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    axes.set(xlabel="step", ylabel="loss (nats per supervised token)")
    axes.ticklabel_format(style="plain", useOffset=False)
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    axes.grid(alpha=0.3)
    with open_atomically(path) as file:
        figure.savefig(file, dpi=130, format="png")
