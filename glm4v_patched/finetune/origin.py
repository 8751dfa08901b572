"""What a checkpoint belongs to: the recipe, the model that training started from, the rows.

Needs no torch. Models are known by their contents, so that folders may move.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.options import is_lora
from ..patch.config_json import is_glm4v, read_object
from .config import Lora, Recipe
from .run_folder import read_report

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# All of a model's folder that changes what is computed.
MODEL_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json"]
MODEL_FILES += ["tokenizer.model", "processor_config.json", "preprocessor_config.json"]
MODEL_FILES += ["chat_template.jinja", "*.bin", "*.bin.index.json"]
NOT_OF_MODEL = "training_args.bin"  # the Trainer leaves it beside what it saves
WHOLE_UP_TO = 64 * 2**20  # bytes
BLOCK, BLOCKS = 64 * 2**10, 64


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


@dataclass(frozen=True)
class Base:
    """The model that training starts from.

    Args:
        model: Folder or id of the Hub of the weights that are no adapters.
        revision: Of an id of the Hub; its commit, once it is known.
        adapters: Folder of the LoRA adapters that go on being trained, if any.
    """

    model: str
    revision: str | None = None
    adapters: Path | None = None


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


def base_of_adapters(folder: Path, revision: str | None = None) -> Base:
    """Where the model under the LoRA adapters in a folder lies.

    Args:
        revision: Of that model, if it is an id of the Hub.

    Raises:
        ValueError: there are no adapters, or a model beside them, or their model is no glm-4v.
    """
    if any(folder.glob("model*.safetensors")):
        raise ValueError(
            f"{folder} holds both a model and adapters ({ADAPTER_CONFIG}), and cannot be both; "
            "move one of them away"
        )
    config = read_object(folder / ADAPTER_CONFIG)
    kind, model = config.get("peft_type"), config.get("base_model_name_or_path")
    if kind != "LORA" or not isinstance(model, str) or not model:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: peft_type is {kind!r} and base_model_name_or_path is "
            f"{model!r}; expected LORA, and where the model under the adapters lies"
        )
    if megatron := config.get("megatron_config"):
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: megatron_config is {megatron!r}, by which peft imports "
            f"the module {config.get('megatron_core')!r}; expected null"
        )
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise ValueError(f"{weights} is missing: expected adapters as safetensors")
    if revision is not None and Path(model).is_dir():
        raise ValueError(
            f"revision is {revision!r}, and the adapters in {folder} are of {model}, a "
            "folder; expected null"
        )
    if Path(model).is_dir():
        _require_glm4v(Path(model), folder)
    return Base(model, revision or config.get("revision"), folder)


def _require_continuable(recipe: Recipe, folder: Path) -> None:
    if not is_lora(recipe.trained):
        raise ValueError(
            f"model is {folder}, which holds LoRA adapters, and trained is {recipe.trained!r}; "
            "to train the adapters on, expected trained to be lora_lm, lora_all or qlora; to train "
            "other weights, merge them into their model first (glm4v-patched merge)"
        )
    on_tower = any(".vision." in name for name in _tensor_names(folder / ADAPTER_WEIGHTS))
    if on_tower != (recipe.trained == "lora_all"):
        has = "tower and language model" if on_tower else "the language model"
        raise ValueError(
            f"the adapters in {folder} are on {has}, and trained is {recipe.trained!r}; expected "
            + ("lora_all" if on_tower else "lora_lm or qlora")
        )
    _require_same_lora(recipe.lora, folder, read_object(folder / ADAPTER_CONFIG))
    if (asked := recipe.lora.options(recipe.trained).targets) is not None:
        found = {
            n.rsplit(".", 3)[1] for n in _tensor_names(folder / ADAPTER_WEIGHTS) if ".lora_A." in n
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


def _require_glm4v(model: Path, adapters: Path) -> None:
    if (model / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{adapters} are adapters of {model}, which holds adapters itself; expected a model"
        )
    config = read_object(model / "config.json")
    if not is_glm4v(config):
        raise ValueError(
            f"{adapters} are adapters of {model}, which is no glm-4v: its model_type is "
            f"{config.get('model_type')!r}, and its vision_config {config.get('vision_config')!r}"
        )


def _tensor_names(weights: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights} cannot be read: {error}") from None


def require_recorded_base(base: Base) -> None:
    """Raise ``ValueError`` if adapters were trained on a model that has changed since."""
    if base.adapters is None:
        return
    recorded = read_report(base.adapters).get("base")
    found = identify(replace(base, adapters=None))
    if isinstance(recorded, dict) and recorded != found:
        names = sorted(n for n in recorded.keys() | found if recorded.get(n) != found.get(n))
        told = [f"{n}: {recorded.get(n)} there, {found.get(n)} now" for n in names]
        raise ValueError(
            f"the adapters in {base.adapters} were trained on another model than {base.model} is "
            f"now; put that one back, or begin new adapters on this one\n  " + "\n  ".join(told)
        )


def not_had(name: str, error: Exception) -> str:
    """What is said where neither a folder nor the Hub has a model or adapters."""
    return f"{name} is no folder here, and cannot be had from the Hub: {error}"


def pin(base: Base) -> Base:
    """The same with the commit of an id of the Hub, so that all processes load one and the same,
    now and when the run is continued.

    Raises:
        ValueError: there is no such model, or it is adapters, or the Hub does not answer.
    """
    if Path(base.model).is_dir():
        return base
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(base.model, "config.json", revision=base.revision))
        commit = config.parent.name
        try:
            hf_hub_download(base.model, ADAPTER_CONFIG, revision=commit)
            has_adapters = True
        except (EntryNotFoundError, LocalEntryNotFoundError):  # offline: never asked for
            has_adapters = False
    except (OSError, ValueError, HfHubHTTPError, EntryNotFoundError) as error:
        raise ValueError(not_had(base.model, error)) from None
    if has_adapters:
        raise ValueError(
            f"{base.model} of the Hub holds adapters; expected their folder, as `hf download "
            f"{base.model} --local-dir FOLDER` makes it"
        )
    if base.adapters is not None:
        _require_glm4v(config.parent, base.adapters)
    return replace(base, revision=commit)


def identify(base: Base) -> dict[str, str]:
    """Digests of the files of a model, and of adapters; of the Hub's, the commit."""
    found = {}
    folder = Path(base.model)
    if folder.is_dir():
        for path in sorted({p for pattern in MODEL_FILES for p in folder.glob(pattern)}):
            if path.name != NOT_OF_MODEL:
                found[path.name] = digest(path)
    else:
        found["model on the Hub"] = f"{base.model} at {base.revision}"
    if base.adapters is not None:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            found[f"adapters: {name}"] = digest(base.adapters / name)
    return found


def digest(path: Path) -> str:
    """sha256 of a file; of one above 64 MiB, of its size and 64 blocks of 64 KiB spread over it.

    The first and the last block are among them. What changes all of a file is noticed; a byte
    between the blocks is not.
    """
    size = path.stat().st_size
    found = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_UP_TO:
            while part := file.read(2**20):
                found.update(part)
            return found.hexdigest()
        found.update(str(size).encode())
        for number in range(BLOCKS):
            file.seek(number * (size - BLOCK) // (BLOCKS - 1))
            found.update(file.read(BLOCK))
    return f"{found.hexdigest()} (of samples)"
