"""``glm4v-patched bench``: starts the processes, prints and writes the rows, or shows old ones."""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

from ..engine.activation_policies import POLICIES
from ..engine.environment import training_environment
from ..engine.options import OPTIMIZERS, TRAINED, require_packages
from .ablation import ablation
from .machine import require_machine
from .pictures import check_drawable, draw_pictures
from .rows import add_row, check_addable, read_rows
from .settings import Settings
from .table import insert, markdown_table

COLUMNS = (
    "workload",
    "implementation",
    "micro-batch",
    "text",
    "samples/s/GPU",
    "tokens/s/GPU",
    "roofline",
    "step (fastest, slowest)",
    "allocated",
    "reserved",
)

SWITCHES_OFF = {"compile": "--no-compile", "gather_in_place": "--copy-gathered"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {field.name: field.default for field in fields(Settings)}
    add = parser.add_argument
    add("--workload", nargs="+", choices=TRAINED, default=["lora_lm"], help="what is trained")
    add("--gpus", type=int, default=2, help="processes, one for each GPU")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a small --config")
    add("--micro-batch", type=int, nargs="+", default=[1], help="samples of one step and GPU")
    add("--text-tokens", type=int, nargs="+", default=[512], help="ids of text in a sample")
    shortest = "samples from so many ids of text up to --text-tokens, evenly; default: all alike"
    add("--shortest-text", type=int, metavar="N", help=shortest)
    add("--packed", action="store_true", help="samples in one row, instead of padded rows")
    add("--attention", default=defaults["attention"], help="implementation of transformers")
    add("--liger", action="store_true", help="RMSNorm and SwiGLU of Liger-Kernel")
    add("--zero-stage", type=int, default=defaults["zero_stage"], help="0 (one process) to 3")
    add("--offload", action="store_true", help="keep the optimizer's states on the CPU")
    add("--memory-limit", type=float, metavar="GIB", help="cap what a process may allocate")
    add("--optimizer", choices=OPTIMIZERS, default=defaults["optimizer"])
    policies = f"auto (by memory), {', '.join(POLICIES)} or 'every N'"
    add("--tower", default=defaults["tower"], help=f"activations kept: {policies}")
    add("--language", default=defaults["language"], help="the same of the language model's layers")
    add("--no-compile", dest="compile", action="store_false", help="leave layers uncompiled")
    add("--kept-gathered", type=float, metavar="WEIGHTS", help="of ZeRO-3")
    copied = "gather weights into a buffer and copy them out of it, as DeepSpeed does"
    add("--copy-gathered", dest="gather_in_place", action="store_false", help=copied)
    ahead = "layers that the CPU may be ahead of the GPU under ZeRO-3; 0: any number"
    add("--layers-ahead", type=int, default=defaults["layers_ahead"], help=ahead)
    add("--reuse-features", action="store_true", help="as from the second epoch on")
    add("--loss-chunk", type=int, default=defaults["loss_chunk"], help="positions with logits")
    add("--all-logits", action="store_true", help="no chunks: logits of all positions")
    add("--zero-options", default=defaults["zero_options"], metavar="JSON", help="for DeepSpeed")
    add("--profile", action="store_true", help="also say what the GPU was busy with in a step")
    add("--warm-up", type=int, default=defaults["warm_up"])
    add("--steps", type=int, default=defaults["steps"], help="timed steps")
    add("--ablation", action="store_true", help="from plain training on, one measure after another")
    add("--config", help="config.json of another size than the real one")
    add("--against", metavar="PATH", help="folder with the original code, measured beside ours")
    add("--timeout", type=float, default=600, help="seconds for one row")
    add("--out", type=Path, metavar="FILE", help="JSON array that rows are added to, one a line")
    add("--pictures", type=Path, metavar="FOLDER", help="draw memory.png and speed.png of the rows")
    add("--rows", type=Path, nargs="+", metavar="FILE", help="measure nothing: table of these rows")
    add("--into", type=Path, metavar="FILE", help="with --rows: put the table into this Markdown")


def run(options: argparse.Namespace) -> None:
    """Measure every combination, each in processes of its own; a failed one becomes a row, too.

    With ``--rows`` nothing is measured, and those rows are shown instead.

    Raises:
        ValueError: settings that contradict each other, a machine that cannot measure them, or a
            file of rows that is none, before anything runs.
    """
    if options.pictures:
        check_drawable(options.pictures)
    if options.rows:
        _show(options)
        return
    if options.into:
        raise ValueError("--into writes the table of rows that are there: name them with --rows")
    if options.out:
        check_addable(options.out)
    if options.ablation and options.against:
        raise ValueError(
            "--ablation with --against: the measures are ours, the original has none of them; "
            "measure one after the other"
        )
    for choice in (*options.workload, options.optimizer, *(["liger"] if options.liger else [])):
        require_packages(choice)
    measurements = [
        Settings(
            **_common(options),
            workload=workload,
            micro_batch=micro_batch,
            text_tokens=text_tokens,
            against=against,
        )
        for workload in options.workload
        for micro_batch in options.micro_batch
        for text_tokens in options.text_tokens
        for against in ([None, options.against] if options.against else [None])
    ]
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
    print("  ".join(COLUMNS))
    rows = []
    for added, settings in _with_ablation(measurements, options.ablation):
        row = measure_in_processes(settings, options.gpus, options.timeout, on_cpu) | added
        arguments = _arguments(settings, options.gpus) + ["--device", "cpu"] * on_cpu
        row["command"] = "glm4v-patched bench " + shlex.join(arguments)
        print(describe(row), flush=True)
        rows.append(row)
        if options.out:
            add_row(options.out, row)
    if options.pictures:
        print("\n".join(map(str, draw_pictures(rows, options.pictures))))


def _with_ablation(measurements: list[Settings], wanted: bool) -> list[tuple[dict, Settings]]:
    """Settings to measure, each with what its row says beside them."""
    if not wanted:
        return [({}, settings) for settings in measurements]
    return [
        ({"added": name}, settings)
        for asked in measurements
        for name, settings in ablation(asked).items()
    ]


def _show(options: argparse.Namespace) -> None:
    """Print the table of rows from files, or put it into a file, and draw their pictures."""
    if options.out:
        raise ValueError("--out takes what is measured, and --rows measures nothing: drop one")
    rows = [row for path in options.rows for row in read_rows(path)]
    table = markdown_table(rows)
    if options.into:
        insert(table, options.into)
    else:
        print(table, end="")
    if options.pictures:
        print("\n".join(map(str, draw_pictures(rows, options.pictures))))


def _common(options: argparse.Namespace) -> dict:
    varied = {"workload", "micro_batch", "text_tokens", "against"}
    names = [field.name for field in fields(Settings) if field.name not in varied]
    return {name: getattr(options, name) for name in names}


def _arguments(settings: Settings, gpus: int) -> list[str]:
    """The shortest command line that measures this one row."""
    arguments = ["--workload", settings.workload, "--gpus", str(gpus)]
    for field in fields(Settings)[1:]:
        value = getattr(settings, field.name)
        if value == field.default:
            continue
        name = SWITCHES_OFF.get(field.name, "--" + field.name.replace("_", "-"))
        arguments += [name] if isinstance(value, bool) else [name, str(value)]
    return arguments


def measure_in_processes(
    settings: Settings, gpus: int, timeout: float, on_cpu: bool = False
) -> dict:
    """One row. ``error`` has the last lines of output where the processes failed or hung."""
    asked = asdict(settings)
    row = {
        "workload": settings.workload,
        "implementation": "ours" if settings.against is None else "original",
        "gpus": gpus,
        "micro_batch": settings.micro_batch,
        "text_tokens": settings.text_tokens,
        "zero_stage": settings.zero_stage,
        "offload": settings.offload,
        "memory_limit_gib": settings.memory_limit,
        "settings": asked,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(gpus)]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        command += ["-m", "glm4v_patched.bench.worker", settings.to_json(), str(out)]
        try:
            ended = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                env=training_environment(gpus, on_cpu),
            )
            output = ended.stdout
        except subprocess.TimeoutExpired as stop:
            output = f"{_text(stop.stdout)}\nnot done after {timeout:.0f} s"
        if out.exists():
            return row | json.loads(out.read_text())
        return row | {"error": _reason(output), "device": "cpu" if on_cpu else _device()}


