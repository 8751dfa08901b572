"""Command-line options of a training, on one machine and on several. Imports no torch."""

import argparse

from ..paths import to_path

DEVICES = ("cuda", "cpu")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the recipe and for values that override its fields."""
    recipe_help = "a YAML or JSON file, or the name of a recipe that ships"
    parser.add_argument("recipe", type=to_path, metavar="RECIPE", help=recipe_help)
    field_help = "override a field of the file, such as engine.compile=true; the value is YAML"
    parser.add_argument("overrides", nargs="*", default=[], metavar="field=value", help=field_help)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the device, and for starting or resuming a run."""
    device_help = "cpu: train without GPUs (slow; for trials with small models)"
    parser.add_argument("--device", choices=DEVICES, default="cuda", help=device_help)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        action="store_true",
        help="resume from the last complete checkpoint, if there is one",
    )
    start.add_argument(
        "--resume-from",
        type=to_path,
        metavar="CHECKPOINT",
        help="resume from this checkpoint",
    )
    start.add_argument(
        "--overwrite",
        action="store_true",
        help="remove what earlier runs wrote to the recipe's folder (out), and nothing else",
    )
    parser.add_argument(
        "--accept-changed-data",
        action="store_true",
        help="resume although rows or images have changed",
    )
