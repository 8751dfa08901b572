"""Rows of generation, ours and the original's code: each code is measured in a process of its own,
which builds the model with random weights."""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from ..engine.environment import python_module, training_environment
from ..engine.options import PACKAGES, require_packages
from ..option_fields import given
from .settings import Speed
from .training import run


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """A row of each batch of ours and, with ``--against``, of the original's code. Raises
    ``ValueError`` for what cannot be measured, and ``RuntimeError`` for what is not installed,
    before anything runs."""
    asked = {each.name: getattr(options, each.name) for each in fields(Speed)}
    asked["batch"] = tuple(asked["batch"])
    speeds = [Speed(**asked | {"against": None})]
    if options.against is not None:
        speeds.append(Speed(**asked))
    if options.weights is not None:
        require_packages(options.weights, f"--weights {options.weights}")
    from ..models.placement import place  # imports pydantic

    place(1, options.device)
    for speed in speeds:
        yield from _measure(speed, options.python, options.timeout * len(speed.batch))


def _measure(speed: Speed, python: str | None, timeout: float) -> list[dict]:
    """A row of each batch; ``error`` where it could not be measured."""
    command = python_module("glm4v_patched.bench.generation_worker")
    if speed.against is not None and python is not None:
        command = [python, *command[1:]]
    settings = asdict(speed) | {"cache": speed.kept}
    settings["packages"] = ["torch", "transformers", "fa3-fwd"]
    settings["packages"] += PACKAGES.get(speed.weights or "", [])
    if speed.against is not None:
        settings["cache"] = "dynamic"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out, environment = folder / "rows.json", training_environment(1, speed.device == "cpu")
        error = run([*command, json.dumps(settings), str(out)], folder, environment, timeout)
        rows = json.loads(out.read_text()) if out.exists() else []
    common = {
        "workload": "generate",
        "implementation": "ours" if speed.against is None else "original",
        "weights": speed.weights,
        "command": command_of(speed),
    }
    missing = {*speed.batch} - {row["batch"] for row in rows}
    rows += [{"batch": batch, "error": error} for batch in sorted(missing)]
    return [common | row for row in rows]


def command_of(speed: Speed) -> str:
    """The shortest command line that measures these rows."""
    return "glm4v-patched bench --generate " + shlex.join(given(speed))