def _device() -> str | None:
    """What the failed processes ran on; asked in a process that takes no memory here."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except subprocess.SubprocessError:
        return None
    return asked.stdout.strip()


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _reason(output: str) -> str:
    """The line that says what went wrong, or the last ones."""
    lines = [line for line in output.splitlines() if line.strip()]
    memory = [line for line in lines if "OutOfMemoryError" in line]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (memory or errors or ["\n".join(lines[-5:])])[-1][:600]


def describe(row: dict) -> str:
    """A line of the table."""
    start = f"{row['added']}: " if "added" in row else ""
    start += f"{row['workload']}  {row['implementation']}  {row['micro_batch']}"
    start += f"  {row['text_tokens']}"
    if "error" in row:
        return f"{start}  failed: {row['error']}"
    step = row["step_s"]
    memory = [
        "-" if row[name] is None else f"{row[name]:.1f} GiB"
        for name in ("peak_allocated_gib", "peak_reserved_gib")
    ]
    return (
        f"{start}  {row['samples_per_s_per_gpu']:.3f}  {row['tokens_per_s_per_gpu']:.0f}  "
        f"{row['roofline_share']:.0%}  {step['median']:.3f} s ({step['fastest']:.3f}, "
        f"{step['slowest']:.3f})  {memory[0]}  {memory[1]}"
    )
