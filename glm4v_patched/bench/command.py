"""``glm4v-patched bench``: starts the processes, prints and writes the rows, or shows old ones."""

import argparse
import json
import os
import shlex
import tempfile
from dataclasses import Field, asdict, fields
from itertools import product
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, get_args

from ..engine.environment import python_module, training_environment
from ..engine.gpus import find_gpus
from ..engine.options import require_packages
from ..inference.speed import add_speed_arguments, measure_speed
from .machine import require_machine
from .pictures import check_drawable, draw_pictures
from .rows import COLUMNS, add_row, cells_of, insert, markdown_table, read_rows
from .settings import Settings

# A row is measured for each combination of their values.
VARIED = ("trained", "micro_batch", "text_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for each in fields(Settings):
        _add_option(parser, each)
    add("--gpus", type=int, default=2, help="processes, one for each GPU (default: 2)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a small --config")
    add("--timeout", type=float, default=600, help="seconds for one row (default: 600)")
    add("--out", type=Path, metavar="FILE", help="JSON array that rows are added to, one a line")
    add("--pictures", type=Path, metavar="FOLDER", help="draw memory.png and speed.png of the rows")
    add("--rows", type=Path, nargs="+", metavar="FILE", help="measure nothing: table of these rows")
    add("--into", type=Path, metavar="FILE", help="with --rows: put the table into this Markdown")
    add_speed_arguments(parser)


def _add_option(parser: argparse.ArgumentParser, each: Field) -> None:
    told, default = each.metadata["help"], each.default
    if each.type is bool:
        action = "store_false" if default else "store_true"
        parser.add_argument(_flag(each), dest=each.name, action=action, help=told)
        return
    typed: dict[str, Any] = {"dest": each.name, "type": (*get_args(each.type), each.type)[0]}
    typed |= {name: each.metadata.get(name) for name in ("choices", "metavar")}
    if each.name in VARIED:
        typed["nargs"], default = "+", [default]
    told += "" if default is None else f" (default: {each.default})"
    parser.add_argument(_flag(each), help=told, default=default, **typed)


def _flag(each: Field) -> str:
    return each.metadata.get("flag") or f"--{each.name}".replace("_", "-")


def run(options: argparse.Namespace) -> None:
    """Measure every combination, or show the rows of files. Raises ``ValueError`` before anything
    runs if settings contradict each other or this machine cannot measure them."""
    if options.generate:
        return measure_speed(options)
    if options.pictures:
        check_drawable(options.pictures)
    if not options.rows:
        rows = _measure_all(options)
    elif options.out:
        raise ValueError("--out takes what is measured, and --rows measures nothing: drop one")
    else:
        rows = [row for path in options.rows for row in read_rows(path)]
        if options.into:
            insert(markdown_table(rows), options.into)
        else:
            print(markdown_table(rows), end="")
    if options.pictures:
        print("\n".join(map(str, draw_pictures(rows, options.pictures))))


def _measure_all(options: argparse.Namespace) -> list[dict]:
    """A row of each combination, measured in processes of its own, even if they fail."""
    if options.into:
        raise ValueError("--into writes the table of rows that are there: name them with --rows")
    if options.out:
        read_rows(options.out, may_be_new=True)
    for choice in (*options.trained, options.optimizer, *["liger"] * options.liger):
        require_packages(choice)
    asked, gpus, on_cpu = settings_asked(options), options.gpus, options.device == "cpu"
    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: expected at least 1")
    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout}: expected a number above 0")
    if options.zero_stage == 0 and gpus != 1:
        raise ValueError(f"{gpus} GPUs with ZeRO stage 0: use --gpus 1, or a stage from 1 to 3")
    require_machine(asked, gpus, on_cpu)
    print("  ".join(COLUMNS))
    rows = []
    for settings in asked:
        row = measure_in_processes(settings, gpus, options.timeout, on_cpu)
        print("  ".join(cells_of(row)), row.get("error", ""), sep="\n" * ("error" in row))
        rows.append(row)
        if options.out:
            add_row(options.out, row)
    return rows


