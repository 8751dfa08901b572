"""``glm4v-patched doctor``: check this machine, its packages and a recipe."""

import argparse
import time
from itertools import islice

from ..finetune.arguments import DEVICES
from ..paths import to_path
from ..terminal_text import printable, show_progress, write_line
from .findings import FAILS, findings_to_json, format_findings
from .machine import check_machine
from .packages import check_packages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``glm4v-patched doctor``."""
    recipe = "also check this recipe on this machine"
    parser.add_argument("recipe", type=to_path, nargs="?", metavar="RECIPE", help=recipe)
    overrides = "replace fields of the recipe, as for train"
    parser.add_argument("overrides", nargs="*", metavar="field=value", help=overrides)
    parser.add_argument("--processes", type=int, metavar="N", help="as for train")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="as for train")
    rows = "only print the first N rows of each data set, with their supervised tokens marked"
    parser.add_argument("--rows", type=int, metavar="N", help=rows)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """Print the findings; return 1 if training will fail."""
    if options.rows is not None:
        return _print_rows(options)
    start = time.perf_counter()
    findings = [*check_packages(), *check_machine(options.device == "cpu")]
    if options.recipe is not None:
        from .recipe import check_recipe

        overrides = [*options.overrides, *options.rest]
        with show_progress(f"checking {printable(str(options.recipe))}"):
            findings += check_recipe(options.recipe, overrides, options.processes, options.device)
    seconds = time.perf_counter() - start
    report = (findings_to_json if options.json else format_findings)(findings, seconds)
    write_line(printable(report, allow="\n"))
    return int(any(finding.verdict == FAILS for finding in findings))


def _print_rows(options: argparse.Namespace) -> int:
    """Print the first rows of each data set; return 1 if some cannot be used.

    The supervised tokens are between ``[[`` and ``]]``. A row that cannot be used is printed with
    the reason.
    """
    if options.recipe is None or options.rows < 1:
        raise ValueError(
            f"--rows {options.rows} prints rows of a recipe's data: name a recipe, and at least 1 "
            "row"
        )
    from ..data.rows import RowProblem, iter_rows, row_location
    from ..finetune.recipe.model import resolve_base
    from ..finetune.recipe.sections import Recipe
    from ..finetune.recipe.shipped import find_recipe
    from ..finetune.summary import show_sample
    from ..models.base import pin_revision
    from ..models.loading import load_processor

    recipe = Recipe.read(find_recipe(options.recipe), [*options.overrides, *options.rest])
    processor, unusable = load_processor(pin_revision(resolve_base(recipe))), 0
    for source in recipe.data.all_sources():
        for row in islice(iter_rows(source), options.rows):
            text = f"{row_location(source, row.line)}:"
            try:
                if isinstance(row, RowProblem):
                    raise ValueError(row.text)
                text += "".join(f"\n  image {image}" for image in row.images)
                text += f"\n{show_sample(processor, row.messages)}"
            except (ValueError, OSError) as error:
                text, unusable = f"{text}\n  {error}", unusable + 1
            write_line(printable(text, allow="\n\t"))
    return int(unusable > 0)
