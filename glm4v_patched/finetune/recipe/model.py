"""The base model of a recipe, and whether the recipe fits the adapters that it starts from.

Imports no torch.
"""

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
    """Return the base model of a recipe.

    If ``model`` is a folder of adapters, the result has the adapters, and the model that they were
    trained on.

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
        parts, expected = "the language model", "lora_lm or qlora"
        if on_tower:
            parts, expected = "the vision tower and the language model", "lora_all"
        raise ValueError(
            f"the adapters in {folder} are on {parts}, and trained is {recipe.trained!r}; expected "
            f"{expected}"
        )
    _require_same_lora(recipe, folder, names)
    return base


def _require_same_lora(recipe: Recipe, folder: Path, names: list[str]) -> None:
    """Raise ``ValueError`` if a field of ``lora`` that is not null differs from the adapters.

    Args:
        names: Names of the adapters' weights, as ``...query_key_value.lora_A.weight``.
    """
    config, lora = read_json_object(folder / ADAPTER_CONFIG), recipe.lora
    peft_names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    peft_names |= {name: name for name in ("use_rslora", "use_dora")}
    for field, name in peft_names.items():
        value, saved = getattr(lora, field), config.get(name)
        # A setting that is missing from the adapters' config means 0 or false.
        if value is not None and value != (saved or 0):
            expected = "the same" if field == "rank" else "the same, or null"
            raise ValueError(
                f"the adapters in {folder} have {name} {saved}, and lora.{field} is {value}; "
                f"expected {expected}"
            )
    if lora.targets is None:
        return
    available = {*LANGUAGE_TARGETS, *(TOWER_TARGETS if recipe.trained == "lora_all" else ())}
    targets = available.intersection(lora.target_names)
    adapted_layers = {name.rsplit(".", 3)[1] for name in names if ".lora_A." in name}
    if adapted_layers != targets:
        raise ValueError(
            f"the adapters in {folder} are on {', '.join(sorted(adapted_layers))}, and "
            f"lora.targets is {', '.join(sorted(targets))}; expected the same, or null"
        )
