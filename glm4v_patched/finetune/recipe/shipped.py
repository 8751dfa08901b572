"""The recipes that ship, by their names. Needs no torch."""

import difflib
import itertools
from pathlib import Path

from .file import RecipeError, shown

FOLDER = Path(__file__).parents[1] / "recipes"
YOURS = "data:\n  train: my.jsonl\nout: trained"


def shipped_names() -> list[str]:
    """As ``lora_1x80gb``: what is trained, and the GPUs that it is for."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def describe_shipped() -> str:
    """A line for each: its name, and what it is for."""
    lines = []
    for name in shipped_names():
        comment = itertools.takewhile(lambda line: line.startswith("# "), _recipe_lines(name))
        told = " ".join(line[2:] for line in comment).partition(" Run it with:")[0]
        lines.append(f"{name:<22}{told}")
    return "\n".join(lines)


def shipped_text(name: str) -> str:
    """A recipe to edit: one that ships, with the fields that are left to its reader.

    Raises:
        RecipeError: none that ships has that name.
    """
    _shipped(name)
    return "\n".join(
        [*_recipe_lines(name), "# Yours: the rows, and the folder for what is trained.", YOURS]
    )


def find_recipe(path: Path) -> Path:
    """The file that is meant: ``path``, or of a bare name that no file has the recipe that ships.

    Raises:
        RecipeError: it is a folder, or none that ships has that name.
    """
    if path.is_dir() and path.name not in shipped_names():
        text = f"{shown(str(path))} is a folder; expected a recipe, such as a run's recipe.json"
        raise RecipeError([text])
    is_file = path.exists() and not path.is_dir()
    return path if is_file or path.suffix or path.parent != Path() else _shipped(path.name)


def _recipe_lines(name: str) -> list[str]:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()


def _shipped(name: str) -> Path:
    names = shipped_names()
    if name in names:
        return FOLDER / f"{name}.yaml"
    near = difflib.get_close_matches(name, names, 1)
    told = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(
        [
            f"{shown(name)} is no file, and no recipe that ships{told}",
            f"recipes that ship: {', '.join(names)}",
        ]
    )
