"""The recipes that ship with this package, by name. Imports no torch."""

import difflib
import itertools
from pathlib import Path

from .file import RecipeError, short_json

FOLDER = Path(__file__).parents[1] / "recipes"
REQUIRED_FIELDS = "data:\n  train: my.jsonl\nout: trained"  # examples, for users to edit


def shipped_names() -> list[str]:
    """Return the names of the recipes, such as ``lora_1x80gb`` (LoRA on one GPU of 80 GB)."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def describe_shipped() -> str:
    """Return a line for each shipped recipe: its name, and its purpose."""
    lines = []
    for name in shipped_names():
        # A recipe begins with a comment: its purpose, and the command that runs it.
        comment = itertools.takewhile(lambda line: line.startswith("# "), _recipe_lines(name))
        purpose = " ".join(line[2:] for line in comment).partition(" Run it with:")[0]
        lines.append(f"{name:<22}{purpose}")
    return "\n".join(lines)


def shipped_text(name: str) -> str:
    """Return a shipped recipe for editing, with the fields that users must fill in.

    Raises:
        RecipeError: No shipped recipe has that name.
    """
    _shipped_path(name)
    return "\n".join(
        [
            *_recipe_lines(name),
            "# Fill in the training data, and the folder for the trained weights.",
            REQUIRED_FIELDS,
        ]
    )


def find_recipe(path: Path) -> Path:
    """Return the file of a recipe: ``path`` itself, or the shipped recipe of that name.

    A bare name (no folder, no suffix) means a shipped recipe unless there is a file of that name.

    Raises:
        RecipeError: The path is a folder, or no shipped recipe has that name.
    """
    if path.is_dir() and path.name not in shipped_names():
        text = (
            f"{short_json(str(path))} is a folder; expected a recipe, such as a run's recipe.json"
        )
        raise RecipeError([text])
    is_bare_name = not path.suffix and path.parent == Path()
    if is_bare_name and (path.is_dir() or not path.exists()):
        return _shipped_path(path.name)
    return path


def _recipe_lines(name: str) -> list[str]:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()


def _shipped_path(name: str) -> Path:
    names = shipped_names()
    if name in names:
        return FOLDER / f"{name}.yaml"
    similar = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    raise RecipeError(
        [
            f"{short_json(name)} is neither a file nor a recipe that ships{hint}",
            f"recipes that ship: {', '.join(names)}",
        ]
    )
