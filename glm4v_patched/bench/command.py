"""``glm4v-patched bench``: starts the processes, prints and writes the rows, or shows old ones."""

import argparse
import json
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path

from ..engine.environment import python_module, run_within, torch_launcher, training_environment
from ..engine.gpus import find_gpus
from ..engine.options import require_packages
from ..installed_versions import versions
from ..option_fields import add_option, given
from .answers import add_answer_arguments, measure_answers
from .charts import check_drawable, draw_pictures
from .generation import add_speed_arguments, measure_speed, refuse_generation
from .machine import require_machine
from .settings import Settings
from .table import COLUMNS, add_rows, cells_of, insert, markdown_table, read_rows

# A row is measured for each combination of their values.
VARIED = ("trained", "micro_batch", "text_tokens")
# Whose versions a row names.
PACKAGES = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "liger-kernel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for each in fields(Settings):
        add_option(parser, each, several=each.name in VARIED)
    add("--gpus", type=int, default=2, help="processes, one for each GPU (default: 2)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a small --config")
    add("--timeout", type=float, default=600, help="seconds for one row (default: 600)")
    add("--out", type=Path, metavar="FILE", help="JSON array that rows are added to, one a line")
    add("--pictures", type=Path, metavar="FOLDER", help="draw memory.png and speed.png of the rows")
    add("--rows", type=Path, nargs="+", metavar="FILE", help="measure nothing: table of these rows")
    add("--into", type=Path, metavar="FILE", help="with --rows: put the table into this Markdown")
    add_speed_arguments(parser)
    add_answer_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Measure every combination, or show the rows of files. Raises ``ValueError`` before anything
    runs if settings contradict each other or this machine cannot measure them."""
    if options.answers:
        return measure_answers(options)
    if options.generate:
        return measure_speed(options)
    refuse_generation(options)
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
        drawn = "\n".join(map(str, draw_pictures(rows, options.pictures)))
        print(drawn or "no picture is drawn, as no row has figures")


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
    require_machine(asked, gpus, on_cpu)
    print("  ".join(COLUMNS))
    start = time.monotonic()
    rows = []
    for settings in asked:
        row = measure_in_processes(settings, gpus, options.timeout, on_cpu)
        cells = map(str.ljust, cells_of(row), map(len, COLUMNS))  # below the names
        print("  ".join(cells).rstrip(), row.get("error", ""), sep="\n" * ("error" in row))
        rows.append(row)
        if options.out:
            add_rows(options.out, [row])
    print(f"{len(rows):,} rows measured in {time.monotonic() - start:.0f} s")
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
    arguments += [*given(settings, but=["trained"]), *["--device", "cpu"] * on_cpu]
    return "glm4v-patched bench " + shlex.join(arguments)


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
        "device": "cpu" if on_cpu else find_gpus().found[0].name,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command, environment in _commands(settings, gpus, on_cpu, folder):
            if error := _run(command, folder / "output.txt", environment, timeout):
                break
        if (out := folder / "row.json").exists():
            found = json.loads(out.read_text())
        elif error:
            return row | {"error": error}
        else:
            found = figures(json.loads((folder / "out" / "training.json").read_text()))
    return row | found | {"versions": versions((*PACKAGES, "glm4v-patched"))}


def _commands(
    settings: Settings, gpus: int, on_cpu: bool, folder: Path
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """What is run, one after the other, with its environment; the last leaves what it measured."""
    asked = json.dumps(asdict(settings))
    if settings.from_files is None:
        worker = ["glm4v_patched.bench.worker", asked, str(folder / "row.json")]
        yield [*torch_launcher(gpus), *worker], training_environment(gpus, on_cpu)
        return
    rows = settings.micro_batch * gpus * (settings.warm_up + settings.steps)
    command = python_module("glm4v_patched.bench.from_files", str(folder), asked, str(rows))
    yield command, training_environment(1, on_cpu)
    command = python_module("glm4v_patched", "train", str(folder / "recipe.json"))
    command += ["--processes", str(gpus), "--device", "cpu" if on_cpu else "cuda"]
    yield command, dict(os.environ)


def figures(report: dict) -> dict:
    """Those of a row that a recipe's ``training.json`` knows."""
    speed = report["measured"]["samples_per_s"]
    return {
        **report["measured"],
        "samples_per_s_per_gpu": None if speed is None else speed / report["world_size"],
        "policies": report["policies"],
        "losses": [entry["loss"] for entry in report["history"]],
    }


def _run(command: list[str], printed: Path, environment: dict, timeout: float) -> str:
    """What went wrong, the line that says so or the last ones; empty if nothing did."""
    with printed.open("w") as file:
        status = run_within(timeout, command, environment, file)
    if status == 0:
        return ""
    late = [f"not done after {timeout:.0f} s"] * (status is None)
    lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
    memory = [line for line in lines if "OutOfMemoryError" in line]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    last = "\n".join(lines[-5:]) or f"ended with status {status} and printed nothing"
    return (memory or late or errors or [last])[-1][:600]
