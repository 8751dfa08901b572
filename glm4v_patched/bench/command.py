"""``glm4v-patched bench``: starts the processes, prints and writes the rows, or shows old ones."""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import Field, asdict, fields
from itertools import product
from pathlib import Path
from typing import Any, get_args

from ..engine.environment import training_environment
from ..engine.gpus import find_gpus
from ..engine.options import require_packages
from .ablation import ablation
from .machine import require_machine
from .pictures import check_drawable, draw_pictures
from .rows import add_row, check_addable, read_rows
from .settings import OLD_NAMES, Settings
from .table import COLUMNS, cells_of, insert, markdown_table

# A row is measured for each combination of their values.
VARIED = ("trained", "micro_batch", "text_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for each in fields(Settings):
        _add_option(parser, each)
    add("--gpus", type=int, default=2, help="processes, one for each GPU (default: 2)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a small --config")
    add("--ablation", action="store_true", help="from plain training on, one measure after another")
    add("--timeout", type=float, default=600, help="seconds for one row (default: 600)")
    add("--out", type=Path, metavar="FILE", help="JSON array that rows are added to, one a line")
    add("--pictures", type=Path, metavar="FOLDER", help="draw memory.png and speed.png of the rows")
    add("--rows", type=Path, nargs="+", metavar="FILE", help="measure nothing: table of these rows")
    add("--into", type=Path, metavar="FILE", help="with --rows: put the table into this Markdown")


def _add_option(parser: argparse.ArgumentParser, each: Field) -> None:
    told, default = each.metadata["help"], each.default
    if each.type is bool:
        action = "store_false" if default else "store_true"
        parser.add_argument(_flag(each), dest=each.name, action=action, help=told)
        return
    typed: dict[str, Any] = {"dest": each.name, "type": (*get_args(each.type), each.type)[0]}
    if each.name in VARIED:
        typed |= {"nargs": "+", "default": [default]}
    else:
        typed["default"] = default
    typed |= {name: each.metadata.get(name) for name in ("choices", "metavar")}
    told += "" if default is None else f" (default: {default})"
    parser.add_argument(_flag(each), help=told, **typed)
    typed["default"] = argparse.SUPPRESS
    for old in (old for old, name in OLD_NAMES.items() if name == each.name):
        parser.add_argument(_dashed(old), help=argparse.SUPPRESS, **typed)


def _flag(each: Field) -> str:
    return each.metadata.get("flag") or _dashed(each.name)


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(options: argparse.Namespace) -> None:
    """Measure every combination, each in processes of its own; a failed one becomes a row, too.

    With ``--rows`` nothing is measured, and those rows are shown instead.

    Raises:
        ValueError: settings that contradict each other, a machine that cannot measure them, or a
            file of rows that is none, before anything runs.
    """
    if options.pictures:
        check_drawable(options.pictures)
    rows = _show(options) if options.rows else _measure_all(options)
    if options.pictures:
        print("\n".join(map(str, draw_pictures(rows, options.pictures))))


def _show(options: argparse.Namespace) -> list[dict]:
    """Print the table of rows from files, or put it into a file."""
    if options.out:
        raise ValueError("--out takes what is measured, and --rows measures nothing: drop one")
    rows = [row for path in options.rows for row in read_rows(path)]
    if options.into:
        insert(markdown_table(rows), options.into)
    else:
        print(markdown_table(rows), end="")
    return rows


def _measure_all(options: argparse.Namespace) -> list[dict]:
    if options.into:
        raise ValueError("--into writes the table of rows that are there: name them with --rows")
    if options.out:
        check_addable(options.out)
    if options.ablation and options.against:
        raise ValueError(
            "--ablation with --against: the measures are ours, the original has none of them; "
            "measure one after the other"
        )
    for choice in (*options.trained, options.optimizer, *(["liger"] if options.liger else [])):
        require_packages(choice)
    measurements = settings_asked(options)
    if options.gpus < 1:
        raise ValueError(f"--gpus {options.gpus}: expected at least 1")
    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout}: expected a number above 0")
    if options.zero_stage == 0 and options.gpus != 1:
        raise ValueError(
            f"{options.gpus} GPUs with ZeRO stage 0, which runs one process: use --gpus 1, or a "
            "stage from 1 to 3"
        )
    on_cpu = options.device == "cpu"
    require_machine(measurements, options.gpus, on_cpu)
    steps = [
        ({"added": name} if options.ablation else {}, settings)
        for asked in measurements
        for name, settings in (ablation(asked) if options.ablation else {"": asked}).items()
    ]
    print("  ".join([*["added"] * options.ablation, *COLUMNS]))
    rows = []
    for added, settings in steps:
        row = measure_in_processes(settings, options.gpus, options.timeout, on_cpu) | added
        row["command"] = command_of(settings, options.gpus, on_cpu)
        print("  ".join([*added.values(), *cells_of(row)]), flush=True)
        if "error" in row:
            print(f"  {row['error']}", flush=True)
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


def measure_in_processes(
    settings: Settings, gpus: int, timeout: float, on_cpu: bool = False
) -> dict:
    """One row. ``error`` has the last lines of output where the processes failed or hung."""
    row = {
        "workload": settings.trained,
        "implementation": "ours" if settings.against is None else "original",
        "gpus": gpus,
        "micro_batch": settings.micro_batch,
        "text_tokens": settings.text_tokens,
        "zero_stage": settings.zero_stage,
        "offload": settings.offload,
        "memory_limit_gib": settings.memory_limit,
        "settings": asdict(settings),
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(gpus)]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        command += ["-m", "glm4v_patched.bench.worker", settings.to_json(), str(out)]
        printed = Path(folder, "output.txt")
        error = _run(command, printed, training_environment(gpus, on_cpu), timeout)
        if out.exists():
            return row | json.loads(out.read_text())
    return row | {"error": error, "device": "cpu" if on_cpu else find_gpus().found[0].name}


def _run(command: list[str], printed: Path, environment: dict[str, str], timeout: float) -> str:
    """What went wrong, if anything did: the line that says so, or the last ones."""
    late = []
    with (
        printed.open("w") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment
        ) as launcher,
    ):
        try:
            launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            late = [f"not done after {timeout:.0f} s"]
            launcher.terminate()  # which ends its processes first
    lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
    memory = [line for line in lines if "OutOfMemoryError" in line]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (memory or late or errors or ["\n".join(lines[-5:])])[-1][:600]