def settings_asked(options: argparse.Namespace) -> list[Settings]:
    """Of every combination; of each, the original's code after ours."""
    common = {each.name: getattr(options, each.name) for each in fields(Settings)}
    codes = [None, options.against] if options.against else [None]
    return [
        Settings(**common | dict(zip((*VARIED, "against"), varied, strict=True)))
        for varied in product(*(common[name] for name in VARIED), codes)
    ]


def command_of(settings: Settings, gpus: int, on_cpu: bool) -> str:
    """The shortest command line that measures this one row."""
    arguments = ["--trained", settings.trained, "--gpus", str(gpus)]
    for each in fields(Settings)[1:]:
        value = getattr(settings, each.name)
        if value != each.default:
            arguments += [_flag(each)] if isinstance(value, bool) else [_flag(each), str(value)]
    return "glm4v-patched bench " + shlex.join(arguments + ["--device", "cpu"] * on_cpu)


def measure_in_processes(settings: Settings, gpus: int, timeout: float, on_cpu: bool) -> dict:
    """One row; ``error`` says what went wrong where the processes failed or hung."""
    same = ("micro_batch", "text_tokens", "zero_stage", "offload", "fp8")
    row = {
        "workload": settings.trained,
        "implementation": "ours" if settings.against is None else "original",
        "gpus": gpus,
        **{name: getattr(settings, name) for name in same},
        "memory_limit_gib": settings.memory_limit,
        "settings": asdict(settings),
        "command": command_of(settings, gpus, on_cpu),
    }
    with tempfile.TemporaryDirectory() as folder:
        out, printed = Path(folder, "row.json"), Path(folder, "output.txt")
        if settings.from_files is not None:
            error = _train_from_files(settings, gpus, timeout, on_cpu, printed, out)
        else:
            command = python_module("torch.distributed.run", "--nproc_per_node", str(gpus))
            command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
            command += ["-m", "glm4v_patched.bench.worker", json.dumps(row["settings"]), str(out)]
            error = _run(command, printed, training_environment(gpus, on_cpu), timeout)
        if out.exists():
            return row | json.loads(out.read_text())
    return row | {"error": error, "device": "cpu" if on_cpu else find_gpus().found[0].name}


def _train_from_files(
    settings: Settings, gpus: int, timeout: float, on_cpu: bool, printed: Path, out: Path
) -> str:
    """Write files beside ``out``, train on them as ``glm4v-patched train`` does, and write to
    ``out`` what was measured; returns what went wrong, as :func:`_run` does."""
    from .from_files import figures, recipe_of  # imports torch

    files = out.parent / "files"
    files.mkdir()
    rows = settings.micro_batch * gpus * (settings.warm_up + settings.steps)
    given = [str(files), json.dumps(asdict(settings)), str(rows)]
    command = python_module("glm4v_patched.bench.from_files", *given)
    error = _run(command, printed, training_environment(1, on_cpu), timeout)
    if not (files / "train.jsonl").exists():
        return error
    recipe = files / "recipe.json"
    recipe.write_text(json.dumps(recipe_of(settings, files)))
    command = python_module("glm4v_patched", "train", str(recipe), "--processes", str(gpus))
    command += ["--device", "cpu"] * on_cpu
    error = _run(command, printed, dict(os.environ), timeout)
    report = files / "out" / "training.json"
    if report.exists():
        out.write_text(json.dumps(figures(json.loads(report.read_text()))))
    return error


def _run(command: list[str], printed: Path, environment: dict, timeout: float) -> str:
    """What went wrong, if anything did: the line that says so, or the last ones."""
    late = []
    with printed.open("w") as file, Popen(command, stdout=file, stderr=file, env=environment) as it:
        try:
            it.wait(timeout)
        except TimeoutExpired:
            late = [f"not done after {timeout:.0f} s"]
            it.terminate()  # torch's launcher, which ends its processes first
    lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
    memory = [line for line in lines if "OutOfMemoryError" in line]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (memory or late or errors or ["\n".join(lines[-5:])])[-1][:600]
