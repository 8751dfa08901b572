"""Train the cells of the matrix with the installed versions and say which gave the right numbers.

``python tests/distributed/matrix.py --out docs/benchmarks/matrix.json``, with ``PYTHONPATH=.``,
runs all that depend on DeepSpeed; ``--strategy fsdp2 ddp`` others; ``--gpus`` on two GPUs with
NCCL. Rows of other versions in the file stay: tests/noxfile.py fills it pair by pair.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from tests.helpers.cells import (
    WITHOUT_DEEPSPEED,
    ZERO_STAGES,
    Cell,
    deepspeed_cells,
    known_limit,
    torch_cells,
)
from tests.helpers.processes import (
    WORKERS,
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


def run_cells(cells: list[Cell], folder: Path, on_gpus: bool = False) -> list[dict]:
    """One row a cell, in order: its axes, ``outcome``, ``reason``, the largest differences, and how
    often ZeRO-3 gathered parameters in the last step. Of cells that cannot work for one reason, the
    first is tried. ``folder`` is scratch space; what it may hold says cell_worker.py."""
    deepspeed = version("deepspeed") if any(c.strategy in ZERO_STAGES for c in cells) else None
    limits = {cell: known_limit(cell, deepspeed) for cell in cells}
    first_of_limit = {limits[cell]: cell for cell in reversed(cells) if limits[cell]}
    tried = [cell for cell in cells if limits[cell] is None]
    found = _train(tried + [*first_of_limit.values()], folder, on_gpus)
    for limit, first in first_of_limit.items():
        alike = [cell for cell in cells if limits[cell] == limit]
        if reason := found[first.name].get("reason"):
            cause = f"{limit} ({reason[:80]})"
            found |= {cell.name: {"reason": cause, "limit": True} for cell in alike}
        else:
            found |= _train([cell for cell in alike if cell != first], folder, on_gpus)
    return [_row(cell, found[cell.name]) for cell in cells]


def _train(cells: list[Cell], folder: Path, on_gpus: bool) -> dict[str, dict]:
    """By the cells' names, what the worker found: differences, or the reason of a failure."""
    small_model().save_pretrained(folder / "model")
    references = {reference_name(cell): cell for cell in cells}
    made = {name: unsharded_run(cell) for name, cell in references.items()}
    torch.save(made, folder / "references.pt")
    found: dict[str, dict] = {}
    while rest := [cell for cell in cells if cell.name not in found]:
        (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in rest]))
        for rows in folder.glob("rows.*.jsonl"):
            rows.unlink()
        worker, seconds = WORKERS / "cell_worker.py", 100 + 10 * len(rest)
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
            found[f"{kind}_difference"] = float(f"{difference:.2e}")
    return {axis: getattr(cell, axis) for axis in AXES} | {
        "outcome": "cannot work" if "limit" in found else "failed" if reason else "passed",
        "reason": reason,
        "loss_difference": found.get("loss_difference"),
        "gradient_difference": found.get("gradient_difference"),
        "gathers": found.get("gathers"),
    }


def run_installed(cells: list[Cell], on_gpus: bool) -> list[dict]:
    """Rows of the cells with the installed versions, which may not even import together."""
    names, imports = ["torch", "transformers", "peft"], "import peft, glm4v_patched.remote.loss"
    if any(cell.strategy in ZERO_STAGES for cell in cells):
        names.append("deepspeed")
        imports += "; from transformers.integrations import HfDeepSpeedConfig; import deepspeed"
    done = run_with_limit([sys.executable, "-c", imports], 300)
    if done.status == 0:
        with tempfile.TemporaryDirectory() as folder:
            rows = run_cells(cells, Path(folder), on_gpus)
    else:
        error = done.output.strip().splitlines()[-1]
        rows = [_row(cell, {"reason": error, "limit": True}) for cell in cells]
    known = {name: version(name) for name in names} | {"device": "cuda" if on_gpus else "cpu"}
    return [known | row for row in rows]


def key(row: dict) -> tuple:
    return (row["transformers"], row.get("deepspeed"), *(row.get(axis) for axis in AXES))


def summary(rows: list[dict]) -> str:
    """Counts by versions, and every distinct reason."""
    counts = Counter((r.get("deepspeed", "-"), r["transformers"], r["outcome"]) for r in rows)
    lines = [f"{' '.join(of)}: {number}" for of, number in counts.items()]
    reasons = Counter(row["reason"].splitlines()[0][:200] for row in rows if row.get("reason"))
    return "\n".join(lines + [f"{number:>5} {reason}" for reason, number in reasons.items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", nargs="+", choices=[*ZERO_STAGES, *WITHOUT_DEEPSPEED])
    parser.add_argument("--gpus", action="store_true", help="two GPUs and NCCL, not gloo")
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    every = {key(row): row for row in rows}
    for cells in (deepspeed_cells(), torch_cells()):
        if chosen := [c for c in cells if c.strategy in (arguments.strategy or ZERO_STAGES)]:
            for row in run_installed(chosen, arguments.gpus):
                every[key(row)] = {name: value for name, value in row.items() if value is not None}
    lines = [json.dumps(row, separators=(",", ":")) for row in every.values()]
    arguments.out.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(summary([*every.values()]))
    return 1 if any(row["outcome"] == "failed" for row in every.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
