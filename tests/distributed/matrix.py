"""Train the cells of the matrix with the installed versions and report which pass.

``python tests/distributed/matrix.py --out docs/benchmarks/matrix.json``, with ``PYTHONPATH=.``,
runs all that depend on DeepSpeed; ``--strategy fsdp2 ddp`` others; ``--gpus`` on two GPUs with
NCCL. Rows of other versions in the file stay: tests/noxfile.py fills it pair by pair.

It starts itself with ``--rank FOLDER`` in two processes. The folder contains ``cells.json`` (the
cells to train), ``references.pt`` and ``model``. The processes train one cell after the other.
Every rank appends to ``rows.<rank>.jsonl`` before and after a cell, and writes losses and gradients
to the folder ``gradients``, if it exists. A cell that raises or hangs ends both processes, because
its leftovers may spoil the next cell; new processes are started for the rest.
"""

import argparse
import faulthandler
import gc
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.cells import WITHOUT_DEEPSPEED, ZERO_STAGES, Cell, known_limit, make_cells
from tests.distributed.strategies import (
    Training,
    averaged,
    select_weights,
    start_deepspeed,
    trainable,
    zero_config,
)
from tests.helpers.processes import gpu_environment, run_ranks, run_with_limit
from tests.helpers.tiny import BOI, EOI, PAD, random_pixels, small_model, text
from tests.tables import put_rows, read_rows

# Relative to the step's largest gradient, over three steps. fp32: DeepSpeed's own linear function
# sums in another order than torch's; measured 3e-6. bf16: one unit is 8e-3; measured 4e-2. Wrong
# numbers (another image, a missing rank, gradients summed instead of averaged) exceed twice the
# limit of the gradient or of the loss (test_matrix.py).
GRADIENT_LIMIT = {"fp32": 5e-5, "bf16": 8e-2, "bf16_autocast": 8e-2}
LOSS_LIMIT = {"fp32": 1e-5, "bf16": 2e-3, "bf16_autocast": 2e-3}
AXES = ("strategy", "weights", "use_reentrant", "precision", "persistence")
CELL_TIMEOUT = 60
LEARNING_RATE = 0.002
# Whether rank 0 and rank 1 have an image, step by step: all four combinations, in every order.
CHANGING_IMAGES = "1001110010000100111011011010000011110101"


def device() -> str:
    """The current GPU, or the CPU if there is none."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def rank_batch(cell: Cell, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return one sequence for this rank, with or without an image, on :func:`device`."""
    has_image = rank == 0
    if cell.images == "changing":
        has_image = CHANGING_IMAGES[(2 * step + rank) % len(CHANGING_IMAGES)] == "1"
    ids = [*text(5, seed=step), *([BOI, PAD, EOI] if has_image else [])]
    ids += text(9, seed=10 * step + rank + 1)
    labels = [-100] * (len(ids) - 6) + ids[-6:]
    batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
    if has_image:
        batch["pixel_values"] = random_pixels(1, seed=2 * step + rank)
    return {name: values.to(device()) for name, values in batch.items()}


def weights_dtype(cell: Cell) -> torch.dtype:
    return torch.bfloat16 if cell.precision == "bf16" else torch.float32


def autocast(cell: Cell):
    return torch.autocast(device(), torch.bfloat16, enabled=cell.precision == "bf16_autocast")


def max_magnitude(gradients: dict[str, torch.Tensor]) -> float:
    return max(gradient.abs().max().item() for gradient in gradients.values())


def reference_name(cell: Cell) -> str:
    """Return the name of a cell's reference, which similar cells share."""
    has_masters = cell.precision == "bf16" and cell.strategy not in WITHOUT_DEEPSPEED
    return f"{cell.weights}-{cell.precision}-{has_masters}-{cell.images}-{cell.steps}"


def unsharded_run(cell: Cell) -> dict:
    """Train in one process without sharding and without activation checkpoints.

    bf16 weights under DeepSpeed are updated in fp32 and rounded; elsewhere in bf16.

    Returns:
        "losses" and "gradients" of each step, averaged over both ranks' batches.
    """
    model = select_weights(small_model(weights_dtype(cell)).to(device()), cell.weights)
    has_masters = cell.precision == "bf16" and cell.strategy not in WITHOUT_DEEPSPEED
    parameters = trainable(model)
    masters = [p.detach().float() if has_masters else p.detach() for p in parameters]
    losses, gradients = [], []
    for step in range(cell.steps):
        loss = 0
        for rank in range(2):
            with autocast(cell):
                loss = loss + model(**rank_batch(cell, rank, step)).loss / 2
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
        )
        for parameter, master in zip(parameters, masters, strict=True):
            if parameter.grad is not None:
                master.sub_(LEARNING_RATE * parameter.grad.to(master.dtype))
                parameter.data.copy_(master)
        model.zero_grad()
    return {"losses": losses, "gradients": gradients}


