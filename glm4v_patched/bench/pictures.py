"""Two pictures of measured rows: bars of their peak memory, and of their speed."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from ..printed import pip_install
from .table import DESCRIPTION, failure, method, sort_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Parts of the peak, from the left; UNKNOWN is what no part accounts for.
UNKNOWN = "allocated, not told apart"
PARTS = {
    "weights": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "activations": "#ccbb44",
    "logits": "#ee6677",
    "rest": "#aa3377",
    UNKNOWN: "#bbbbbb",
}


def check_drawable(folder: Path) -> None:
    """Raises ``RuntimeError`` without matplotlib, ``ValueError`` if the folder is a file."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"pictures need matplotlib: {pip_install('matplotlib')}, or leave out --pictures"
        ) from error
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; pictures need a folder")


def draw_pictures(rows: list[dict], folder: Path) -> list[Path]:
    """Draw ``memory.png`` and ``speed.png``; the folder is made.

    Rows are sorted and numbered as in the table. Those of an ablation are left out unless there are
    no others.

    Raises:
        ValueError: there are no rows.
    """
    rows = sort_rows([row for row in rows if "added" not in row]) or rows
    if not rows:
        raise ValueError("there are no rows to draw; measure some, or name files that have some")
    folder.mkdir(parents=True, exist_ok=True)
    figures = {folder / "memory.png": memory_figure(rows), folder / "speed.png": speed_figure(rows)}
    for path, figure in figures.items():
        figure.savefig(path, dpi=130)
    return [*figures]


def memory_figure(rows: list[dict]) -> Figure:
    """Bars as long as the peak allocated, parted where rows have parts; a mark is the reserved."""
    notes = [
        failure(row) or ("not measured" if row["peak_allocated_gib"] is None else "")
        for row in rows
    ]
    figure, axes = _axes(rows, "peak memory, GiB a GPU", notes)
    parts, left = [_parts(row) for row in rows], [0.0] * len(rows)
    for part, colour in PARTS.items():
        width = [of_row[part] for of_row in parts]
        label = part if any(width) else "_nothing"  # matplotlib leaves such a name out
        axes.barh(range(len(rows)), width, left=left, color=colour, label=label)
        left = [sum(ends) for ends in zip(left, width, strict=True)]
    reserved = [row.get("peak_reserved_gib") for row in rows]
    marks = [float("nan") if value is None else value for value in reserved]
    axes.plot(marks, range(len(rows)), "|", color="black", markersize=14, label="reserved")
    figure.legend(loc="outside lower center", ncols=8, frameon=False)
    return figure


def speed_figure(rows: list[dict]) -> Figure:
    """Bars as long as tokens/s/GPU, with samples/s/GPU beside them."""
    label = "tokens/s/GPU, an image's positions included; beside: samples/s/GPU"
    figure, axes = _axes(rows, label, [failure(row) for row in rows])
    bars = axes.barh(range(len(rows)), [row.get("tokens_per_s_per_gpu", 0) for row in rows])
    told = ["" if failure(row) else f"{row['samples_per_s_per_gpu']:.3g}" for row in rows]
    axes.bar_label(bars, told, padding=3)
    return figure


def _axes(rows: list[dict], label: str, notes: list[str]) -> tuple[Figure, Axes]:
    """A line for each row, that says what sets it apart, and a note at its start; what all rows
    have in common is the title."""
    from matplotlib.figure import Figure

    names = [_name(row) for row in rows]
    shared = [word for word in names[0] if len(rows) > 1 and all(word in name for name in names)]
    told = [
        textwrap.fill("; ".join([str(number), *(w for w in name if w not in shared)]), 70)
        for number, name in enumerate(names, 1)
    ]
    lines = sum(text.count("\n") + 1 for text in told)
    figure = Figure(figsize=(12, 2.4 + 0.2 * lines + 0.1 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(textwrap.fill("; ".join(shared), 120), fontsize=9)
    axes.set_yticks(range(len(rows)), told, fontsize=8)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=label)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    axes.margins(x=0.08)
    for place, note in enumerate(notes):
        axes.text(0, place, f" {note}", va="center", color="#cc3311", in_layout=False)
    return figure, axes


def _name(row: dict) -> list[str]:
    trained, hardware, *rest, _ = ((name, say(row)) for name, say in DESCRIPTION.items())
    told = [re.sub("( of |,).*", "", name) + f" {cell}" for name, cell in rest]
    added = [f"+ {row['added']}"] if "added" in row else []
    return [*added, trained[1], hardware[1], *told, *method(row)]


def _parts(row: dict) -> dict[str, float]:
    """GiB of each of ``PARTS``; 0 for all of a row without a peak."""
    allocated = row.get("peak_allocated_gib") or 0.0
    found = row.get("memory_gib") or {}
    parts = {part: found.get(part) or 0.0 for part in PARTS if allocated}
    unknown = allocated - sum(parts.values())
    return (
        dict.fromkeys(PARTS, 0.0)
        | parts
        | {UNKNOWN: unknown if unknown > 0.001 * allocated else 0.0}
    )
