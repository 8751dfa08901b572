"""Train the cells of the matrix with the installed versions and say which gave the right numbers.

``python tests/distributed/matrix.py --out docs/benchmarks/matrix.json``, with ``PYTHONPATH=.``,
runs all that depend on DeepSpeed; ``--strategy fsdp2 ddp`` others; ``--gpus`` on two GPUs with
NCCL. Rows of other versions in the file stay: tests/noxfile.py fills it pair by pair. ``--table``
prints what the file holds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from tests.helpers.cells import (
    DEEPSPEED,
    TRANSFORMERS,
    WITHOUT_DEEPSPEED,
    ZERO_STAGES,
    Cell,
    deepspeed_cells,
    known_limit,
    torch_cells,
)
from tests.helpers.processes import (
    WORKERS,
    cpu_environment,
    gpu_environment,
    run_ranks,
    run_with_limit,
    two_processes,
)
from tests.helpers.steps import small_model
from tests.helpers.unsharded import reference_name, unsharded_run

# Relative to the step's largest gradient, over three steps. fp32: DeepSpeed's own linear function
# sums in another order than torch's; measured 3e-6. bf16: one unit is 8e-3; measured 4e-2. What
# must not pass, another image, a rank left out, gradients summed and not averaged, goes beyond
# twice the limit of the gradient or of the loss (test_matrix.py).
GRADIENT_LIMIT = {"fp32": 5e-5, "bf16": 8e-2, "bf16_autocast": 8e-2}
LOSS_LIMIT = {"fp32": 1e-5, "bf16": 2e-3, "bf16_autocast": 2e-3}
AXES = ("strategy", "weights", "use_reentrant", "precision", "persistence")
OUTCOMES = ("passed", "failed", "cannot work")
SECONDS_TO_START = 100
SECONDS_A_CELL = 10


def run_cells(cells: list[Cell], folder: Path, on_gpus: bool = False) -> list[dict]:
    """One row a cell, in order: its axes, ``outcome``, ``reason``, the largest differences, and how
    often ZeRO-3 gathered parameters in the last step.

    ``folder`` is scratch space. Where it holds a folder ``gradients``, each cell's losses and
    gradients are saved there under its name.
    """
    deepspeed = version("deepspeed") if any(c.strategy in ZERO_STAGES for c in cells) else None
    limits = {cell: known_limit(cell, deepspeed) for cell in cells}
    first_of_limit = {limits[cell]: cell for cell in reversed(cells)}
    tried = [cell for cell in cells if limits[cell] is None or first_of_limit[limits[cell]] == cell]
    found = _train(tried, folder, on_gpus)
    for limit, first in first_of_limit.items():
        if limit is None:
            continue
        rest = [cell for cell in cells if limits[cell] == limit and cell != first]
        if "reason" in found[first.name]:
            cause = f"{limit} ({found[first.name]['reason'][:80]})"
            found |= {cell.name: {"reason": cause, "limit": True} for cell in (first, *rest)}
        else:
            found |= _train(rest, folder, on_gpus)
    return [_row(cell, found[cell.name]) for cell in cells]


def _train(cells: list[Cell], folder: Path, on_gpus: bool) -> dict[str, dict]:
    """By the cells' names, what the worker found: differences, or the reason of a failure."""
    small_model().save_pretrained(folder / "model")
    references = {reference_name(cell): cell for cell in cells}
    torch.save(
        {name: unsharded_run(cell) for name, cell in references.items()},
        folder / "references.pt",
    )
    found: dict[str, dict] = {}
    while rest := [cell for cell in cells if cell.name not in found]:
        (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in rest]))
        for rows in folder.glob("rows.*.jsonl"):
            rows.unlink()
        worker = WORKERS / "cell_worker.py"
        seconds = SECONDS_TO_START + SECONDS_A_CELL * len(rest)
        if on_gpus:
            ended = run_with_limit(two_processes(worker, str(folder)), seconds, gpu_environment())
        else:
            ended = run_ranks(str(worker), str(folder), seconds=seconds)
        news = _outcomes(folder, ended)
        if not news:
            raise RuntimeError(f"the worker ended before its first cell\n{ended.output[-4000:]}")
        found |= news
        for name, figures in news.items():
            if "reason" in figures:
                print(f"{name}: {figures['reason']}", file=sys.stderr, flush=True)
    return found


def _outcomes(folder: Path, ended) -> dict[str, dict]:
    """What the ranks wrote: differences of finished cells, the reason of the one that was not."""
    found, reasons, started = {}, {}, None
    for rank in range(2):
        path = folder / f"rows.{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            if "failed" in row:
                reasons.setdefault(row["failed"], row["reason"])
            elif "done" in row:
                found[row.pop("done")] = row
            elif rank == 0:
                started = row["started"]
    if ended.status != 0 and started is not None:
        name = next(iter(reasons), started)
        if name not in found or reasons:
            end = "hung" if "Timeout (" in ended.output or ended.status is None else "died"
            found[name] = {"reason": reasons.get(name, f"{end}: {ended.output[-300:]}")}
    return found


