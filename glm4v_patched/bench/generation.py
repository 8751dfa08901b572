"""Measures generation in a separate process, which builds the model with random weights."""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from ..engine.environment import python_module_command, training_environment
from ..engine.options import REQUIRED_PACKAGES, require_packages
from ..option_fields import to_cli_arguments
from .settings import GenerationSettings
from .training import run_and_log


def measure_generation(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the measurement of each batch size; if one failed, its ``error`` has the reason.

    Raises:
        ValueError: the options cannot be measured; raised before anything runs.
        RuntimeError: a package is missing; raised before anything runs.
    """
    values = {field.name: getattr(options, field.name) for field in fields(GenerationSettings)}
    settings = GenerationSettings(**values | {"batch": tuple(options.batch)})
    if options.weights is not None:
        require_packages(options.weights, f"--weights {options.weights}")
    from ..models.placement import place_processes

    place_processes(1, options.device)
    job = asdict(settings) | {"cache": settings.resolved_cache}
    job["packages"] = [
        "torch",
        "transformers",
        "fa3-fwd",
        *REQUIRED_PACKAGES.get(settings.weights or "", []),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out, environment = folder / "rows.json", training_environment(1, settings.device == "cpu")
        worker = ("glm4v_patched.bench.generation_worker", json.dumps(job), str(out))
        timeout = options.timeout * len(settings.batch)
        error = run_and_log(python_module_command(*worker), folder, environment, timeout)
        rows = json.loads(out.read_text()) if out.exists() else []
    missing = {*settings.batch} - {row["batch"] for row in rows}
    rows += [{"batch": batch, "error": error} for batch in sorted(missing)]
    command = "glm4v-patched bench --generate " + shlex.join(to_cli_arguments(settings))
    common = {"workload": "generate", "weights": settings.weights, "command": command}
    yield from (common | row for row in rows)
