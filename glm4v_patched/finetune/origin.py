"""What a checkpoint belongs to: the recipe, the model that training started from, the rows.

Needs no torch. Models are known by their contents, so that folders may move.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.options import is_lora
from ..models.base import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Base,
    base_of_adapters,
    tensor_names,
)
from ..patch.config_json import read_object
from .recipe import Lora, Recipe


@dataclass(frozen=True)
class Rows:
    """The rows that are learned, in their order.

    Args:
        digests: Of each row with the bytes of its pictures.
        lines: Where it stands in the file; of several files, with the file's name.
        evaluated: Digest of the rows for evaluation, where they decide what is saved or when the
            run ends.
    """

    digests: tuple[str, ...]
    lines: tuple[int | str, ...]
    evaluated: str | None = None

    def changes_to(self, new: "Rows") -> list[str]:
        """What is different in ``new``, a line for each kind; nothing if they are the same."""
        changes = self._changes_to_learned(new)
        if self.evaluated and new.evaluated and self.evaluated != new.evaluated:
            changes.append("rows for evaluation: others; the best so far is of those there")
        return changes

    def _changes_to_learned(self, new: "Rows") -> list[str]:
        if self.digests == new.digests:
            return []
        there, now = len(self.digests), len(new.digests)
        changed = [
            line for line, a, b in zip(new.lines, self.digests, new.digests, strict=False) if a != b
        ]
        counts = Counter(self.digests), Counter(new.digests)
        if counts[0] == counts[1]:
            return [f"rows: the same {now}, in another order from line {changed[0]} on"]
        gone, come = _lines_of(self, counts[0] - counts[1]), _lines_of(new, counts[1] - counts[0])
        if there == now and len(changed) == len(come):
            return [f"rows: {now} there and now, {_count(changed, 'differ')}"]
        changes = f"{_count(gone, 'are gone')}; {_count(come, 'are new')}"
        return [f"rows: {there} there, {now} now; {changes}"]


def _lines_of(rows: Rows, wanted: Counter) -> list[int | str]:
    """Where so many rows of each digest stand; of equal ones, the last."""
    lines: list[int | str] = []
    for row, line in zip(reversed(rows.digests), reversed(rows.lines), strict=True):
        if wanted[row] > 0:
            wanted[row] -= 1
            lines.append(line)
    return lines[::-1]


def _count(lines: Sequence[int | str], what: str, most: int = 5) -> str:
    if not lines:
        return f"0 {what}"
    places = ", ".join(map(str, lines[:most])) + (", ..." if len(lines) > most else "")
    return f"{len(lines)} {what} (line{'s' if len(lines) > 1 else ''} {places})"


@dataclass(frozen=True)
class Origin:
    """What a run and its continuation must have in common."""

    settings: dict[str, Any]
    base: dict[str, str]
    rows: Rows


def length_of(recipe: Recipe) -> dict[str, float]:
    """How long a recipe trains: its steps, or where it leaves them open its epochs."""
    if recipe.trainer.max_steps is not None:
        return {"max_steps": recipe.trainer.max_steps}
    return {"num_train_epochs": recipe.trainer.num_train_epochs}


def is_longer(there: Any, now: dict[str, float]) -> bool:
    """Whether a run that lasts ``now`` is longer than one whose :func:`length_of` was ``there``;
    epochs and steps are not compared with each other."""
    if not isinstance(there, dict) or there.keys() != now.keys():
        return False
    return all(now[name] > there[name] for name in now)


def base_of(recipe: Recipe) -> Base:
    """Where the recipe's model lies; of a folder of adapters, where the model under them does.

    Raises:
        ValueError: adapters that this recipe cannot continue, or whose model is no glm-4v.
    """
    folder = Path(recipe.model)
    if not (folder / ADAPTER_CONFIG).is_file():
        return Base(recipe.model, recipe.revision)
    base = base_of_adapters(folder, recipe.revision)
    _require_continuable(recipe, folder)
    return base


def _require_continuable(recipe: Recipe, folder: Path) -> None:
    if not is_lora(recipe.trained):
        raise ValueError(
            f"model is {folder}, which holds LoRA adapters, and trained is {recipe.trained!r}; "
            "to train the adapters on, expected trained to be lora_lm, lora_all or qlora; to train "
            "other weights, merge them into their model first (glm4v-patched merge)"
        )
    on_tower = any(".vision." in name for name in tensor_names(folder / ADAPTER_WEIGHTS))
    if on_tower != (recipe.trained == "lora_all"):
        has = "tower and language model" if on_tower else "the language model"
        raise ValueError(
            f"the adapters in {folder} are on {has}, and trained is {recipe.trained!r}; expected "
            + ("lora_all" if on_tower else "lora_lm or qlora")
        )
    _require_same_lora(recipe.lora, folder, read_object(folder / ADAPTER_CONFIG))
    if (asked := recipe.lora.options(recipe.trained).targets) is not None:
        found = {
            n.rsplit(".", 3)[1] for n in tensor_names(folder / ADAPTER_WEIGHTS) if ".lora_A." in n
        }
        if found != {*asked}:
            raise ValueError(
                f"the adapters in {folder} are on {', '.join(sorted(found))}, and lora.targets is "
                f"{', '.join(sorted(asked))}; expected the same, or null"
            )


def _require_same_lora(lora: Lora, folder: Path, config: dict) -> None:
    if config.get("r") != lora.rank:
        raise ValueError(
            f"the adapters in {folder} have rank {config.get('r')}, and lora.rank is {lora.rank}; "
            "expected the same"
        )
    names = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
    for field in ("alpha", "dropout", "use_rslora", "use_dora"):
        asked, there = getattr(lora, field), config.get(names.get(field, field))
        if asked is not None and asked != (there or 0):
            raise ValueError(
                f"the adapters in {folder} have {names.get(field, field)} {there}, and lora.{field}"
                f" is {asked}; expected the same, or null"
            )