def deepspeed_config_of(cell: Cell) -> dict:
    zero: dict = {}
    if cell.strategy == "zero3_offload":
        zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return zero_config(ZERO_STAGES[cell.strategy], cell.persistence == "0", **zero) | {
        "bf16": {"enabled": cell.precision == "bf16"},
        "torch_autocast": {"enabled": cell.precision == "bf16_autocast", "dtype": "bfloat16"},
    }


def start(cell: Cell, folder: Path) -> Training:
    config = None
    if cell.strategy in ZERO_STAGES:
        from transformers.integrations import HfDeepSpeedConfig

        config = deepspeed_config_of(cell)
        # It must exist while the model loads, so that from_pretrained shards it under stage 3.
        hf_config = HfDeepSpeedConfig(config)  # noqa: F841
    model = GLM4VForCausalLM.from_pretrained(
        folder / "model", attn_implementation="sdpa", dtype=weights_dtype(cell)
    )
    model = select_weights(model, cell.weights)
    model.config.skip_logits = cell.skip_logits
    if cell.use_reentrant != "off":
        kwargs = {"use_reentrant": cell.use_reentrant} if cell.use_reentrant != "unset" else None
        model.gradient_checkpointing_enable(kwargs)
    model = model if config else model.to(device())
    return Training(model, cell.strategy, config, LEARNING_RATE)


def train(cell: Cell, folder: Path) -> dict:
    """Return "losses", averaged over the ranks, and "gradients" of each step."""
    training, rank = start(cell, folder), torch.distributed.get_rank()
    result: dict = {"losses": [], "gradients": []}
    for step in range(cell.steps):
        with autocast(cell):
            loss = training(**rank_batch(cell, rank, step)).loss
        training.backward(loss)
        result["losses"].append(averaged(loss))
        result["gradients"].append({n: g.float().cpu() for n, g in training.gradients().items()})
        training.update()
    training.close()
    return result


def differences(actual: dict, expected: dict) -> dict[str, float]:
    """Return the largest differences of two trainings over all steps.

    They are relative to the loss, and to the step's largest gradient. A parameter without a
    gradient counts as one whose gradient is zero.
    """
    losses = zip(actual["losses"], expected["losses"], strict=True)
    loss = max(abs(one - other) / abs(other) for one, other in losses)
    gradient = 0.0
    for step, expected_step in zip(actual["gradients"], expected["gradients"], strict=True):
        if missing := expected_step.keys() - step.keys():
            raise ValueError(f"no gradient for {sorted(missing)}")
        errors = {n: g - expected_step[n] if n in expected_step else g for n, g in step.items()}
        gradient = max(gradient, max_magnitude(errors) / max_magnitude(expected_step))
    return {"loss_difference": loss, "gradient_difference": gradient}


def train_and_compare(cell: Cell, folder: Path, references: dict, note) -> None:
    result = train(cell, folder)
    if torch.distributed.get_rank() == 0:
        figures = differences(result, references[reference_name(cell)])
        note({"done": cell.name} | figures)
        if (folder / "gradients").is_dir():
            torch.save(result, folder / "gradients" / f"{cell.name}.pt")