def _row(cell: Cell, found: dict) -> dict:
    reason = found.get("reason")
    if reason is None:
        for kind, limit in (("gradient", GRADIENT_LIMIT), ("loss", LOSS_LIMIT)):
            difference = found[f"{kind}_difference"]
            if not difference <= limit[cell.precision]:
                reason = f"{kind} differs by {difference:.1e}, limit {limit[cell.precision]:.0e}"
    return {axis: getattr(cell, axis) for axis in AXES} | {
        "outcome": "cannot work" if "limit" in found else "failed" if reason else "passed",
        "reason": reason,
        "loss_difference": _rounded(found.get("loss_difference")),
        "gradient_difference": _rounded(found.get("gradient_difference")),
        "gathers": found.get("gathers"),
    }


def _rounded(difference: float | None) -> float | None:
    return None if difference is None else float(f"{difference:.2e}")


def installed_versions(cells: Iterable[Cell]) -> dict[str, str | None]:
    names = ["torch", "transformers", "peft"]
    versions: dict[str, str | None] = {name: version(name) for name in names}
    with_deepspeed = any(cell.strategy in ZERO_STAGES for cell in cells)
    return versions | {"deepspeed": version("deepspeed") if with_deepspeed else None}


def import_error(cells: list[Cell]) -> str | None:
    """Why the installed versions do not import together, if they do not."""
    imports = "from transformers.integrations import HfDeepSpeedConfig; import deepspeed, peft"
    if all(cell.strategy in WITHOUT_DEEPSPEED for cell in cells):
        imports = "import peft"
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}; import glm4v_patched.remote.modeling_chatglm"],
        env=cpu_environment(),
        capture_output=True,
        text=True,
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def run_installed(cells: list[Cell], on_gpus: bool) -> list[dict]:
    """Rows of the cells with the installed versions, which may not work together at all."""
    versions = installed_versions(cells)
    if error := import_error(cells):
        rows = [_row(cell, {"reason": error, "limit": True}) for cell in cells]
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = run_cells(cells, Path(folder), on_gpus)
    return [versions | {"device": "cuda" if on_gpus else "cpu"} | row for row in rows]


def merge(old: list[dict], new: list[dict]) -> list[dict]:
    """Old rows but for those of the same cell and versions."""

    def key(row: dict) -> tuple:
        return (row["transformers"], row.get("deepspeed"), *(row.get(axis) for axis in AXES))

    replaced = {key(row) for row in new}
    return [row for row in old if key(row) not in replaced] + new


def table(rows: list[dict]) -> str:
    """Counts by strategy and versions, then every distinct reason with its cells."""
    lines = [f"{'strategy':<18}{'DeepSpeed':<11}" + "".join(f"{v:>16}" for v in TRANSFORMERS)]
    for strategy in (*ZERO_STAGES, *WITHOUT_DEEPSPEED):
        for deepspeed in DEEPSPEED if strategy in ZERO_STAGES else (None,):
            counts = []
            for transformers in TRANSFORMERS:
                outcomes = Counter(
                    row["outcome"]
                    for row in rows
                    if (row["strategy"], row.get("deepspeed"), row["transformers"])
                    == (strategy, deepspeed, transformers)
                )
                counts.append("/".join(str(outcomes[o]) for o in OUTCOMES) if outcomes else "-")
            lines.append(
                f"{strategy:<18}{deepspeed or '':<11}" + "".join(f"{c:>16}" for c in counts)
            )
    total = Counter(row["outcome"] for row in rows)
    lines.append("cells: " + ", ".join(f"{total[outcome]} {outcome}" for outcome in OUTCOMES))
    for precision in GRADIENT_LIMIT:
        worst = [
            row["gradient_difference"]
            for row in rows
            if row["precision"] == precision and row["outcome"] == "passed"
        ]
        if worst:
            lines.append(f"largest gradient difference, {precision}: {max(worst):.1e}")
    reasons = Counter(
        (row["outcome"], row["reason"].splitlines()[0][:200]) for row in rows if row.get("reason")
    )
    lines += [f"{number:>5} {outcome}: {reason}" for (outcome, reason), number in reasons.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", nargs="+", choices=[*ZERO_STAGES, *WITHOUT_DEEPSPEED])
    parser.add_argument("--gpus", action="store_true", help="two GPUs and NCCL, not gloo")
    parser.add_argument("--table", action="store_true", help="print the file, train nothing")
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    if not arguments.table:
        chosen = arguments.strategy or ZERO_STAGES
        for cells in (deepspeed_cells(), torch_cells()):
            if cells := [cell for cell in cells if cell.strategy in chosen]:
                rows = merge(rows, run_installed(cells, arguments.gpus))
        rows = [
            {column: value for column, value in row.items() if value is not None} for row in rows
        ]
        lines = [json.dumps(row, separators=(",", ":")) for row in rows]
        arguments.out.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(table(rows))
    return 1 if any(row["outcome"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
