"""``glm4v-patched bench``: measure, print and store rows, or print the table of stored rows."""

import argparse
import time
from dataclasses import fields
from typing import Any

from ..engine.options import EngineSection
from ..inference.questions import ModelOptions
from ..option_fields import add_option, add_options
from ..paths import refuse_overlap, to_path
from ..terminal_text import pluralize, write_line
from . import answers, generation, training
from .settings import GenerationSettings, ProcessSettings, TrainingSettings, image_size
from .table import (
    append_measurements,
    cells_of,
    insert_table,
    markdown_table,
    read_measurements,
    require_same_kind,
)

# Options of all workloads; each is named as in argparse's namespace.
COMMON_OPTIONS = {"command", "run", "parser", "commands", "rest", "device", "timeout", "out"}
COMMON_OPTIONS |= {"rows"}
TRAINING_OPTIONS = {
    field.name for section in (TrainingSettings, EngineSection) for field in fields(section)
}
TRAINING_OPTIONS |= {"gpus", "into"}
ANSWER_OPTIONS = {"answers", "answer_rows", "weights", *answers.SHARED_OPTIONS}
# For each workload, the function that measures and its options; all others are refused.
WORKLOADS = {
    "answers": (answers.measure_answers, ANSWER_OPTIONS),
    "generate": (
        generation.measure_generation,
        {field.name for field in fields(GenerationSettings)} | {"generate"},
    ),
    "training": (training.measure_training, TRAINING_OPTIONS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``glm4v-patched bench``."""
    add = parser.add_argument
    for field in fields(TrainingSettings):
        if field.metadata:
            add_option(parser, field, several=field.name in training.VARIED_SETTINGS)
    for field in (*fields(EngineSection), *fields(ProcessSettings)):
        add_option(parser, field)
    out = "append the measured rows to this JSON file"
    add("--out", type=to_path, metavar="FILE", help=out)
    rows = "measure nothing; print the table of the rows in these files"
    add("--rows", type=to_path, nargs="+", metavar="FILE", help=rows)
    into = "with --rows: write the table into this Markdown file"
    add("--into", type=to_path, metavar="FILE", help=into)
    group = parser.add_argument_group("--generate")
    group.add_argument(
        "--generate", action="store_true", help="measure generation instead of training"
    )
    for field in fields(GenerationSettings):
        if field.metadata:
            add_option(group, field)
    add_options(parser, ModelOptions, ["weights"])
    add = parser.add_argument_group("--answers").add_argument
    answers_help = "measure the command answer, with JPEG files of this size; takes --batch, "
    answers_help += "--new-tokens, --weights and --model"
    add("--answers", metavar="WxH", type=image_size, help=answers_help)
    rows = "number of questions (default: 64)"
    add("--answer-rows", type=int, default=64, metavar="N", help=rows)


def run(options: argparse.Namespace) -> None:
    """Measure, or print the table of stored rows.

    Raises:
        ValueError: options contradict each other, or this machine cannot measure them; raised
            before anything runs.
    """
    workload = next(
        (name for name in ("answers", "generate") if getattr(options, name)), "training"
    )
    measure, workload_options = WORKLOADS[workload]
    for name in sorted(vars(options).keys() - workload_options - COMMON_OPTIONS):
        if getattr(options, name) != options.parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} has no effect on measurements of {workload}: leave it out")
    if options.out and options.model:
        refuse_overlap(options.out, [("the model's folder", options.model)], "--out")
    if options.rows:
        _print_table(options)
    elif options.into:
        raise ValueError("--into writes the table of stored rows: name their files with --rows")
    else:
        _measure_and_print(options, workload, measure)


def _print_table(options: argparse.Namespace) -> None:
    if options.out:
        raise ValueError("--out stores new measurements, and --rows measures nothing: drop one")
    rows = [row for path in options.rows for row in read_measurements(path)]
    if options.into:
        insert_table(markdown_table(rows), options.into)
    else:
        write_line(markdown_table(rows).rstrip("\n"))


def _measure_and_print(options: argparse.Namespace, workload: str, measure: Any) -> None:
    if options.out:
        require_same_kind(options.out, workload)
    number, start = 0, time.monotonic()
    for number, row in enumerate(measure(options), 1):
        cells = cells_of(row)
        if number == 1:
            write_line("  ".join(cells))
        write_line("  ".join(map(str.ljust, cells.values(), map(len, cells))).rstrip())
        if "error" in row:
            write_line(row["error"])
        if options.out:
            append_measurements(options.out, [row])
    write_line(f"{pluralize(number, 'row')} measured in {time.monotonic() - start:.0f} s")
