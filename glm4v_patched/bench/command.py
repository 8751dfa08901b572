"""``glm4v-patched bench``: prints and writes rows as they are measured, or shows old ones."""

import argparse
import time
from dataclasses import fields
from typing import Any

from ..engine.options import EngineSection
from ..inference.questions import ModelOptions
from ..option_fields import add_option, add_options
from ..paths import require_apart, to_path
from . import answers, generation, training
from .settings import ProcessSettings, TrainingSettings, GenerationSettings, image_size
from .table import append_measurements, cells_of, insert_table, markdown_table, read_measurements, require_same_kind

# By option, what measures, and the options that are not heeded by it; nothing else is refused.
COMMON_OPTIONS = {"command", "run", "parser", "commands", "rest", "device", "timeout", "out", "rows"}
TRAINING_OPTIONS = {each.name for of in (TrainingSettings, EngineSection) for each in fields(of)}
TRAINING_OPTIONS |= {"gpus", "into"}
ANSWER_OPTIONS = {"answers", "answer_rows", "weights", *answers.KNOWN}
WORKLOADS = {
    "answers": (answers.measure, ANSWER_OPTIONS),
    "generate": (
        generation.measure,
        {each.name for each in fields(GenerationSettings)} | {"generate"},
    ),
    "training": (training.measure, TRAINING_OPTIONS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for each in fields(TrainingSettings):
        if each.metadata:
            add_option(parser, each, several=each.name in training.VARIED_SETTINGS)
    for each in (*fields(EngineSection), *fields(ProcessSettings)):
        add_option(parser, each)
    add("--out", type=to_path, metavar="FILE", help="JSON array that rows are added to, one a line")
    shown = "measure nothing: table of these rows"
    add("--rows", type=to_path, nargs="+", metavar="FILE", help=shown)
    add(
        "--into", type=to_path, metavar="FILE", help="with --rows: put the table into this Markdown"
    )
    group = parser.add_argument_group("--generate")
    add = group.add_argument
    add("--generate", action="store_true", help="measure generation, not training")
    for each in fields(GenerationSettings):
        if each.metadata:
            add_option(group, each)
    add_options(parser, ModelOptions, ["weights"])
    add = parser.add_argument_group("--answers").add_argument
    told = "measure answer, with JPEG files of this size; --batch, --new-tokens, --weights, --model"
    add("--answers", metavar="WxH", type=image_size, help=told)
    add("--answer-rows", type=int, default=64, metavar="N", help="rows of the file (default: 64)")


def run(options: argparse.Namespace) -> None:
    """Measure what is asked for, or show the rows of files. Raises ``ValueError`` before anything
    runs if settings contradict each other or this machine cannot measure them."""
    kind = next((name for name in ("answers", "generate") if getattr(options, name)), "training")
    measure, known = WORKLOADS[kind]
    for name in sorted(vars(options).keys() - known - COMMON_OPTIONS):
        if getattr(options, name) != options.parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is not of {kind}: leave it out")
    if options.out and options.model:
        require_apart(options.out, [("the model's folder", options.model)], "--out")
    if options.rows:
        _print_table(options)
    elif options.into:
        raise ValueError("--into writes the table of rows that are there: name them with --rows")
    else:
        _measure_and_print(options, kind, measure)


def _print_table(options: argparse.Namespace) -> None:
    if options.out:
        raise ValueError("--out takes what is measured, and --rows measures nothing: drop one")
    rows = [row for path in options.rows for row in read_measurements(path)]
    if options.into:
        insert_table(markdown_table(rows), options.into)
    else:
        print(markdown_table(rows), end="")


def _measure_and_print(options: argparse.Namespace, kind: str, measure: Any) -> None:
    if options.out:
        require_same_kind(options.out, kind)
    number, start = 0, time.monotonic()
    for number, row in enumerate(measure(options), 1):
        cells = cells_of(row)
        if number == 1:
            print("  ".join(cells))
        print("  ".join(map(str.ljust, cells.values(), map(len, cells))).rstrip(), flush=True)
        if "error" in row:
            print(row["error"])
        if options.out:
            append_measurements(options.out, [row])
    print(f"{number:,} rows measured in {time.monotonic() - start:.0f} s")
