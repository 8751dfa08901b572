"""Measured rows in words: a Markdown table, with the command of every row."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ..engine.options import TRAINED, trains_tower
from .rows import replace_file
from .settings import DEFAULTS, settings_of

# What a long error message means, by a part of it.
REASONS = {
    "outofmemoryerror": "out of memory",
    "out of memory": "out of memory",
    "not done after": "not done in time",
    "sigkill": "killed",
}
# Settings that have columns of their own, or say nothing of how it was trained.
TOLD = {"trained", "micro_batch", "text_tokens", "tower", "language", "memory_limit"}
TOLD |= {"stage3_max_live_parameters", "zero_stage", "steps", "warm_up", "profile", "config"}
BEGIN, END = "<!-- rows of bench -->", "<!-- end of the rows of bench -->"


def hardware(row: dict) -> str:
    """Number and name of the devices, which a row that failed may not have; the limit, if any."""
    gpus, device = row["gpus"], row.get("device")
    if device == "cpu":
        return f"CPU, {gpus} process{'es' * (gpus > 1)}"
    devices = f"{gpus} GPU{'s' * (gpus > 1)}" if device is None else f"{gpus} x {device}"
    limit = row.get("memory_limit_gib")
    return devices if limit is None else f"{devices}, at most {limit:g} GiB"


def policies(row: dict) -> str:
    """Of tower and language model; ``-`` for a tower that keeps nothing anyway.

    What the row says was chosen comes before what was asked for.
    """
    if row.get("implementation") == "original":
        return "-"
    chosen = settings_of(row) | (row.get("policies") or {})
    return f"{chosen['tower'] if trains_tower(row['workload']) else '-'}, {chosen['language']}"


def live_parameters(row: dict) -> str:
    chosen = (row.get("policies") or {}).get("gathered")
    live = settings_of(row).get("stage3_max_live_parameters") if chosen is None else chosen
    return "-" if live is None or row.get("zero_stage", 3) != 3 else f"{live:.2g}"


def method(row: dict) -> list[str]:
    """The ZeRO stage, and every other setting that is not the default."""
    stage = row.get("zero_stage", 3)
    words = [f"ZeRO-{stage}" if stage else "no ZeRO"]
    for name, value in settings_of(row).items():
        if name == "against" and value is not None:
            words.append("the original's code")
        elif name not in TOLD and value != DEFAULTS.get(name):
            named = f"{'' if value else 'no '}{name}" if isinstance(value, bool) else None
            words.append(named or f"{name} {value}")
    return words


def failure(row: dict) -> str:
    """Why there are no figures, in a few words; empty where there are."""
    error = " ".join(row.get("error", "").split())
    for part, reason in REASONS.items():
        if part in error.lower():
            return reason
    return error if len(error) <= 60 else error[:57] + "..."


def _rate(row: dict) -> str:
    rate = row["samples_per_s_per_gpu"]
    return f"{rate:,.{max(2 - math.floor(math.log10(rate)), 0)}f}"  # three digits


def _step(row: dict) -> str:
    step = row.get("step_s")
    return f"{step['median']:.3f} ({step['fastest']:.3f}-{step['slowest']:.3f})" if step else "-"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


DESCRIPTION: dict[str, Callable[[dict], str]] = {
    "trained": lambda row: row["workload"],
    "hardware": hardware,
    "micro-batch, ids of text": lambda row: f"{row['micro_batch']}, {row['text_tokens']:,}",
    "policies of tower, language model": policies,
    "live parameters": live_parameters,
    "method": lambda row: ", ".join(method(row)),
}
FIGURES: dict[str, Callable[[dict], str]] = {
    "samples/s/GPU": _rate,
    "tokens/s/GPU": lambda row: f"{row['tokens_per_s_per_gpu']:,.0f}",
    "roofline": lambda row: f"{row['roofline_share']:.0%}",
    "step, s (fastest-slowest)": _step,
    "GiB allocated": lambda row: _gib(row["peak_allocated_gib"]),
    "reserved": lambda row: _gib(row["peak_reserved_gib"]),
}
COLUMNS = (*DESCRIPTION, *FIGURES)


def cells_of(row: dict) -> list[str]:
    """The row's cell in each of ``COLUMNS``; a failure stands in place of the first figure."""
    what = [cell(row) for cell in DESCRIPTION.values()]
    if "error" in row:
        return [*what, failure(row), *["-"] * (len(FIGURES) - 1)]
    return [*what, *(cell(row) for cell in FIGURES.values())]


def markdown_table(rows: list[dict]) -> str:
    """The table, sorted, and below it, folded, each row's command and versions.

    Rows of an ablation follow in a table of their own, in their order. The numbers in the first
    column are those of the commands.
    """
    single = sort_rows([row for row in rows if "added" not in row])
    steps = [row for row in rows if "added" in row]
    parts = []
    if single:
        parts.append(_table(COLUMNS, [cells_of(row) for row in single], first=1))
    if steps:
        parts.append("Cumulative, each row with all measures of those above it:")
        cells = [[row["added"], *cells_of(row)] for row in steps]
        parts.append(_table(("added", *COLUMNS), cells, first=len(single) + 1))
    commands = "\n".join(f"{n}. {_command(row)}" for n, row in enumerate([*single, *steps], 1))
    parts.append(f"<details><summary>The command of each row</summary>\n\n{commands}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: list[list[str]], first: int) -> str:
    numbered = [[str(number), *cells] for number, cells in enumerate(rows, first)]
    lines = [["#", *columns], ["---"] * (len(columns) + 1), *numbered]
    escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def _command(row: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row.get("versions", {}).items())
    command = f"`{row['command']}`" if "command" in row else "no command"
    return f"{command} ({versions})" if versions else command


def sort_rows(rows: list[dict]) -> list[dict]:
    """By workload and hardware; rows that have both in common stay in their order."""
    rank = {workload: place for place, workload in enumerate(TRAINED)}
    return sorted(rows, key=lambda row: (rank.get(row["workload"], len(rank)), hardware(row)))


def insert(table: str, path: Path) -> None:
    """Put the table between the two markers of a Markdown file, in place of what is there.

    Raises:
        ValueError: the file does not have each of the two lines once, in this order.
    """
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(
            f"{path} has {text.count(BEGIN)} lines {BEGIN} and {text.count(END)} lines {END}; "
            "expected one of each, in this order, where the table goes"
        )
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    replace_file(path, f"{before}{BEGIN}\n\n{table}\n{after}")
