"""Rows of training: each is measured in processes of its own, even if they fail."""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from ..engine.environment import (
    single_process_environment,
    python_module_command,
    run_with_timeout,
    training_environment,
)
from ..engine.gpus import find_gpus
from ..engine.options import EngineSection, require_packages
from ..installed_versions import versions
from ..option_fields import to_cli_arguments
from .settings import FULL_SIZE_ON_CPU, TrainingSettings, in_bench_terms

# A row is measured for each combination of their values.
VARIED_SETTINGS = ("trained", "micro_batch", "text_tokens")
# Whose versions a row names.
VERSIONED_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes")


def measure_training(options: argparse.Namespace) -> Iterator[dict]:
    """A row of each combination. Raises ``ValueError`` for what cannot be measured, and
    ``RuntimeError`` for what is not installed, before anything runs."""
    for choice in (*options.trained, options.optimizer):
        require_packages(choice)
    asked, gpus, on_cpu = requested_settings(options), options.gpus, options.device == "cpu"
    _require_machine(asked, gpus, on_cpu)
    for settings in asked:
        yield measure_in_processes(settings, gpus, options.timeout, on_cpu)


def requested_settings(options: argparse.Namespace) -> list[TrainingSettings]:
    """Of every combination."""

    def asked(section: type) -> dict[str, Any]:
        return {each.name: getattr(options, each.name) for each in fields(section) if each.metadata}

    engine, common = EngineSection(**asked(EngineSection)), asked(TrainingSettings)
    return [
        TrainingSettings(**common | dict(zip(VARIED_SETTINGS, varied, strict=True)), engine=engine)
        for varied in product(*(common[name] for name in VARIED_SETTINGS))
    ]


def _require_machine(measurements: Sequence[TrainingSettings], processes: int, on_cpu: bool) -> None:
    """Raise ``ValueError`` with a line for each thing that this machine lacks, as a recipe would be
    refused. What may fit is tried: only what is surely too large is refused."""
    from ..finetune.preflight import find_device_problems
    from ..models.placement import Device, place_processes

    device: Device = "cpu" if on_cpu else "cuda"
    asked = measurements[0]
    try:
        place_processes(processes, device, asked.engine.zero_stage)
    except ValueError as error:
        raise ValueError(in_bench_terms(str(error))) from None
    found = find_device_problems(asked.recipe_fields(), device, processes)
    faults = [in_bench_terms(fault.text) for fault in found]
    if on_cpu and asked.config is None and asked.model is None:
        faults.append(FULL_SIZE_ON_CPU)
    if not faults:
        faults = [line for asked in measurements if (line := _memory_problem(asked, processes, on_cpu))]
    if faults:
        raise ValueError("\n".join(dict.fromkeys(faults)))


def _memory_problem(settings: TrainingSettings, processes: int, on_cpu: bool) -> str:
    # Late, for they import torch: the checks before are answered at once.
    from ..engine.memory_check import find_memory_problem
    from ..engine.memory_plan import apply_memory_limit
    from .roofline import benchmark_batch, config_of

    free = 0.0 if on_cpu else min(gpu.memory for gpu in find_gpus().devices[:processes])
    config = config_of(settings)
    free = apply_memory_limit(free, settings.engine.memory_limit)
    batch = benchmark_batch(settings, config, processes)
    told = find_memory_problem(config, settings.engine_options(), batch, free)
    at = f"{settings.trained}, micro-batch {settings.micro_batch}, on {processes} processes"
    return told and f"{at}: {in_bench_terms(told)}"


def command_of(settings: TrainingSettings, gpus: int, on_cpu: bool) -> str:
    """The shortest command line that measures this one row."""
    arguments = ["--trained", settings.trained, "--gpus", str(gpus)]
    arguments += [*to_cli_arguments(settings, but=["trained", "engine"]), *to_cli_arguments(settings.engine)]
    return "glm4v-patched bench " + shlex.join([*arguments, *["--device", "cpu"] * on_cpu])


def measure_in_processes(settings: TrainingSettings, gpus: int, timeout: float, on_cpu: bool) -> dict:
    """One row; ``error`` says what went wrong where the processes failed or hung."""
    row = {
        "workload": settings.trained,
        "gpus": gpus,
        "micro_batch": settings.micro_batch,
        "text_tokens": settings.text_tokens,
        "zero_stage": settings.engine.zero_stage,
        "fp8": settings.engine.fp8,
        "memory_limit_gib": settings.engine.memory_limit,
        "settings": settings.changed_values(),
        "command": command_of(settings, gpus, on_cpu),
        "device": device_name(on_cpu),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "row.json"
        worker, environment = ["glm4v_patched.bench.worker"], single_process_environment(on_cpu)
        if settings.engine.zero_stage:
            launcher = ["--standalone", "--nproc_per_node", str(gpus), "-m"]  # at a free port
            worker = ["torch.distributed.run", *launcher, *worker]
            environment = training_environment(gpus, on_cpu)
        command = python_module_command(*worker, settings.text(), str(out))
        error = run(command, folder, environment, timeout)
        found = json.loads(out.read_text()) if out.exists() else {"error": error}
    if "error" not in found:
        found["versions"] = versions((*VERSIONED_PACKAGES, "glm4v-patched"))
    return row | found


def device_name(on_cpu: bool) -> str:
    return "cpu" if on_cpu else find_gpus().devices[0].name


def run(command: list[str], folder: Path, environment: Mapping[str, str], timeout: float) -> str:
    """Run a command, which prints to ``folder/printed.txt``; what went wrong, the line that says
    so or the last ones; empty if nothing did."""
    printed = folder / "printed.txt"
    with printed.open("w") as file:
        status = run_with_timeout(timeout, command, environment, file)
    if status == 0:
        return ""
    late = [f"not done after {timeout:.0f} s"] * (status is None)
    lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
    memory = [line for line in lines if "OutOfMemoryError" in line]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    last = "\n".join(lines[-5:]) or f"ended with status {status} and printed nothing"
    return (memory or late or errors or [last])[-1][:600]
