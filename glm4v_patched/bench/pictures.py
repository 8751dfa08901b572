"""Two pictures of measured rows: bars of their peak memory, and of their speed."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from .table import chosen, failure, hardware, method, sort_rows

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
            "pictures need matplotlib: pip install matplotlib, or leave out --pictures"
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
    figure, axes = _axes(rows, "peak memory, GiB a GPU", "peak_allocated_gib")
    left = [0.0] * len(rows)
    for part, colour in PARTS.items():
        found = [(row.get("memory_gib") or {}).get(part) or 0.0 for row in rows]
        if part == UNKNOWN:
            peaks = [row.get("peak_allocated_gib") or 0.0 for row in rows]
            rest = [peak - known for peak, known in zip(peaks, left, strict=True)]
            found = [size if size > 0.1 else 0.0 for size in rest]
        label = part if any(found) else "_nothing"  # matplotlib leaves such a name out
        axes.barh(range(len(rows)), found, left=left, color=colour, label=label)
        left = [sum(ends) for ends in zip(left, found, strict=True)]
    marks = [row.get("peak_reserved_gib") or float("nan") for row in rows]
    axes.plot(marks, range(len(rows)), "|", color="black", markersize=14, label="reserved")
    figure.legend(loc="outside lower center", ncols=8, frameon=False)
    return figure


def speed_figure(rows: list[dict]) -> Figure:
    """Bars as long as tokens/s/GPU, with samples/s/GPU beside them."""
    label = "tokens/s/GPU, an image's positions included; beside: samples/s/GPU"
    figure, axes = _axes(rows, label, "tokens_per_s_per_gpu")
    bars = axes.barh(range(len(rows)), [row.get("tokens_per_s_per_gpu", 0) for row in rows])
    told = ["" if failure(row) else f"{row['samples_per_s_per_gpu']:.3g}" for row in rows]
    axes.bar_label(bars, told, padding=3)
    return figure


def _axes(rows: list[dict], label: str, figure_of: str) -> tuple[Figure, Axes]:
    """A line for each row, named by what sets it apart; what all have in common is the title.

    Rows without the field ``figure_of`` say why.
    """
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
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=label, axisbelow=True)
    axes.grid(alpha=0.3, axis="x")
    axes.margins(x=0.08)
    for place, row in enumerate(rows):
        note = failure(row) or ("not measured" if row[figure_of] is None else "")
        axes.text(0, place, f" {note}", va="center", color="#cc3311", in_layout=False)
    return figure, axes


def _name(row: dict) -> list[str]:
    added = [f"+ {row['added']}"] if "added" in row else []
    shape = f"micro-batch {row['micro_batch']}, {row['text_tokens']:,} ids of text"
    policies, live = chosen(row)
    kept = [f"policies {policies}", f"live parameters {live}"]
    return [*added, row["workload"], hardware(row), shape, *kept, *method(row)]
