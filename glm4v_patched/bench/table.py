"""Measured rows: their files, JSON arrays with one row a line; and their tables in Markdown, with
the command of every row."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..atomic import write_atomically
from ..engine.options import TRAINED, trains_tower

# What a long error message means, by a pattern in it.
SHORT_REASONS = {"out ?of ?memory": "out of memory", "not done": "not done in time", "sigkill": "killed"}
# Settings that have columns of their own, or say nothing of how it was trained.
SETTINGS_WITH_COLUMNS = {"trained", "micro_batch", "text_tokens", "tower", "language", "memory_limit"}
SETTINGS_WITH_COLUMNS |= {"stage3_max_live_parameters", "zero_stage", "steps", "warm_up", "profile", "config"}
# Also of older releases, whose bench had more settings.
BEGIN_MARKER, END_MARKER = "<!-- rows of bench -->", "<!-- end of the rows of bench -->"
Column = Callable[[dict], str]
# What rows must have to be shown, by their workload.
REQUIRED_TRAINING_KEYS = {"gpus", "micro_batch", "text_tokens", "settings"}
REQUIRED_KEYS = {"generate": {"batch"}}
REQUIRED_KEYS |= {"answers": {"batch", "image", "rows", "new_tokens"}}


def read_measurements(path: Path, may_be_new: bool = False) -> list[dict]:
    """The rows of a file; none of one that may be new.

    Raises:
        FileNotFoundError: there is no such file, or no folder for it.
        ValueError: it is no JSON array of measured rows.
    """
    if may_be_new and not path.exists():
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{path.absolute().parent} is no folder; make it first")
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError("no array of rows")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or "workload" not in row:
                raise ValueError(f"entry {number} of {len(rows)} is no object that has a workload")
            if lacking := sorted(REQUIRED_KEYS.get(row["workload"], REQUIRED_TRAINING_KEYS) - row.keys()):
                raise ValueError(f"entry {number} of {len(rows)} has no {', '.join(lacking)}")
    except ValueError as error:  # no JSON, no text, no rows
        expected = "expected what bench writes with --out, or a new file"
        raise ValueError(f"{path} is no file of rows ({error}); {expected}") from error
    return rows


def require_same_kind(path: Path, workload: str) -> None:
    """Raise as :func:`read_rows` does, or ``ValueError`` if a file has rows of another kind, which
    one table cannot show."""
    for row in read_measurements(path, may_be_new=True)[:1]:
        if columns_of(row) is not columns_of({"workload": workload}):
            raise ValueError(f"{path} has rows of {row['workload']}: give --out another file")


def append_measurements(path: Path, rows: list[dict]) -> None:
    """Add rows to a file, which is replaced as a whole: nothing is lost if this is interrupted.
    Raises as :func:`read_rows` does."""
    # A loss may be NaN, which json writes and reads although JSON has no word for it.
    text = json.dumps([*read_measurements(path, may_be_new=True), *rows])
    finite = json.loads(text, parse_constant=lambda constant: None)
    write_atomically(path.resolve(), "[\n" + ",\n".join(map(json.dumps, finite)) + "\n]\n")


def hardware_cell(row: dict) -> str:
    """Number and name of the devices, which a row that failed may not have; the limit, if any."""
    gpus, device, limit = row["gpus"], row.get("device"), row.get("memory_limit_gib")
    if device == "cpu":
        return f"CPU, {gpus} process{'es' * (gpus > 1)}"
    devices = f"{gpus} GPU{'s' * (gpus > 1)}" if device is None else f"{gpus} x {device}"
    return devices if limit is None else f"{devices}, at most {limit:g} GiB"


def _policies_cell(row: dict) -> str:
    """Of tower and language model: those that were chosen, before those that were asked for."""
    of = {"tower": "auto", "language": "auto"} | row["settings"] | (row.get("policies") or {})
    tower = of["tower"] if trains_tower(row["workload"]) else "-"  # a frozen one keeps nothing
    return f"{tower}, {of['language']}"


def _live_parameters_cell(row: dict) -> str:
    of = row["settings"] | (row.get("policies") or {})
    live = of.get("gathered", of.get("stage3_max_live_parameters"))
    return "-" if live is None or row.get("zero_stage", 3) != 3 else f"{live:.2g}"


def _method_cell(row: dict) -> str:
    """The ZeRO stage, and every other setting: a row has those that are not the default."""
    stage = row.get("zero_stage", 3)
    words = [f"ZeRO-{stage}" if stage else "no ZeRO"]
    for name, value in row["settings"].items():
        if name not in SETTINGS_WITH_COLUMNS:
            switch = name if value else f"no {name}"
            words.append(switch if isinstance(value, bool) else f"{name} {value}")
    return ", ".join(words)


def short_error(row: dict) -> str:
    """Why there are no figures, in a few words; empty where there are."""
    error = " ".join(row.get("error", "").split())
    reasons = (reason for part, reason in SHORT_REASONS.items() if re.search(part, error, re.IGNORECASE))
    return next(reasons, error if len(error) <= 60 else error[:57] + "...")


def _formatted(name: str, written: str) -> Column:
    return lambda row: "-" if row.get(name) is None else written.format(row[name])


# What sets a row of training apart.
TRAINING_SETTING_COLUMNS: dict[str, Column] = {
    "added": _formatted("added", "{}"),
    "trained": lambda row: row["workload"],
    "hardware": hardware_cell,
    "micro-batch, text tokens": lambda row: f"{row['micro_batch']}, {row['text_tokens']:,}",
    "policies of tower, language model": _policies_cell,
    "live parameters": _live_parameters_cell,
    "method": _method_cell,
}
TRAINING_COLUMNS = TRAINING_SETTING_COLUMNS | {
    "samples/s/GPU": _formatted("samples_per_s_per_gpu", "{:#.3g}"),
    "tokens/s/GPU": _formatted("tokens_per_s_per_gpu", "{:,.0f}"),
    "roofline": _formatted("roofline_share", "{:.0%}"),
    "step, s (fastest-slowest)": _formatted(
        "step_s", "{0[median]:.3f} ({0[fastest]:.3f}-{0[slowest]:.3f})"
    ),
    "GiB allocated": _formatted("peak_allocated_gib", "{:.1f}"),
    "reserved": _formatted("peak_reserved_gib", "{:.1f}"),
}
GENERATION_COLUMNS: dict[str, Column] = {
    "device": _formatted("device", "{}"),
    "weights": _formatted("weights", "{}"),
    "cache": _formatted("cache", "{}"),
    "batch": lambda row: str(row["batch"]),
    "first token, s": _formatted("first_token_s", "{:.3f}"),
    "tokens/s": _formatted("tokens_per_s", "{:,.1f}"),
    "bandwidth": _formatted("bandwidth_share", "{:.0%}"),
    "GiB": _formatted("peak_allocated_gib", "{:.1f}"),
}
ANSWER_COLUMNS: dict[str, Column] = {
    "device": _formatted("device", "{}"),
    "weights": _formatted("weights", "{}"),
    "image": _formatted("image", "{}"),
    "batch": lambda row: str(row["batch"]),
    "rows of tokens": lambda row: f"{row['rows']} of {row['new_tokens']}",
    "answers/s": _formatted("answers_per_s", "{:.3g}"),
    "first answers, s": _formatted("first_answer_s", "{:.3g}"),
    "command, s": _formatted("command_s", "{:.3g}"),
    "GPU idle": _formatted("gpu_idle", "{:.0%}"),
}
# Where a failure stands in place of the figure.
ERROR_COLUMNS = {"samples/s/GPU", "first token, s", "answers/s"}


def columns_of(row: dict) -> dict[str, Column]:
    return {"generate": GENERATION_COLUMNS, "answers": ANSWER_COLUMNS}.get(row["workload"], TRAINING_COLUMNS)


def cells_of(row: dict) -> dict[str, str]:
    cells = {name: cell(row) for name, cell in columns_of(row).items()}
    failed = {name: short_error(row) for name in cells.keys() & ERROR_COLUMNS if "error" in row}
    return cells | failed


def markdown_table(rows: list[dict]) -> str:
    """The table of rows of one kind, sorted, and below it, folded, each row's command and versions
    by its number. Columns that say nothing of any row are left out."""
    if not rows:
        raise ValueError("there are no rows to show; measure some, or name files that have some")
    if len(kinds := {tuple(columns_of(row)) for row in rows}) > 1:
        raise ValueError("these files have rows of several kinds: name those of one")
    rows = sort_measurements(rows)
    cells = [[str(number), *cells_of(row).values()] for number, row in enumerate(rows, 1)]
    columns = zip(("#", *kinds.pop()), *cells, strict=True)
    told, *lines = zip(*(column for column in columns if {*column[1:]} != {"-"}), strict=True)
    commands = []
    for number, row in enumerate(rows, 1):
        versions = [f"{name} {version}" for name, version in row.get("versions", {}).items()]
        of = ", ".join(versions) or "failed"
        commands.append(f"{number}. `{row.get('command')}` ({of})\n")
    summary = "<summary>The command of each row</summary>"
    return f"{_markdown(told, lines)}\n<details>{summary}\n\n{''.join(commands)}\n</details>\n"


def _markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in lines]
    table = [columns, ["---"] * len(columns), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def sort_measurements(rows: list[dict]) -> list[dict]:
    """Of training, by what was trained and hardware, then those of ablations, in their order; of
    the others, by device and batch."""
    if "gpus" not in rows[0]:
        return sorted(rows, key=lambda row: (row.get("device", "-"), row["batch"]))
    single = [row for row in rows if "added" not in row]
    kinds = {row["workload"]: (*TRAINED, row["workload"]).index(row["workload"]) for row in rows}
    single.sort(key=lambda row: (kinds[row["workload"]], hardware_cell(row)))
    return single + [row for row in rows if "added" in row]


def insert_table(table: str, path: Path) -> None:
    """Put the table between the two markers of a Markdown file, in place of what is there. Raises
    ``ValueError`` if the file does not have each of the two lines once, in this order."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN_MARKER) != 1 or text.count(END_MARKER) != 1 or text.index(END_MARKER) < text.index(BEGIN_MARKER):
        raise ValueError(
            f"{path} has {text.count(BEGIN_MARKER)} lines {BEGIN_MARKER} and {text.count(END_MARKER)} lines {END_MARKER}; "
            "expected one of each, in this order, where the table goes"
        )
    before, after = text[: text.index(BEGIN_MARKER)], text[text.index(END_MARKER) :]
    write_atomically(path.resolve(), f"{before}{BEGIN_MARKER}\n\n{table}\n{after}")
