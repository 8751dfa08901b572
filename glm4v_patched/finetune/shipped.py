"""The recipes that ship, by their names. Needs no torch."""

import difflib
from pathlib import Path

from .recipe_file import RecipeError, shown

FOLDER = Path(__file__).with_name("recipes")


def shipped_names() -> list[str]:
    """As ``lora_1x80gb``: what is trained, and the GPUs that it is for."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(path: Path) -> Path:
    """The file that is meant: ``path`` itself if it is there, or the recipe of that name.

    Raises:
        RecipeError: neither is there, and it is a bare name: lists those that ship.
    """
    bare = path.parent == Path() and path.suffix == "" and path.name != ""
    if path.exists() or not bare:
        return path
    names = shipped_names()
    if path.name in names:
        return FOLDER / f"{path.name}.yaml"
    close = difflib.get_close_matches(path.name, names, 1)
    told = f"; did you mean {close[0]}?" if close else ""
    raise RecipeError(
        f"{shown(path.name)} is no file, and no recipe that ships{told}\n"
        f"recipes that ship: {', '.join(names)}"
    )
