"""Files of measured rows (JSON arrays, one row per line), and their tables in Markdown."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..atomic import write_atomically
from ..engine.options import TRAINED_CHOICES, trains_tower

# Short reasons for failures; each key is a pattern that the error message contains.
SHORT_REASONS = {
    "out ?of ?memory": "out of memory",
    "not done": "not done in time",
    "sigkill": "killed",
}
# Settings that the column "method" leaves out, because they have their own columns or do not
# describe the training. Some exist only in the rows of older releases.
SETTINGS_WITH_COLUMNS = {
    "trained",
    "micro_batch",
    "text_tokens",
    "tower",
    "language",
    "memory_limit",
    "stage3_max_live_parameters",
    "zero_stage",
    "steps",
    "warm_up",
    "profile",
    "config",
}
BEGIN_MARKER, END_MARKER = "<!-- rows of bench -->", "<!-- end of the rows of bench -->"
Column = Callable[[dict], str]  # returns a row's cell
# Keys that the rows of each workload must have. A row's workload is "generate", "answers" or, for
# training, the trained weights (TRAINED_CHOICES).
REQUIRED_TRAINING_KEYS = {"gpus", "micro_batch", "text_tokens", "settings"}
REQUIRED_KEYS = {"generate": {"batch"}}
REQUIRED_KEYS |= {"answers": {"batch", "image", "rows", "new_tokens"}}


def read_measurements(path: Path, may_be_new: bool = False) -> list[dict]:
    """Read the rows of a file.

    Args:
        may_be_new: Whether the file may be missing; no rows are returned then.

    Raises:
        FileNotFoundError: the file, or the folder of a new file, does not exist.
        ValueError: the file is not a JSON array of measured rows.
    """
    if may_be_new and not path.exists():
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"the folder {path.absolute().parent} does not exist; make it")
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError("it contains no array")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or "workload" not in row:
                raise ValueError(f"entry {number} of {len(rows)} is not an object with a workload")
            required = REQUIRED_KEYS.get(row["workload"], REQUIRED_TRAINING_KEYS)
            if missing := sorted(required - row.keys()):
                raise ValueError(f"entry {number} of {len(rows)} has no {', '.join(missing)}")
    except ValueError as error:  # not JSON, not UTF-8, or not rows
        expected = "expected a file that bench wrote with --out, or a new file"
        raise ValueError(f"{path} has no rows of bench: {error}; {expected}") from error
    return rows


def require_same_kind(path: Path, workload: str) -> None:
    """Require that new rows of a workload fit into one table with the rows of a file.

    Raises:
        ValueError: the file's rows have other columns.
        FileNotFoundError, ValueError: see :func:`read_measurements`.
    """
    for row in read_measurements(path, may_be_new=True)[:1]:
        if columns_of(row) is not columns_of({"workload": workload}):
            stored = row["workload"] if row["workload"] in REQUIRED_KEYS else "training"
            raise ValueError(
                f"{path} has measurements of {stored}, and measurements of {workload} do not fit "
                "into the same table: give --out another file"
            )


def append_measurements(path: Path, rows: list[dict]) -> None:
    """Append rows to a file, which is replaced atomically: an interruption loses nothing.

    Raises:
        FileNotFoundError, ValueError: see :func:`read_measurements`.
    """
    # Replace a NaN loss by null: Python's json would write NaN, which is not valid JSON.
    text = json.dumps([*read_measurements(path, may_be_new=True), *rows])
    finite = json.loads(text, parse_constant=lambda constant: None)
    write_atomically(path.resolve(), "[\n" + ",\n".join(map(json.dumps, finite)) + "\n]\n")


def hardware_cell(row: dict) -> str:
    """Return the number of devices, their name if the row has it, and any memory limit."""
    gpus, device, limit = row["gpus"], row.get("device"), row.get("memory_limit_gib")
    if device == "cpu":
        return f"CPU, {gpus} process{'es' * (gpus > 1)}"
    devices = f"{gpus} GPU{'s' * (gpus > 1)}" if device is None else f"{gpus} x {device}"
    return devices if limit is None else f"{devices}, at most {limit:g} GiB"


def _policies_cell(row: dict) -> str:
    """Return the activation checkpointing of tower and language model."""
    checkpointing = {"tower": "auto", "language": "auto"} | row["settings"]
    checkpointing |= row.get("policies") or {}  # what "auto" was resolved to
    # A frozen tower stores no activations.
    tower = checkpointing["tower"] if trains_tower(row["workload"]) else "-"
    return f"{tower}, {checkpointing['language']}"


def _live_parameters_cell(row: dict) -> str:
    """Return how many parameters ZeRO-3 keeps gathered; "-" if unknown or without ZeRO-3."""
    # The key "gathered" of row["policies"] is the decided stage3_max_live_parameters.
    settings = row["settings"] | (row.get("policies") or {})
    live = settings.get("gathered", settings.get("stage3_max_live_parameters"))
    return "-" if live is None or row.get("zero_stage", 3) != 3 else f"{live:.2g}"


def _method_cell(row: dict) -> str:
    """Return the ZeRO stage, and the settings that differ from their defaults."""
    stage = row.get("zero_stage", 3)
    items = [f"ZeRO-{stage}" if stage else "no ZeRO"]
    for name, value in row["settings"].items():
        if name not in SETTINGS_WITH_COLUMNS:
            switch = name if value else f"no {name}"
            items.append(switch if isinstance(value, bool) else f"{name} {value}")
    return ", ".join(items)


def short_error(row: dict) -> str:
    """Return a row's error in a few words; empty if the measurement succeeded."""
    error = " ".join(row.get("error", "").split())
    reasons = (
        reason
        for pattern, reason in SHORT_REASONS.items()
        if re.search(pattern, error, re.IGNORECASE)
    )
    return next(reasons, error if len(error) <= 60 else error[:57] + "...")


