"""The class :class:`Job`: a recipe resolved once. Imports no torch.

Functions that plan, check or train take a job or its values; none of them takes a recipe.
"""

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
from .recipe.sections import Recipe, changeable_fields
from .recipe.trainer import TrainerFields

# Only texts that match are published. They have no "/", so they are not paths of this machine.
PUBLIC_TEXT = re.compile(r"[\w.+-]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training to be planned.

    Args:
        out: The run's folder.
        base: The base model, from :func:`resolve_base`.
        inputs: Files that the run reads. They include each file of the model's folder, because such
            a file may be a link.
        options: Options of the engine; those that the recipe leaves open are "auto".
        data, trainer: Sections of the recipe.
        from_scratch: Prefixes of the names of weights that the model lacks on purpose.
        max_nonfinite_steps: Number of steps in a row with a NaN or infinite loss or gradient norm
            that end the run.
        result_settings: Values of the recipe that determine the result of training, by dotted
            names.
        public_values: Values of the recipe for the card of adapters, without names of files.
        values: All values of the recipe, as written to ``out``.
    """

    out: Path
    base: ModelSource
    inputs: tuple[Path, ...]
    options: EngineOptions
    data: Data
    trainer: TrainerFields
    from_scratch: tuple[str, ...]
    max_nonfinite_steps: int
    result_settings: dict[str, Any]
    public_values: dict[str, Any]
    values: dict[str, Any]

    @property
    def has_adapters(self) -> bool:
        """Return whether the run trains adapters, which are saved without their base model."""
        return is_lora(self.options.trained)

    def with_base(self, base: ModelSource) -> "Job":
        """Return this job with another description of its base model, such as one with a commit."""
        return replace(self, base=base)

    def settings(self, processes: int) -> dict[str, Any]:
        """Return the values that must be the same when a run is resumed.

        They are as JSON returns them, with lists in place of tuples, to be compared with those that
        a checkpoint stores.
        """
        return json.loads(json.dumps(self.result_settings | {"processes": processes}))

    def write(self, path: Path) -> None:
        """Write the recipe as JSON, with the commit of a model on the Hub."""
        values = self.values
        if not Path(self.base.model).is_dir():
            values = values | {"revision": self.base.revision}
        write_values(path, values)


def resolve_recipe(recipe: Recipe) -> Job:
    """Turn a valid recipe into a job.

    Raises:
        ValueError: The recipe does not fit the adapters that it starts from.
    """
    base = resolve_base(recipe)
    folders = [Path(name) for name in {recipe.model, base.model} if Path(name).is_dir()]
    return Job(
        out=Path(recipe.out),
        base=base,
        inputs=(*recipe.data.files(), *(file for folder in folders for file in folder.iterdir())),
        options=recipe.engine_options(),
        data=recipe.data,
        trainer=recipe.trainer,
        from_scratch=tuple(recipe.from_scratch),
        max_nonfinite_steps=recipe.max_nonfinite_steps,
        result_settings=_result_settings(recipe),
        public_values=_public_values(recipe),
        values=recipe.model_dump(),
    )


def _result_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the values that determine the result of training, by dotted names."""
    changeable = changeable_fields()
    settings = {name: value for name, value in recipe.flat().items() if name not in changeable}
    if recipe.trainer.max_steps is not None:
        del settings["trainer.num_train_epochs"]  # max_steps overrides this field
    if recipe.data.is_streamed:  # the digests of other data cover the weights, which repeat rows
        settings["data.train"] = {"weights": [source.weight for source in recipe.data.sources()]}
    return settings


def _public_values(recipe: Recipe) -> dict[str, Any]:
    """Return the values that describe the training, without defaults and paths."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    names = ("trained", "lora", "engine", "trainer")
    return _without_paths({name: values[name] for name in names if name in values}) or {}


def _without_paths(value: Any) -> Any:
    """Return a value without texts that may be paths; None if nothing remains."""
    if isinstance(value, dict):
        cleaned = {name: _without_paths(inner) for name, inner in value.items()}
        return {name: inner for name, inner in cleaned.items() if inner is not None} or None
    if isinstance(value, list):
        return [item for item in map(_without_paths, value) if item is not None] or None
    return value if not isinstance(value, str) or PUBLIC_TEXT.fullmatch(value) else None
