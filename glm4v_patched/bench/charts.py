"""Two pictures of measured rows: bars of their peak memory, and of their speed."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.options import require_packages
from .table import DESCRIPTION, failure, sort_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Parts of the peak, from the left; the last is what no part accounts for.
UNKNOWN = "allocated, not told apart"
MEMORY, SPEED = "peak_allocated_gib", "tokens_per_s_per_gpu"
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "rest", UNKNOWN)


def check_drawable(folder: Path) -> None:
    """Raises ``RuntimeError`` without matplotlib, ``ValueError`` if the folder is a file."""
    require_packages("--pictures")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; pictures need a folder")


def draw_pictures(rows: list[dict], folder: Path) -> list[Path]:
    """Draw ``memory.png`` and ``speed.png`` of rows, numbered as in the table; neither where no row
    has its figure, for memory is not measured on a CPU. The folder is made. Raises ``ValueError``
    if there are no rows."""
    if not rows:
        raise ValueError("there are no rows to draw; measure some, or name files that have some")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw, figure in (("memory", memory_figure, MEMORY), ("speed", speed_figure, SPEED)):
        if any(row.get(figure) for row in rows):
            drawn.append(folder / f"{name}.png")
            draw(sort_rows(rows)).savefig(drawn[-1], dpi=130)
    return drawn


def memory_figure(rows: list[dict]) -> Figure:
    """Bars as long as the peak allocated, parted where rows have parts; a mark is the reserved."""
    figure, axes = _axes(rows, "peak memory, GiB a GPU", MEMORY)
    left = [0.0] * len(rows)
    for part in PARTS:
        found = [(row.get("memory_gib") or {}).get(part) or 0.0 for row in rows]
        if part == UNKNOWN:
            peaks = [row.get(MEMORY) or 0.0 for row in rows]
            rest = [peak - known for peak, known in zip(peaks, left, strict=True)]
            found = [size if size > 0.1 else 0.0 for size in rest]
        label = part if any(found) else "_nothing"  # matplotlib leaves such a name out
        axes.barh(range(len(rows)), found, left=left, label=label)
        left = [sum(ends) for ends in zip(left, found, strict=True)]
    marks = [row.get("peak_reserved_gib") or float("nan") for row in rows]
    axes.plot(marks, range(len(rows)), "|", color="black", markersize=14, label="reserved")
    figure.legend(loc="outside lower center", ncols=8, frameon=False)
    return figure


def speed_figure(rows: list[dict]) -> Figure:
    """Bars as long as tokens/s/GPU, with samples/s/GPU beside them."""
    label = "tokens/s/GPU, an image's positions included; beside: samples/s/GPU"
    figure, axes = _axes(rows, label, SPEED)
    bars = axes.barh(range(len(rows)), [row.get(SPEED, 0) for row in rows])
    told = ["" if failure(row) else f"{row['samples_per_s_per_gpu']:.3g}" for row in rows]
    axes.bar_label(bars, told, padding=3)
    return figure


def _axes(rows: list[dict], label: str, figure_of: str) -> tuple[Figure, Axes]:
    """A line for each row, named by what sets it apart; what all have in common is the title. Rows
    without the field ``figure_of`` say why."""
    from matplotlib.figure import Figure

    cells = [[column(row) for column in DESCRIPTION.values()] for row in rows]
    columns = {
        name: told
        for name, told in zip(DESCRIPTION, zip(*cells, strict=True), strict=True)
        if {*told} != {"-"}
    }
    shared = {name: told[0] for name, told in columns.items() if len(rows) > 1 == len({*told})}
    apart = {name: told for name, told in columns.items() if name not in shared}
    numbers = map(str, range(1, len(rows) + 1))
    names = [
        textwrap.fill("; ".join(words), 70) for words in zip(numbers, *apart.values(), strict=True)
    ]
    lines = "".join(names).count("\n") + len(names)
    figure = Figure(figsize=(12, 2.6 + 0.2 * lines + 0.1 * len(rows)), layout="constrained")
    axes = figure.subplots()
    told = "; ".join(f"{name}: {value}" for name, value in shared.items())
    title = [textwrap.fill(text, 150) for text in (told, f"rows: {'; '.join(['#', *apart])}")]
    figure.suptitle("\n".join(filter(None, title)), fontsize=9)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=label, axisbelow=True)
    axes.grid(alpha=0.3, axis="x")
    axes.margins(x=0.08)
    for place, row in enumerate(rows):
        note = failure(row) or ("not measured" if row[figure_of] is None else "")
        axes.text(0, place, f" {note}", va="center", color="#cc3311", in_layout=False)
    return figure, axes
