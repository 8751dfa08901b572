"""Measured rows: their files, and in words as a Markdown table with the command of every row."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .. import result_files
from ..atomic import write_atomically
from ..engine.options import TRAINED, trains_tower
from .settings import DEFAULTS

_REQUIRED = "workload", "gpus", "micro_batch", "text_tokens", "settings"
read_rows = partial(result_files.read_rows, _REQUIRED)
add_rows = partial(result_files.add_rows, _REQUIRED)
# What a long error message means, by a pattern in it.
REASONS = {"out ?of ?memory": "out of memory", "not done": "not done in time", "sigkill": "killed"}
# Settings that have columns of their own, or say nothing of how it was trained.
TOLD = {"trained", "micro_batch", "text_tokens", "tower", "language", "memory_limit"}
TOLD |= {"stage3_max_live_parameters", "zero_stage", "steps", "warm_up", "profile", "config"}
BEGIN, END = "<!-- rows of bench -->", "<!-- end of the rows of bench -->"


def hardware(row: dict) -> str:
    """Number and name of the devices, which a row that failed may not have; the limit, if any."""
    gpus, device, limit = row["gpus"], row.get("device"), row.get("memory_limit_gib")
    if device == "cpu":
        return f"CPU, {gpus} process{'es' * (gpus > 1)}"
    devices = f"{gpus} GPU{'s' * (gpus > 1)}" if device is None else f"{gpus} x {device}"
    return devices if limit is None else f"{devices}, at most {limit:g} GiB"


def chosen(row: dict) -> list[str]:
    """Policies of tower and language model, and live parameters; ``-`` where there are none.

    What the row says was chosen comes before what was asked for.
    """
    of = row["settings"] | (row.get("policies") or {})
    live = of.get("gathered", of.get("stage3_max_live_parameters"))
    tower = of["tower"] if trains_tower(row["workload"]) else "-"  # a frozen one keeps nothing
    policies = "-" if row.get("implementation") == "original" else f"{tower}, {of['language']}"
    return [policies, "-" if live is None or row.get("zero_stage", 3) != 3 else f"{live:.2g}"]


def method(row: dict) -> list[str]:
    """The ZeRO stage, and every other setting that is not the default."""
    stage = row.get("zero_stage", 3)
    words = [f"ZeRO-{stage}" if stage else "no ZeRO"]
    for name, value in row["settings"].items():
        if name == "against" and value is not None:
            words.append("the original's code")
        elif name not in TOLD and value != DEFAULTS.get(name):
            switch = name if value else f"no {name}"
            words.append(switch if isinstance(value, bool) else f"{name} {value}")
    return words


def failure(row: dict) -> str:
    """Why there are no figures, in a few words; empty where there are."""
    error = " ".join(row.get("error", "").split())
    reasons = (reason for part, reason in REASONS.items() if re.search(part, error, re.IGNORECASE))
    return next(reasons, error if len(error) <= 60 else error[:57] + "...")


DESCRIPTION: dict[str, Callable[[dict], str]] = {
    "added": lambda row: row.get("added", "-"),
    "trained": lambda row: row["workload"],
    "hardware": hardware,
    "micro-batch, ids of text": lambda row: f"{row['micro_batch']}, {row['text_tokens']:,}",
    "policies of tower, language model": lambda row: chosen(row)[0],
    "live parameters": lambda row: chosen(row)[1],
    "method": lambda row: ", ".join(method(row)),
}
# Of each its field in a row, and how it is written.
FIGURES = {
    "samples/s/GPU": ("samples_per_s_per_gpu", "{:#.3g}"),
    "tokens/s/GPU": ("tokens_per_s_per_gpu", "{:,.0f}"),
    "roofline": ("roofline_share", "{:.0%}"),
    "step, s (fastest-slowest)": ("step_s", "{0[median]:.3f} ({0[fastest]:.3f}-{0[slowest]:.3f})"),
    "GiB allocated": ("peak_allocated_gib", "{:.1f}"),
    "reserved": ("peak_reserved_gib", "{:.1f}"),
}
COLUMNS = (*DESCRIPTION, *FIGURES)


def cells_of(row: dict) -> list[str]:
    """The row's cell in each of ``COLUMNS``; a failure stands in place of the first figure."""
    cells = [cell(row) for cell in DESCRIPTION.values()]
    for name, written in FIGURES.values():
        cells.append("-" if row.get(name) is None else written.format(row[name]))
    if "error" in row:
        cells[len(DESCRIPTION)] = failure(row)
    return cells


def markdown_table(rows: list[dict]) -> str:
    """The table, sorted, and below it, folded, each row's command and versions by its number.

    Columns that say nothing of any row are left out.
    """
    rows = sort_rows(rows)
    cells = [[str(number), *cells_of(row)] for number, row in enumerate(rows, 1)]
    columns = zip(("#", *COLUMNS), *cells, strict=True)
    told, *lines = zip(*(column for column in columns if {*column[1:]} != {"-"}), strict=True)
    commands = []
    for number, row in enumerate(rows, 1):
        versions = [f"{name} {version}" for name, version in row.get("versions", {}).items()]
        of = ", ".join(versions) or "failed"
        commands.append(f"{number}. `{row.get('command')}` ({of})\n")
    summary = "<summary>The command of each row</summary>"
    table = result_files.markdown(told, lines)
    return f"{table}\n<details>{summary}\n\n{''.join(commands)}\n</details>\n"


def sort_rows(rows: list[dict]) -> list[dict]:
    """By what was trained and hardware; then those of ablations, in their order."""
    single = [row for row in rows if "added" not in row]
    kinds = {row["workload"]: (*TRAINED, row["workload"]).index(row["workload"]) for row in rows}
    single.sort(key=lambda row: (kinds[row["workload"]], hardware(row)))
    return single + [row for row in rows if "added" in row]


def insert(table: str, path: Path) -> None:
    """Put the table between the two markers of a Markdown file, in place of what is there. Raises
    ``ValueError`` if the file does not have each of the two lines once, in this order."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(
            f"{path} has {text.count(BEGIN)} lines {BEGIN} and {text.count(END)} lines {END}; "
            "expected one of each, in this order, where the table goes"
        )
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    write_atomically(path.resolve(), f"{before}{BEGIN}\n\n{table}\n{after}")
