"""Measures how fast the command ``answer`` turns a file of questions into a file of answers.

For each batch size the command is started twice, and the second start is measured: by then, the
files are in the page cache and the kernels are compiled. Weights are random unless ``--model`` is
given.
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
from .training import device_name, run_and_log

# Matches the line that answer.describe_speed() returns.
SPEED_LINE = re.compile(r"rows? answered in ([\d.]+) s, the first after ([\d.]+) s")
# Options of training and generation that apply here, too.
SHARED_OPTIONS = {"batch", "new_tokens", "prompt_tokens", "cache", "model", "config"}


def measure_answers(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the measurement of each batch size.

    Raises:
        ValueError: the options cannot be measured; raised before anything runs.
        RuntimeError: the model and the questions could not be written.
    """
    from ..models.placement import place_processes

    place_processes(1, options.device)
    check_weights_option(options.weights, options.device, options.cache)
    for batch in options.batch:
        if options.answer_rows < 2 * batch:
            raise ValueError(
                f"--answer-rows {options.answer_rows} is too small for --batch {batch}; expected "
                f"at least {2 * batch}: the first batch is not measured, as its time includes "
                "loading the model"
            )
    # Half of a sample's text is its reference answer, which is not part of the prompt.
    settings = TrainingSettings(
        from_files=options.answers,
        text_tokens=2 * options.prompt_tokens,
        model=options.model,
        config=options.config,
    )
    with tempfile.TemporaryDirectory() as name:
        arguments = [name, settings.to_json(), str(options.answer_rows)]
        command = python_module_command("glm4v_patched.bench.samples", *arguments)
        environment = training_environment(1, options.device == "cpu")
        if error := run_and_log(command, Path(name), environment, options.timeout):
            raise RuntimeError(f"the model and its questions could not be written: {error}")
        for batch in options.batch:
            yield _measure_batch(options, Path(name), batch)


def _measure_batch(options: argparse.Namespace, folder: Path, batch: int) -> dict:
    """Start ``answer`` twice, and return the measurement of the second start."""
    on_cpu, out = options.device == "cpu", folder / "answers.jsonl"
    shared = ["--cache", options.cache, "--device", options.device]
    shared += ["--weights", options.weights] if options.weights else []
    arguments = [options.model or str(folder / "model"), "--data", str(folder / "train.jsonl")]
    arguments += ["--batch-size", str(batch), "--max-new-tokens", str(options.new_tokens)]
    arguments += [*shared, "--processes", "1", "--out", str(out)]
    command = python_module_command("glm4v_patched", "answer", *arguments)
    bench_arguments = ["--answer-rows", str(options.answer_rows), "--batch", str(batch)]
    bench_arguments += ["--new-tokens", str(options.new_tokens), *shared]
    row = {
        "workload": "answers",
        "weights": options.weights or "bf16",
        "image": options.answers,
        "batch": batch,
        "rows": options.answer_rows,
        "new_tokens": options.new_tokens,
        "device": device_name(on_cpu),
        "versions": versions(("torch", "transformers", "fa3-fwd", "glm4v-patched")),
        "command": shlex.join(
            ["glm4v-patched", "bench", "--answers", options.answers, *bench_arguments]
        ),
    }
    for _ in range(2):
        out.unlink(missing_ok=True)
        began = time.monotonic()
        error = run_and_log(command, folder, training_environment(1, on_cpu), options.timeout)
        row["command_s"] = time.monotonic() - began
        speed = SPEED_LINE.search((folder / "printed.txt").read_text(errors="replace"))
        if error or speed is None:
            return row | {"error": error or "answer did not print its speed"}
        total, row["first_answer_s"] = map(float, speed.groups())
        # The first batch does not count, because its time includes loading the model. The printed
        # times have one decimal, so their difference may be 0.
        after_first = max(total - row["first_answer_s"], 0.1)
        row["answers_per_s"] = (options.answer_rows - batch) / after_first
    return row
