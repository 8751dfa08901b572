"""What a recipe asks for, resolved once: whoever decides, checks or trains takes this, or a value
of it, and no recipe. Needs no torch."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.options import EngineOptions, is_lora
from ..models.base import ModelSource
from .recipe.data import Data
from .recipe.file import write_values
from .recipe.model import resolve_base
from .recipe.sections import Recipe, may_change
from .recipe.trainer import TrainerFields

# Of a recipe's values: whatever may be the name of a file is left out.
PLAIN = re.compile(r"[\w.+-]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training that is asked for.

    Args:
        out: The run's folder.
        base: Of :func:`resolve_base`.
        inputs: The files that the run reads; of a model's folder, which may be links to elsewhere,
            each.
        options: Of the engine, "auto" where that is left open.
        data, trainer: These sections of the recipe.
        from_scratch: Beginnings of the names of weights that the model lacks on purpose.
        max_nonfinite_steps: The run ends after so many in a row.
        decisive: Values that decide the course of training, by dotted names.
        shown: Values that may be told on a card of adapters: none is the name of a file.
        values: All of the recipe, as its file in ``out`` has them.
    """

    out: Path
    base: ModelSource
    inputs: tuple[Path, ...]
    options: EngineOptions
    data: Data
    trainer: TrainerFields
    from_scratch: tuple[str, ...]
    max_nonfinite_steps: int
    decisive: dict[str, Any]
    shown: dict[str, Any]
    values: dict[str, Any]

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and saved alone."""
        return is_lora(self.options.trained)

    def with_base(self, base: ModelSource) -> "Job":
        """This training of the same model, which is pinned."""
        return replace(self, base=base)

    def settings(self, processes: int) -> dict[str, Any]:
        """What decides the course of training, and is the same for a run and its continuation; as
        a manifest has it."""
        return json.loads(json.dumps(self.decisive | {"processes": processes}))

    def write(self, path: Path) -> None:
        """Write the recipe as JSON, which is YAML, too; of a model on the Hub with the commit."""
        values = self.values
        if not Path(self.base.model).is_dir():
            values = values | {"revision": self.base.revision}
        write_values(path, values)


def resolve_recipe(recipe: Recipe) -> Job:
    """Turn a recipe, which is right by itself, into what is asked for.

    Raises:
        ValueError: it cannot go on with the adapters that it starts from.
    """
    base = resolve_base(recipe)
    models = [Path(name) for name in {recipe.model, base.model} if Path(name).is_dir()]
    return Job(
        out=Path(recipe.out),
        base=base,
        inputs=(*recipe.data.files(), *(file for model in models for file in model.iterdir())),
        options=recipe.engine_options(),
        data=recipe.data,
        trainer=recipe.trainer,
        from_scratch=tuple(recipe.from_scratch),
        max_nonfinite_steps=recipe.max_nonfinite_steps,
        decisive=_decisive(recipe),
        shown=_plain_values(recipe),
        values=recipe.model_dump(),
    )


def _decisive(recipe: Recipe) -> dict[str, Any]:
    free = may_change()
    decisive = {k: v for k, v in recipe.flat().items() if k not in free}
    if recipe.trainer.max_steps is not None:
        del decisive["trainer.num_train_epochs"]  # which it overrides
    if recipe.data.is_streamed:  # else those of the rows that are compared
        decisive["data.train"] = {"weights": [source.weight for source in recipe.data.sources()]}
    return decisive


def _plain_values(recipe: Recipe) -> dict[str, Any]:
    given = recipe.model_dump(mode="json", exclude_defaults=True)
    names = ("trained", "lora", "engine", "trainer")
    return _without_paths({name: given[name] for name in names if name in given}) or {}


def _without_paths(value: Any) -> Any:
    """The value without texts that may name files; None where nothing is left."""
    if isinstance(value, dict):
        inner = {name: _without_paths(one) for name, one in value.items()}
        return {name: one for name, one in inner.items() if one is not None} or None
    if isinstance(value, list):
        return [one for one in map(_without_paths, value) if one is not None] or None
    return value if not isinstance(value, str) or PLAIN.fullmatch(value) else None
