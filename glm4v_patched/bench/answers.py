"""``glm4v-patched bench --answers WxH``: how fast ``answer`` goes from files to a file of answers.

What is measured is the command itself, started twice: the second start finds what the first one
left (files in the system's cache, compiled kernels). Weights are random, or a folder's own.
"""

import argparse
import json
import re
import shlex
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from ..engine.environment import python_module, run_within, training_environment
from ..engine.gpus import find_gpus
from ..engine.nvidia_driver import share_in_use
from ..installed_versions import versions
from ..models.placement import place
from ..models.quantised_weights import check_weights
from ..option_fields import refuse_changed
from ..result_files import add_rows, markdown, read_rows
from .generation import OTHERS, Speed
from .settings import Settings, picture_size

REQUIRED = "batch", "picture"
COLUMNS = {
    "device": "device", "weights": "weights", "picture": "picture", "batch": "batch",
    "rows of tokens": "rows_of_tokens", "answers/s": "answers_per_s",
    "first answers, s": "first_answer_s", "command, s": "command_s", "GPU idle": "gpu_idle",
}  # fmt: skip
SPEED = re.compile(r"the first [\d,]+ after ([\d.]+) s, then ([\d.e+]+) rows/s")
OF_OTHERS = "is not of --answers: leave it out"
KNOWN = {"batch", "new_tokens", "prompt_tokens", "cache", "model", "config"}


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("--answers").add_argument
    told = "measure answer, with JPEG files of this size; --batch, --new-tokens, --weights, --model"
    add("--answers", metavar="WxH", help=told)
    add("--answer-rows", type=int, default=64, metavar="N", help="rows of the file (default: 64)")


def measure_answers(options: argparse.Namespace) -> None:
    """Measure each batch, print the rows and add them to ``--out``; with ``--rows``, print those of
    files. Raises ``ValueError`` for what cannot be measured, before anything runs."""
    if options.rows:
        print(table([row for path in options.rows for row in read_rows(REQUIRED, path)]), end="")
        return
    _check(options)
    if options.out:
        read_rows(REQUIRED, options.out, may_be_new=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = json.dumps(asdict(_written(options)))
        arguments = [str(folder), asked, str(options.answer_rows)]
        on_cpu = options.device == "cpu"
        made = python_module("glm4v_patched.bench.from_files", *arguments)
        status = run_within(options.timeout, made, training_environment(1, on_cpu))
        if status != 0:
            raise RuntimeError(f"the model and its rows were not written (status {status})")
        rows = [_measure(options, folder, batch) for batch in options.batch]
    print(table(rows), end="")
    if options.out:
        add_rows(REQUIRED, options.out, rows)


def table(rows: list[dict]) -> str:
    def cell(row: dict, name: str) -> str:
        if name == "rows_of_tokens":
            return f"{row['rows']} of {row['new_tokens']}"
        value = row.get(name)
        if name == "gpu_idle" and value is not None:
            return f"{value:.0%}"
        return f"{value:.3g}" if isinstance(value, float) else str("-" if value is None else value)

    return markdown([*COLUMNS], ([cell(row, name) for name in COLUMNS.values()] for row in rows))


def _check(options: argparse.Namespace) -> None:
    picture_size("--answers", options.answers)
    for name, default in OTHERS.items():
        if getattr(options, name) != default:
            raise ValueError(f"--{name} {OF_OTHERS}")
    for kind in (Settings, Speed):
        refuse_changed(options, kind, KNOWN, OF_OTHERS)
    place(1, options.device)
    check_weights(options.weights, options.device, options.cache)
    for batch in options.batch:
        if options.answer_rows < 2 * batch:
            raise ValueError(
                f"--answer-rows {options.answer_rows} with --batch {batch}: expected at least "
                f"{2 * batch}, since the first batch's time has the loading in it"
            )


def _written(options: argparse.Namespace) -> Settings:
    """Of the rows: half of their text is the reference, which is not read."""
    return Settings(
        from_files=options.answers,
        text_tokens=2 * options.prompt_tokens,
        model=options.model,
        config=options.config,
    )


def _measure(options: argparse.Namespace, folder: Path, batch: int) -> dict:
    """A row, of the second of two starts."""
    on_cpu, out = options.device == "cpu", folder / "answers.jsonl"
    same = ["--cache", options.cache, "--device", options.device]
    same += ["--weights", options.weights] if options.weights else []
    files = [options.model or str(folder / "model"), "--data", str(folder / "train.jsonl")]
    asked = ["--batch-size", str(batch), "--max-new-tokens", str(options.new_tokens), *same]
    asked += ["--processes", "1", "--out", str(out)]
    command, found = python_module("glm4v_patched", "answer", *files, *asked), None
    for _ in range(2):
        out.unlink(missing_ok=True)
        printed, began = folder / "printed.txt", time.monotonic()
        with _Watched(out) as watched, printed.open("w") as file:
            status = run_within(options.timeout, command, training_environment(1, on_cpu), file)
        seconds, told = time.monotonic() - began, printed.read_text(errors="replace")
        found = SPEED.search(told)
        if status != 0 or found is None:
            raise RuntimeError(f"answer ended with status {status}: {told.strip()[-500:]}")
    assert found is not None
    own = ["--answer-rows", str(options.answer_rows), "--batch", str(batch)]
    own += ["--new-tokens", str(options.new_tokens), *same]
    return {
        "workload": "answers",
        "weights": options.weights or "bf16",
        "picture": options.answers,
        "batch": batch,
        "rows": options.answer_rows,
        "new_tokens": options.new_tokens,
        "answers_per_s": float(found[2]),
        "first_answer_s": float(found[1]),
        "command_s": seconds,
        "gpu_idle": watched.idle,
        "device": "cpu" if on_cpu else find_gpus().found[0].name,
        "versions": versions(("torch", "transformers", "fa3-fwd", "glm4v-patched")),
        "command": shlex.join(["glm4v-patched", "bench", "--answers", options.answers, *own]),
    }


class _Watched:
    """Samples how busy the GPU is from the first answers on.

    Attributes:
        idle: Of that time, the share in which no kernel ran; None where the driver does not say.
    """

    def __init__(self, out: Path):
        self.out, self.shares = out, list[float]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "_Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.5):
            if self.out.exists() and self.out.stat().st_size:
                self.shares += [share for share in [share_in_use()] if share is not None]

    @property
    def idle(self) -> float | None:
        # The last sample may be of the time after the last answer.
        shares = self.shares[:-1]
        return 1 - sum(shares) / len(shares) if shares else None
