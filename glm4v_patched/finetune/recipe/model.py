"""The base model of a recipe, and the check that the recipe fits its adapters. Imports no torch."""

from itertools import chain
from pathlib import Path

from ...engine.options import LANGUAGE_TARGETS, TOWER_TARGETS, is_lora
from ...models.base import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ModelSource,
    source_of_adapters,
)
from ...models.weight_files import read_header
from ...patch.config_json import read_json_object
from .sections import Recipe


def resolve_base(recipe: Recipe) -> ModelSource:
    """Return the recipe's model; if it is a folder of adapters, their base model with the adapters.

    Raises:
        ValueError: The recipe does not fit the adapters, or their base model is not a glm-4v.
    """
    folder = Path(recipe.model)
    if not (folder / ADAPTER_CONFIG).is_file():
        return ModelSource(recipe.model, recipe.revision)
    base = source_of_adapters(folder, recipe.revision)
    if not is_lora(recipe.trained):
        raise ValueError(
            f"model is {folder}, which holds LoRA adapters, and trained is {recipe.trained!r}; "
            "to train the adapters further, expected trained to be lora_lm, lora_all or qlora; to "
            "train other weights, merge them into their model first (glm4v-patched merge)"
        )
    names = [*read_header(folder / ADAPTER_WEIGHTS)]
    on_tower = any(".vision." in name for name in names)
    if on_tower != (recipe.trained == "lora_all"):
        parts = "tower and language model" if on_tower else "the language model"
        raise ValueError(
            f"the adapters in {folder} are on {parts}, and trained is {recipe.trained!r}; expected "
            + ("lora_all" if on_tower else "lora_lm or qlora")
        )
    _require_same_lora(recipe, folder, names)
    return base


def _require_same_lora(recipe: Recipe, folder: Path, names: list[str]) -> None:
    """Raise ``ValueError`` if a field of ``lora`` that is not null differs from the adapters."""
    config, lora = read_json_object(folder / ADAPTER_CONFIG), recipe.lora
    peft_names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    peft_names |= {name: name for name in ("use_rslora", "use_dora")}
    for field, name in peft_names.items():
        value, saved = getattr(lora, field), config.get(name)
        if value is not None and value != (saved or 0):
            raise ValueError(
                f"the adapters in {folder} have {name} {saved}, and lora.{field} is {value}; "
                "expected the same" + ", or null" * (field != "rank")
            )
    available_targets = [LANGUAGE_TARGETS, *[TOWER_TARGETS] * (recipe.trained == "lora_all")]
    targets = None if lora.targets is None else {*lora.target_names} & {*chain(*available_targets)}
    adapted = {name.rsplit(".", 3)[1] for name in names if ".lora_A." in name}
    if targets is not None and adapted != targets:
        raise ValueError(
            f"the adapters in {folder} are on {', '.join(sorted(adapted))}, and lora.targets is "
            f"{', '.join(sorted(targets))}; expected the same, or null"
        )