def train_as_rank(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cells = [Cell(**cell) for cell in json.loads((folder / "cells.json").read_text())]
    references = torch.load(folder / "references.pt") if rank == 0 else {}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if any(cell.strategy in ZERO_STAGES for cell in cells):
        start_deepspeed()
    else:
        torch.distributed.init_process_group("nccl" if device() == "cuda" else "gloo")

    def note(row: dict) -> None:
        with open(folder / f"rows.{rank}.jsonl", "a") as rows:
            rows.write(json.dumps(row) + "\n")

    for cell in cells:
        note({"started": cell.name})
        faulthandler.dump_traceback_later(CELL_TIMEOUT, exit=True)
        try:
            train_and_compare(cell, folder, references, note)
        except Exception as error:
            note({"failed": cell.name, "reason": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        gc.collect()
        gc.freeze()  # else the imported modules cost half a second in each later collection
    faulthandler.cancel_dump_traceback_later()
    torch.distributed.destroy_process_group()


def run_cells(cells: list[Cell], folder: Path, on_gpus: bool = False) -> list[dict]:
    """Train cells and return a row for each: its axes, outcome, reason and largest differences.

    Args:
        folder: Scratch space; it may contain a folder ``gradients``.
    """
    deepspeed = version("deepspeed") if any(c.strategy in ZERO_STAGES for c in cells) else None
    limits = {cell: known_limit(cell, deepspeed) for cell in cells}
    results = _train([cell for cell in cells if limits[cell] is None], folder, on_gpus)
    results |= {c.name: {"reason": reason, "limit": True} for c, reason in limits.items() if reason}
    return [_row(cell, results[cell.name]) for cell in cells]


def _train(cells: list[Cell], folder: Path, on_gpus: bool) -> dict[str, dict]:
    """Train cells in two processes; return differences, or the reason of a failure, by name."""
    small_model().save_pretrained(folder / "model")
    references = {reference_name(cell): cell for cell in cells}
    runs = {name: unsharded_run(cell) for name, cell in references.items()}
    torch.save(runs, folder / "references.pt")
    results: dict[str, dict] = {}
    while rest := [cell for cell in cells if cell.name not in results]:
        (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in rest]))
        for rows in folder.glob("rows.*.jsonl"):
            rows.unlink()
        rank, seconds = (__file__, "--rank", str(folder)), 100 + 10 * len(rest)
        if on_gpus:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, "--nproc_per_node", "2", *rank]
            ended = run_with_limit(command, seconds, gpu_environment())
        else:
            ended = run_ranks(*rank, seconds=seconds)
        new_results = _read_results(folder, ended)
        if not new_results:
            raise RuntimeError(f"the worker ended before its first cell\n{ended.output[-4000:]}")
        results |= new_results
        for name, result in new_results.items():
            if "reason" in result:
                print(f"{name}: {result['reason']}", file=sys.stderr, flush=True)
    return results


def _read_results(folder: Path, ended) -> dict[str, dict]:
    """Return the differences of finished cells, and why another one failed, as ranks wrote them."""
    results, reasons, started = {}, {}, None
    for rank in range(2):
        path = folder / f"rows.{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            if "failed" in row:
                reasons.setdefault(row["failed"], row["reason"])
            elif "done" in row:
                results[row.pop("done")] = row
            elif rank == 0:
                started = row["started"]
    if ended.status != 0 and started is not None:
        name = next(iter(reasons), started)
        if name not in results or reasons:
            end = "hung" if "Timeout (" in ended.output or ended.status is None else "died"
            results[name] = {"reason": reasons.get(name, f"{end}: {ended.output[-300:]}")}
    return results


def _row(cell: Cell, result: dict) -> dict:
    reason = result.get("reason")
    if reason is None:
        for kind, limit in (("gradient", GRADIENT_LIMIT), ("loss", LOSS_LIMIT)):
            difference = result[f"{kind}_difference"]
            if not difference <= limit[cell.precision]:
                reason = f"{kind} differs by {difference:.1e}, limit {limit[cell.precision]:.0e}"
            result[f"{kind}_difference"] = float(f"{difference:.2e}")
    return {axis: getattr(cell, axis) for axis in AXES} | {
        "outcome": "cannot work" if "limit" in result else "failed" if reason else "passed",
        "reason": reason,
        "loss_difference": result.get("loss_difference"),
        "gradient_difference": result.get("gradient_difference"),
    }


def run_installed(cells: list[Cell], on_gpus: bool) -> list[dict]:
    """Return the cells' rows with the installed versions, which may not even import together."""
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


def row_key(row: dict) -> tuple:
    return (row["transformers"], row.get("deepspeed"), *(row.get(axis) for axis in AXES))


def summary(rows: list[dict]) -> str:
    """Return counts by versions and outcome, and every distinct reason."""
    counts = Counter((r.get("deepspeed", "-"), r["transformers"], r["outcome"]) for r in rows)
    lines = [f"{' '.join(group)}: {count}" for group, count in counts.items()]
    reasons = Counter(row["reason"].splitlines()[0][:200] for row in rows if row.get("reason"))
    return "\n".join(lines + [f"{count:>5} {reason}" for reason, count in reasons.items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", nargs="+", choices=[*ZERO_STAGES, *WITHOUT_DEEPSPEED])
    parser.add_argument("--gpus", action="store_true", help="two GPUs and NCCL, not gloo")
    arguments = parser.parse_args()
    for cells in (make_cells(ZERO_STAGES), make_cells(WITHOUT_DEEPSPEED)):
        if chosen := [c for c in cells if c.strategy in (arguments.strategy or ZERO_STAGES)]:
            rows = run_installed(chosen, arguments.gpus)
            rows = [{n: value for n, value in row.items() if value is not None} for row in rows]
            put_rows(arguments.out, rows, row_key)
    all_rows = read_rows(arguments.out)
    print(summary(all_rows))
    return 1 if any(row["outcome"] == "failed" for row in all_rows) else 0


if __name__ == "__main__":
    sys.exit(train_as_rank(Path(sys.argv[2])) if sys.argv[1] == "--rank" else main())
