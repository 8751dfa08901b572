"""The recipes that ship, by their names. Needs no torch."""

import difflib
import itertools
from pathlib import Path

from .recipe_file import RecipeError, shown

FOLDER = Path(__file__).with_name("recipes")
RECIPE = "recipe.json"  # of a run, in its folder
SUFFIXES = (".yaml", ".yml", ".json")
YOURS = "data:\n  train: my.jsonl\nout: trained"


def shipped_names() -> list[str]:
    """As ``lora_1x80gb``: what is trained, and the GPUs that it is for."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def describe_shipped() -> str:
    """A line for each: its name, and what it is for."""
    lines = []
    for name in shipped_names():
        comment = itertools.takewhile(lambda line: line.startswith("# "), _lines(name))
        told = " ".join(line[2:] for line in comment).partition(" Run it with:")[0]
        lines.append(f"{name:<22}{told}")
    return "\n".join(lines)


def shipped_text(name: str) -> str:
    """A recipe to edit: one that ships, with the fields that are left to its reader.

    Raises:
        RecipeError: none that ships has that name.
    """
    if name not in shipped_names():
        near = difflib.get_close_matches(name, shipped_names(), 1)
        raise _none_ships(name, f"; did you mean {near[0]}?" if near else "")
    return "\n".join(
        [*_lines(name), "# Yours: the rows, and the folder for what is trained.", YOURS]
    )


def _lines(name: str) -> list[str]:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()


def _none_ships(name: str, told: str, what: str = "no recipe that ships") -> RecipeError:
    ships = ", ".join(shipped_names())
    return RecipeError([f"{shown(name)} is {what}{told}", f"recipes that ship: {ships}"])


def find_recipe(path: Path) -> Path:
    """The file that is meant: ``path`` itself if it is there, or the recipe of that name.

    Raises:
        RecipeError: it is a folder, or nothing of the name is there and a name like it is; or it is
            a bare name, and no recipe that ships has it: lists those that do.
    """
    if path.exists() and not path.is_dir():
        return path
    names = shipped_names() if path.parent == Path() and path.suffix == "" else []
    if path.name in names:
        return FOLDER / f"{path.name}.yaml"
    if path.is_dir():
        inside = path / RECIPE
        told = f"; did you mean {inside}?" if inside.is_file() else "; expected a recipe"
        raise RecipeError([f"{shown(str(path))} is a folder{told}"])
    told = _did_you_mean(path, names)
    if names:
        raise _none_ships(path.name, told, "no file, and no recipe that ships")
    if told:
        raise RecipeError([f"{shown(str(path))} is no file{told}"])
    return path


def _did_you_mean(path: Path, names: list[str]) -> str:
    try:
        files = {file.name: str(file) for file in path.parent.iterdir() if file.suffix in SUFFIXES}
    except OSError:
        files = {}
    of_stem = [path.name + suffix for suffix in SUFFIXES if path.name + suffix in files]
    near = [*of_stem, *difflib.get_close_matches(path.name, [*names, *files], 1)]
    return f"; did you mean {files.get(near[0], near[0])}?" if near else ""
