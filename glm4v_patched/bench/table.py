"""Measured rows as a Markdown table, with the command of every row."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..engine.options import ALL_WEIGHTS, TRAINED, gathers_whole_layers, trains_tower
from .rows import replace_file

WORKLOADS = {
    "full": "all weights",
    "lm": "language model",
    "lora_lm": "LoRA, language model",
    "lora_all": "LoRA, both towers",
    "qlora": "QLoRA, language model",
}
OPTIMIZERS = {"adamw": "AdamW", "adamw_8bit": "8-bit AdamW"}
COLUMNS = (
    "#",
    "trained",
    "hardware",
    "micro-batch, ids of text",
    "recomputed of tower, language model",
    "method",
    "samples/s/GPU",
    "tokens/s/GPU",
    "roofline",
    "GiB allocated",
    "reserved",
)
# What a long error message means, by a part of it.
REASONS = (
    ("outofmemoryerror", "out of memory"),
    ("out of memory", "out of memory"),
    ("not done after", "not done in time"),
    ("sigkill", "killed"),
)
BEGIN, END = "<!-- rows of bench -->", "<!-- end of the rows of bench -->"


def markdown_table(rows: list[dict]) -> str:
    """The table, sorted, and below it, folded, each row's command and versions.

    Rows of an ablation follow in a table of their own, in their order. The numbers in the first
    column are those of the commands.
    """
    single = sort_rows([row for row in rows if "added" not in row])
    steps = [row for row in rows if "added" in row]
    parts = []
    if single:
        parts.append(_table(COLUMNS, [_cells(row) for row in single], first=1))
    if steps:
        cells = [[row["added"], *_cells(row)] for row in steps]
        parts.append("Cumulative, each row with all measures of those above it:")
        columns = (COLUMNS[0], "added", *COLUMNS[1:])
        parts.append(_table(columns, cells, first=len(single) + 1))
    numbered = enumerate([*single, *steps], 1)
    commands = "\n".join(f"{number}. {_command(row)}" for number, row in numbered)
    parts.append(f"<details><summary>The command of each row</summary>\n\n{commands}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: list[list[str]], first: int) -> str:
    numbered = [[str(number), *cells] for number, cells in enumerate(rows, first)]
    lines = [columns, ["---"] * len(columns), *numbered]
    return "\n".join("| " + " | ".join(map(_escape, cells)) + " |" for cells in lines)


def sort_rows(rows: list[dict]) -> list[dict]:
    """By workload and hardware; rows that have both in common stay in their order."""
    return sorted(rows, key=lambda row: (_rank(row["workload"]), hardware(row)))


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


def workload_name(row: dict) -> str:
    return WORKLOADS.get(row["workload"], row["workload"])


def hardware(row: dict) -> str:
    """Number and name of the devices, which a row that failed may not have; the limit, if any."""
    gpus, device = row["gpus"], row.get("device")
    if device == "cpu":
        return f"CPU, {_count(gpus, 'process', 'processes')}"
    devices = _count(gpus, "GPU", "GPUs") if device is None else f"{gpus} x {device}"
    limit = row.get("memory_limit_gib")
    return devices if limit is None else f"{devices}, at most {limit:g} GiB"


def recomputed(row: dict) -> str:
    """Policies of tower and language model; ``-`` for a tower that keeps nothing anyway.

    What the row says was chosen comes before what was asked for.
    """
    if is_original(row):
        return "its own"
    tower, language = _policies(row)
    return f"{tower if trains_tower(row['workload']) else '-'}, {language}"


def method(row: dict) -> list[str]:
    """The rest of how it was trained, most telling first."""
    settings, stage = row["settings"], row.get("zero_stage", 3)
    optimizer = settings.get("optimizer", "adamw")
    parts = ["the original's code"] if is_original(row) else []
    parts.append(f"ZeRO-{stage}" if stage else "no ZeRO")
    parts.append(OPTIMIZERS.get(optimizer, optimizer))
    if row.get("offload"):
        parts.append("optimizer on the CPU")
    if not is_original(row):
        parts.append("compiled" if settings.get("compile") else "not compiled")
        chosen = (row.get("policies") or {}).get("gathered")
        kept = settings.get("kept_gathered") if chosen is None else chosen
        if stage == 3 and kept is not None:
            parts.append(f"{_weights(kept)} kept gathered")
        whole = gathers_whole_layers(stage, settings.get("compile"), *_policies(row))
        if whole and not settings.get("gather_in_place", True):
            parts.append("gathers copied")
        if settings.get("attention", "sdpa") != "sdpa":
            parts.append(f"{settings['attention']} attention")
        if settings.get("liger"):
            parts.append("Liger's kernels")
    if settings.get("shortest_text"):
        parts.append(f"texts from {settings['shortest_text']:,}")
    if settings.get("packed"):
        parts.append("packed")
    if settings.get("all_logits"):
        parts.append("all logits")
    if settings.get("reuse_features"):
        parts.append("features reused")
    return parts


def is_original(row: dict) -> bool:
    return row.get("implementation", "ours") == "original"


def failure(row: dict) -> str | None:
    """Why there are no figures, in a few words; None where there are."""
    if "error" not in row:
        return None
    error = " ".join(row["error"].split())
    for part, reason in REASONS:
        if part in error.lower():
            return reason
    return error if len(error) <= 60 else error[:57] + "..."


def _cells(row: dict) -> list[str]:
    what = [
        workload_name(row),
        hardware(row),
        f"{row['micro_batch']}, {row['text_tokens']:,}",
        recomputed(row),
        ", ".join(method(row)),
    ]
    reason = failure(row)
    if reason is not None:
        return [*what, reason, "-", "-", "-", "-"]
    return [
        *what,
        _three_digits(row["samples_per_s_per_gpu"]),
        f"{row['tokens_per_s_per_gpu']:,.0f}",
        f"{row['roofline_share']:.0%}",
        _gib(row["peak_allocated_gib"]),
        _gib(row["peak_reserved_gib"]),
    ]


def _command(row: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row.get("versions", {}).items())
    command = f"`{row['command']}`" if "command" in row else "no command"
    return f"{command} ({versions})" if versions else command


def _rank(workload: str) -> int:
    return TRAINED.index(workload) if workload in TRAINED else len(TRAINED)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


def _policies(row: dict) -> tuple[str, str]:
    chosen = row["settings"] | (row.get("policies") or {})
    return chosen["tower"], chosen["language"]


def _weights(number: float) -> str:
    return "weights" if number >= ALL_WEIGHTS else f"{number / 1e9:.3g} G weights"


def _three_digits(value: float) -> str:
    decimals = 2 - math.floor(math.log10(value))
    return f"{value:,.{max(decimals, 0)}f}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
