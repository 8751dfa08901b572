"""Measured rows: their files, JSON arrays with one row a line; and their tables in Markdown, with
the command of every row."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..atomic import write_atomically
from ..engine.options import TRAINED, trains_tower

# What a long error message means, by a pattern in it.
REASONS = {"out ?of ?memory": "out of memory", "not done": "not done in time", "sigkill": "killed"}
# Settings that have columns of their own, or say nothing of how it was trained.
TOLD = {"trained", "micro_batch", "text_tokens", "tower", "language", "memory_limit"}
TOLD |= {"stage3_max_live_parameters", "zero_stage", "steps", "warm_up", "profile", "config"}
# Also of older releases, whose bench had more settings.
BEGIN, END = "<!-- rows of bench -->", "<!-- end of the rows of bench -->"
Column = Callable[[dict], str]
# What rows must have to be shown, by their workload.
OF_TRAINING = {"gpus", "micro_batch", "text_tokens", "settings"}
FIELDS = {"generate": {"batch"}}
FIELDS |= {"answers": {"batch", "image", "rows", "new_tokens"}}


def read_rows(path: Path, may_be_new: bool = False) -> list[dict]:
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
            if lacking := sorted(FIELDS.get(row["workload"], OF_TRAINING) - row.keys()):
                raise ValueError(f"entry {number} of {len(rows)} has no {', '.join(lacking)}")
    except ValueError as error:  # no JSON, no text, no rows
        expected = "expected what bench writes with --out, or a new file"
        raise ValueError(f"{path} is no file of rows ({error}); {expected}") from error
    return rows


def require_addable(path: Path, workload: str) -> None:
    """Raise as :func:`read_rows` does, or ``ValueError`` if a file has rows of another kind, which
    one table cannot show."""
    for row in read_rows(path, may_be_new=True)[:1]:
        if columns_of(row) is not columns_of({"workload": workload}):
            raise ValueError(f"{path} has rows of {row['workload']}: give --out another file")


def add_rows(path: Path, rows: list[dict]) -> None:
    """Add rows to a file, which is replaced as a whole: nothing is lost if this is interrupted.
    Raises as :func:`read_rows` does."""
    # A loss may be NaN, which json writes and reads although JSON has no word for it.
    text = json.dumps([*read_rows(path, may_be_new=True), *rows])
    finite = json.loads(text, parse_constant=lambda constant: None)
    write_atomically(path.resolve(), "[\n" + ",\n".join(map(json.dumps, finite)) + "\n]\n")


def hardware(row: dict) -> str:
    """Number and name of the devices, which a row that failed may not have; the limit, if any."""
    gpus, device, limit = row["gpus"], row.get("device"), row.get("memory_limit_gib")
    if device == "cpu":
        return f"CPU, {gpus} process{'es' * (gpus > 1)}"
    devices = f"{gpus} GPU{'s' * (gpus > 1)}" if device is None else f"{gpus} x {device}"
    return devices if limit is None else f"{devices}, at most {limit:g} GiB"


def _policies(row: dict) -> str:
    """Of tower and language model: those that were chosen, before those that were asked for."""
    of = {"tower": "auto", "language": "auto"} | row["settings"] | (row.get("policies") or {})
    tower = of["tower"] if trains_tower(row["workload"]) else "-"  # a frozen one keeps nothing
    return f"{tower}, {of['language']}"


def _live_parameters(row: dict) -> str:
    of = row["settings"] | (row.get("policies") or {})
    live = of.get("gathered", of.get("stage3_max_live_parameters"))
    return "-" if live is None or row.get("zero_stage", 3) != 3 else f"{live:.2g}"


def _method(row: dict) -> str:
    """The ZeRO stage, and every other setting: a row has those that are not the default."""
    stage = row.get("zero_stage", 3)
    words = [f"ZeRO-{stage}" if stage else "no ZeRO"]
    for name, value in row["settings"].items():
        if name not in TOLD:
            switch = name if value else f"no {name}"
            words.append(switch if isinstance(value, bool) else f"{name} {value}")
    return ", ".join(words)


def failure(row: dict) -> str:
    """Why there are no figures, in a few words; empty where there are."""
    error = " ".join(row.get("error", "").split())
    reasons = (reason for part, reason in REASONS.items() if re.search(part, error, re.IGNORECASE))
    return next(reasons, error if len(error) <= 60 else error[:57] + "...")


def _figure(name: str, written: str) -> Column:
    return lambda row: "-" if row.get(name) is None else written.format(row[name])


# What sets a row of training apart.
DESCRIPTION: dict[str, Column] = {
    "added": _figure("added", "{}"),
    "trained": lambda row: row["workload"],
    "hardware": hardware,
    "micro-batch, ids of text": lambda row: f"{row['micro_batch']}, {row['text_tokens']:,}",
    "policies of tower, language model": _policies,
    "live parameters": _live_parameters,
    "method": _method,
}
TRAINING = DESCRIPTION | {
    "samples/s/GPU": _figure("samples_per_s_per_gpu", "{:#.3g}"),
    "tokens/s/GPU": _figure("tokens_per_s_per_gpu", "{:,.0f}"),
    "roofline": _figure("roofline_share", "{:.0%}"),
    "step, s (fastest-slowest)": _figure(
        "step_s", "{0[median]:.3f} ({0[fastest]:.3f}-{0[slowest]:.3f})"
    ),
    "GiB allocated": _figure("peak_allocated_gib", "{:.1f}"),
    "reserved": _figure("peak_reserved_gib", "{:.1f}"),
}
GENERATION: dict[str, Column] = {
    "device": _figure("device", "{}"),
    "weights": _figure("weights", "{}"),
    "cache": _figure("cache", "{}"),
    "batch": lambda row: str(row["batch"]),
    "first token, s": _figure("first_token_s", "{:.3f}"),
    "tokens/s": _figure("tokens_per_s", "{:,.1f}"),
    "bandwidth": _figure("bandwidth_share", "{:.0%}"),
    "GiB": _figure("peak_allocated_gib", "{:.1f}"),
}
ANSWERS: dict[str, Column] = {
    "device": _figure("device", "{}"),
    "weights": _figure("weights", "{}"),
    "image": _figure("image", "{}"),
    "batch": lambda row: str(row["batch"]),
    "rows of tokens": lambda row: f"{row['rows']} of {row['new_tokens']}",
    "answers/s": _figure("answers_per_s", "{:.3g}"),
    "first answers, s": _figure("first_answer_s", "{:.3g}"),
    "command, s": _figure("command_s", "{:.3g}"),
    "GPU idle": _figure("gpu_idle", "{:.0%}"),
}
# Where a failure stands in place of the figure.
FIRST_FIGURES = {"samples/s/GPU", "first token, s", "answers/s"}


def columns_of(row: dict) -> dict[str, Column]:
    return {"generate": GENERATION, "answers": ANSWERS}.get(row["workload"], TRAINING)


def cells_of(row: dict) -> dict[str, str]:
    cells = {name: cell(row) for name, cell in columns_of(row).items()}
    failed = {name: failure(row) for name in cells.keys() & FIRST_FIGURES if "error" in row}
    return cells | failed


def markdown_table(rows: list[dict]) -> str:
    """The table of rows of one kind, sorted, and below it, folded, each row's command and versions
    by its number. Columns that say nothing of any row are left out."""
    if not rows:
        raise ValueError("there are no rows to show; measure some, or name files that have some")
    if len(kinds := {tuple(columns_of(row)) for row in rows}) > 1:
        raise ValueError("these files have rows of several kinds: name those of one")
    rows = sort_rows(rows)
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


def sort_rows(rows: list[dict]) -> list[dict]:
    """Of training, by what was trained and hardware, then those of ablations, in their order; of
    the others, by device and batch."""
    if "gpus" not in rows[0]:
        return sorted(rows, key=lambda row: (row.get("device", "-"), row["batch"]))
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