def _formatted(key: str, template: str) -> Column:
    """Return the column that formats a row's value of ``key``; "-" without a value."""
    return lambda row: "-" if row.get(key) is None else template.format(row[key])


# Columns that describe a measurement of training. In an ablation, each row differs from the row
# above it by one setting, which the column "added" names.
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
    "rows x new tokens": lambda row: f"{row['rows']} x {row['new_tokens']}",
    "answers/s": _formatted("answers_per_s", "{:.3g}"),
    "first answers, s": _formatted("first_answer_s", "{:.3g}"),
    "command, s": _formatted("command_s", "{:.3g}"),
    "GPU idle": _formatted("gpu_idle", "{:.0%}"),
}
# Columns in which a failed row has its error.
ERROR_COLUMNS = {"samples/s/GPU", "first token, s", "answers/s"}


def columns_of(row: dict) -> dict[str, Column]:
    """Return the columns of a row's workload."""
    columns = {"generate": GENERATION_COLUMNS, "answers": ANSWER_COLUMNS}
    return columns.get(row["workload"], TRAINING_COLUMNS)


def cells_of(row: dict) -> dict[str, str]:
    """Return the cells of a row by column; a failed row has its error in place of a figure."""
    cells = {name: cell(row) for name, cell in columns_of(row).items()}
    errors = {name: short_error(row) for name in cells.keys() & ERROR_COLUMNS if "error" in row}
    return cells | errors


def markdown_table(rows: list[dict]) -> str:
    """Return the sorted table of rows that have the same columns.

    Columns without any value are left out. A folded list below the table has the command and the
    versions of each row, under the row's number.

    Raises:
        ValueError: there are no rows, or their columns differ.
    """
    if not rows:
        raise ValueError("these files have no rows; measure some, or name files that have some")
    if len(headers := {tuple(columns_of(row)) for row in rows}) > 1:
        raise ValueError(
            "these files have rows of several workloads (training, generate, answers), which do "
            "not fit into one table: name the files of one workload"
        )
    rows = sort_measurements(rows)
    cells = [[str(number), *cells_of(row).values()] for number, row in enumerate(rows, 1)]
    columns = zip(("#", *headers.pop()), *cells, strict=True)
    filled = (column for column in columns if {*column[1:]} != {"-"})
    header, *lines = zip(*filled, strict=True)
    commands = []
    for number, row in enumerate(rows, 1):
        versions = [f"{name} {version}" for name, version in row.get("versions", {}).items()]
        remark = ", ".join(versions) or "failed"
        commands.append(f"{number}. `{row.get('command')}` ({remark})\n")
    summary = "<summary>The command of each row</summary>"
    return f"{_markdown(header, lines)}\n<details>{summary}\n\n{''.join(commands)}\n</details>\n"


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in lines]
    table = [header, ["---"] * len(header), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def sort_measurements(rows: list[dict]) -> list[dict]:
    """Sort rows of training by trained weights and hardware, others by device and batch size.

    Rows of ablations (with the key ``added``) come last, in the order of ``rows``.
    """
    if "gpus" not in rows[0]:
        return sorted(rows, key=lambda row: (row.get("device", "-"), row["batch"]))
    regular = [row for row in rows if "added" not in row]
    order = {trained: number for number, trained in enumerate(TRAINED_CHOICES)}
    last = len(order)  # for lists of model parts, such as "tower+projector"
    regular.sort(key=lambda row: (order.get(row["workload"], last), hardware_cell(row)))
    return regular + [row for row in rows if "added" in row]


def insert_table(table: str, path: Path) -> None:
    """Replace the text between the two markers of a Markdown file by the table.

    Raises:
        ValueError: the file does not have each marker once, in this order.
    """
    text = path.read_text(encoding="utf-8")
    if (
        text.count(BEGIN_MARKER) != 1
        or text.count(END_MARKER) != 1
        or text.index(END_MARKER) < text.index(BEGIN_MARKER)
    ):
        raise ValueError(
            f"{path} has {text.count(BEGIN_MARKER)} lines {BEGIN_MARKER} and "
            f"{text.count(END_MARKER)} lines {END_MARKER}; expected one of each, in this order, "
            "where the table goes"
        )
    before, after = text[: text.index(BEGIN_MARKER)], text[text.index(END_MARKER) :]
    write_atomically(path.resolve(), f"{before}{BEGIN_MARKER}\n\n{table}\n{after}")
