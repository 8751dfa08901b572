"""Two pictures of measured rows: peak memory and speed, by text length and by micro-batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .table import failure, hardware, method, recomputed, sort_rows, workload_name

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of each panel: the field of the horizontal axis, and the field that is fixed along a line.
PANELS = (("text_tokens", "micro_batch"), ("micro_batch", "text_tokens"))
NAMES = {"text_tokens": "ids of text in a sample, beside its image", "micro_batch": "micro-batch"}
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


class Line(NamedTuple):
    """Rows of one series that differ in the field of a panel's axis.

    A series is what was asked for: workload, policies, method and hardware, by the number that it
    has in both panels. ``rows`` are by their place on the horizontal axis, ascending.
    """

    axes: Axes
    series: int
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

    Rows of an ablation are left out unless there are no others.

    Raises:
        ValueError: there are no rows.
    """
    rows = [row for row in rows if "added" not in row] or rows
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"memory.png": memory_figure(rows), "speed.png": speed_figure(rows)}
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name in pictures]


def memory_figure(rows: list[dict]) -> Figure:
    """A bar for each row, as high as the peak allocated and parted where the row has parts.

    A line above is the peak reserved.
    """
    figure, lines = _place(rows, "peak memory, GiB a GPU")
    for line in lines:
        for place, row in line.rows.items():
            _draw_bar(line.axes, place, row)
    found = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    order = [name for name in (*PARTS, NOT_TOLD_APART, "reserved") if name in found]
    found = [found[name] for name in order]
    figure.legend(found, order, loc="outside upper center", ncols=8, frameon=False)
    _finish(figure, rows, {})
    return figure


def speed_figure(rows: list[dict]) -> Figure:
    """A line of tokens/s/GPU for each series; failures stand on the axis."""
    figure, lines = _place(rows, "tokens/s/GPU, an image's positions included")
    handles = {}
    for axes, series, of_line in lines:
        colour, style = f"C{series % 10}", ("-", "--", ":")[series // 10 % 3]
        speeds = {
            place: row["tokens_per_s_per_gpu"]
            for place, row in of_line.items()
            if failure(row) is None
        }
        (handles[series],) = axes.plot(
            list(speeds), list(speeds.values()), "o", linestyle=style, color=colour
        )
        for place in of_line.keys() - speeds.keys():
            axes.plot([place], [0], "x", color=colour, clip_on=False)
            _say(axes, place, failure(of_line[place]), colour)
    _finish(figure, rows, handles)
    return figure


def _place(rows: list[dict], label: str) -> tuple[Figure, list[Line]]:
    """Two panels, and the lines of both: groups of places, a group for each value of the axis.

    Beside each other, rows of equal values hide none of each other. Each place has its key.

    Raises:
        ValueError: there are no rows.
    """
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError("there are no rows to draw; measure some, or name files that have some")
    # The panels keep more than half of the height, whatever the legend takes of it.
    figure = Figure(figsize=(14, 5 + 0.3 * len(_series(rows))), layout="constrained")
    placed = []
    for axes, (axis, fixed) in zip(figure.subplots(1, 2, sharey=True), PANELS, strict=True):
        lines = _lines(rows, axis, fixed)
        values = sorted({value for _, value, _ in lines})
        letters = {v: chr(ord("a") + n) if len(values) > 1 else "" for n, v in enumerate(values)}
        told = (f"{value:,} ({key})".removesuffix(" ()") for value, key in letters.items())
        axes.set_title(f"{NAMES[fixed]}: {', '.join(told)}", fontsize=10)
        places = [{} for _ in lines]
        keys, centres, place = {}, {}, 0
        for axis_value in sorted({value for _, _, of_line in lines for value in of_line}):
            first = place
            for (series, value, of_line), at in zip(lines, places, strict=True):
                if axis_value in of_line:
                    at[place] = of_line[axis_value]
                    keys[place] = f"#{series + 1}{letters[value]}"
                    place += 1
            centres[(first + place - 1) / 2] = f"{axis_value:,}"
            place += 1  # a gap
        placed += [Line(axes, line[0], at) for line, at in zip(lines, places, strict=True)]
        pad, rotation = (30, 90) if place > 20 else (18, 0)
        axes.set_xticks(list(centres), list(centres.values()))
        axes.tick_params(axis="x", which="major", length=0, pad=pad)
        axes.set_xticks(list(keys), list(keys.values()), minor=True)
        axes.tick_params(axis="x", which="minor", labelsize=8, rotation=rotation)
        axes.xaxis.remove_overlapping_locs = False  # one in the middle of its group has its key
        middle = place / 2 - 1
        half = max(middle + 0.7, 2.5)  # a single bar does not fill the panel
        axes.set_xlim(middle - half, middle + half)
        axes.set_xlabel(NAMES[axis])
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    figure.axes[0].set_ylabel(label)
    return figure, placed


def _finish(figure: Figure, rows: list[dict], handles: dict[int, Artist]) -> None:
    """One legend of all series, below both panels; ``handles`` are by series."""
    from matplotlib.lines import Line2D

    figure.axes[0].set_ylim(bottom=0)  # of both, once both have their data
    every = list(_series(rows))
    shared = [part for part in every[0][2:] if all(part in parts for parts in every)]
    labels = [
        f"#{number}: {'; '.join(part for part in parts if part not in shared)}"
        for number, parts in enumerate(every, 1)
    ]
    figure.legend(
        [handles.get(n, Line2D([], [], linestyle="none")) for n in range(len(labels))],
        labels,
        title=f"all: {'; '.join(shared)}" if shared else None,
        loc="outside lower center",
        fontsize=8,
        title_fontsize=8,
        labelspacing=0.3,
        frameon=False,
        **({} if handles else {"handlelength": 0, "handletextpad": 0}),
    )


def _series(rows: list[dict]) -> dict[tuple[str, ...], list[dict]]:
    """Rows by what was asked for, in words, in the order of the table."""
    series: dict[tuple[str, ...], list[dict]] = {}
    for row in sort_rows(rows):
        series.setdefault(_parts(row), []).append(row)
    return series


def _lines(rows: list[dict], axis: str, fixed: str) -> list[tuple[int, int, dict[int, dict]]]:
    """Of each line of one panel: its series, its value of ``fixed``, its rows by ``axis``.

    A series has one line, at the value of ``fixed`` that gives it most points. Where that is a
    single point, its others are drawn, too, unless the other panel has them on a line.
    """
    lines = []
    for number, of_series in enumerate(_series(rows).values()):
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
        lines += [(number, value, by_fixed[value]) for value in drawn]
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
    """Workload, policies, method and hardware, in words: what was asked for, not what was chosen.

    So rows that ask alike make one line, though more is recomputed where more is needed.
    """
    asked = row | {"policies": None}
    policies = f"recomputed: {recomputed(asked)}"
    chosen = recomputed(asked) in ("auto, auto", "-, auto")
    if chosen and row["settings"].get("kept_gathered") is None:
        policies = "chosen by memory"
    return (workload_name(row), policies, *method(asked), hardware(row))


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


def _say(axes: Axes, x: float, text: str, colour: str) -> None:
    """Write upwards from the axis."""
    axes.annotate(
        text,
        (x, 0),
        xytext=(0, 8),
        textcoords="offset points",
        rotation=90,
        ha="center",
        va="bottom",
        fontsize=8,
        color=colour,
    )
