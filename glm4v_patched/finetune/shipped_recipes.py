"""The recipes that ship, by their names. Needs no torch."""

import difflib
from pathlib import Path

from .recipe_file import RecipeError, shown

FOLDER = Path(__file__).with_name("recipes")
RECIPE = "recipe.json"  # of a run, in its folder
SUFFIXES = (".yaml", ".yml", ".json")


def shipped_names() -> list[str]:
    """As ``lora_1x80gb``: what is trained, and the GPUs that it is for."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


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
        raise RecipeError(f"{shown(str(path))} is a folder{told}")
    told = _did_you_mean(path, names)
    if names:
        raise RecipeError(
            f"{shown(path.name)} is no file, and no recipe that ships{told}\n"
            f"recipes that ship: {', '.join(names)}"
        )
    if told:
        raise RecipeError(f"{shown(str(path))} is no file{told}")
    return path


def _did_you_mean(path: Path, names: list[str]) -> str:
    try:
        files = {file.name: str(file) for file in path.parent.iterdir() if file.suffix in SUFFIXES}
    except OSError:
        files = {}
    of_stem = [path.name + suffix for suffix in SUFFIXES if path.name + suffix in files]
    near = [*of_stem, *difflib.get_close_matches(path.name, [*names, *files], 1)]
    return f"; did you mean {files.get(near[0], near[0])}?" if near else ""
