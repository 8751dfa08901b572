"""The location, the commit and the content of a model and its adapters. Needs no torch.

A model and its adapters are identified by digests of their files, so their folders may be moved.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..patch.config_json import MAX_FLOAT32, find_nonfinite_number, read_json_object, why_not_glm4v
from .weight_files import read_header

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TRAINING_REPORT = "training.json"  # a training writes it beside the weights that it saves
# Files of a model's folder that affect the model's outputs.
MODEL_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json"]
MODEL_FILES += ["tokenizer.model", "processor_config.json", "preprocessor_config.json"]
MODEL_FILES += ["chat_template.jinja"]
# Valid types of peft's settings, besides null. With values of other types, peft would raise errors
# of any class.
NAME_TYPES, FLAG_TYPES, NUMBER_TYPES = (str, list), (bool,), (int, float)
PEFT_SETTING_TYPES: dict[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": NUMBER_TYPES,
    "lora_dropout": NUMBER_TYPES,
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "inference_mode"), FLAG_TYPES),
    **dict.fromkeys(("lora_bias", "use_qalora", "ensure_weight_tying"), FLAG_TYPES),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), NAME_TYPES),
    "modules_to_save": (list,),
    "layers_to_transform": (int, list),
    "bias": (str,),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "auto_mapping", "eva_config"), (dict,)),
    "task_type": (str,),
    "revision": (str,),
    "init_lora_weights": (bool, str),
    "corda_config": (dict,),
    "runtime_config": (dict,),
    "qalora_group_size": (int,),
}
# Settings with which peft does more than add LoRA to linear layers. We do not test them.
UNSUPPORTED_SETTINGS: tuple[str, ...] = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "loftq_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "velora_config",
)
NOT_NULL_SETTINGS = {"r", "lora_alpha", "lora_dropout", "bias", "rank_pattern", "alpha_pattern"}
MAX_FULLY_HASHED_BYTES = 64 * 2**20
# In larger files, NUM_BLOCKS blocks of BLOCK_BYTES are hashed.
BLOCK_BYTES, NUM_BLOCKS = 64 * 2**10, 64


@dataclass(frozen=True)
class ModelSource:
    """The location of a model, and optionally of LoRA adapters that were trained on it.

    Attributes:
        model: The folder or Hub id of the model's weights.
        revision: The revision of a Hub id; after :func:`pin_revision`, a commit.
        adapters: The folder of the adapters.
    """

    model: str
    revision: str | None = None
    adapters: Path | None = None


def folders_of(source: ModelSource) -> list[tuple[str, str | Path]]:
    """Return ``(description, path)`` of a source's folders, for :func:`paths.refuse_overlap`."""
    folders: list[tuple[str, str | Path]] = [("the model's folder", source.model)]
    if source.adapters is not None:
        folders.append(("the adapters' folder", source.adapters))
    return folders


def source_of_adapters(folder: Path, revision: str | None = None) -> ModelSource:
    """Return the adapters in a folder, together with the model that they were trained on.

    Args:
        revision: The revision of that model, if it is on the Hub.

    Raises:
        ValueError: The folder has no valid adapters, it also contains a model, or the model of the
            adapters is not a glm-4v.
    """
    if any(folder.glob("model*.safetensors")):
        raise ValueError(
            f"{folder} contains both a model and adapters ({ADAPTER_CONFIG}); move one of them to "
            "another folder"
        )
    config = read_json_object(folder / ADAPTER_CONFIG)
    peft_type, model = config.get("peft_type"), config.get("base_model_name_or_path")
    if peft_type != "LORA" or not isinstance(model, str) or not model:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: peft_type is {peft_type!r} and base_model_name_or_path is "
            f"{model!r}; expected LORA, and the path or Hub id of the base model"
        )
    if megatron := config.get("megatron_config"):
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: megatron_config is {megatron!r}, which makes peft import "
            f"the module {config.get('megatron_core')!r}; expected null"
        )
    if nonfinite := find_nonfinite_number(config):
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: {nonfinite}; expected a finite number, at most "
            f"{MAX_FLOAT32:.2g}, the largest of float32"
        )
    for name, value in config.items():
        if expected := _expected_setting(name, value):
            raise ValueError(
                f"{folder / ADAPTER_CONFIG}: {name} is {value!r:.60}; expected {expected}"
            )
    read_header(folder / ADAPTER_WEIGHTS)  # check that the file is readable
    if Path(model).is_dir():
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, but the adapters in {folder} belong to {model}, a "
                "folder, which has no revisions; remove revision"
            )
        _require_glm4v(Path(model), folder)
    return ModelSource(model, revision or config.get("revision"), folder)


