"""Two pictures of measured rows: peak memory and speed, by text length and by micro-batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .table import failure, hardware, method, recomputed, sort_rows, workload_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of each panel: the field of the horizontal axis, and the field that is fixed along a line.
PANELS = (("text_tokens", "micro_batch"), ("micro_batch", "text_tokens"))
LABELS = {"text_tokens": "ids of text in a sample, beside its image", "micro_batch": "micro-batch"}
FIXED = {"text_tokens": "{:,} ids of text", "micro_batch": "micro-batch {}"}
# Parts of the peak, from the bottom up; what is left of it when they are known.
PARTS = {
    "weights": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "activations": "#ccbb44",
    "logits": "#ee6677",
    "rest": "#aa3377",
}
NOT_TOLD_APART, GREY = "allocated, not told apart", "#bbbbbb"


@dataclass(frozen=True)
class Line:
    """Rows of one workload and method on one hardware that differ in the field of a panel's axis.

    ``series`` counts workloads and methods, the same way in both panels, and ``variant`` the lines
    that one of them has in this panel. ``rows`` are by the field's value, ascending.
    """

    key: str
    series: int
    variant: int
    name: str
    fixed: int
    rows: dict[int, dict]


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

    Raises:
        ValueError: there are no rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"memory.png": memory_figure(rows), "speed.png": speed_figure(rows)}
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name in pictures]


def memory_figure(rows: list[dict]) -> Figure:
    """A bar for each row, as high as the peak allocated and parted where the row has parts.

    A line above is the peak reserved.
    """
    figure, panels = _panels(rows, "peak memory, GiB a GPU")
    for axes, (axis, fixed) in zip(panels, PANELS, strict=True):
        lines = _lines(rows, axis, fixed)
        values = sorted({value for line in lines for value in line.rows})
        position, centres, bars = 0, [], {}
        for value in values:
            present = [line for line in lines if value in line.rows]
            for line in present:
                _draw_bar(axes, position, line.rows[value])
                bars[position] = line.key
                position += 1
            centres.append(position - (len(present) + 1) / 2)
            position += 1  # a gap
        axes.set_xticks(centres, [f"{value:,}" for value in values])
        axes.tick_params(axis="x", which="major", length=0, pad=18)
        axes.set_xticks(list(bars), list(bars.values()), minor=True)
        axes.xaxis.remove_overlapping_locs = False  # a bar in the middle of its group has its key
        middle = position / 2 - 1
        half = max(middle + 0.7, 2.5)  # a single bar does not fill the panel
        axes.set_xlim(middle - half, middle + half)
        _finish(axes, axis, fixed, lines)
        for line, name in zip(lines, _line_names(lines, fixed), strict=True):
            axes.plot([], [], linestyle="none", label=f"{line.key}: {name}")
        _legend(axes, handlelength=0, handletextpad=0)
    panels[0].set_ylim(bottom=0)  # of both, once both have their data
    handles = {}
    for axes in panels:
        for artist in (*axes.containers, *axes.lines):
            label = artist.get_label()
            if label in PARTS or label in (NOT_TOLD_APART, "reserved"):
                handles[label] = artist
    order = [name for name in (*PARTS, NOT_TOLD_APART, "reserved") if name in handles]
    found = [handles[name] for name in order]
    title = "; ".join(_shared(rows))
    figure.legend(found, order, loc="outside upper center", ncols=8, frameon=False, title=title)
    return figure


def speed_figure(rows: list[dict]) -> Figure:
    """A line of tokens/s/GPU for each workload and method; failures stand on the axis."""
    figure, panels = _panels(rows, "tokens/s/GPU, an image's positions included")
    for axes, (axis, fixed) in zip(panels, PANELS, strict=True):
        lines = _lines(rows, axis, fixed)
        values = sorted({value for line in lines for value in line.rows})
        failures = Counter()
        for line, name in zip(lines, _line_names(lines, fixed), strict=True):
            measured = {
                value: row["tokens_per_s_per_gpu"]
                for value, row in line.rows.items()
                if failure(row) is None
            }
            colour = f"C{line.series % 10}"
            style = "os^D"[line.variant % 4] + ("-", "--", ":")[line.series // 10 % 3]
            axes.plot(list(measured), list(measured.values()), style, color=colour, label=name)
            for value in line.rows.keys() - measured.keys():
                axes.plot([value], [0], "x", color=colour, clip_on=False)
                _say(axes, value, failure(line.rows[value]), colour, 12 * failures[value])
                failures[value] += 1
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.set_xticks([], minor=True)
        axes.set_xlim(values[0] / 1.5, values[-1] * 1.5)
        _finish(axes, axis, fixed, lines)
        _legend(axes)
    panels[0].set_ylim(bottom=0)  # of both, once both have their data
    figure.suptitle("; ".join(_shared(rows)), fontsize=10)
    return figure


def _panels(rows: list[dict], label: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError("there are no rows to draw; measure some, or name files that have some")
    height = 5 + 0.2 * len({_parts(row) for row in rows})
    figure = Figure(figsize=(14, height), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_ylabel(label)
    return figure, [left, right]


def _lines(rows: list[dict], axis: str, fixed: str) -> list[Line]:
    """The lines of one panel.

    A workload and method has one line, at the value of ``fixed`` that gives it most points. Where
    that is a single point, its others are drawn, too, unless the other panel has them on a line.
    """
    series: dict[tuple[str, ...], list[dict]] = {}
    for row in sort_rows(rows):
        series.setdefault(_parts(row), []).append(row)
    shared = _shared(rows)
    lines = []
    for number, (parts, of_series) in enumerate(series.items()):
        by_fixed = _by_fixed(of_series, axis, fixed)
        best = _best(by_fixed, rows, fixed)
        drawn = [best]
        if len(by_fixed[best]) == 1:
            across = _by_fixed(of_series, fixed, axis)
            crossing = _best(across, rows, axis)
            on_line = {crossing} if len(across[crossing]) > 1 else set()
            drawn += [
                value
                for value in sorted(by_fixed)
                if value != best and by_fixed[value].keys() - on_line
            ]
        name = "; ".join(part for part in parts if part not in shared)
        for variant, value in enumerate(drawn):
            key = f"#{number + 1}{chr(ord('a') + variant) if len(drawn) > 1 else ''}"
            by_axis = dict(sorted(by_fixed[value].items()))
            lines.append(Line(key, number, variant, name, value, by_axis))
    return lines


def _by_fixed(rows: list[dict], axis: str, fixed: str) -> dict[int, dict[int, dict]]:
    """Rows by ``fixed``, then ``axis``; one measured again takes the place of the earlier one."""
    found: dict[int, dict[int, dict]] = {}
    for row in rows:
        found.setdefault(row[fixed], {})[row[axis]] = row
    return found


def _best(by_fixed: dict[int, dict[int, dict]], rows: list[dict], fixed: str) -> int:
    """The value with most points; of equals the most common one of all rows, then the smallest."""
    counted = Counter(row[fixed] for row in rows)
    return max(by_fixed, key=lambda value: (len(by_fixed[value]), counted[value], -value))


def _parts(row: dict) -> tuple[str, ...]:
    """Workload, policies, method and hardware, in words."""
    policies = f"recomputed: {recomputed(row)}"
    return (workload_name(row), policies, *method(row), hardware(row))


def _shared(rows: list[dict]) -> list[str]:
    """Words on method and hardware that hold for all rows."""
    every = [_parts(row)[2:] for row in rows]
    return [part for part in every[0] if all(part in parts for parts in every)]


def _line_names(lines: list[Line], fixed: str) -> list[str]:
    if len({line.fixed for line in lines}) == 1:  # the title has it
        return [line.name for line in lines]
    return [f"{line.name}; {FIXED[fixed].format(line.fixed)}" for line in lines]


def _draw_bar(axes: Axes, position: int, row: dict) -> None:
    reason = failure(row)
    if reason is not None or row["peak_allocated_gib"] is None:
        _say(axes, position, reason or "not measured", "#cc3311")
        return
    allocated, bottom = row["peak_allocated_gib"], 0.0
    found = row.get("memory_gib") or {}
    for part, colour in PARTS.items():
        height = found.get(part)
        if height is not None:
            axes.bar(position, height, bottom=bottom, color=colour, label=part)
            bottom += height
    if bottom < 0.999 * allocated:
        axes.bar(position, allocated - bottom, bottom=bottom, color=GREY, label=NOT_TOLD_APART)
    if row["peak_reserved_gib"] is not None:
        ends = [position - 0.4, position + 0.4]
        axes.plot(ends, [row["peak_reserved_gib"]] * 2, color="black", label="reserved")


def _say(axes: Axes, x: float, text: str, colour: str, shift: int = 0) -> None:
    """Write upwards from the axis."""
    axes.annotate(
        text,
        (x, 0),
        xytext=(shift, 8),
        textcoords="offset points",
        rotation=90,
        ha="center",
        va="bottom",
        fontsize=8,
        color=colour,
    )


def _finish(axes: Axes, axis: str, fixed: str, lines: list[Line]) -> None:
    values = {line.fixed for line in lines}
    if len(values) == 1:
        axes.set_title(FIXED[fixed].format(*values), fontsize=10)
    axes.set_xlabel(LABELS[axis])
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)


def _legend(axes: Axes, **options) -> None:
    handles, labels = axes.get_legend_handles_labels()
    keyed = [
        (handle, label)
        for handle, label in zip(handles, labels, strict=True)
        if label not in PARTS and label not in (NOT_TOLD_APART, "reserved")
    ]
    axes.legend(
        *zip(*keyed, strict=True),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        fontsize=8,
        frameon=False,
        **options,
    )
