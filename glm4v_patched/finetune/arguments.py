"""Options of the command line that say how a run begins; needs no torch."""

import argparse

from ..paths import to_path

DEVICES = ("cuda", "cpu")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    which = "a YAML or JSON file, or the name of one that ships"
    parser.add_argument("recipe", type=to_path, metavar="RECIPE", help=which)
    instead = "instead of what the file says, as engine.compile=true; YAML"
    parser.add_argument("overrides", nargs="*", default=[], metavar="field=value", help=instead)


def add_start(parser: argparse.ArgumentParser) -> None:
    device = "cpu: train without GPUs (slow: for trials of small models)"
    parser.add_argument("--device", choices=DEVICES, default="cuda", help=device)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last complete checkpoint, if there is one",
    )
    start.add_argument(
        "--resume-from",
        type=to_path,
        metavar="CHECKPOINT",
        help="continue from this checkpoint",
    )
    start.add_argument(
        "--overwrite",
        action="store_true",
        help="remove what earlier runs wrote to the recipe's folder (out), and nothing else",
    )
    parser.add_argument(
        "--accept-changed-data",
        action="store_true",
        help="continue although rows or images have changed",
    )