def _expected_setting(name: str, value: Any) -> str | None:
    """Return which values of a peft setting are valid if ``value`` is not; None if it is valid."""
    if name in UNSUPPORTED_SETTINGS:
        # peft ignores an empty loftq_config; any other empty config means default settings.
        is_off = not value and (name == "loftq_config" or value != {})
        return None if is_off else "null: adapters with it are not supported"
    types = PEFT_SETTING_TYPES.get(name)
    if types is None or (value is None and name not in NOT_NULL_SETTINGS):
        return None
    has_type = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    if not has_type:
        return " or ".join(kind.__name__ for kind in types)
    if isinstance(value, list):
        item_type = int if int in types else str
        is_valid = all(type(item) is item_type for item in value)
        return None if is_valid else f"{item_type.__name__} in it"
    if name in ("rank_pattern", "alpha_pattern"):
        is_valid = all(isinstance(item, NUMBER_TYPES) and item > 0 for item in value.values())
        return None if is_valid else "numbers above 0 in it"
    return "1 or more" if name == "r" and not 0 < value < 2**31 else None


def _require_glm4v(model: Path, adapters: Path) -> None:
    if (model / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{adapters} are adapters of {model}, which contains adapters itself; expected a model"
        )
    if reason := why_not_glm4v(read_json_object(model / "config.json")):
        raise ValueError(
            f"{adapters} are adapters of {model}, whose config.json does not belong to a glm-4v: "
            f"{reason}"
        )


def read_training_report(folder: Path) -> dict:
    """Return the content of ``training.json``; an empty dictionary if it cannot be read."""
    try:
        return read_json_object(folder / TRAINING_REPORT)
    except ValueError:
        return {}


def require_unchanged_base(source: ModelSource) -> None:
    """Raise ``ValueError`` if the base model of adapters has changed since they were trained."""
    if source.adapters is None:
        return
    recorded = read_training_report(source.adapters).get("base")
    current = identify(replace(source, adapters=None))
    if isinstance(recorded, dict) and recorded != current:
        files = sorted(recorded.keys() | current)
        lines = [
            f"{file}: {recorded.get(file)} recorded, {current.get(file)} now"
            for file in files
            if recorded.get(file) != current.get(file)
        ]
        raise ValueError(
            f"{source.model} has changed since the adapters in {source.adapters} were trained on "
            "it; restore it, or train new adapters on this one\n  " + "\n  ".join(lines)
        )


@contextmanager
def explain_hub_errors(subject: str) -> Iterator[None]:
    """Raise any error of the Hub's client as a ``ValueError`` that begins with ``subject``.

    If files in a repository are not what the client expects, it raises errors of any class.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{subject} cannot be loaded from the Hub: {error}") from None


def pin_revision(source: ModelSource) -> ModelSource:
    """Return the source with the current commit of its model on the Hub.

    With the commit, all processes and later runs load the same files. If the model is a local
    folder, the source is returned unchanged.

    Raises:
        ValueError: There is no such model, it contains adapters, or the Hub does not respond.
    """
    if Path(source.model).is_dir():
        return source
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with explain_hub_errors(f"{source.model} is not a local folder, and"):
        config = Path(hf_hub_download(source.model, "config.json", revision=source.revision))
        commit, has_adapters = config.parent.name, False
        # These errors mean: there is no such file, or the machine is offline and the file is not in
        # the cache.
        with suppress(EntryNotFoundError, LocalEntryNotFoundError):
            hf_hub_download(source.model, ADAPTER_CONFIG, revision=commit)
            has_adapters = True  # transformers would silently load them
    if has_adapters:
        raise ValueError(
            f"{source.model} on the Hub contains adapters; download them and use their folder: "
            f"hf download {source.model} --local-dir FOLDER"
        )
    if source.adapters is not None:
        _require_glm4v(config.parent, source.adapters)
    return replace(source, revision=commit)


def identify(source: ModelSource) -> dict[str, str]:
    """Return digests of the files of a model and its adapters, by name.

    For a model on the Hub, return its commit in place of digests.
    """
    digests = {}
    folder = Path(source.model)
    if folder.is_dir():
        for path in sorted({p for pattern in MODEL_FILES for p in folder.glob(pattern)}):
            digests[path.name] = digest_file(path)
    else:
        digests["model on the Hub"] = f"{source.model} at {source.revision}"
    if source.adapters is not None:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            digests[f"adapters: {name}"] = digest_file(source.adapters / name)
    return digests


def digest_file(path: Path) -> str:
    """Return the sha256 of a file.

    If the file is larger than 64 MiB, only its size and 64 evenly spaced blocks of 64 KiB are
    hashed. The digest then does not show changes between the blocks.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= MAX_FULLY_HASHED_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        sha256 = hashlib.sha256(str(size).encode())
        for block in range(NUM_BLOCKS):
            file.seek(block * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
            sha256.update(file.read(BLOCK_BYTES))
    return f"{sha256.hexdigest()} (of samples)"
