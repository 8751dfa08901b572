"""Rows of how fast ``answer`` goes from files to a file of answers.

What is measured is the command itself, started twice: the second start finds what the first one
left (files in the system's cache, compiled kernels). Weights are random, or a folder's own.
"""

import argparse
import re
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..engine.environment import python_module_command, training_environment
from ..installed_versions import versions
from ..models.quantized_weights import check_weights_option
from .settings import TrainingSettings
from .training import device_name, run

# What answer.describe_speed() says.
SPEED_LINE = re.compile(r"rows answered in ([\d.]+) s, the first after ([\d.]+) s")
# Options of the others that count here, too.
SHARED_OPTIONS = {"batch", "new_tokens", "prompt_tokens", "cache", "model", "config"}


def measure_answers(options: argparse.Namespace) -> Iterator[dict]:
    """A row of each batch. Raises ``ValueError`` for what cannot be measured, before anything
    runs, and ``RuntimeError`` where nothing could be written to be answered."""
    from ..models.placement import place_processes  # imports pydantic

    place_processes(1, options.device)
    check_weights_option(options.weights, options.device, options.cache)
    for batch in options.batch:
        if options.answer_rows < 2 * batch:
            raise ValueError(
                f"--answer-rows {options.answer_rows} with --batch {batch}: expected at least "
                f"{2 * batch}, since the first batch's time has the loading in it"
            )
    # Of their text, half is the reference, which is not read.
    tokens, of_model = 2 * options.prompt_tokens, {"model": options.model, "config": options.config}
    written = TrainingSettings(from_files=options.answers, text_tokens=tokens, **of_model)
    with tempfile.TemporaryDirectory() as name:
        arguments = [name, written.text(), str(options.answer_rows)]
        command = python_module_command("glm4v_patched.bench.samples", *arguments)
        environment = training_environment(1, options.device == "cpu")
        if error := run(command, Path(name), environment, options.timeout):
            raise RuntimeError(f"the model and its rows were not written: {error}")
        for batch in options.batch:
            yield _measure_batch(options, Path(name), batch)


def _measure_batch(options: argparse.Namespace, folder: Path, batch: int) -> dict:
    """A row, of the second of two starts."""
    on_cpu, out = options.device == "cpu", folder / "answers.jsonl"
    same = ["--cache", options.cache, "--device", options.device]
    same += ["--weights", options.weights] if options.weights else []
    asked = [options.model or str(folder / "model"), "--data", str(folder / "train.jsonl")]
    asked += ["--batch-size", str(batch), "--max-new-tokens", str(options.new_tokens), *same]
    asked += ["--processes", "1", "--out", str(out)]
    command = python_module_command("glm4v_patched", "answer", *asked)
    own = ["--answer-rows", str(options.answer_rows), "--batch", str(batch)]
    own += ["--new-tokens", str(options.new_tokens), *same]
    row = {
        "workload": "answers",
        "weights": options.weights or "bf16",
        "image": options.answers,
        "batch": batch,
        "rows": options.answer_rows,
        "new_tokens": options.new_tokens,
        "device": device_name(on_cpu),
        "versions": versions(("torch", "transformers", "fa3-fwd", "glm4v-patched")),
        "command": shlex.join(["glm4v-patched", "bench", "--answers", options.answers, *own]),
    }
    for _ in range(2):
        out.unlink(missing_ok=True)
        began = time.monotonic()
        error = run(command, folder, training_environment(1, on_cpu), options.timeout)
        row["command_s"] = time.monotonic() - began
        found = SPEED_LINE.search((folder / "printed.txt").read_text(errors="replace"))
        if error or found is None:
            return row | {"error": error or "answer said nothing of its speed"}
        took, row["first_answer_s"] = map(float, found.groups())
        # Of the batches after the first one, whose time has the loading in it.
        after_first = max(took - row["first_answer_s"], 0.1)  # as finely as it is said
        row["answers_per_s"] = (options.answer_rows - batch) / after_first
    return row
