"""The model that a recipe starts from, and whether it can go on with the adapters there.

Needs no torch.
"""

from itertools import chain
from pathlib import Path

from ...engine.options import LANGUAGE_TARGETS, TOWER_TARGETS, is_lora
from ...models.base import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ModelSource,
    base_of_adapters,
)
from ...models.weight_files import read_header
from ...patch.config_json import read_json_object
from .sections import Recipe


def resolve_base(recipe: Recipe) -> ModelSource:
    """Where the recipe's model lies; of a folder of adapters, where the model under them does.

    Raises:
        ValueError: adapters that this recipe cannot continue, or whose model is no glm-4v.
    """
    folder = Path(recipe.model)
    if not (folder / ADAPTER_CONFIG).is_file():
        return ModelSource(recipe.model, recipe.revision)
    base = base_of_adapters(folder, recipe.revision)
    if not is_lora(recipe.trained):
        raise ValueError(
            f"model is {folder}, which holds LoRA adapters, and trained is {recipe.trained!r}; "
            "to train the adapters on, expected trained to be lora_lm, lora_all or qlora; to train "
            "other weights, merge them into their model first (glm4v-patched merge)"
        )
    names = [*read_header(folder / ADAPTER_WEIGHTS)]
    on_tower = any(".vision." in name for name in names)
    if on_tower != (recipe.trained == "lora_all"):
        has = "tower and language model" if on_tower else "the language model"
        raise ValueError(
            f"the adapters in {folder} are on {has}, and trained is {recipe.trained!r}; expected "
            + ("lora_all" if on_tower else "lora_lm or qlora")
        )
    _require_same_lora(recipe, folder, names)
    return base


def _require_same_lora(recipe: Recipe, folder: Path, names: list[str]) -> None:
    """What the recipe says of adapters is what those in a folder have, as far as it says it."""
    config, lora = read_json_object(folder / ADAPTER_CONFIG), recipe.lora
    theirs = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    theirs |= {name: name for name in ("use_rslora", "use_dora")}
    for field, name in theirs.items():
        asked, there = getattr(lora, field), config.get(name)
        if asked is not None and asked != (there or 0):
            raise ValueError(
                f"the adapters in {folder} have {name} {there}, and lora.{field} is {asked}; "
                "expected the same" + ", or null" * (field != "rank")
            )
    towers = [LANGUAGE_TARGETS, *[TOWER_TARGETS] * (recipe.trained == "lora_all")]
    targets = None if lora.targets is None else {*lora.target_names} & {*chain(*towers)}
    on = {name.rsplit(".", 3)[1] for name in names if ".lora_A." in name}
    if targets is not None and on != targets:
        raise ValueError(
            f"the adapters in {folder} are on {', '.join(sorted(on))}, and lora.targets is "
            f"{', '.join(sorted(targets))}; expected the same, or null"
        )
