"""Measures training, each measurement in its own processes, so that a failure stops no other."""

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
    python_module_command,
    run_with_timeout,
    single_process_environment,
    training_environment,
)
from ..engine.gpus import find_gpus
from ..engine.options import EngineSection, require_packages
from ..installed_versions import versions
from ..option_fields import to_cli_arguments
from .settings import FULL_SIZE_ON_CPU_MESSAGE, TrainingSettings, in_bench_terms

# Settings that take several values; every combination is measured.
VARIED_SETTINGS = ("trained", "micro_batch", "text_tokens")
# Packages whose versions are stored with a row.
VERSIONED_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes")


def measure_training(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the measurement of each combination of settings.

    Raises:
        ValueError: the options cannot be measured; raised before anything runs.
        RuntimeError: a package is missing; raised before anything runs.
    """
    for choice in (*options.trained, options.optimizer):
        require_packages(choice)
    combinations = requested_settings(options)
    gpus, on_cpu = options.gpus, options.device == "cpu"
    _require_machine(combinations, gpus, on_cpu)
    for settings in combinations:
        yield measure_in_processes(settings, gpus, options.timeout, on_cpu)


def requested_settings(options: argparse.Namespace) -> list[TrainingSettings]:
    """Return the settings of every combination that the command line asks for."""

    def option_values(section: type) -> dict[str, Any]:
        return {
            field.name: getattr(options, field.name) for field in fields(section) if field.metadata
        }

    engine, common = EngineSection(**option_values(EngineSection)), option_values(TrainingSettings)
    return [
        TrainingSettings(**common | dict(zip(VARIED_SETTINGS, varied, strict=True)), engine=engine)
        for varied in product(*(common[name] for name in VARIED_SETTINGS))
    ]


def _require_machine(
    combinations: Sequence[TrainingSettings], processes: int, on_cpu: bool
) -> None:
    """Refuse settings for which this machine would also refuse a recipe.

    A measurement is refused for memory only if it certainly does not fit.

    Raises:
        ValueError: the settings are refused; the message has one line for each problem.
    """
    from ..finetune.preflight import find_device_problems
    from ..models.placement import Device, place_processes

    device: Device = "cpu" if on_cpu else "cuda"
    first = combinations[0]
    try:
        place_processes(processes, device, first.engine.zero_stage)
    except ValueError as error:
        raise ValueError(in_bench_terms(str(error))) from None
    recipe_problems = find_device_problems(first.recipe_fields(), device, processes)
    problems = [in_bench_terms(problem.text) for problem in recipe_problems]
    if on_cpu and first.config is None and first.model is None:
        problems.append(FULL_SIZE_ON_CPU_MESSAGE)
    if not problems:
        problems = [
            problem
            for settings in combinations
            if (problem := _memory_problem(settings, processes, on_cpu))
        ]
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def _memory_problem(settings: TrainingSettings, processes: int, on_cpu: bool) -> str:
    """Return why a training does not fit into memory; empty if it may fit."""
    # Imported here, because these modules import torch: the other checks need no torch and answer
    # at once.
    from ..engine.memory_check import find_memory_problem
    from ..engine.memory_plan import apply_memory_limit
    from .roofline import benchmark_batch, benchmark_config

    free = 0.0 if on_cpu else min(gpu.memory for gpu in find_gpus().devices[:processes])
    config = benchmark_config(settings.config, settings.model)
    free = apply_memory_limit(free, settings.engine.memory_limit)
    batch = benchmark_batch(settings, config, processes)
    problem = find_memory_problem(config, settings.engine_options(), batch, free)
    on_processes = f"on {processes} process{'es' * (processes != 1)}"
    measurement = f"{settings.trained}, micro-batch {settings.micro_batch}, {on_processes}"
    return problem and f"{measurement}: {in_bench_terms(problem)}"


def command_of(settings: TrainingSettings, gpus: int, on_cpu: bool) -> str:
    """Return the shortest command line that repeats this measurement."""
    arguments = ["--trained", settings.trained, "--gpus", str(gpus)]
    arguments += [
        *to_cli_arguments(settings, exclude=["trained", "engine"]),
        *to_cli_arguments(settings.engine),
    ]
    return "glm4v-patched bench " + shlex.join([*arguments, *["--device", "cpu"] * on_cpu])


def measure_in_processes(
    settings: TrainingSettings, gpus: int, timeout: float, on_cpu: bool
) -> dict:
    """Measure in new processes; ``error`` has the reason if they failed or timed out."""
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
            launcher = ["--standalone", "--nproc_per_node", str(gpus), "-m"]  # uses a free port
            worker = ["torch.distributed.run", *launcher, *worker]
            environment = training_environment(gpus, on_cpu)
        command = python_module_command(*worker, settings.to_json(), str(out))
        error = run_and_log(command, folder, environment, timeout)
        figures = json.loads(out.read_text()) if out.exists() else {"error": error}
    if "error" not in figures:
        figures["versions"] = versions((*VERSIONED_PACKAGES, "glm4v-patched"))
    return row | figures


def device_name(on_cpu: bool) -> str:
    """Return the name of the first GPU, or ``cpu``."""
    return "cpu" if on_cpu else find_gpus().devices[0].name


def run_and_log(
    command: list[str], folder: Path, environment: Mapping[str, str], timeout: float
) -> str:
    """Run a command with its output in ``folder/printed.txt``.

    Args:
        timeout: Seconds after which the command is stopped.

    Returns:
        An empty string on success; else the line of the output that has the error, or the output's
        last lines.
    """
    printed = folder / "printed.txt"
    with printed.open("w") as file:
        status = run_with_timeout(timeout, command, environment, file)
    if status == 0:
        return ""
    timed_out = [f"not done after {timeout:.0f} s"] * (status is None)
    lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
    memory_errors = [line for line in lines if "OutOfMemoryError" in line]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    last = "\n".join(lines[-5:]) or f"ended with status {status} and printed nothing"
    return (memory_errors or timed_out or errors or [last])[-1][:600]
