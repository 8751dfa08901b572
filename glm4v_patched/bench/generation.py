"""Rows of generation: a process of its own builds the model with random weights, and measures."""

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
from .training import run


def measure_generation(options: argparse.Namespace) -> Iterator[dict]:
    """A row of each batch; ``error`` where it could not be measured. Raises ``ValueError`` for what
    cannot be measured, and ``RuntimeError`` for what is not installed, before anything runs."""
    asked = {each.name: getattr(options, each.name) for each in fields(GenerationSettings)}
    speed = GenerationSettings(**asked | {"batch": tuple(options.batch)})
    if options.weights is not None:
        require_packages(options.weights, f"--weights {options.weights}")
    from ..models.placement import place_processes  # imports pydantic

    place_processes(1, options.device)
    settings = asdict(speed) | {"cache": speed.resolved_cache}
    settings["packages"] = [
        "torch",
        "transformers",
        "fa3-fwd",
        *REQUIRED_PACKAGES.get(speed.weights or "", []),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out, environment = folder / "rows.json", training_environment(1, speed.device == "cpu")
        worker = ("glm4v_patched.bench.generation_worker", json.dumps(settings), str(out))
        limit = options.timeout * len(speed.batch)
        error = run(python_module_command(*worker), folder, environment, limit)
        rows = json.loads(out.read_text()) if out.exists() else []
    missing = {*speed.batch} - {row["batch"] for row in rows}
    rows += [{"batch": batch, "error": error} for batch in sorted(missing)]
    command = "glm4v-patched bench --generate " + shlex.join(to_cli_arguments(speed))
    common = {"workload": "generate", "weights": speed.weights, "command": command}
    yield from (common | row for row in rows)
