"""``glm4v-patched doctor``."""

import argparse
import time
from itertools import islice

from ..finetune.arguments import DEVICES
from ..paths import to_path
from ..terminal_text import printable
from .findings import FAILS, findings_to_json, format_findings
from .machine import check_machine
from .packages import check_packages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=to_path, nargs="?", metavar="RECIPE", help="check it, too")
    instead = "instead of what the file says, as for train"
    parser.add_argument("overrides", nargs="*", metavar="field=value", help=instead)
    parser.add_argument("--processes", type=int, metavar="N", help="as for train")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="as for train")
    rows = "only show the first N rows of each set, as the model would learn them"
    parser.add_argument("--rows", type=int, metavar="N", help=rows)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """Print what was found; 1 if something will fail."""
    if options.rows is not None:
        return _show_rows(options)
    start = time.perf_counter()
    found = [*check_packages(), *check_machine(options.device == "cpu")]
    if options.recipe is not None:
        from .recipe import check_recipe

        overrides = [*options.overrides, *options.rest]
        found += check_recipe(options.recipe, overrides, options.processes, options.device)
    seconds = time.perf_counter() - start
    told = findings_to_json(found, seconds) if options.json else format_findings(found, seconds)
    print(printable(told, allow="\n"))
    return int(any(each.verdict == FAILS for each in found))


def _show_rows(options: argparse.Namespace) -> int:
    """Print the first rows of each set, with what is learned of them between ``[[`` and ``]]`` or
    why they cannot be used; 1 if some cannot."""
    if options.recipe is None or options.rows < 1:
        raise ValueError(f"--rows {options.rows} is for the data of a recipe: name one, and N >= 1")
    from ..data.rows import RowProblem, row_location, iter_rows
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
            told = f"{row_location(source, row.line)}:"
            try:
                if isinstance(row, RowProblem):
                    raise ValueError(row.text)
                told += "".join(f"\n  image {image}" for image in row.images)
                told += f"\n{show_sample(processor, row.messages)}"
            except (ValueError, OSError) as error:
                told, unusable = f"{told}\n  {error}", unusable + 1
            print(printable(told, allow="\n\t"), flush=True)
    return int(unusable > 0)
